"""Packs of a whole list, and the check on every selection: a partition of its input, within every limit."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np

from energon_packing.errors import PackingError, some_of
from energon_packing.packing.constraints import FLOAT_TOLERANCE, Constraints

NAMED = 8  # how many indices an error names before it only counts


class PackGroups(Sequence[np.ndarray]):
    """Index groups in two arrays, because millions of small ones take seconds to make and 100 bytes each.

    Attributes:
        order: ``[N]`` integers, the indices of all packs, one pack after another.
        offsets: ``[packs + 1]`` int64; pack p is ``order[offsets[p]:offsets[p + 1]]``.
    """

    __slots__ = ("offsets", "order")

    def __init__(self, order: np.ndarray, offsets: np.ndarray) -> None:
        self.order, self.offsets = order, offsets

    @classmethod
    def of(cls, pack: np.ndarray) -> "PackGroups":
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


def check_partition(groups: Sequence[np.ndarray | Sequence[int]], expected: np.ndarray | Sequence[int] | int) -> None:
    """Checks that each ``expected`` index (distinct and non-negative ones, or a number N for 0 to N - 1) is in exactly
    one group and no group is empty. Raises PackingError: names missing, duplicate and unexpected indices, and empty
    groups."""
    _check_indices(flatten(groups)[0], expected)


def check_groups(
    groups: Sequence[np.ndarray | Sequence[int]], lengths: np.ndarray, capacity: int, constraints: Constraints
) -> None:
    """Checks a policy's result: a partition of all N samples, every pack within its capacity and every limit. Raises
    PackingError: as `check_partition`; or a pack over a limit: names the first one, its indices and its sum."""
    flat, starts = flatten(groups)
    _check_indices(flat, lengths.size)
    if not starts.size:
        return
    columns: dict[str, tuple[np.ndarray, int | float]] = {"tokens": (lengths, capacity)}
    columns.update({name: (cost, constraints.limits[name]) for name, cost in constraints.costs.items()})
    for name, (cost, limit) in columns.items():
        sums = np.add.reduceat(cost[flat], starts)
        over = sums > (limit if cost.dtype.kind == "i" else limit * (1 + FLOAT_TOLERANCE))
        if over.any():
            number = int(over.argmax())
            raise PackingError(
                f"pack {number} holds {sums[number]} {name}, limit {limit}; "
                f"its indices: {some_of([int(index) for index in groups[number]], NAMED)}"
            )


def flatten(groups: Sequence[np.ndarray | Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All indices ``[N]`` int64, one group after another, and where each group starts ``[P]`` int64. Raises
    PackingError: a group is empty; names the groups."""
    if isinstance(groups, PackGroups):
        sizes = np.diff(groups.offsets)
    else:
        sizes = np.fromiter(map(len, groups), dtype=np.int64, count=len(groups))
    if not sizes.all():
        raise PackingError(f"selection made empty packs: {some_of(np.flatnonzero(sizes == 0).tolist(), NAMED)}")
    if isinstance(groups, PackGroups):
        return groups.order, groups.offsets[:-1]
    return np.concatenate([sizes[:0], *groups]).astype(np.int64, copy=False), np.cumsum(sizes) - sizes


def _check_indices(flat: np.ndarray, expected: np.ndarray | Sequence[int] | int) -> None:
    if flat.size and flat.min() < 0:
        raise PackingError(f"selection is not a partition: negative indices {some_of(flat[flat < 0].tolist(), NAMED)}")
    indices = np.arange(expected) if isinstance(expected, int) else np.asarray(expected, dtype=np.int64)
    top = int(max(flat.max(initial=-1), indices.max(initial=-1))) + 1
    wanted, counts = np.bincount(indices, minlength=top), np.bincount(flat, minlength=top)
    if np.array_equal(counts, wanted):
        return
    wrong = {
        "missing": (counts == 0) & (wanted > 0),
        "more than once": (counts > 1) & (wanted > 0),
        "not among the input": (counts > 0) & (wanted == 0),
    }
    places = {word: np.flatnonzero(where).tolist() for word, where in wrong.items() if where.any()}
    problems = [f"{word}: {some_of(found, NAMED)}" for word, found in places.items()]
    raise PackingError(f"selection is not a partition of its input; indices {'; '.join(problems)}")
