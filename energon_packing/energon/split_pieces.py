"""Turns the pieces of split samples into separate samples, between measuring and packing.

Energon's `MapDataset` could do this with a generator, but its documentation calls that broken for saved states. Here
the state is the restore key of the current sample and the number of its next piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.energon import WorkerConfig

from energon_packing.energon.internals import (
    BaseWrapperDataset,
    SavableDataset,
    add_sample_restore_key,
    get_sample_restore_key,
)
from energon_packing.energon.samples import MeasuredSample, Problem
from energon_packing.errors import ConfigError, SampleRejected


class SplitPieces(BaseWrapperDataset[MeasuredSample, MeasuredSample]):
    """Yields the pieces of split samples, and all other samples unchanged. Saved states and restore keys contain the
    class name.

    Args:
        dataset: yields measured samples; one with ``split`` set is replaced by its pieces ``key#0``, ``key#1``, ...
    """

    _savable_fields = ("_whole_key", "_next")

    def __init__(self, dataset: SavableDataset[MeasuredSample], *, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Starts with no pending pieces."""
        self._whole_key: Any = None  # of the sample whose pieces are being yielded
        self._next = 0  # number of its next piece

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Returns the source's length; the number of pieces is unknown before the samples are measured."""
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[MeasuredSample]:
        if self._whole_key is not None:
            yield from self._pieces(self.dataset.restore_sample(self._whole_key))
        for sample in self.dataset:
            if sample.split is not None:
                self._whole_key, self._next = get_sample_restore_key(sample), 0
            yield from self._pieces(sample)

    def _pieces(self, sample: MeasuredSample) -> Iterator[MeasuredSample]:
        if sample.split is None:  # an ordinary sample, or a restored one that can no longer be read
            self._whole_key, self._next = None, 0
            yield add_sample_restore_key(sample, 0, src=self)
            return
        for number in range(self._next, len(sample.split.pieces)):
            self._next = number + 1
            yield add_sample_restore_key(piece_of(sample, number), number, src=self)
        self._whole_key, self._next = None, 0

    def restore_sample(self, restore_key: tuple[Any, ...]) -> MeasuredSample:
        """Rebuilds a piece from its restore key."""
        name, number, *inner = restore_key
        if name != type(self).__name__:
            raise ConfigError(f"The restore key was made by {name}, not by {type(self).__name__}.")
        sample: MeasuredSample = self.dataset.restore_sample(tuple(inner))
        return add_sample_restore_key(sample if sample.split is None else piece_of(sample, number), number, src=self)

    def config(self) -> dict[str, Any]:
        """What Energon writes into the description of a loader."""
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}

    def __str__(self) -> str:
        return f"SplitPieces(dataset={self.dataset})"


def piece_of(sample: MeasuredSample, number: int) -> MeasuredSample:
    """Returns one piece of a split sample: measured, or with its problem."""
    if sample.split is None:
        raise ConfigError(f"sample {sample.__key__} was not split")
    piece = sample.split.pieces[number]
    refused = isinstance(piece, SampleRejected)
    changed: dict[str, Any] = {
        "__key__": f"{sample.__key__}#{number}",
        "measured": None if refused else piece,
        "problem": Problem(reason=piece.reason, detail=piece.detail) if isinstance(piece, SampleRejected) else None,
        "split": None,
    }
    kept = {name: getattr(sample, name) for name in sample.__dataclass_fields__ if name not in changed}
    return type(sample)(**kept, **changed)
