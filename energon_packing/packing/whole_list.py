"""`pack_lengths`: packs a whole list of samples with any policy and checks the result."""

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, Literal

import numpy as np

from energon_packing.errors import ConfigError, UserError
from energon_packing.packing.constraints import Constraints, Padded
from energon_packing.packing.partition import PackGroups, check_groups, flat_groups, stable_order
from energon_packing.packing.policies import Policy, get_policy
from energon_packing.packing.policies.best_fit import pack_limited

Oversize = Literal["raise", "drop", "truncate", "split"]
LOOK_AHEAD = 64  # Samples that may be left for later packs while a pack of samples with images is filled


def pack_lengths(
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    policy: str | Policy = "best_fit",
    *,
    constraints: Mapping[str, tuple[Sequence[int | float] | np.ndarray, int | float]] | None = None,
    window: int = 256,
    oversize: Oversize = "raise",
    seed: int = 0,
) -> list[np.ndarray]:
    """Packs samples by their lengths. Returns index groups (int64) in order of emission; the index of each kept sample
    is in exactly one group. Raises UserError: a length that is not a positive integer, an oversize sample under
    ``"raise"``; ConfigError: an unknown policy, capacity or window below 1, an oversize mode that needs tokens;
    PackingError: the policy's result is not a partition or breaks a limit.

    Args:
        lengths: tokens of each sample, ``[N]`` positive integers, in stream order. With an alignment multiple, pass
            aligned lengths (or alignment units, with the capacity in units).
        capacity: tokens of a pack, in the same unit.
        policy: a name of `policy_names` or a `Policy`.
        constraints: name -> (cost of each sample ``[N]``, limit per pack), for example
            ``{"images": (images, 48), "segments": (np.ones(N), 64)}``; non-negative.
        window: samples held by ``window``; unused by the other policies.
        oversize: of a sample that exceeds the capacity or a limit by itself: ``"raise"`` a `UserError`, or ``"drop"``.
        seed: for policies with random choices; the built-in ones have none.
    """
    more: Any = {"constraints": constraints, "window": window, "oversize": oversize, "seed": seed}
    return list(pack_lengths_flat(lengths, capacity, policy, **more))


def pack_lengths_flat(
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    policy: str | Policy = "best_fit",
    *,
    constraints: Mapping[str, tuple[Sequence[int | float] | np.ndarray, int | float]] | None = None,
    window: int = 256,
    oversize: Oversize = "raise",
    seed: int = 0,
) -> PackGroups:
    """`pack_lengths` for lists of millions: the same packs as views of two arrays, ``order`` and ``offsets``."""
    if isinstance(capacity, bool) or int(capacity) != capacity or capacity < 1:
        raise ConfigError(f"capacity must be a whole number of at least 1 token, not {capacity!r}")
    if window < 1:
        raise ConfigError(f"window must hold at least 1 sample, not {window!r}")
    capacity = int(capacity)
    tokens = _as_lengths(lengths)
    limits = Constraints.from_pairs(constraints, tokens.size)
    kept = _kept(tokens, capacity, limits, oversize)
    if kept is not None:
        tokens, limits = tokens[kept], limits.take(kept)
    run = get_policy(policy) if isinstance(policy, str) else policy
    groups = flat_groups(run(tokens, capacity, limits, window=window, seed=seed))
    check_groups(groups, tokens, capacity, limits)
    return groups if kept is None else PackGroups(kept[groups.order], groups.offsets)


def dealt(numbers: np.ndarray) -> list[np.ndarray]:
    """Positions of samples ``[N]``, in as few parts of equal size as there can be, none with one of `numbers` twice."""
    parts = int(np.bincount(numbers).max(initial=1))
    order = stable_order(numbers) if parts > 1 else np.arange(numbers.size)  # equal ones are neighbours
    return [np.sort(order[part::parts]) for part in range(parts)]


def within_padding(
    packs: PackGroups,
    lengths: np.ndarray,
    room: int,
    constraints: Constraints,
    padding: Padded | None,
    *,
    policy: str = "best_fit",
) -> PackGroups:
    """Packs of a whole list; where one is over the limit of `padding`, those over it are made anew. All are if `policy`
    keeps no order of its own and that gives fewer packs. Arguments as for `pack_lengths_flat`, with costs that are
    integers; samples fit alone."""
    if padding is None:
        return packs
    shapes, most = padding
    each_pack = (shapes[:, pack] for pack in packs)
    over = [images.sum() * high.max() * wide.max() > most for images, high, wide in each_pack]
    if not any(over):
        return packs
    kept = [pack for pack, again in zip(packs, over, strict=True) if not again]
    some, anew = np.sort(np.concatenate([*compress(packs, over)])), (lengths, room, constraints, shapes, most)
    # Neighbours in height need least room for padding; where other limits are scarcer, a mixture fills packs better.
    found = [[*kept, *_made_anew(some, *anew, by_height=each)] for each in (True, False)]
    if policy == "best_fit":
        found.append(_made_anew(np.arange(lengths.size), *anew, by_height=True))
    made = min(found, key=len)
    made.sort(key=lambda pack: int(pack[0]))
    groups = PackGroups(np.concatenate(made), np.cumsum([0, *map(len, made)]))
    check_groups(groups, lengths, room, constraints)
    return groups


