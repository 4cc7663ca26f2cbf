"""Integer best-fit decreasing: the packs of textbook best-fit decreasing in O(N + C).

Longest first, each sample goes to the pack with the least room that still holds it. Lengths are small integers, so no
samples are compared one by one: samples of equal length are placed together, packs are grouped by their number of free
tokens, and a byte map finds the next group that fits.
"""

import numpy as np

from energon_packing.packing.partition import PackGroups, stable_order


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
