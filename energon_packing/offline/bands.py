"""Plans of more samples than are packed at once: what is known of them after one pass over the index, and their bands.

Each epoch is cut into bands of equal size, which take the same share of every data set, so each has the blend's mix. In
the row of permutations of a data set, its shards come in random order, and the samples of each in an order of its own:
a band reads few shards, each once, and so does training. Where shards differ in the lengths of their samples, so that
bands would too, a permutation goes through them in several rounds, and each takes some samples of every shard.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from energon_packing.offline.blend import Blend, Part, position, stretch, turns
from energon_packing.offline.samples import AnyLimits, Drop, Samples, Sources, joined, shard_samples
from energon_packing.sample_kind import AnyRun

BAND = 1 << 22  # rows of a plan that are packed at once
EVEN, FEWEST = 0.02, 8
"""How far the mean length in a band is from that of the whole, in standard deviations, and the fewest shards of a band:
each data set, by its share of the rows, has as many rounds as that takes."""


def chunks(sources: Sources) -> Iterator[range]:
    """Shards in a row that have up to `BAND` samples."""
    first = 0
    while first < len(sources.shard):
        stop = int(np.searchsorted(sources.starts, sources.starts[first] + BAND, side="right")) - 1
        yield range(first, first := max(stop, first + 1))


@dataclass(kw_only=True, slots=True, eq=False)
class Counted:
    """What is known of all samples when each was read once."""

    sources: Sources
    config: AnyRun
    # rows of `Samples`, their `Samples.amounts` and their tokens: ``[shards, 3]`` float64
    shards: np.ndarray
    samples: int = 0  # source samples that can be packed
    pairs: int = 0
    images: bool = False  # whether any sample has some
    again: list[Samples] = field(default_factory=list)  # that were measured again
    # rows by the power of two below their tokens
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(64, dtype=np.int64))
    drops: Counter[str] = field(default_factory=Counter)  # samples and pieces by reason
    # of each data set, source samples by one of their reasons, and the first drop of each reason
    dropped: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    first: dict[tuple[int, str], Drop] = field(default_factory=dict)

    def add(self, shards: range, samples: Samples, again: Samples, drops: Sequence[Drop]) -> None:
        """Counts what `energon_packing.offline.samples.fitting_samples` said of some shards."""
        sizes, tokens = samples.sizes, samples.sizes.tokens
        bounds = np.searchsorted(samples.source, self.sources.starts[shards.start : shards.stop + 1])
        for at, each in enumerate((None, samples.amounts(self.config.plan.weights_by), tokens)):
            sums = np.arange(len(samples) + 1) if each is None else np.cumsum(np.concatenate([[0], each]))
            self.shards[shards.start : shards.stop, at] = np.diff(sums[bounds])
        self.samples += int(np.count_nonzero(np.diff(samples.source, prepend=-1)))
        self.pairs += int(np.count_nonzero(sizes.second))
        self.images |= bool(np.any(sizes.images))
        self.lengths += np.bincount(np.frexp(np.maximum(tokens, 1))[1] - 1, minlength=64)
        self.again.append(again)
        self.drops.update(drop.reason for drop in drops)
        of = self.sources.place(np.array([drop.source for drop in drops], dtype=np.int64))[0].tolist()
        for number, reason in {drop.source: (at, drop.reason) for at, drop in zip(of, drops, strict=True)}.values():
            self.dropped[number][reason] += 1
        for number, drop in zip(of, drops, strict=True):
            self.first.setdefault((number, drop.reason), drop)

    @property
    def datasets(self) -> np.ndarray:
        """The columns of `shards`, of each data set, ``[D, 3]``."""
        count = len(self.sources.datasets)
        return np.stack([np.bincount(self.sources.dataset, each, count) for each in self.shards.T], axis=1)


def bands_of(parts: Sequence[Part], rows: np.ndarray) -> list[list[Part]]:
    """What is packed at once: of parts with more than `BAND` rows, a band; of smaller ones, as many as have no more.
    ``rows`` ``[D]`` are those of each data set."""
    bands: list[list[Part]] = []
    held = float(BAND)
    for part in parts:
        ends = np.array(part.intervals).reshape(-1, 2)
        count = float(rows @ np.diff(ends)[:, 0]) if part.rows is None else part.rows.size
        if (number := math.ceil(count / BAND)) > 1:
            cuts = [[position(low + (high - low) * at / number) for low, high in ends] for at in range(1, number)]
            for at, (low, high) in enumerate(pairwise([ends[:, 0].tolist(), *cuts, ends[:, 1].tolist()])):
                intervals = tuple(zip(low, high, strict=True))
                bands.append([replace(part, intervals=intervals, band=(at,), ends=at == number - 1)])
            held = float(BAND)
        elif bands and held + count <= BAND:
            bands[-1].append(part)
            held += count
        else:
            bands.append([part])
            held = count
    return bands


def rounds_of(counted: Counted, parts: Sequence[Part]) -> list[int]:
    """How many rounds each permutation of a data set goes through its shards in. That follows from the first of the
    parts that has some of it, so that a plan of more epochs or stages begins with the same packs."""
    lengths = np.array([[last - first for first, last in part.intervals] for part in parts])
    read = counted.datasets[:, 0] * lengths
    rounds = []
    for dataset, at in enumerate((lengths > 0).argmax(axis=0).tolist()):
        rows, _, tokens = counted.shards[counted.sources.dataset == dataset].T
        rows, tokens = rows[rows > 0], tokens[rows > 0]
        often, held = float(lengths[at, dataset]), float(read[at].sum())
        share = float(read[at, dataset]) / max(held, 1)
        wanted, apart = 1, held / BAND / often if often else 0.0  # bands from permutation to next
        if rows.size and apart > 1:
            mean = tokens.sum() / rows.sum()
            spread = float(rows @ np.square(tokens / rows / mean - 1)) / rows.sum()
            units = share * max(FEWEST, spread / EVEN**2) * apart
            wanted = min(math.ceil(units / rows.size), math.ceil(apart))
        rounds.append(wanted)
    return rounds


class Band:
    """As `energon_packing.offline.blend.AllSamples`, of the samples of some parts, with these columns of the index."""

    def __init__(
        self,
        parts: Sequence[Part],
        blend: Blend,
        counted: Counted,
        again: Samples,
        rounds: Sequence[int],
        limits: AnyLimits,
        columns: Sequence[str],
    ) -> None:
        sources, config = counted.sources, counted.config
        bounds = np.searchsorted(sources.dataset, np.arange(len(sources.datasets) + 1)).tolist()
        wanted: dict[int, list[tuple[tuple[int, float, float], tuple[tuple[int, ...], float, float]]]]
        wanted = defaultdict(list)
        for dataset, (first, last) in ((at, ends) for part in parts for at, ends in enumerate(part.intervals)):
            amounts = counted.shards[bounds[dataset] : bounds[dataset + 1], 1]
            for turn, *ends in turns(first, last) if amounts.any() else ():
                seed = [blend.config.seed, dataset, turn, 2]
                for shard, low, high in shard_stretches(amounts, rounds[dataset], seed, *ends):
                    part = (dataset, turn, 2, shard), low, high
                    wanted[bounds[dataset] + shard].append(((dataset, first, last), part))
        self._drawn: defaultdict[tuple[int, float, float], list[np.ndarray]] = defaultdict(list)
        self._content: list[pa.Table] = []
        taken: list[Samples] = [again.take(slice(0))]
        count = 0
        for shard in sorted(wanted):
            samples, table = shard_samples(sources, shard, limits, config, again, columns)
            if not len(samples):
                continue
            chosen = [(interval, stretch(samples, blend.config, *part)) for interval, part in wanted[shard]]
            used = np.zeros(len(samples), dtype=bool)
            used[np.concatenate([rows for _, rows in chosen])] = True
            place = count - 1 + np.cumsum(used)
            for interval, rows in chosen:
                self._drawn[interval].append(place[rows])
            count += int(np.count_nonzero(used))
            taken.append(samples.take(used))
            row = np.unique(taken[-1].source) - sources.starts[shard]
            self._content.append(table if row.size == len(table) else table.take(pa.array(row)))
        self.samples = joined(*taken)

    def of_dataset(self, dataset: int, first: float, last: float) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._drawn.get((dataset, first, last), ())])

    def content(self, columns: Sequence[str]) -> tuple[list[pa.Table], np.ndarray]:
        return self._content, np.cumsum(np.diff(self.samples.source, prepend=-1) != 0) - 1


def shard_stretches(
    amounts: np.ndarray, rounds: int, seed: Sequence[int], low: float, high: float
) -> Iterator[tuple[int, float, float]]:
    """The shards, of these amounts ``[S]``, in the part ``[low, high)`` of a permutation, and of each the part of its
    own permutation. Stretches that meet share no sample, and leave none out."""
    random = np.random.default_rng(seed)
    order = np.concatenate([random.permutation(amounts.size) for _ in range(rounds)])
    after = np.cumsum(amounts[order])
    after = after / after[-1]
    before = np.concatenate([[0.0], after[:-1]])
    begin, end = int(np.searchsorted(after, low, side="right")), int(np.searchsorted(before, high))
    for at in range(begin, end):
        turn, width = at // amounts.size, after[at] - before[at]
        first = turn if before[at] >= low else turn + (low - before[at]) / width
        last = turn + 1 if after[at] <= high else turn + (high - before[at]) / width
        if first / rounds < last / rounds:
            yield int(order[at]), first / rounds, last / rounds