def _made_anew(
    part: np.ndarray,
    lengths: np.ndarray,
    room: int,
    constraints: Constraints,
    shapes: np.ndarray,
    most: int,
    *,
    by_height: bool,
) -> list[np.ndarray]:
    """Packs of the samples `part`: of images first, and texts fill what is left."""
    constraints, shapes, columns = constraints.take(part), shapes[:, part], [lengths[part]]
    columns += constraints.costs.values()
    order = np.lexsort(shapes[:0:-1] * by_height)
    shelves = _shelves(order[shapes[0][order] > 0], columns, [room, *constraints.limits.values()], shapes, most)
    texts = np.flatnonzero(shapes[0] == 0)
    order = np.concatenate([*map(np.array, shelves), texts])
    sizes = np.concatenate([np.array([*map(len, shelves)], dtype=np.int64), np.ones_like(texts)])
    starts = np.cumsum(sizes) - sizes
    tokens, *sums = (np.add.reduceat(column[order], starts) for column in columns)
    is_shelf = (np.arange(sizes.size) < len(shelves)).astype(np.int64)
    costs = {**dict(zip(constraints.costs, sums, strict=True)), "shelves": is_shelf}
    packs = pack_limited(tokens, room, Constraints(costs=costs, limits={**constraints.limits, "shelves": 1}))
    chosen, sizes = starts[packs.order], sizes[packs.order]
    stops = np.cumsum(sizes)
    samples = order[np.arange(order.size) + np.repeat(chosen - stops + sizes, sizes)]
    return [part[np.sort(pack)] for pack in np.split(samples, stops[packs.offsets[1:-1] - 1])]


def _shelves(
    samples: np.ndarray, columns: Sequence[np.ndarray], bounds: Sequence[float], shapes: np.ndarray, most: int
) -> list[list[int]]:
    """Packs of samples with images, from the last to the first."""
    rows, (images, heights, widths) = np.stack(columns, axis=1).tolist(), shapes.tolist()
    waiting: list[int] = samples.tolist()
    made = []
    while waiting:
        pack: list[int] = []
        later: list[int] = []
        free, count, high, wide = bounds, 0, 0, 0
        while waiting and len(later) < LOOK_AHEAD:
            at = waiting.pop()
            after = [room - cost for room, cost in zip(free, rows[at], strict=True)]
            size = count + images[at], max(high, heights[at]), max(wide, widths[at])
            if not pack or (math.prod(size) <= most and min(after) >= 0):
                pack.append(at)
                free, (count, high, wide) = after, size
            else:
                later.append(at)
        waiting += later[::-1]
        made.append(pack)
    return made


def _as_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(
            f"lengths must be a flat list of integers (tokens of each sample), got {array.dtype} of shape {array.shape}"
        )
    array = array.astype(np.int64)
    if array.min(initial=1) < 1:
        index = int((array < 1).argmax())
        raise UserError(f"sample {index} has length {array[index]}; an empty sample cannot be packed, leave it out")
    return array


def _kept(tokens: np.ndarray, capacity: int, limits: Constraints, oversize: str) -> np.ndarray | None:
    """Indices of the samples that fit alone, or None if all do."""
    if oversize not in ("raise", "drop"):
        raise ConfigError(
            f"oversize={oversize!r} is not known here, but raise and drop; truncate and split change tokens, which "
            "pack_lengths does not see: use pack_sequences or concatenate_and_pack"
        )
    too_long = tokens > capacity
    over = too_long | limits.oversize(tokens.size)
    if not over.any():
        return None
    if oversize == "drop":
        return np.flatnonzero(~over)
    index = int(over.argmax())
    if too_long[index]:
        what = f"length {tokens[index]}, capacity {capacity}"
    else:
        name = next(name for name, cost in limits.costs.items() if cost[index] > limits.limits[name])
        what = f"{limits.costs[name][index]} {name}, limit {limits.limits[name]}"
    fix = "raise the limit, shorten the samples, or pass oversize='drop'"
    raise UserError(f"sample {index} does not fit into a pack: {what} ({int(over.sum())} such samples); {fix}")
