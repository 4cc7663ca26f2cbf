"""Packs of a whole list: what holds them, the check on every selection (a partition of its input, within every limit),
what no packer can beat, and integer best-fit decreasing: the packs of textbook best-fit decreasing in O(N + C).

Longest first, each sample goes to the pack with the least room that still holds it. Lengths are small integers, so no
samples are compared one by one: samples of equal length are placed together, packs are grouped by their number of free
tokens, and a byte map finds the next group that fits.
"""

import math
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
        """Groups from the pack number of each sample, ``[N]``; every number from 0 to P - 1 must be used. Every group
        is ascending; packs are ordered by their smallest index, regardless of their numbers."""
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
    """Stable ascending order of non-negative integers, ``[N]`` int64. NumPy radix-sorts 16-bit integers, many times
    faster than wider ones, so wider integers are sorted in two halves."""
    top = int(values.max(initial=0))
    if top < 1 << 16:
        return np.argsort(values.astype(np.uint16), kind="stable")
    if top < 1 << 32:
        order = np.argsort((values & 0xFFFF).astype(np.uint16), kind="stable")
        return order[np.argsort((values >> 16).astype(np.uint16)[order], kind="stable")]
    return np.argsort(values, kind="stable")


def check_partition(groups: Sequence[np.ndarray | Sequence[int]], expected: np.ndarray | Sequence[int] | int) -> None:
    """Checks that each ``expected`` index (distinct and non-negative ones, or a number N for 0 to N - 1) is in exactly
    one group and no group is empty. Raises PackingError: names missing, duplicate, unexpected indices, empty groups."""
    _check_indices(flat_groups(groups).order, expected)


def check_groups(
    groups: Sequence[np.ndarray | Sequence[int]], lengths: np.ndarray, capacity: int, constraints: Constraints
) -> None:
    """Checks a policy's result: a partition of all N samples, every pack within its capacity and every limit. Raises
    PackingError: as `check_partition`; or a pack over a limit: names the first one, its indices and its sum."""
    packs = flat_groups(groups)
    _check_indices(packs.order, lengths.size)
    if not len(packs):
        return
    columns: dict[str, tuple[np.ndarray, int | float]] = {"tokens": (lengths, capacity)}
    columns.update({name: (cost, constraints.limits[name]) for name, cost in constraints.costs.items()})
    for name, (cost, limit) in columns.items():
        sums = np.add.reduceat(cost[packs.order], packs.offsets[:-1])
        over = sums > (limit if cost.dtype.kind == "i" else limit * (1 + FLOAT_TOLERANCE))
        if over.any():
            number = int(over.argmax())
            indices = some_of(packs[number].tolist(), NAMED)
            raise PackingError(f"pack {number} holds {sums[number]} {name}, limit {limit}; its indices: {indices}")


def flat_groups(groups: Sequence[np.ndarray | Sequence[int]]) -> PackGroups:
    """Groups of any form in two arrays. Raises PackingError: a group is empty; names the groups."""
    if not isinstance(groups, PackGroups):
        offsets = np.cumsum([0, *map(len, groups := [*groups])])
        groups = PackGroups(np.concatenate([offsets[:0], *groups]).astype(np.int64, copy=False), offsets)
    if (empty := np.flatnonzero(np.diff(groups.offsets) == 0)).size:
        raise PackingError(f"selection made empty packs: {some_of(empty.tolist(), NAMED)}")
    return groups


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


def lower_bound(lengths: Sequence[int] | np.ndarray, capacity: int, constraints: Constraints | None = None) -> int:
    """Fewest packs that the samples can need: Martello and Toth's L2, and for each further limit total cost over limit.
    For each threshold K up to half the capacity, L2 counts the samples that cannot share with a sample of K or more,
    the other samples above half the capacity, and whatever of the rest does not fit beside the latter.

    Source: S. Martello, P. Toth, "Lower bounds and reduction procedures for the bin packing problem" (1990)."""
    tokens = np.asarray(lengths, dtype=np.int64)
    if tokens.size == 0:
        return 0
    constraints = constraints or Constraints()
    pairs = [(float(cost.sum()), constraints.limits[name]) for name, cost in constraints.costs.items()]
    # A float sum may exceed a whole number of packs by a rounding error, which must not count as another pack.
    bounds = (math.ceil(total / limit - 1e-9) for total, limit in pairs if limit > 0)
    return max([_martello_toth(tokens, capacity), *bounds])


