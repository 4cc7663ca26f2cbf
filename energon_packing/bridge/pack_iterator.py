"""The iterator that Bridge trains on: packs for this rank's replica, with a state that Bridge's checkpoints save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from energon_packing.energon.loader import LoaderBase
from energon_packing.energon.metrics import PackMetrics
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import EveryReader, OneReader
from energon_packing.errors import ConfigError
from energon_packing.offline.open_loader import open_together
from energon_packing.thd.batch import PackedBatch


def to_bridge(batch: Any) -> dict[str, Any]:
    """A packed row as the mapping that Bridge's forward step reads."""
    made: dict[str, Any] = batch.to_bridge()
    return made


class EndlessPacks:
    """A loader's batches without end, with the loader's state.

    Args:
        loader: of this rank.
        metrics: is told of each pack.
    """

    def __init__(self, loader: LoaderBase, metrics: PackMetrics | None = None) -> None:
        self._loader, self._metrics = loader, metrics
        self._packs = self._endless()
        self.save_state, self.state_later = loader.save_state, loader.state_later

    def _endless(self) -> Iterator[PackedBatch]:
        while True:
            pack = None
            for pack in self._loader:
                if self._metrics is not None:
                    self._metrics.made(pack)
                yield pack.batch
            if pack is None:
                raise ConfigError("A whole epoch of the data set had no packs; the ledger (packing.ledger) says why.")

    def __next__(self) -> PackedBatch:
        return next(self._packs)

    def restore_state(self, state: Any) -> None:
        """Continues after the batch at which the state was saved; call before the first batch."""
        self._loader.restore_state(state)
        self._packs = self._endless()
        if self._metrics is not None:
            self._metrics.forget()


def open_packs(
    config: Any, replica: Replica, *, every: bool = False, **what: Any
) -> tuple[EndlessPacks | None, PackMetrics | None]:
    """Opens a rank's loader, as a collective call of all ranks.

    Args:
        config: of the run.
        replica: of this rank.
        every: each rank of a replica reads for itself, in place of one for all.
        what: see `open_together`.

    Returns:
        Its packs, on a rank that reads; and what counts them, on the rank that does so for its replica.
    """
    loader = open_together(config, replica, reads=replica.is_reader or every, **what)
    if loader is None:
        return None, None
    if config.data.depth and replica.size > 1 and not every:
        loader.share_unpinned()
    metrics = None
    if replica.is_reader:
        metrics = PackMetrics.of(config.metrics, loader, rank=replica.rank, world_size=replica.world_size)
    return EndlessPacks(loader, metrics), metrics


def packs_of_steps(steps: int, samples: int, ranks: int) -> int:
    """Returns the packs that all ranks read in some steps of so many samples.

    Trainers may round a step down to what the ranks divide (``decrease_batch_size_if_needed``).
    """
    return max(steps, 0) * (samples // ranks) * ranks


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
