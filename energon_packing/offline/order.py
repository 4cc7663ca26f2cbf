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

What an epoch has too many for whole groups is a group shared with the next epoch, of packs of similar cost; at the end
of the plan it is left as it is.
"""

import numpy as np

BLOCK = 48
"""Groups of a block; a longer one makes steps a little more even and their order less."""
RUN = 32
"""Steps in a row whose mean cost is near that of the whole."""
SHARE = 0.05
"""How near."""
DRAWS = 256
"""Orders of a block that are drawn at a time."""
TIMES = 16
"""How often, before one is built step by step. That is needed only where groups
vary in cost by about a third."""


def balanced_order(costs: np.ndarray, *, group: int, start: int, near: float | None, seed: list[int]) -> np.ndarray:
    """The order of one epoch's packs: positions ``[P]`` int64, each once.

    Args:
        costs: ``[P]`` of the packs.
        group: packs of a step at the largest data-parallel size.
        start: packs before this epoch.
        near: mean cost of the incomplete group at the end of the epoch before, which this epoch completes.
        seed: of all random choices.
    """
    random = np.random.default_rng(seed)
    costs = np.asarray(costs, dtype=np.float64)
    shuffled = random.permutation(costs.size)  # packs of equal cost are in random order
    ascending = shuffled[np.argsort(costs[shuffled], kind="stable")]
    ahead = min(-start % group, costs.size)
    head, ascending = _taken(ascending, costs, ahead, near, random)
    behind = ascending.size % group
    middle = float(costs[ascending].mean()) if ascending.size else None
    tail, ascending = _taken(ascending, costs, behind, middle, random)
    parts = [random.permutation(head)]
    groups = _groups(ascending, group, random)
    if len(groups):
        means = costs[groups].mean(axis=1)
        order = _level_order(means, float(costs.mean()), random)
        parts.append(_shuffled_inside(groups[order], random).ravel())
    parts.append(random.permutation(tail))
    return np.concatenate(parts)


def incomplete_group(costs: np.ndarray, start: int, group: int) -> float | None:
    """Mean cost of the packs that the next epoch has to complete to a group; None if there are none. `costs` are
    ``[P]`` of an epoch's packs in their order, `start` packs are before it."""
    left = (start + costs.size) % group
    return float(costs[-min(left, costs.size) :].mean()) if left and costs.size else None


def order_again(start: int, stop: int, *, position: int, group: int, seed: list[int]) -> np.ndarray:
    """Another order of the packs ``[start, stop)`` of an epoch, ``[stop - start]`` int64, each once: its whole groups
    change places, and so do the packs inside each. A step is as even as it was, but for those that hold the first or
    the last packs of an epoch. ``position`` is that of the first of them; where steps would straddle two groups, a part
    of a group comes first. ``group`` and ``seed``: as for `balanced_order`."""
    random = np.random.default_rng(seed)
    first = min(-(-start // group) * group, stop)
    last = max(stop // group * group, first)
    head, tail = (random.permutation(np.arange(*ends)) for ends in ((start, first), (last, stop)))
    groups = random.permutation(np.arange(first, last).reshape(-1, group))
    groups = _shuffled_inside(groups, random) if len(groups) else groups
    ahead = -position % group
    if ahead != head.size and len(groups):
        head, tail = groups[0, :ahead], np.concatenate([groups[0, ahead:], tail, head])
        groups = groups[1:]
    return np.concatenate([head, groups.ravel(), tail])


def _taken(
    ascending: np.ndarray, costs: np.ndarray, count: int, near: float | None, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`count` neighbours in order of cost, and the rest. They cost about `near` on average."""
    if count == 0:
        return ascending[:0], ascending
    if near is None:
        at = int(random.integers(0, ascending.size - count + 1))
    else:
        sums = np.concatenate([[0.0], np.cumsum(costs[ascending])])
        means = (sums[count:] - sums[:-count]) / count
        at = int(np.abs(means - near).argmin())
    return ascending[at : at + count], np.delete(ascending, slice(at, at + count))


def _groups(ascending: np.ndarray, group: int, random: np.random.Generator) -> np.ndarray:
    """Groups of neighbours in cost ``[G, group]``, block by block and ascending in each."""
    count = ascending.size // group
    if count == 0:
        return np.zeros((0, group), dtype=np.int64)
    blocks = max(1, round(count / BLOCK))
    sizes = np.full(blocks, count // blocks)
    sizes[: count % blocks] += 1
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
        places = random.random(parts.shape[:2]).argsort(axis=1)
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
    count = means.size
    blocks = max(1, round(count / BLOCK))
    bound = SHARE / 2 * RUN
    order: list[np.ndarray] = []
    walked = 0.0
    for part in np.array_split(np.arange(count), blocks):
        steps = means[part] / target - 1.0
        chosen = _drawn(steps, walked, bound, random)
        order.append(part[chosen])
        walked += float(steps.sum())
    return np.concatenate(order)


def _drawn(steps: np.ndarray, walked: float, bound: float, random: np.random.Generator) -> np.ndarray:
    """An order that keeps the walk in bounds: drawn from all of these with equal chances, else built step by step: a
    random one of those that keep the walk in bounds, or the one that leaves least."""
    for _ in range(TIMES):
        draws = random.permuted(np.tile(np.arange(steps.size), (DRAWS, 1)), axis=1)
        walks = walked + np.cumsum(steps[draws], axis=1)
        good = np.flatnonzero(np.abs(walks[:, :-1]).max(axis=1, initial=0.0) <= bound)
        if good.size:
            return np.asarray(draws[good[0]])
    left = random.permutation(steps.size).tolist()
    order = []
    while left:
        after = np.abs(walked + steps[left])
        inside = np.flatnonzero(after <= bound)
        at = int(random.choice(inside)) if inside.size else int(after.argmin())
        order.append(left.pop(at))
        walked += float(steps[order[-1]])
    return np.array(order, dtype=np.int64)
