"""The iterator that Bridge trains on: packs for this rank's replica, with a state that Bridge's checkpoints save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from energon_packing.energon.metrics import PackMetrics
from energon_packing.energon.replica_reader import EveryReader, OneReader
from energon_packing.thd.batch import PackedBatch


def to_bridge(batch: Any) -> dict[str, Any]:
    """A packed row as the mapping that Bridge's forward step reads."""
    made: dict[str, Any] = batch.to_bridge()
    return made


class BridgePackIterator:
    """An endless iterator of Bridge batches with a state that Bridge's checkpoints save.

    ``setup_data_iterators`` wraps it for reruns; ``checkpointing`` calls `save_state` on the first tensor-, context-
    and pipeline-parallel rank, which is the one that reads, and `restore_state` on every rank. With virtual pipeline
    stages Bridge itself hands each model chunk the same batches (``make_data_iterator_list``), so a rank has one
    iterator and one state.

    Args:
        reader: yields the batches.
        form: turns each batch into what Bridge's steps read; packed rows by default.
        metrics: counts each batch, on the rank that writes them for its replica.
    """

    def __init__(
        self,
        reader: OneReader | EveryReader,
        form: Callable[[Any], dict[str, Any]] = to_bridge,
        *,
        metrics: PackMetrics | None = None,
    ) -> None:
        self._reader = reader
        self._form = form
        self._metrics = metrics
        self._continues = False
        if metrics is not None:
            metrics.until_end_of(self)

    def __iter__(self) -> BridgePackIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        batch: Any = next(self._reader) if self._metrics is None else self._metrics.take(self._reader)
        if isinstance(batch, PackedBatch) and batch.pixel_forms and torch.cuda.is_available():
            # Bytes travel to the device, where `to_bridge` makes the processor's numbers of them.
            batch = batch.with_pixels_on(torch.device("cuda", torch.cuda.current_device()))
        return self._form(batch)

    def save_state(self) -> Any:
        """State after the last batch; it holds only builtins and Energon's own state classes."""
        return self._reader.save_state()

    def restore_together(self, read: Callable[[], Any]) -> None:
        """Continues at the state that ``read`` returns, if any; see `OneReader.restore_together`."""
        self._continues = self._reader.restore_together(read) is not None

    @property
    def restore_state(self) -> Callable[[Any], None]:
        """Continues after the batch at which a state was saved; call on every rank, before the first batch.

        An iterator that continues already has no such method, and Bridge then reads no file for it: that of this rank
        may be missing, or of an earlier attempt, where all ranks have one state.
        """
        if self._continues:
            raise AttributeError("this iterator was restored when it was built")
        return lambda state: self.restore_together(lambda: state)
