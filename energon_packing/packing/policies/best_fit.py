"""Policy ``best_fit``: best-fit decreasing over a whole list; the default offline.

Good for: lists that are fully known. Cost: O(N + C), about 0.1-0.3 microseconds per sample at a million samples.
Measured: the packs of textbook best-fit decreasing, 99.9-100 % of the bound's fill on lists of 100,000.

With limits other than tokens, this becomes vector bin packing. Best-fit decreasing by the largest share then wastes
20-30 % of the packs (measured on multimodal mixes with limited images), because it fills packs with one resource and
leaves them empty in the other. `pack_lengths` therefore packs as ``window`` does, and a plan, which has millions of
samples, by `pack_limited`. Where samples are much alike (tiles of one size), ``window`` packs one of each run of equals
for all of it. Otherwise:

1. There are as many packs as the lower bound says. Samples that cost something scarce, and large ones, go to the packs
with the most room left: the largest first, each by the limit of which it uses the largest share (longest processing
time first, as machines are given jobs). A sample that finds no room goes where the scarcest resource of all limits is
most plentiful, then by each limit in turn.
2. Where every sample costs something (a number of segments, attention), the smallest samples are spread by it, too, but
for a part that is kept for the gaps.
3. All others, mostly plain text, fill the gaps: best-fit decreasing by tokens, into packs that are partly full.
4. Samples that found no place and those of packs over a limit are packed anew, in the company of good packs: some of
all, and those that waste room of the scarcest limit. What is left after a few times is packed by ``window``.
5. If that is more than 0.2 % over the bound, ``window`` packs the whole list, too, and the fewer packs count.

Measured (`scripts/bench.py offline plan`): the packs of the bound where media are limited, 0.08 % more where patches,
images and samples are limited together, in about a microsecond per sample and limit; with step 5, the time is that of
``window``. Of 10 million samples that are alike in runs, 0.01 to 0.02 % over it, in 1 to 3 microseconds each.
"""

import math
from dataclasses import dataclass

import numpy as np

from energon_packing.packing.constraints import Constraints
from energon_packing.packing.partition import PackGroups, best_fit_decreasing, best_fit_into, flat_groups, lower_bound
from energon_packing.packing.policies import Groups, PackingPolicy
from energon_packing.packing.policies.window import pack_window

LEVELS = (0.5, 0.25, 0.125, 0.0625, 0.0)
"""Samples are placed by the largest share that they use of any limit, level by level."""
LARGE = 0.125  # Samples above this share are placed in step 1, whatever they cost
SCARCE = 0.25
"""A limit counts if all samples need at least this share of the packs for it that they need for the scarcest."""
UNEVEN = 0.2  # A limit is about some of the samples if what they cost beyond the median is more than this share of all
PART = 8  # In each round, at least one pack of so many gets a sample, so that rounds stay few
KEPT = 16  # Of the smallest samples, one of so many is kept for the gaps
COMPANY = 128
"""Good packs that are packed anew for each pack over a limit: between them they have the room that one sample lacks."""
MOST = 4  # But at most one of so many
WASTED = 0.01  # A pack with more room than this share of the scarcest limit wastes it, and is packed anew too
TIMES = 3  # How often what did not fit is packed anew
WINDOW = 1024  # Samples that the policy ``window`` holds; it looks at no more
LEAST, MOST_COPIES, ROUNDED = 131_072, 64, 1e-4
"""Of long lists, so many samples at least are packed, each for so many that are alike: all as large as the largest of
them, which adds this share at most."""
NEARLY = 0.98  # A limit that needs more than this share of the packs that the scarcest needs is scarce, too
ENOUGH = 1.002  # Packs over the bound that are good enough; if there are more, ``window`` packs the list too


