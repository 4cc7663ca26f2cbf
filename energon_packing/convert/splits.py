"""Which split a sample belongs to: decided by a hash of its key, so that more data never moves an old sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest

import numpy as np
from numpy.typing import NDArray

from energon_packing.convert.key_names import key_digest

Positions = NDArray[np.float64]


def position_of(key: str) -> float:
    """A number in [0, 1) that depends on the key alone."""
    return float(positions_of(key_digest(key))[0])


def positions_of(digests: bytes) -> Positions:
    """`position_of` each of some keys, from their `key_digest` one after the other. Shape [n]."""
    return (np.frombuffer(digests, ">u8")[::2] >> np.uint64(11)) / float(1 << 53)


class SplitAssigner:
    """Assigns samples to splits as they come, and keeps what it needs to fill a split that stays empty."""

    def __init__(self, split: Mapping[str, float]) -> None:
        """
        Args:
            split: name -> share, adding up to 1.
        """
        self.names = list(split)
        self.counts = [0] * len(self.names)
        """Samples of each split so far."""
        self._ends = np.cumsum(list(split.values()))
        self._ends[-1] = 1.0
        self._samples = 0
        # (empty split, the split that the samples are in) -> the nearest samples as (distance, number)
        self._nearest: dict[tuple[int, int], list[tuple[float, int]]] = {}

    def add(self, positions: Positions) -> NDArray[np.int64]:
        """The splits of the next samples, as indices into `names`.

        Args:
            positions: `position_of` their keys. Shape [n].
        """
        assigned = np.searchsorted(self._ends, positions, side="right").astype(np.int64)
        for index, count in enumerate(np.bincount(assigned, minlength=len(self.names)).tolist()):
            self.counts[index] += count
        for empty in (index for index, count in enumerate(self.counts) if count == 0):
            start, end = (float(self._ends[empty - 1]) if empty else 0.0), float(self._ends[empty])
            distances = np.maximum(start - positions, positions - end)
            for source in np.unique(assigned).tolist():
                members = np.flatnonzero(assigned == source)
                found = zip(distances[members].tolist(), (self._samples + members).tolist(), strict=True)
                kept = self._nearest.get((empty, source), [])
                self._nearest[empty, source] = nsmallest(len(self.names), [*kept, *found])
        self._samples += len(positions)
        return assigned

    def finish(self) -> dict[int, int]:
        """Fills splits that are empty, because nobody wants an empty validation set from 2 % of a small data set.

        Each gets the sample nearest to its own range from the fullest split, if there are enough samples.

        Returns:
            Number of a sample -> its new split, for those that move. `counts` follow.
        """
        moved: dict[int, int] = {}
        for empty in [index for index, count in enumerate(self.counts) if count == 0]:
            fullest = max(range(len(self.names)), key=lambda index: self.counts[index])
            if self.counts[fullest] < 2:
                break
            candidates = self._nearest[empty, fullest]
            moved[next(number for _, number in candidates if number not in moved)] = empty
            self.counts[fullest] -= 1
            self.counts[empty] += 1
        return moved


def assign_splits(positions: Sequence[float], split: Mapping[str, float]) -> list[str]:
    """The name of the split of each sample.

    Args:
        positions: `position_of` every key.
        split: name -> share, adding up to 1.
    """
    assigner = SplitAssigner(split)
    assigned = assigner.add(np.array(positions, np.float64)).tolist()
    for number, index in assigner.finish().items():
        assigned[number] = index
    return [assigner.names[index] for index in assigned]
