"""Which samples fill the room of one pack best, under one limit or several: subset sums on Python integers.

The set of reachable sums is one arbitrary-precision integer, so adding a sample to every sum at once takes one shift
and one `or` over machine words. Bits are indexed by the room that is *left*, not the room that is used: taking a sample
of length ``n`` is a right shift, and sums that do not fit fall off the end without a mask.

Cost: one shift per sample, about 0.1 microseconds at a room of 2,048 tokens and 1 microsecond at 32,768.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

# A limit counts as scarce if the window needs at least this share of the packs for it that its tokens need.
SCARCE = 0.9
# The greedy fit hands over to the exact fit at this free share: smaller is faster, larger fills better.
HAND_OVER = 0.25
# Weight of a sample's size relative to the imbalance that it leaves.
SIZE_WEIGHT = 0.5
# Finest resolution of the second cost in the exact fit; the work grows with it.
LEVELS = 64


def fill_exactly(lengths: Sequence[int], room: int, positions: Iterable[int]) -> list[int]:
    """The first exact fit of ``room`` in the order of ``positions``, or the fullest subset if there is none.

    Samples are added in the given order until some subset fills the room exactly. Among the subsets with the best sum,
    the one that needs the shortest prefix of ``positions`` wins.

    Args:
        lengths: tokens of each sample, positive, indexed by position.
        room: tokens to fill.
        positions: which samples may be taken, in order of preference; samples longer than the room are skipped.

    Returns:
        Positions in no particular order; their lengths sum to at most ``room``.
    """
    reach = 1 << room
    history = [reach]
    offered: list[int] = []
    for position in positions:
        length = lengths[position]
        if length > room:
            continue
        reach |= reach >> length
        history.append(reach)
        offered.append(position)
        if reach & 1:
            break
    left = (reach & -reach).bit_length() - 1
    chosen: list[int] = []
    high = len(offered)
    while left < room:
        # Once reachable, a sum stays reachable, so the first step that reached it took its last sample.
        low = 0
        while low < high:
            middle = (low + high) // 2
            if history[middle] >> left & 1:
                high = middle
            else:
                low = middle + 1
        position = offered[low - 1]
        chosen.append(position)
        left += lengths[position]
        high = low - 1
    return chosen


def fill_two(
    lengths: Sequence[int],
    room: int,
    units: Sequence[int],
    unit_room: int,
    positions: Iterable[int],
    *,
    weights: tuple[float, float],
    stop_at_full_room: bool,
) -> list[int]:
    """Subset sum under a second limit: one set of reachable token sums for each amount of the second cost.

    Args:
        lengths: tokens of each sample, indexed by position.
        room: tokens to fill.
        units: second cost of each sample, small non-negative integers, indexed by position.
        unit_room: how many units may be used; the work grows with it.
        positions: candidates in order of preference.
        weights: penalties for an empty share of the room and of the unit room; the subset with the lowest total wins.
        stop_at_full_room: True ends the search at the first exact fit in tokens, whatever units it leaves; False
            continues until both are full.

    Returns:
        Positions whose lengths sum to at most ``room`` and whose units sum to at most ``unit_room``.
    """
    levels = [0] * (unit_room + 1)
    levels[0] = 1 << room
    history: list[list[int]] = []
    offered: list[int] = []
    top = 0
    for position in positions:
        length, cost = lengths[position], units[position]
        if length > room or cost > unit_room:
            continue
        grown = levels.copy()
        full = False
        for level in range(min(top, unit_room - cost) + 1):
            if levels[level]:
                moved = levels[level] >> length
                if moved:
                    grown[level + cost] |= moved
                    full = full or bool(moved & 1)
        top = min(unit_room, top + cost)
        history.append(levels)
        offered.append(position)
        levels = grown
        if full and (stop_at_full_room or levels[unit_room] & 1):
            break
    room_weight, unit_weight = weights[0] / max(room, 1), weights[1] / max(unit_room, 1)
    best: tuple[float, int, int] | None = None
    for level, reach in enumerate(levels):
        if reach:
            left = (reach & -reach).bit_length() - 1
            waste = left * room_weight + (unit_room - level) * unit_weight
            if best is None or waste < best[0]:
                best = (waste, level, left)
    assert best is not None  # the empty subset is always there
    _, level, left = best
    chosen: list[int] = []
    for earlier, position in zip(reversed(history), reversed(offered), strict=True):
        if not earlier[level] >> left & 1:
            chosen.append(position)
            level -= units[position]
            left += lengths[position]
    return chosen


def fill_limited(
    lengths: Sequence[int],
    capacity: int,
    costs: Mapping[str, Sequence[int | float]],
    limits: Mapping[str, int | float],
) -> list[int]:
    """Returns positions of one pack under several limits, in no particular order.

    Position 0 is among them and must fit alone. Pure and deterministic.

    There are three steps, each used only if the previous one is not enough:

    1. Fit tokens alone, oldest first. This suffices if tokens run out first and the fit happens to obey the limits.
    2. Greedily fit large samples until a set share of the pack is left. The next sample is large in its dominant share
       and leaves the pack's free shares in proportion to the window's demand, so that tokens and images run out
       together.
    3. Fill the rest with an exact two-dimensional subset sum over tokens and the scarcest limit. If the pack breaks a
       third limit, repeat it with each sample's largest share of any limit as the second cost. Sums of maxima are never
       below maxima of sums, so this pack obeys all limits.
    """
    names = list(limits)
    columns = [np.asarray(lengths, dtype=np.float64), *(np.asarray(costs[name], dtype=np.float64) for name in names)]
    bounds = [float(capacity), *(float(limits[name]) for name in names)]
    shares = np.stack(
        [
            column / bound if bound > 0 else np.where(column > 0, np.inf, 0.0)
            for column, bound in zip(columns, bounds, strict=True)
        ]
    )
    fits = (shares <= 1.0).all(axis=0)
    demand = np.where(fits, shares, 0.0).sum(axis=1)
    candidates = [position for position in np.flatnonzero(fits).tolist() if position]
    if (demand[1:] < SCARCE * demand[0]).all():
        chosen = [0, *fill_exactly(lengths, capacity - lengths[0], candidates)]
        if _within(chosen, costs, limits):
            return chosen
    chosen = _greedy(shares, fits, demand)
    return chosen + _finish(lengths, capacity, costs, limits, chosen, fits, demand)


def _greedy(shares: np.ndarray, fits: np.ndarray, demand: np.ndarray) -> list[int]:
    """Step 2. `shares` is ``[1 + limits, N]``, tokens in row 0; `demand` sums it over the samples that fit alone."""
    chosen = [0]
    open_ = fits.copy()
    open_[0] = False
    left = 1.0 - shares[:, 0]
    # Only scarce costs must run out together with the tokens; balancing the others would only restrict the choice.
    scarce = demand >= 0.5 * demand.max()
    weight = np.where(scarce, demand[scarce].min() / np.where(demand > 0, demand, 1.0), 0.0)[:, None]
    dominant = shares.max(axis=0)
    while (left[scarce] > HAND_OVER).all():
        after = left[:, None] - shares
        possible = open_ & (after >= 0.0).all(axis=0)
        if not possible.any():
            break
        weighed = (after * weight)[scarce]
        score = SIZE_WEIGHT * dominant - (weighed.max(axis=0) - weighed.min(axis=0))
        score[~possible] = -np.inf
        position = int(score.argmax())
        chosen.append(position)
        open_[position] = False
        left = after[:, position]
    return chosen


def _finish(
    lengths: Sequence[int],
    capacity: int,
    costs: Mapping[str, Sequence[int | float]],
    limits: Mapping[str, int | float],
    chosen: list[int],
    fits: np.ndarray,
    demand: np.ndarray,
) -> list[int]:
    """Step 3: what to add to `chosen`."""
    room = capacity - sum(lengths[position] for position in chosen)
    rest = {name: limits[name] - sum(costs[name][position] for position in chosen) for name in limits}
    taken = set(chosen)
    candidates = [
        position
        for position in np.flatnonzero(fits).tolist()
        if position not in taken
        and lengths[position] <= room
        and all(costs[name][position] <= rest[name] for name in limits)
    ]
    if not candidates:
        return []
    scarcest = max(range(len(limits)), key=lambda index: float(demand[1 + index]))
    name = list(limits)[scarcest]
    weights = (float(demand[0]), float(demand[1 + scarcest]))
    stop = weights[1] < SCARCE * weights[0]
    units, unit_room = _units(costs[name], rest[name], candidates)
    added = fill_two(lengths, room, units, unit_room, candidates, weights=weights, stop_at_full_room=stop)
    if _within(chosen + added, costs, limits):
        return added
    largest = [0.0] * len(lengths)
    for position in candidates:
        largest[position] = max((costs[n][position] / rest[n] for n in limits if rest[n] > 0), default=0.0)
    units, unit_room = _units(largest, 1.0, candidates)
    return fill_two(lengths, room, units, unit_room, candidates, weights=weights, stop_at_full_room=stop)


def _units(values: Sequence[int | float], room: int | float, positions: list[int]) -> tuple[list[int], int]:
    """Converts a cost to small integers, rounded up so that units within the unit room mean costs within the room."""
    units = [0] * len(values)
    if room <= 0:
        return units, 0
    if room <= LEVELS and all(float(values[position]).is_integer() for position in positions):
        for position in positions:
            units[position] = int(values[position])
        return units, int(room)
    for position in positions:
        units[position] = -int(-values[position] * LEVELS // room)
    return units, LEVELS


def _within(chosen: list[int], costs: Mapping[str, Sequence[int | float]], limits: Mapping[str, int | float]) -> bool:
    return all(sum(costs[name][position] for position in chosen) <= limit for name, limit in limits.items())
