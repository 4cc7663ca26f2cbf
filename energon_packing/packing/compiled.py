"""Integer best-fit decreasing compiled by numba: the packs of `energon_packing.packing.decreasing`, sample for sample.

Optional (``pip install energon-packing[fast]``). Importing numba costs half a second and compiling seconds more, once a
machine, so `wanted` takes it only for lists that are long enough to repay that, or where the program has it already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

COMPILED_FROM = 4_000_000
"""Samples from which a list repays the import of numba."""
LARGEST_CAPACITY = 1 << 24
"""Tokens of a pack up to which tables with one entry a token are kept."""
SWITCH = "ENERGON_PACKING_NUMBA"
"""Environment variable: ``0`` never uses numba, ``1`` always does where it is installed."""


def wanted(samples: int, capacity: int) -> bool:
    """Whether a list of so many samples is packed by the compiled functions."""
    if samples >= 1 << 31 or capacity > LARGEST_CAPACITY:
        return False
    choice = os.environ.get(SWITCH)
    if choice == "0" or (choice != "1" and "numba" not in sys.modules and samples < COMPILED_FROM):
        return False
    return find_spec("numba") is not None


def best_fit_groups(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Order of the samples, int32 ``[N]``, pack after pack, and where each pack begins, int64 ``[packs + 1]``.

    Args:
        lengths: ``[N]`` int64, at least one, each 1 to `capacity`.
        capacity: tokens of a pack.
    """
    order, offsets = _functions()(lengths, min(capacity, int(lengths.sum())))
    return order, offsets


@cache
def _functions() -> Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]:
    import numba

    def compiled(function: Any) -> Any:
        try:
            return numba.njit(cache=True)(function)
        except RuntimeError:  # no directory that a cache can be written to
            return numba.njit(function)

    place, group = compiled(_place), compiled(_group)

    def run(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        placed, packs = place(lengths, capacity)
        found: tuple[np.ndarray, np.ndarray] = group(placed, packs)
        return found

    return run


def _place(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack of each sample, int32 ``[N]``, and the number of packs.

    Packs with equal room are kept as runs of consecutive numbers, on one stack a room; a run is taken from its front.
    """
    size = lengths.size
    counts = np.zeros(capacity + 2, dtype=np.int64)
    for index in range(size):
        counts[lengths[index]] += 1
    # Where the samples of each length begin, longest first; `at` moves while the samples are written down.
    begin = np.zeros(capacity + 2, dtype=np.int64)
    at = 0
    for length in range(capacity, 0, -1):
        begin[length] = at
        at += counts[length]
    order = np.empty(size, dtype=np.int32)
    for index in range(size):
        length = lengths[index]
        order[begin[length]] = index
        begin[length] += 1

    placed = np.empty(size, dtype=np.int32)
    words = (capacity >> 6) + 1
    occupied = np.zeros(words, dtype=np.uint64)
    one = np.uint64(1)
    top = np.full(capacity + 1, -1, dtype=np.int32)
    first, number, below = np.empty(64, dtype=np.int32), np.empty(64, dtype=np.int32), np.empty(64, dtype=np.int32)
    spare = -1  # runs that are free again, as a stack of their own
    runs = 0
    opened = 0
    at = 0
    for length in range(capacity, 0, -1):
        end = at + counts[length]
        while at < end:
            # The least room that holds the length: the next bit in the map of rooms.
            word = length >> 6
            bits = occupied[word] >> np.uint64(length & 63) << np.uint64(length & 63)
            while bits == 0 and word + 1 < words:
                word += 1
                bits = occupied[word]
            if bits == 0:
                room = capacity
                each = capacity // length
                pack = opened
                packs = -(-(end - at) // each)
                opened += packs
            else:
                low = 0
                while (bits >> np.uint64(low)) & one == 0:
                    low += 1
                room = (word << 6) + low
                run = top[room]
                pack, packs = first[run], number[run]
                top[room] = below[run]
                if top[room] < 0:
                    occupied[word] &= ~(one << np.uint64(low))
                below[run] = spare
                spare = run
                each = room // length
            full = (end - at) // each
            rest = (end - at) - full * each
            if full >= packs:
                full, rest = packs, 0
            for taken in range(full):
                for _ in range(each):
                    placed[order[at]] = pack + taken
                    at += 1
            for _ in range(rest):
                placed[order[at]] = pack + full
                at += 1
            started = 1 if rest else 0
            # Three runs go back: filled as far as they go, the one in which the samples ran out, and those not begun.
            for part in range(3):
                if part == 0:
                    start, count, left = pack, full, room - each * length
                elif part == 1:
                    start, count, left = pack + full, started, room - rest * length
                else:
                    start, count, left = pack + full + started, packs - full - started, room
                if count == 0 or left == 0:
                    continue
                if spare >= 0:
                    run = spare
                    spare = below[run]
                else:
                    run = runs
                    runs += 1
                    if run == first.size:
                        first = np.concatenate((first, np.empty(run, dtype=np.int32)))
                        number = np.concatenate((number, np.empty(run, dtype=np.int32)))
                        below = np.concatenate((below, np.empty(run, dtype=np.int32)))
                first[run], number[run], below[run] = start, count, top[left]
                top[left] = run
                occupied[left >> 6] |= one << np.uint64(left & 63)
    return placed, opened


def _group(placed: np.ndarray, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples pack after pack, packs by their oldest sample: order int32 ``[N]``, offsets int64 ``[packs + 1]``."""
    renumbered = np.full(packs, -1, dtype=np.int32)
    sizes = np.zeros(packs + 1, dtype=np.int64)
    seen = 0
    for index in range(placed.size):
        pack = placed[index]
        if renumbered[pack] < 0:
            renumbered[pack] = seen
            seen += 1
        sizes[renumbered[pack] + 1] += 1
    offsets = np.cumsum(sizes)
    after = offsets[:-1].copy()
    order = np.empty(placed.size, dtype=np.int32)
    for index in range(placed.size):
        pack = renumbered[placed[index]]
        order[after[pack]] = index
        after[pack] += 1
    return order, offsets
