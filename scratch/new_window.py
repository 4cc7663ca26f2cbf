p='energon_packing/packing/policies/window.py'
t=open(p).read()
i=t.index("# A limit counts as scarce if"); j=t.index("def _units(")
new='''# A limit counts as scarce if the window needs at least this share of the packs for it that its tokens need.
SCARCE = 0.9
# The oldest samples tell what is scarce and are looked at first, then so many more if they fill no pack. Those that
# packs leave behind are soon among the oldest, so that what they need counts: asked of all that a long window holds,
# packs of the easy kind come first, and the end of the stream pays for it.
LOOK, MORE = 64, 256
# Places of the exact fit, tokens times levels; beyond it, the oldest samples are taken first, up to this share left.
WORK, HAND_OVER = 1 << 16, 0.25
# Finest resolution of the second cost in the exact fit.
LEVELS = 64
# Parts of a room of which some may stay free, and the longest room that is looked at token by token and its parts.
SPARE_PARTS, LONG_ROOM, ROOM_PARTS = 512, 32_768, 8_192
# A pack is full if one token of so many is free.
FULL = 2048


def fill(
    lengths: Sequence[int],
    room: int,
    positions: Iterable[int],
    *,
    parts: int = 0,
    units: Sequence[int] | None = None,
    unit_room: int = 0,
    spare: tuple[int, int] = (0, 0),
    weights: tuple[float, float] = (1.0, 0.0),
) -> list[int]:
    """The first subset that fills the room, in the order of `positions`, or that which wastes least if there is none.

    Samples are added in the given order until some subset is within `spare`. Of subsets with the same sums, the one
    that needs the shortest prefix of `positions` wins.

    Args:
        lengths: tokens of each sample, positive, indexed by position.
        positions: which samples may be taken, in order of preference; samples that do not fit are skipped.
        parts: how many parts of the room are told apart, lengths rounded up; 0 for all tokens.
        units: second cost of each sample, small non-negative integers, indexed by position; None for no second limit.
        unit_room: how many units may be used; the work grows with it.
        spare: tokens and units that a full pack may leave.
        weights: penalties for an empty share of the room and of the unit room, beyond `spare` first.

    Returns:
        Positions in no particular order; their lengths sum to at most ``room``, their units to at most ``unit_room``.
    """
    part = -(-room // parts) if parts and room > parts else 1
    room, left_free = room // part, min(spare[0] // part, room // part)
    # All pairs of room and units left are bits of one integer. Behind the rooms of each number of units is as much
    # place again, into which sums that do not fit fall, to be masked.
    stride = 2 * room + 1
    good = sum(((1 << left_free + 1) - 1) << level * stride for level in range(min(spare[1], unit_room) + 1))
    valid = sum(((1 << room + 1) - 1) << level * stride for level in range(unit_room + 1))
    reach = 1 << unit_room * stride + room
    history = [reach]
    offered: list[tuple[int, int, int]] = []
    for position in positions if not reach & good else ():
        length, unit = lengths[position], 0 if units is None else units[position]
        if part > 1:
            length = -(-length // part) if length > room * part else min(-(-length // part), room)
        if length > room or unit > unit_room:
            continue
        moved = reach >> unit * stride + length
        reach |= moved & valid if unit_room else moved
        history.append(reach)
        offered.append((position, length, unit))
        if reach & good:
            break
    level, left = _least_waste(reach, room, unit_room, (left_free, spare[1]), weights)
    chosen: list[int] = []
    taken = len(offered)
    while left < room or level < unit_room:
        # Once reachable, sums stay reachable, so the first step that reached them took their last sample.
        bit = level * stride + left
        taken = bisect_left(history, 1, hi=taken, key=lambda reached: reached >> bit & 1) - 1
        position, length, unit = offered[taken]
        chosen.append(position)
        left, level = left + length, level + unit
    return chosen


def _least_waste(
    reach: int, room: int, unit_room: int, spare: tuple[int, int], weights: tuple[float, float]
) -> tuple[int, int]:
    """The units and the room that the best of the reachable sums leaves."""
    stride, ends = 2 * room + 1, []
    for level in range(unit_room + 1):
        if own := reach >> level * stride & (1 << room + 1) - 1:
            ends.append((level, (own & -own).bit_length() - 1))
    by_room, by_unit = weights[0] / max(room, 1), weights[1] / max(unit_room, 1)

    def waste(end: tuple[int, int]) -> tuple[float, float]:
        level, left = end
        beyond = max(left - spare[0], 0) * by_room + max(level - spare[1], 0) * by_unit
        return beyond, left * by_room + level * by_unit

    return min(ends, key=waste)


def fill_limited(
    lengths: Sequence[int], capacity: int, costs: Mapping[str, Sequence[int | float]], limits: Mapping[str, int | float]
) -> list[int]:
    """Returns positions of one pack under several limits, in no particular order.

    Position 0 is among them and must fit alone. What the oldest samples need most of, tokens or a limit, is scarce, and
    of the others a pack may leave free what they need less. Each step is used only if the previous one is not enough:

    1. Fit tokens alone, oldest first. This suffices if tokens run out first and the fit happens to obey the limits.
    2. An exact subset sum over tokens and the scarcest limit. Of large packs, the oldest samples are taken until a
    quarter is left.
    3. If the pack breaks a third limit, repeat it with each sample's largest share of any limit as the second cost.
    Sums of maxima are never below maxima of sums, so this pack obeys all limits.
    """
    count = min(len(lengths), MORE)
    needs = {name: _need(costs[name], limits[name]) for name in limits}
    need, scarcest = _need(lengths, capacity), max(limits, key=lambda name: needs[name])
    top = max(need, needs[scarcest])
    spare = max(capacity // FULL, int(capacity * (1 - need / top)), 1)
    if needs[scarcest] < SCARCE * need:
        parts = ROOM_PARTS if capacity > LONG_ROOM else 0
        chosen = [0, *fill(lengths, capacity - lengths[0], range(1, count), parts=parts, spare=(0, 0))]
        if _within(chosen, costs, limits) and capacity - lengths[0] <= LONG_ROOM:
            return chosen
    chosen, first = _oldest(lengths, capacity, costs, limits, spare, scarcest, count)
    ...


'''
