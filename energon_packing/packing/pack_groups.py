"""Packs of a whole list in two arrays, because millions of small arrays take seconds to make and 100 bytes each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np


class PackGroups(Sequence[np.ndarray]):
    """Index groups, created on access.

    Attributes:
        order: ``[N]`` integers, the indices of all packs, one pack after another.
        offsets: ``[packs + 1]`` int64; pack p is ``order[offsets[p]:offsets[p + 1]]``.
    """

    __slots__ = ("offsets", "order")

    def __init__(self, order: np.ndarray, offsets: np.ndarray) -> None:
        self.order = order
        self.offsets = offsets

    @classmethod
    def of(cls, pack: np.ndarray) -> PackGroups:
        """Groups from the pack number of each sample, ``[N]``; every number from 0 to P - 1 must be used.

        Every group is ascending; packs are ordered by their smallest index, regardless of their numbers.
        """
        count = int(pack.max(initial=-1)) + 1
        indices = np.arange(pack.size, dtype=np.int32 if pack.size < 1 << 31 else np.int64)
        oldest = np.empty(count, dtype=indices.dtype)
        oldest[pack[::-1]] = indices[::-1]  # the last write wins: the smallest index
        # Ranked without a sort: a pack's place is the number of packs whose oldest sample is not after its own.
        first = np.zeros(pack.size, dtype=np.bool_)
        first[oldest] = True
        renumbered = np.cumsum(first, dtype=indices.dtype)[oldest] - 1
        number = renumbered[pack]
        offsets = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(number, minlength=count), out=offsets[1:])
        return cls(stable_order(number), offsets)

    def __len__(self) -> int:
        return self.offsets.size - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        at = index % len(self)
        return self.order[self.offsets[at] : self.offsets[at + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        for start, end in pairwise(self.offsets.tolist()):
            yield self.order[start:end]


def stable_order(values: np.ndarray) -> np.ndarray:
    """Stable ascending order of non-negative integers, ``[N]`` int64.

    NumPy radix-sorts 16-bit integers, many times faster than wider ones, so wider integers are sorted in two halves.
    """
    top = int(values.max(initial=0))
    if top < 1 << 16:
        return np.argsort(values.astype(np.uint16), kind="stable")
    if top < 1 << 32:
        order = np.argsort((values & 0xFFFF).astype(np.uint16), kind="stable")
        return order[np.argsort((values >> 16).astype(np.uint16)[order], kind="stable")]
    return np.argsort(values, kind="stable")
