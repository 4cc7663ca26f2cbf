"""The global order of packs: each step's packs cost nearly the same, for every data-parallel size, and it is a shuffle.

A step takes the next D packs and lasts as long as the costliest, so packs of similar cost must be neighbours. Packs are

1. dealt to blocks of about `BLOCK` groups, each block a picture of the whole epoch;
2. sorted by cost inside a block and cut into groups of ``max_data_parallel``, so that a step of any size that divides
   it lies inside one group;
3. shuffled inside a group: it is halved again and again (or cut by its other factors) and the parts change places at
   random, so that steps smaller than a group hold neighbours in cost, too;
4. ordered by groups: at random among the orders in which no 32 steps in a row cost more than 5 % more or less than 32
   average ones. The sum of deviations from the mean is a walk, and two of its places never differ by more than that if
   none is further than half of it from zero.

What an epoch has too many for whole groups, and all of a small one, is cut into pieces of neighbours in cost: parts of
a group as in 3, of the largest size that fits, then the next. So steps of these sizes are even too. Where an epoch
has begun a group, the next one goes on with pieces that cost about as much as the packs beside them in a part.

Where ranks wait for each other twice, after the vision tower and after the language model, packs are neighbours in two
costs: instead of 1 and 2, an epoch is cut in two, again and again, by the cost whose maximum is further above its mean
and where ranks then wait least; the packs of each of about `CELLS` parts are dealt to its groups. Parts of groups are
sorted by the less even cost, too. A replica's sum over several steps is at least as even as each of them. Both count
alike, each in shares of its own mean; where one is `LITTLE`, both in shares of the sum, as the time that ranks wait.
"""

from collections.abc import Iterator, Sequence

import numpy as np

BLOCK = 48  # groups of a block; a longer one makes steps a little more even and their order less
CELLS = 256  # more are more even, too, and packs then meet the same ones in every epoch
RUN = 32  # steps in a row whose mean cost is near that of the whole
SHARE = 0.05  # how near
LITTLE = 0.05  # the share of both costs below which one counts for no more than it is
DRAWS = 256  # orders of a block that are drawn at a time
TIMES, HOPELESS = 16, 1.25
"""How often, before one is built step by step; and how far outside the bounds the best of those drawn may be for more
draws. Building is needed only where groups vary in cost by about a third."""


def balanced_order(costs: np.ndarray, *, group: int, before: np.ndarray, seed: list[int]) -> np.ndarray:
    """The order of one epoch's packs: positions ``[P]`` int64, each once. Their `costs` are ``[P]``, or ``[P, 2]``, if
    both are to be even in every step, in the same unit. A step at the largest data-parallel size has `group` packs;
    `before` are the costs of the packs of the group, not whole yet, with which the epochs before this one end; and
    `seed` is that of all random choices."""
    random = np.random.default_rng(seed)
    table = np.atleast_2d(np.asarray(costs, dtype=np.float64).T)
    known = np.asarray(before, dtype=np.float64).reshape(-1, len(table)).T
    told = table.any(axis=1) if table.any() else [0]  # text has one cost
    count, one = table.shape[1], np.sum(told) < 2
    shuffled = random.permutation(count)  # packs of equal cost are in random order
    table, known = table[told][:, shuffled], known[told]
    left = table[0].argsort(kind="stable") if one else np.arange(count)
    if not one:
        means = table.mean(axis=1, keepdims=True)
        unit = means if means.min() >= LITTLE * means.sum() else means.sum()
        table, known = (table / unit).astype(np.float32), known / unit
    sizes, parts = _sizes(group), [left[:0]]
    for at, size in _pieces(known.shape[1], known.shape[1] + count, sizes):
        begun = at % sizes[sizes.index(size) - 1] if size < group else 0
        if not begun:
            break
        piece, left = _taken(left, table, size, known[:, -begun:].mean(axis=1))
        parts.append(_shuffled_inside(_close(piece[None], table), random).ravel())
        known = np.concatenate([known, table[:, piece]], axis=1)
    middle = table[:, left].mean(axis=1) if left.size else np.zeros(len(table))
    tail, left = _taken(left, table, left.size % group, middle)
    most = max(1, round(left.size / group / CELLS))
    groups = _groups(left, group, random) if one else _cells(left, table[:, left], group, most, random)
    if len(groups):
        means = table[:, groups].mean(axis=2, dtype=np.float64)
        order = _level_order(means[0], float(table.mean()), random) if one else _level_walk(means, random)
        parts.append(_shuffled_inside(_close(groups[order], table), random).ravel())
    for _, size in _pieces(0, tail.size, sizes):  # from either end, so that what is left are neighbours too
        tail = tail if one else tail[_ascending(table[:, tail[None]])[0]]
        at = int(random.integers(2)) * (tail.size - size)
        parts.append(_shuffled_inside(_close(tail[None, at : at + size], table), random).ravel())
        tail = np.delete(tail, slice(at, at + size))
    return shuffled[np.concatenate(parts)]


