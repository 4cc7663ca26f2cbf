"""Policy ``window``: a sliding window with carry-over; the default for streams.

Good for: endless streams. At most ``window`` samples are held. The oldest is always in the next pack, so no sample
waits for more packs than the window holds samples. The rest of the pack is filled exactly by subset sum, oldest first.
Cost: 2-4 microseconds per sample for texts of an eighth of the capacity, about 20 if two samples fill a pack.
Measured with 256 held: 99.99-100 % of the bound's fill on multimodal mixes, 99.6 % if samples are half a pack.

`select_from_window` and `drain_window` are pure functions of the samples held, for code that stores these elsewhere (a
savable loader); `WindowPacker` has its own storage.

Subset sums are on Python integers: the set of reachable sums is one integer of arbitrary precision, so adding a sample
to every sum at once takes one shift and one `or` over machine words (0.1 microseconds at a room of 2,048 tokens, 1 at
32,768). Bits are indexed by the room that is *left*: taking ``n`` tokens is a right shift, and sums that do not fit
fall off the end. With a room of 5, the samples 2 and 4 make 0b100000, then 0b101000 (left: 5 or 3), then 0b101010 (5, 3
or 1).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_packing.errors import PackingError, refuse
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.partition import best_fit_decreasing
from energon_packing.packing.policies import Costs, Groups, Limits, Number, PackingPolicy

# The oldest samples tell what is scarce. Those that packs leave behind are soon among them, so that what they need
# counts: asked of all that a long window holds, easy packs come first, and the end of the stream pays for it.
OLDEST, ASKED = 64, 1024
# A few videos among them are chance. Less than it is, in standard errors, may not stay free; and where it is more than
# this share of what they need, four times as many are asked, and again, unless a limit is clearly less scarce than
# tokens.
CHANCE, NOISE = 2.0, 0.1
# The most samples that a fit under limits looks at, unless more are asked: more make it slower, and hardly better.
MOST = 256
SCARCE = 0.9  # tokens alone are fitted first if the other limits need at most this share of the packs that tokens need
FULL = 2048  # a pack is full of what is scarce if one part of so many is free
# An exact fit has at most so many places, tokens times levels. Of larger packs the oldest samples are taken first,
# until this share of one of the two is left; what is left of them may differ by a share of it.
PLACES, HAND_OVER, UNEVEN = 1 << 15, 0.125, 0.3
# The longest room, in tokens, that is looked at token by token, and the parts into which others are cut.
LONG_ROOM, ROOM_PARTS = 32_768, 8_192
# Levels into which a cost is cut that is not a few units; and the most levels that one of it may count.
LEVELS, HUGE = 64, 1e300
# If more than this share of the tokens may stay free: parts of the room beside few units, and beside so many levels.
LOOSE, UNIT_PARTS, LEVEL_PARTS, LOOSE_LEVELS = 0.02, 512, 64, 1024


def fill_exactly(lengths: Sequence[int], room: int, positions: Iterable[int]) -> list[int]:
    """The first exact fit of ``room``, or the fullest subset if there is none; positions in no particular order.
    Samples, of positive ``lengths``, are added in the order of ``positions`` until some subset fills the room exactly;
    those longer than the room are skipped. Among the subsets with the best sum, the one that needs the shortest prefix
    of ``positions`` wins."""
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
    left = _least_left(reach)
    chosen: list[int] = []
    taken = len(offered)
    while left < room:
        # Once reachable, a sum stays reachable, so the first step that reached it took its last sample.
        taken = bisect_left(history, 1, hi=taken, key=lambda reached: reached >> left & 1) - 1
        chosen.append(offered[taken])
        left += lengths[offered[taken]]
    return chosen


def _least_left(reach: int) -> int:
    return (reach & -reach).bit_length() - 1


def fill_two(
    samples: Iterable[tuple[int, int, int]],
    room: int,
    unit_room: int,
    *,
    weights: tuple[float, float] = (1.0, 1.0),
    spare: tuple[int, int] = (0, 0),
) -> list[int]:
    """Subset sum under a second limit: the first subset that is full, or the one that wastes least if there is none, as
    positions in no particular order. Among the subsets of the same sums, the one that needs the shortest prefix of
    ``samples`` wins.

    Args:
        samples: position, length (positive) and units (non-negative) of each, in order of preference; those longer
            than the room, or of more units than there is room for, are skipped.
        room, unit_room: what the lengths and the units may sum to; the work grows with their product.
        weights: penalties for an empty share of the room and of the unit room.
        spare: room and units that a full pack may leave. Only what is beyond them is waste.
    """
    spare = min(spare[0], room), min(spare[1], unit_room)
    # The pairs of room and units left are bits of one integer. Behind the rooms of each number of units there is as
    # much place again: sums that do not fit fall into it, and are masked.
    stride = 2 * room + 1
    valid = _repeated((1 << room + 1) - 1, stride, unit_room + 1)
    full = _repeated((1 << spare[0] + 1) - 1, stride, spare[1] + 1)
    reach = 1 << unit_room * stride + room
    history = [reach]
    offered: list[tuple[int, int, int]] = []
    for sample in samples if not reach & full else ():
        _, length, units = sample
        if length > room or units > unit_room:
            continue
        reach |= reach >> units * stride + length & valid
        history.append(reach)
        offered.append(sample)
        if reach & full:
            break
    room_weight, unit_weight = weights[0] / max(room, 1), weights[1] / max(unit_room, 1)
    best, level, left = (math.inf, math.inf), unit_room, room
    unit, rest = 0, reach
    while rest and max(unit - spare[1], 0) * unit_weight <= best[0]:
        levels, least = divmod(_least_left(rest), stride)
        unit, rest = unit + levels, rest >> levels * stride
        beyond = max(least - spare[0], 0) * room_weight + max(unit - spare[1], 0) * unit_weight
        if (waste := (beyond, least * room_weight + unit * unit_weight)) < best:
            best, level, left = waste, unit, least
        unit, rest = unit + 1, rest >> stride
    chosen: list[int] = []
    taken = len(offered)
    while left < room or level < unit_room:
        bit = level * stride + left
        taken = bisect_left(history, 1, hi=taken, key=lambda reached: reached >> bit & 1) - 1
        position, length, units = offered[taken]
        chosen.append(position)
        left, level = left + length, level + units
    return chosen


def _repeated(bits: int, stride: int, times: int) -> int:
    done = 1
    while done < times:
        more = min(done, times - done)
        bits |= (bits & (1 << more * stride) - 1) << done * stride
        done += more
    return bits


def fill_limited(
    lengths: Sequence[int], capacity: int, costs: Mapping[str, Sequence[Number]], limits: Mapping[str, Number]
) -> list[int]:
    """Returns positions of one pack under several limits, in no particular order. Position 0 is among them and must fit
    alone. What the oldest samples need most packs for, tokens or a limit, is scarce; of the others a pack may leave
    free what they need less. Each step is used only if the previous one is not enough:

    1. Fit tokens alone, oldest first. This suffices if tokens run out first and the fit happens to obey the limits.
    2. An exact subset sum over tokens and the scarcest limit, oldest first. Of large packs, the oldest samples that fit
    are taken until the rest is small.
    3. If the pack breaks a third limit, repeat it with each sample's largest share of any limit as the second cost.
    Sums of maxima are never below maxima of sums, so this pack obeys all limits.
    """
    columns = [lengths, *(costs[name] for name in limits)]
    bounds: list[Number] = [capacity, *limits.values()]
    asked = OLDEST
    while True:
        needs = [sum(column[:asked]) / (bound or 1) for column, bound in zip(columns, bounds, strict=True)]
        second = max(range(1, len(bounds)), key=lambda index: needs[index])
        chance = _chance(columns[0][:asked], columns[second], bounds[0], bounds[second] or 1) / max(needs)
        if chance <= max(NOISE, (SCARCE - needs[second] / needs[0]) / 2) or asked >= min(ASKED, len(lengths)):
            break
        asked *= 4
    both, most = (needs[0], needs[second]), max(MOST, asked)
    fit = _Fit(columns=columns, bounds=bounds, needs=both, second=second, chance=chance, most=most)
    chosen, room = [0], capacity - lengths[0]
    if needs[second] < SCARCE * needs[0]:
        part = -(-room // ROOM_PARTS) if room > LONG_ROOM else 1
        cut = [_in_parts(length, room, part) for length in lengths] if part > 1 else lengths
        alone = [0, *fill_exactly(cut, room // part, range(1, len(lengths)))]
        if min(fit.free(alone)) >= 0:
            if part == 1:
                return alone
            chosen = alone
    return fit.finished(chosen)


def _chance(lengths: Sequence[Number], costs: Sequence[Number], capacity: Number, limit: Number) -> float:
    """The packs by which the needs of tokens and of a limit differ by chance."""
    apart = [length / capacity - cost / limit for length, cost in zip(lengths, costs, strict=False)]
    mean = sum(apart) / len(apart)
    return CHANCE * math.sqrt(sum((each - mean) ** 2 for each in apart))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    """Steps 2 and 3 for samples of these costs, `columns` ``[1 + limits][N]``, tokens first. `needs` are the packs that
    the oldest samples need for tokens and for the `second` resource, the scarcest limit, and `chance` the share of them
    by which they differ for nothing. At `most` so many samples are looked at."""

    columns: Sequence[Sequence[Number]]
    bounds: Sequence[Number]
    needs: tuple[float, float]
    second: int
    chance: float
    most: int

    def free(self, chosen: Iterable[int]) -> list[float]:
        pairs = zip(self.columns, self.bounds, strict=True)
        return [bound - sum(column[position] for position in chosen) for column, bound in pairs]

    def finished(self, chosen: list[int]) -> list[int]:
        """The pack that begins with the samples `chosen`."""
        # What may stay free of tokens and of the second: what it surely needs less.
        spare = [max(1 - need / max(self.needs) - self.chance, 0.0) for need in self.needs]
        limit = self.bounds[self.second]
        units, loose = set(map(type, self.columns[self.second][: self.most])) <= {int, np.int64}, spare[0] > LOOSE
        levels, parts = LEVELS, ROOM_PARTS
        if loose:
            levels, parts = (LEVELS, UNIT_PARTS) if units and limit <= LEVELS else (LOOSE_LEVELS, LEVEL_PARTS)
        if len(chosen) == 1:
            at = self.second
            chosen = self._oldest(lambda free: min(free[0], parts) * (min(free[at], levels) if units else levels))
        while True:
            left = self.free(chosen)[self.second]
            added = self._added(chosen, parts, int(left) if units and left <= levels else levels, spare)
            chosen = chosen + added
            # What the parts of a room leave of it is filled again, in finer ones.
            if loose or not added or self.free(chosen)[0] <= self.bounds[0] / FULL:
                return chosen

    def _oldest(self, places: Callable[[Sequence[float]], float]) -> list[int]:
        """The oldest samples that use up both resources evenly, until what is left has few places."""
        room, limit, second = self.bounds[0], self.bounds[self.second] or 1, self.second
        wanted, other = (need / max(self.needs) or 1 for need in self.needs)

        def apart(free: Sequence[float]) -> float:
            """How unlike the shares are that are still to come of each; what is not wanted may stay empty."""
            return abs((free[0] / room - 1) / wanted - (free[second] / limit - 1) / other)

        chosen, free = [0], self.free([0])
        uneven = apart(free)
        for position in range(1, min(len(self.columns[0]), self.most)):
            if places(free) <= PLACES or min(free[0] / room, free[second] / limit) <= HAND_OVER:
                break
            after = [left - column[position] for column, left in zip(self.columns, free, strict=True)]
            if min(after) >= 0:
                most = max(uneven, UNEVEN * min(after[0] / room, after[second] / limit))
                if (then := apart(after)) <= most:
                    chosen.append(position)
                    free, uneven = after, then
        return chosen

    def _added(self, chosen: list[int], parts: int, levels: int, spare: Sequence[float]) -> list[int]:
        """What to add to `chosen`: tokens are cut into at most so many parts, the second into levels."""
        free, taken, limit = self.free(chosen), set(chosen), self.bounds[self.second] or 1
        room, left = int(free[0]), free[self.second]
        weights = self.needs[0] * room / self.bounds[0], self.needs[1] * left / limit
        tokens, second = self.columns[0], self.columns[self.second]
        rest = list(zip(self.columns[1:], free[1:], strict=True))
        several = rest if len(rest) > 1 else ()  # of one, the sum takes care

        def largest(position: int) -> float:
            return max((column[position] / left for column, left in rest if left > 0), default=0.0)

        for cost, most, cut in ((second.__getitem__, left, levels), (largest, 1.0, LEVELS)):
            cut, by = (cut, min(cut / most, HUGE)) if most > 0 else (0, 1.0)
            part = max(-(-room // min(parts, 2 * PLACES // max(cut, 1))), 1)
            most_parts = room // part
            samples = (
                (position, min(-(-int(tokens[position]) // part), most_parts), math.ceil(cost(position) * by))
                for position in range(1, min(len(tokens), self.most))
                if tokens[position] <= room and position not in taken
                if not several or all(column[position] <= left for column, left in several)
            )
            # Of the second, whose units may be few, twice what is needed less may stay free.
            most_free = (
                int(max(spare[0], 1 / FULL) * self.bounds[0]) // part,
                math.ceil(2 * spare[1] * limit * cut / left) if left > 0 else 0,
            )
            added = fill_two(samples, most_parts, cut, weights=weights, spare=most_free)
            if min(self.free(chosen + added)) >= 0:
                return added
        return []


def _in_parts(length: int, room: int, part: int) -> int:
    """A length in parts of a room, rounded so that what fits in parts fits in tokens, and what fits alone does."""
    return min(-(-length // part), room // part) if length <= room else room + 1


def select_from_window(lengths: Sequence[int], capacity: int, costs: Costs = None, limits: Limits = None) -> list[int]:
    """The next pack: ascending positions in the window, which always include position 0 (the oldest). A pure function:
    equal windows yield equal packs. Samples that fit no pack alone are never chosen, but the oldest must fit. Raises
    PackingError: an empty window, or an oldest sample that fits no pack alone (the caller must keep such samples out of
    the window, with `Constraints.oversize` or an oversize policy).

    Args:
        lengths: tokens (or alignment units) of the samples held, oldest first; positive integers.
        capacity: tokens (or units) of a pack.
        costs: further costs by name, one non-negative number per sample; names without a limit are ignored.
        limits: for each limited cost, the most that a pack may hold.
    """
    if not lengths:
        raise PackingError("an empty window has no next pack")
    if not 0 < lengths[0] <= capacity:
        raise PackingError(f"the oldest sample of the window has {lengths[0]} tokens, a pack holds 1 to {capacity}")
    if not limits:
        return sorted([0, *fill_exactly(lengths, capacity - lengths[0], range(1, len(lengths)))])
    limited = {name: (costs or {})[name] for name in limits}
    for name, limit in limits.items():
        if limited[name][0] > limit:
            raise PackingError(f"the oldest sample of the window costs {limited[name][0]} {name}, limit {limit}")
    return sorted(fill_limited(lengths, capacity, limited, limits))


def drain_window(lengths: Sequence[int], capacity: int, costs: Costs = None, limits: Limits = None) -> list[list[int]]:
    """All packs of the samples left when the stream has ended; each ascending, ordered by their oldest sample. Without
    limits this is best-fit decreasing over all samples held, as no later ones can fill gaps. With limits it repeats
    `select_from_window` until nothing is left, which fills better there. Either way, removing the first pack and
    calling this for the rest returns the other packs. Arguments as for `select_from_window`."""
    if not limits:
        return [group.tolist() for group in best_fit_decreasing(np.asarray(lengths, dtype=np.int64), capacity)]
    packs: list[list[int]] = []
    left = list(range(len(lengths)))
    while left:
        columns = {name: [(costs or {})[name][position] for position in left] for name in limits}
        chosen = set(select_from_window([lengths[position] for position in left], capacity, columns, limits))
        packs.append([left[at] for at in sorted(chosen)])
        left = [position for at, position in enumerate(left) if at not in chosen]
    return packs


def pack_window(lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int) -> Groups:
    """The policy: `lengths` int64 ``[N]`` in stream order; see `energon_packing.packing.pack_lengths`."""
    del seed  # deterministic
    packer: WindowPacker[int] = WindowPacker(capacity, window, constraints.limits)
    tokens = lengths.tolist()
    columns = {name: cost.tolist() for name, cost in constraints.costs.items()}
    groups: list[np.ndarray] = []
    for start in range(len(tokens)):
        packer.add(start, tokens[start], {name: column[start] for name, column in columns.items()})
        if len(packer) == window:
            groups.append(np.array(packer.next_pack(), dtype=np.int64))
    groups.extend(np.array(group, dtype=np.int64) for group in packer.drain())
    return groups


class WindowPacker[Key]:
    """A window with its own storage: add samples, take packs, drain at the end. Call `next_pack` when `full`; calling
    it earlier is allowed and returns a pack of the samples held. At most `window` samples are held; `limits` are
    further limits per pack, by name."""

    def __init__(self, capacity: int, window: int = 256, limits: Mapping[str, Number] | None = None) -> None:
        refuse(
            (capacity < 1, f"capacity must be at least 1 token, not {capacity}"),
            (window < 1, f"window must hold at least 1 sample, not {window}"),
        )
        self.capacity = capacity
        self.window = window
        self.limits = dict(limits or {})
        self._keys: list[Key] = []
        self._lengths: list[int] = []
        self._costs: dict[str, list[Number]] = {name: [] for name in self.limits}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def full(self) -> bool:
        """True when the window holds ``window`` samples: take a pack before adding more."""
        return len(self._keys) >= self.window

    def misfit(self, length: int, costs: Mapping[str, Number]) -> str | None:
        """Returns why a sample fits no pack alone, as part of a sentence; None if it fits."""
        if not 0 < length <= self.capacity:
            return f"length {length}, capacity {self.capacity}"
        over = (name for name, limit in self.limits.items() if name not in costs or not 0 <= costs[name] <= limit)
        return next((f"{costs.get(name)} {name}, limit {self.limits[name]}" for name in over), None)

    def add(self, key: Key, length: int, costs: Mapping[str, Number] | None = None) -> None:
        """Holds one more sample; a PackingError if the window is full, or the sample fits no pack alone."""
        costs = costs or {}
        if self.full:
            raise PackingError(f"the window already holds {self.window} samples; take a pack first")
        if (problem := self.misfit(length, costs)) is not None:
            raise PackingError(f"sample {key!r} does not fit into a pack: {problem}")
        self._keys.append(key)
        self._lengths.append(length)
        for name, column in self._costs.items():
            column.append(costs[name])

    def next_pack(self) -> list[Key]:
        """Takes the next pack out of the window: keys, oldest first."""
        return self._take(select_from_window(self._lengths, self.capacity, self._costs, self.limits))

    def drain(self) -> list[list[Key]]:
        """Takes out everything, for the end of a stream: packs of keys, ordered by their oldest sample."""
        groups = drain_window(self._lengths, self.capacity, self._costs, self.limits)
        packs = [[self._keys[position] for position in group] for group in groups]
        self._take(range(len(self)))
        return packs

    def state(self) -> dict[str, Any]:
        """The state for `load_state`: keys, lengths and costs as plain lists, oldest first."""
        costs = {name: list(column) for name, column in self._costs.items()}
        return {"keys": list(self._keys), "lengths": list(self._lengths), "costs": costs}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replaces the samples held with those of a `state`; a PackingError if they were held under other limits."""
        if set(state["costs"]) != set(self.limits):
            raise PackingError(f"the state has the costs {sorted(state['costs'])}, the packer {sorted(self.limits)}")
        self._take(range(len(self)))
        for position, key in enumerate(state["keys"]):
            costs = {name: column[position] for name, column in state["costs"].items()}
            self.add(key, state["lengths"][position], costs)

    def _take(self, positions: Sequence[int]) -> list[Key]:
        taken = [self._keys[position] for position in positions]
        columns: list[list[Any]] = [self._keys, self._lengths, *self._costs.values()]
        for column in columns:
            for position in reversed(positions):
                del column[position]
        return taken


def next_from_window(lengths: Sequence[int], capacity: int, costs: Costs, limits: Limits, *, ended: bool) -> list[int]:
    """`select_from_window` while the stream runs, and the first pack of `drain_window` once it has ended; under limits
    that is the same one, and the others need not be packed for it."""
    if ended and not limits:
        return drain_window(lengths, capacity)[0]
    return select_from_window(lengths, capacity, costs, limits)


POLICY = PackingPolicy(whole_list=pack_window, next_pack=next_from_window)