def pack_limited(units: np.ndarray, capacity: int, constraints: Constraints) -> PackGroups:
    """Packs samples that fit alone; returns groups of indices, each ascending, ordered by their smallest index.

    Args:
        units: ``[N]`` int64, alignment units of each sample.
        capacity: units of a pack.
        constraints: the other limits, over the same samples; costs and limits are integers.
    """
    if units.size == 0:
        return PackGroups(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    if (copied := _in_copies(units, capacity, constraints)) is not None:
        return copied
    packs = _spread(units, capacity, constraints, TIMES)
    if len(packs) <= ENOUGH * lower_bound(units, capacity, constraints):
        return packs
    numbers = _numbers(pack_window(units, capacity, constraints, window=WINDOW, seed=0))
    return min(packs, PackGroups.of(numbers), key=len)


def _in_copies(units: np.ndarray, capacity: int, constraints: Constraints) -> PackGroups | None:
    """Packs a long list of samples that are alike in runs: one of each run as all of it, as large as its largest. Those
    of packs that waste more than most, and what is left over, are packed by themselves. None if they are too unlike."""
    columns = [units, *constraints.costs.values()]
    bounds = [capacity, *(constraints.limits[name] for name in constraints.costs)]
    order, copies = np.lexsort(columns), min(units.size // LEAST, MOST_COPIES)
    while copies > 1:
        runs = order[: order.size // copies * copies].reshape(-1, copies)
        largest = [column[runs].max(axis=1) for column in columns]
        if all(
            large.sum(dtype=float) * copies <= (1 + ROUNDED) * column[runs].sum(dtype=float)
            for large, column in zip(largest, columns, strict=True)
        ):
            break
        copies //= 2
    else:
        return None
    drawn = np.random.default_rng(0).permutation(len(runs))
    tokens, *costs = (large[drawn] for large in largest)
    part = Constraints(costs=dict(zip(constraints.costs, costs, strict=True)), limits=constraints.limits)
    made = flat_groups(pack_window(tokens, capacity, part, window=WINDOW, seed=0))
    flat, sizes, pairs = made.order, np.diff(made.offsets), zip((tokens, *costs), bounds, strict=True)
    shares = np.stack([np.add.reduceat(column[flat], made.offsets[:-1]) / (bound or 1) for column, bound in pairs])
    needs = shares.sum(axis=1)
    used = shares[needs > NEARLY * needs.max()].mean(axis=0)
    good = used >= np.median(used) - WASTED / 10
    number = np.full(len(runs), -1)
    number[drawn[flat]] = np.repeat(np.where(good, np.cumsum(good) - 1, -1), sizes)
    packs = np.full(units.size, -1, dtype=np.int64)
    packs[runs] = np.where(number[:, None] < 0, -1, number[:, None] * copies + np.arange(copies))
    left = np.random.default_rng(1).permutation(np.flatnonzero(packs < 0))
    rest = pack_window(units[left], capacity, constraints.take(left), window=WINDOW, seed=0)
    packs[left] = copies * int(good.sum()) + _numbers(rest)
    return PackGroups.of(packs)


def _spread(units: np.ndarray, capacity: int, constraints: Constraints, times: int) -> PackGroups:
    """Steps 1 to 4; ``times``: how often what did not fit may be packed anew."""
    columns = np.stack([units, *constraints.costs.values()], axis=1)
    bounds = np.array([capacity, *(constraints.limits[name] for name in constraints.costs)])
    free = np.tile(bounds, (lower_bound(units, capacity, constraints), 1))
    packs = _Packs(columns=columns, free=free, pack=np.full(units.size, -1, dtype=np.int64))
    fillers = _place(packs, columns / np.maximum(bounds, 1))
    packs.pack[fillers] = best_fit_into(units[fillers], capacity, packs.free[:, 0])
    again = _unfit(packs, bounds, company=times > 0)
    if again.size:
        part = constraints.take(again)
        if times and again.size < units.size:
            left: Groups = _spread(units[again], capacity, part, times - 1)
        else:
            left = pack_window(units[again], capacity, part, window=WINDOW, seed=0)
        packs.pack[again] = int(packs.pack.max()) + 1 + _numbers(left)
    # What was packed anew has left empty packs.
    return PackGroups.of((np.cumsum(np.bincount(packs.pack) > 0) - 1)[packs.pack])


def _numbers(groups: Groups) -> np.ndarray:
    """The number of the pack of each sample, ``[N]`` int64."""
    packs = flat_groups(groups)
    numbers = np.empty(packs.order.size, dtype=np.int64)
    numbers[packs.order] = np.repeat(np.arange(len(packs)), np.diff(packs.offsets))
    return numbers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Packs:
    """Partly filled packs; the arrays change. `columns` ``[N, limits]`` are what each sample costs, tokens first;
    `free` ``[packs, limits]`` what each pack has left; `pack` ``[N]`` that of each sample, -1 if it has none."""

    columns: np.ndarray
    free: np.ndarray
    pack: np.ndarray

    def spread(self, members: np.ndarray, by: int, others: np.ndarray) -> None:
        """Places samples, the largest first, where there is most room by a limit; else by any of the others."""
        left = members[np.argsort(-self.columns[members, by], kind="stable")]
        for limit in (by, None, *others[others != by].tolist(), None):
            if left.size == 0:
                return
            left = self._rounds(left, limit, others)

    def _rounds(self, members: np.ndarray, by: int | None, others: np.ndarray) -> np.ndarray:
        """Places what fits and returns the rest. None means the limit of which a pack has least left."""
        count = self.free.shape[0]
        missed = [members[:0]]
        at = 0
        while at < members.size:
            if by is None:
                mean = np.maximum(self.free[:, others].mean(axis=0), 1e-9)
                room = (self.free[:, others] / mean).min(axis=1)
                size = float((self.columns[members[at], others] / mean).max())
            else:
                room, size = self.free[:, by], float(self.columns[members[at], by])
            # Packs that are roomier than the roomiest after its next sample get one each before any gets a second.
            open_ = max(int(np.count_nonzero(room > room.max() - size)), count // PART, 1)
            open_ = min(open_, members.size - at, count)
            # Of equally roomy ones the last; which ones `argpartition` takes differs by processor.
            packs = np.argsort(room, kind="stable")[::-1][:open_]
            given = members[at : at + open_]
            fits = (self.columns[given] <= self.free[packs]).all(axis=1)
            self.free[packs[fits]] -= self.columns[given[fits]]
            self.pack[given[fits]] = packs[fits]
            missed.append(given[~fits])
            at += open_
        return np.concatenate(missed)


def _place(packs: _Packs, shares: np.ndarray) -> np.ndarray:
    """Steps 1 and 2; `shares` are ``[N, limits]`` of a whole pack. Returns the samples that are left for the gaps;
    others without a pack have found no room."""
    demand = shares.sum(axis=0)
    scarce = demand >= SCARCE * demand.max()
    usual = np.median(packs.columns, axis=0)
    unusual = np.maximum(packs.columns - usual, 0).sum(axis=0) / np.maximum(packs.columns.sum(axis=0), 1)
    some = scarce & (unusual > UNEVEN)
    every = scarce & (usual > 0)
    some[0] = every[0] = False
    spread_by = some.copy()
    spread_by[0] = True
    others = np.flatnonzero(spread_by)
    kind = np.argmax(shares * spread_by, axis=1)
    largest = shares.max(axis=1)
    early = (packs.columns[:, some] > usual[some]).any(axis=1) | (largest > LARGE)
    for below, above in zip((np.inf, *LEVELS), LEVELS, strict=False):
        level = np.flatnonzero(early & (largest > above) & (largest <= below))
        for by in np.flatnonzero(np.bincount(kind[level]))[::-1].tolist():  # tokens last
            packs.spread(level[kind[level] == by], by, others)
    late = np.flatnonzero(~early)
    for by in np.flatnonzero(every).tolist():
        tiny = late[(packs.pack[late] < 0) & (shares[late, by] > shares[late, 0])]
        tiny = tiny[np.argsort(-packs.columns[tiny, 0], kind="stable")]
        packs.spread(np.delete(tiny, slice(None, None, KEPT)), by, others)
    return late[packs.pack[late] < 0]


def _unfit(packs: _Packs, bounds: np.ndarray, *, company: bool) -> np.ndarray:
    """Samples without a pack, and those of packs over a limit; with `company` also those of some good packs."""
    placed = packs.pack >= 0
    count = int(packs.pack.max(initial=-1)) + 1
    # Sums in float64 are exact below 2**53.
    used = [np.bincount(packs.pack[placed], packs.columns[placed, limit], count) for limit in range(bounds.size)]
    over = (np.stack(used, axis=1) > bounds).any(axis=1)
    if placed.all() and not over.any():
        return np.zeros(0, dtype=np.int64)
    if company:
        bounds = np.maximum(bounds, 1)  # of a limit of 0, all need none
        good = np.flatnonzero(~over)
        most = max(1, good.size // MOST)
        homeless = float((packs.columns[~placed] / bounds).max(axis=1, initial=0).sum())  # in packs
        more = min(COMPANY * (int(over.sum()) + math.ceil(homeless)), most)
        over[good[:: max(1, good.size // more)]] = True
        scarcest = int((packs.columns.sum(axis=0) / bounds).argmax())
        room = 1 - used[scarcest][good] / bounds[scarcest]
        roomiest = np.argsort(-room, kind="stable")[:most]
        over[good[roomiest[room[roomiest] > WASTED]]] = True
    return np.flatnonzero(~placed | over[packs.pack])


def pack_best_fit(lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int) -> Groups:
    """The policy: `lengths` int64 ``[N]``; packs in the order of their oldest sample. `window` is not used."""
    del window  # a whole list
    if constraints:
        return pack_window(lengths, capacity, constraints, window=WINDOW, seed=seed)
    return best_fit_decreasing(lengths, capacity)


POLICY = PackingPolicy(whole_list=pack_best_fit)