def order_again(start: int, stop: int, position: int, group: int, seed: list[int], older: bool = False) -> np.ndarray:
    """Another order of the packs ``[start, stop)`` of an epoch, ``[stop - start]`` int64, each once: its whole groups
    change places, and so do the packs inside each, and the pieces that make up the rest. ``position`` is that of the
    first of them: where steps would straddle two pieces, a part of one comes first. ``group`` and ``seed``: as for
    `balanced_order`. ``older``: the order of versions that did not cut the rest, which their states go on with."""
    random = np.random.default_rng(seed)
    first = min(-(-start // group) * group, stop)
    last = max(stop // group * group, first)
    head, tail = (random.permutation(np.arange(*ends)) for ends in ((start, first), (last, stop)))
    groups = random.permutation(np.arange(first, last).reshape(-1, group))
    groups = _shuffled_inside(groups, random) if len(groups) else groups
    ahead = -position % group
    if older:
        if ahead != head.size and len(groups):
            head, tail = groups[0, :ahead], np.concatenate([groups[0, ahead:], tail, head])
            groups = groups[1:]
        return np.concatenate([head, groups.ravel(), tail])
    sizes = _sizes(group)
    left: dict[int, list[np.ndarray]] = {size: [] for size in sizes}
    for at, size in (*_pieces(start, first, sizes), *_pieces(last, stop, sizes)):
        left[size].append(np.arange(at, at + size))
    parts, at, end = [head[:0]], position, position + stop - start
    while at < end:
        _, wanted = next(_pieces(at, end, sizes))
        whole = (end - at) // group if wanted == group else 0
        if whole and len(groups):
            piece, groups = groups[:whole].ravel(), groups[whole:]
        else:
            if not any(left[size] for size in sizes if size >= wanted) and len(groups):
                left[group], groups = [groups[0]], groups[1:]
            of = min((size for size in sizes if left[size]), key=lambda size: (size < wanted, abs(size - wanted)))
            piece = left[of].pop()
            while piece.size > wanted:
                piece, *others = random.permutation(piece.reshape(-1, sizes[sizes.index(piece.size) + 1]))
                left[piece.size] += others
            piece = _shuffled_inside(piece[None], random).ravel()
        parts.append(piece)
        at += piece.size
    return np.concatenate(parts)


def _sizes(group: int) -> list[int]:
    """Packs of a group, of its parts, of their parts, and so on to 1; see `_shuffled_inside`."""
    return [group, *(group // int(product) for product in np.cumprod(_factors(group)))]


def _pieces(at: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cuts the positions ``[at, stop)`` into the fewest pieces of these sizes: the position and size of each, which
    divides its position."""
    while at < stop:
        size = next(each for each in sizes if at % each == 0 and at + each <= stop)
        yield at, size
        at += size


def _taken(left: np.ndarray, costs: np.ndarray, count: int, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`count` neighbours in cost, and the rest. They cost about `near` on average. By one cost, `left` is ascending."""
    if count == 0:
        return left[:0], left
    if len(costs) == 2:
        away = np.abs(costs[:, left] - near[:, None]).max(axis=0)
        within = np.flatnonzero(away <= np.partition(away, count - 1)[count - 1])[:count]
        return left[within], np.delete(left, within)
    sums = np.concatenate([[0.0], np.cumsum(costs[0, left])])
    means = (sums[count:] - sums[:-count]) / count
    at = int(np.abs(means - near).argmin())
    return left[at : at + count], np.delete(left, slice(at, at + count))


def _ascending(costs: np.ndarray) -> np.ndarray:
    """The order ``[R, n]`` in which rows with costs ``[2, R, n]`` ascend in that which is less even in them."""
    second = np.diff(costs.max(axis=2) - costs.mean(axis=2), axis=0)[0] > 0
    bits = np.where(second[:, None], costs[1], costs[0]).view(np.int32)  # floats from 0 are in the order of their bits
    keys = bits.astype(np.int64) << 32 | np.arange(costs.shape[2])  # no two are equal, so all machines sort alike
    keys.sort(axis=1)
    return np.asarray(keys & 0xFFFFFFFF)


def _close(rows: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Rows of packs ``[R, n]``, ordered so that the parts of `_shuffled_inside` are neighbours in both costs; by one
    cost, they are already."""
    sizes = _sizes(rows.shape[1])
    for size in sizes[: max(len(sizes) - 4, 1) : 2] if len(costs) == 2 else ():
        parts = rows.reshape(-1, size)
        rows = np.take_along_axis(parts, _ascending(costs.take(parts, axis=1)), axis=1).reshape(rows.shape)
    return rows


def _cells(packs: np.ndarray, costs: np.ndarray, group: int, most: int, random: np.random.Generator) -> np.ndarray:
    """Groups ``[G, group]`` of packs with these costs, dealt at random from neighbours in both of at most `most`."""
    count = packs.size // group
    if count <= most:
        return random.permutation(packs).reshape(count, group)
    order = _ascending(costs[:, None])[0]
    packs, costs = packs.take(order), costs.take(order, axis=1)
    highest = costs.reshape(2, count, group).max(axis=2)
    below = np.maximum.accumulate(highest, axis=1).sum(axis=0)
    above = np.maximum.accumulate(highest[:, ::-1], axis=1)[:, ::-1].sum(axis=0)
    at = np.arange(1, count)[count // 8 : count - 1 - count // 8]
    cut = int(at[(at * below[at - 1] + (count - at) * above[at]).argmin()]) * group
    parts = (packs[:cut], costs[:, :cut]), (packs[cut:], costs[:, cut:])
    return np.concatenate([_cells(*part, group, most, random) for part in parts])


def _level_walk(means: np.ndarray, random: np.random.Generator) -> list[int]:
    """The order of groups whose two costs are ``[2, G]`` means: of those left, in random order, the first that keeps
    both walks within half of `SHARE` of `RUN` steps, else the one of `DRAWS` that leaves least. Where costs rise
    together no step would lead out of a corner, so the second walks in a band beside its share of the first."""
    bound, x, y, order = SHARE / 2 * RUN, 0.0, 0.0, []
    means = (means - means.mean(axis=1, keepdims=True))[:: 1 if np.ptp(means[0]) > np.ptp(means[1]) else -1]
    slope = float(np.clip((means[0] * means[1]).sum() / max(np.square(means[0]).sum(), 1e-9), -0.9, 0.9))
    steps = np.stack([means[0], (means[1] - slope * means[0]) / (1 - abs(slope))], axis=1).tolist()
    left = random.permutation(len(steps)).tolist()
    while left:
        least, chosen = np.inf, 0
        for at in reversed(range(max(len(left) - DRAWS, 0), len(left))):
            outside = max(abs(x + steps[left[at]][0]), abs(y + steps[left[at]][1]))
            if outside < least:
                least, chosen = outside, at
            if least <= bound:
                break
        order.append(left.pop(chosen))
        x, y = x + steps[order[-1]][0], y + steps[order[-1]][1]
    return order


def _groups(ascending: np.ndarray, group: int, random: np.random.Generator) -> np.ndarray:
    """Groups of neighbours in cost ``[G, group]``, block by block and ascending in each."""
    count = ascending.size // group
    if count == 0:
        return np.zeros((0, group), dtype=np.int64)
    blocks = max(1, round(count / BLOCK))
    sizes = [part.size for part in np.array_split(np.arange(count), blocks)]
    # Of each `count` neighbours in cost, every block gets as many as it has groups.
    labels = np.tile(np.repeat(np.arange(blocks), sizes), (group, 1))
    labels = random.permuted(labels, axis=1).ravel()
    return ascending[np.argsort(labels, kind="stable")].reshape(count, group)


def _shuffled_inside(groups: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Each group ``[G, group]`` with its parts, their parts, and so on, in random order; every part stays together."""
    size = groups.shape[1]
    parts = groups
    for factor in _factors(size):
        size //= factor
        parts = parts.reshape(-1, factor, size)
        places = random.random(parts.shape[:2]).argsort(axis=1, kind="stable")
        parts = np.take_along_axis(parts, places[:, :, None], axis=1)
    return parts.reshape(groups.shape)


def _factors(number: int) -> list[int]:
    """Prime factors, largest first: data-parallel sizes are mostly powers of two, which then stay whole longest."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]


def _level_order(means: np.ndarray, target: float, random: np.random.Generator) -> np.ndarray:
    """The order of groups, block by block, whose walk stays within half of `SHARE` of `RUN` steps."""
    order: list[np.ndarray] = []
    walked = 0.0
    for part in np.array_split(np.arange(means.size), max(1, round(means.size / BLOCK))):
        steps = means[part] / target - 1.0
        order.append(part[_drawn(steps, walked, SHARE / 2 * RUN, random)])
        walked += float(steps.sum())
    return np.concatenate(order)


def _drawn(steps: np.ndarray, walked: float, bound: float, random: np.random.Generator) -> np.ndarray:
    """An order that keeps the walk in bounds: drawn from all of these with equal chances, else built step by step: a
    random one of those that keep the walk in bounds, or the one that leaves least."""
    for _ in range(TIMES):
        draws = random.permuted(np.tile(np.arange(steps.size), (DRAWS, 1)), axis=1)
        worst = np.abs(walked + np.cumsum(steps[draws], axis=1)[:, :-1]).max(axis=1, initial=0.0)
        if worst.min() <= bound:
            return np.asarray(draws[int((worst <= bound).argmax())])
        if worst.min() > HOPELESS * bound:
            break
    left = random.permutation(steps.size).tolist()
    costs, order = steps.tolist(), []
    while left:
        inside = [at for at, number in enumerate(left) if abs(walked + costs[number]) <= bound]
        nearest = inside or [min(range(len(left)), key=lambda at: abs(walked + costs[left[at]]))]
        order.append(left.pop(nearest[int(random.random() * len(nearest))]))
        walked += costs[order[-1]]
    return np.array(order, dtype=np.int64)