def _martello_toth(tokens: np.ndarray, capacity: int) -> int:
    counts = np.bincount(tokens, minlength=capacity + 1)
    sums = counts * np.arange(counts.size)
    number, total = np.cumsum(counts), np.cumsum(sums)  # number[x] and total[x]: samples of at most x tokens
    half = capacity // 2
    threshold = np.arange(half + 1)
    alone = number[capacity] - number[capacity - threshold]
    large = number[capacity - threshold] - number[half]
    large_sum = total[capacity - threshold] - total[half]
    below = np.where(threshold > 0, total[np.maximum(threshold - 1, 0)], 0)
    overflow = np.maximum(0, total[half] - below - (large * capacity - large_sum))
    return int((alone + large + -(-overflow // capacity)).max())


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> PackGroups:
    """Groups of indices, each ascending, ordered by their smallest index; arguments as for `best_fit_into`."""
    return PackGroups.of(best_fit_into(lengths, capacity))


def best_fit_into(lengths: np.ndarray, capacity: int, rooms: np.ndarray | None = None) -> np.ndarray:
    """The pack number of each sample, ``[N]`` int32.

    Args:
        lengths: ``[N]`` int64, each 1 to `capacity` tokens.
        capacity: tokens of a new pack.
        rooms: ``[packs]`` int64, free tokens of packs that are there already, numbered from 0; new ones follow.
    """
    if not lengths.size:
        return np.zeros(0, dtype=np.int32)
    if rooms is None:
        capacity = min(capacity, int(lengths.sum()))
    # Every gap is a multiple of the common divisor, so aligned lengths cost no more than their alignment units.
    divisor = int(np.gcd.reduce(lengths))
    units = lengths // divisor
    capacity //= divisor
    order = stable_order(capacity - units)
    descending = units[order]
    first = np.flatnonzero(np.diff(descending, prepend=-1))
    counts = np.diff(np.append(first, descending.size))
    placed = np.empty(lengths.size, dtype=np.int32)
    # Packs with `room` free units: a stack of arrays of pack numbers, the fullest choice last in, first out.
    stacks: dict[int, list[np.ndarray]] = {}
    occupied = bytearray(capacity + 1)
    opened = 0

    def put(room: int, packs: np.ndarray) -> None:
        if room:
            stacks.setdefault(room, []).append(packs)
            occupied[room] = 1

    if rooms is not None and rooms.size:
        opened = rooms.size
        by_room = np.argsort(rooms, kind="stable").astype(np.int32)
        free, starts = np.unique(rooms[by_room] // divisor, return_index=True)
        for room, packs in zip(free.tolist(), np.split(by_room, starts[1:]), strict=True):
            put(room, packs)
    for length, count, at in zip(descending[first].tolist(), counts.tolist(), first.tolist(), strict=True):
        end = at + count
        while at < end:
            room = occupied.find(1, length)
            if room < 0:
                # Nothing fits: open as many packs as the remaining samples of this length need.
                each = capacity // length
                new = -(-(end - at) // each)
                packs = np.arange(opened, opened + new, dtype=np.int32)
                opened += new
                room = capacity
            else:
                stack = stacks[room]
                packs = stack.pop()
                if not stack:
                    occupied[room] = 0
                each = room // length
            full, rest = divmod(end - at, each)
            if full >= packs.size:
                full, rest = packs.size, 0
            # A pack takes samples of this length until none fits, because it stays the pack with the least room.
            used = full * each
            placed[at : at + used] = np.repeat(packs[:full], each) if each > 1 else packs[:full]
            at += used
            if full:
                put(room - each * length, packs[:full])
            if rest:
                placed[at : at + rest] = packs[full]
                at += rest
                put(room - rest * length, packs[full : full + 1])
                full += 1
            if full < packs.size:
                put(room, packs[full:])
    result = np.empty(lengths.size, dtype=np.int32)
    result[order] = placed
    return result
