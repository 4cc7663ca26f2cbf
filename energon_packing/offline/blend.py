"""Which samples occur in which epoch or stage of a plan, when data sets have weights or are repeated.

The share of a data set is what the section ``plan`` says, or else the metadataset that was measured. Every data set is
an endless row of seeded permutations of its samples, and each epoch or stage takes the next stretch of it. So a data
set that occurs half a time in an epoch is complete after two, and no sample occurs twice before all have occurred. What
is packed together is a `Part`: an epoch, or a band of a large one (`energon_packing.offline.bands`).

A plan that goes on from another one keeps its first packs. The permutations that these have begun are then completed:
what they lack comes first.
"""

import bisect
import difflib
import math
import os.path
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from energon_packing.config.run import LARGEST_EPOCHS, PlanConfig, PlannedDatasetConfig, group_name
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline.index import IndexedDataset
from energon_packing.offline.plan import ROUNDING, Plan
from energon_packing.offline.samples import Samples, Sources


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Of one data set: its weight relative to those of the others (None for all or for none); how often an epoch has
    each of its samples, with weights how often at most; and the group that it shares packs with, None for that of its
    subflavors."""

    weight: float | None
    epochs: float
    group: str | None


def shares_of(datasets: Sequence[IndexedDataset], config: PlanConfig) -> list[Share]:
    """The share of each data set. Raises ConfigError: a name that no data set has, or that two have; weights for only
    some of the data sets."""
    settings = _by_name(datasets, config.datasets, PlannedDatasetConfig(), "plan.datasets")
    if config.stages:
        used = np.any(stage_weights(datasets, config), axis=0).tolist()
        pairs = zip(settings, used, strict=True)
        return [Share(weight=None, epochs=float(it), group=setting.group) for setting, it in pairs]
    epochs = [_epochs(dataset, setting, config) for dataset, setting in zip(datasets, settings, strict=True)]
    used = [number for number, each in enumerate(epochs) if each > 0]
    if not used:
        raise ConfigError("plan.datasets: epochs is 0 for every data set; nothing is left to plan.")
    weights = [setting.weight for setting in settings]
    missing = [datasets[number].name for number in used if weights[number] is None]
    if len(missing) == len(used):
        weights = _weights_of_the_blend(datasets, used, config)
    elif missing:
        what = f"{', '.join(missing)} has no weight, but others have"
        raise ConfigError(f"plan.datasets: {what}; give a weight to all, or to none.")
    rows = zip(weights, epochs, settings, strict=True)
    return [Share(weight=weight, epochs=epoch, group=setting.group) for weight, epoch, setting in rows]


def _epochs(dataset: IndexedDataset, setting: PlannedDatasetConfig, config: PlanConfig) -> float:
    if setting.epochs is not None:
        return setting.epochs
    if config.weights_by == "none" or setting.weight is not None:
        return 1.0
    return 0.0 if dataset.weight == 0 else 1.0 if dataset.repetitions is None else dataset.repetitions


def _weights_of_the_blend(
    datasets: Sequence[IndexedDataset], used: Sequence[int], config: PlanConfig
) -> list[float | None]:
    """The weights that a metadataset gives these data sets; None for all if none does, or it shall not count. A
    ConfigError if it has data sets beside it."""
    blended = [number for number in used if datasets[number].weight is not None]
    if not blended or config.weights_by == "none":
        return [None] * len(datasets)
    blends = sorted({f"{datasets[number].path} ({datasets[number].asked})" for number in blended})
    if len(blended) < len(used) or len(blends) > 1:
        others = [datasets[number].name for number in used if number not in blended]
        beside = f"{', '.join(others)} has none" if others else f"so does {blends[1]}"
        fix = "give each data set a weight in plan.datasets, or set plan.weights_by to none"
        raise ConfigError(f"{blends[0]} gives its data sets weights, and {beside}; {fix}.")
    return [dataset.weight for dataset in datasets]


def stage_weights(datasets: Sequence[IndexedDataset], config: PlanConfig) -> np.ndarray:
    """The weight of each data set in each stage, ``[stages, D]`` float64. Raises ConfigError: a name that no data set
    has, or that two have."""
    return np.array([_by_name(datasets, stage.datasets, 0.0, "plan.stages") for stage in config.stages])


def _by_name[T](datasets: Sequence[IndexedDataset], entries: Mapping[str, T], default: T, where: str) -> list[T]:
    """The entry of each data set in a setting, by any of its names."""
    names: defaultdict[str, list[int]] = defaultdict(list)
    short: defaultdict[str, list[int]] = defaultdict(list)
    for number, dataset in enumerate(datasets):
        for name in dataset.names:
            names[name].append(number)
        for name in {os.path.basename(path) for path in dataset.names} - dataset.names:
            short[name].append(number)
    settings = [default] * len(datasets)
    named: dict[int, str] = {}
    for name, setting in entries.items():
        spelled = (name, os.path.abspath(name))
        numbers = next((known[each] for known in (names, short) for each in spelled if each in known), [])
        if not numbers:
            near = difflib.get_close_matches(name, [*names, *short], n=1)
            known = ", ".join(dataset.name for dataset in datasets)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {known}."
            raise ConfigError(f"{where}: no index has the data set {name!r}; {hint}")
        if len(numbers) > 1:
            several = ", ".join(f"{datasets[at].name} in {datasets[at].root}" for at in numbers)
            raise ConfigError(f"{where}: {name!r} names several data sets ({several}); name the one you mean.")
        if numbers[0] in named:
            raise ConfigError(f"{where}: {named[numbers[0]]!r} and {name!r} are the same data set; name it once.")
        named[numbers[0]] = name
        settings[numbers[0]] = setting
    return settings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """What is packed together: of each data set, an interval ``[first, last)`` of its endless row of permutations."""

    number: int  # of its epoch
    intervals: tuple[tuple[float, float], ...] = ()  # of each data set, in permutations
    rows: np.ndarray | None = None  # ``[N]`` rows of `Samples` that it has instead, all of one group
    place: int = 0  # its position among the parts of the plan
    # its number from 0 if it is one of several bands of such an interval; for random choices
    band: tuple[int, ...] = ()
    ends: bool = True  # whether the epoch ends with it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kept:
    """The first packs of another plan, with which a plan begins."""

    order: np.ndarray  # ``[rows]`` int64 rows of `Samples`, one pack after another
    sizes: np.ndarray  # ``[packs]`` int64, rows of each pack
    times: np.ndarray  # ``[N]`` int64, how often they have each row of `Samples`
    given: np.ndarray  # ``[D]`` float64, how many permutations of each data set they have
    repeats: np.ndarray  # ``[D]`` float64, how many an epoch of that plan has; 0 of what they have none of
    tokens: int  # of those of the stage that has begun
    share_left: float  # of the packs of the epoch that has begun
    ends: tuple[int, ...]  # packs up to the end of each epoch or stage that they have whole
    ended: list[list[Any]]  # `PlanFacts.ended` of these packs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blend:
    """Which samples the parts of a plan have."""

    shares: tuple[Share, ...]  # of each data set, as the plan or its metadataset says
    repeats: tuple[float, ...]  # how often each data set occurs in one epoch
    groups: Mapping[str, tuple[int, ...]]  # for each group, the numbers of its data sets, by name of the group
    config: PlanConfig  # seed and unit of the weights
    # ``[N]`` rows of `Samples` that come first, as a part of their own; None or none begins with a whole epoch
    rest: np.ndarray | None = None
    kept: Kept | None = None  # what comes before all parts
    lengths: np.ndarray | None = None  # ``[stages, D]`` permutations of each data set in a stage, if there are stages

    @classmethod
    def of(cls, datasets: Sequence[IndexedDataset], held: np.ndarray, config: PlanConfig) -> "Blend":
        """The blend of these data sets, with sums ``[D, 2]`` of each: `Samples.amounts`, and their tokens.
        Raises as `shares_of`; UserError: a data set of a stage has nothing."""
        shares = shares_of(datasets, config)
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for number, share in enumerate(shares):
            group = group_name(datasets[number].subflavors) if share.group is None else share.group
            groups[group].append(number)
        amounts, lengths = held[:, 0], None
        if config.stages:
            weights = stage_weights(datasets, config)
            if (empty := np.flatnonzero(weights.any(axis=0) & (amounts == 0))).size:
                raise UserError(f"plan.stages: no sample of {datasets[empty[0]].name} can be packed; leave it out.")
            of_weight = weights / np.maximum(amounts, 1)  # permutations for a unit of weight
            units = np.array([each.tokens for each in config.stages]) / (of_weight @ held[:, 1])
            lengths = of_weight * units[:, None]
            if (most := float(lengths.sum(axis=0).max())) > LARGEST_EPOCHS:
                raise ConfigError(f"plan.stages: a data set would come {most:.4g} times; give the stages fewer tokens.")
        return cls(
            shares=tuple(shares),
            repeats=_repeats(shares, amounts.tolist()) if lengths is None else tuple(lengths.mean(axis=0).tolist()),
            lengths=lengths,
            groups={name: tuple(numbers) for name, numbers in groups.items()},
            config=config,
        )

    def parts(self) -> list[Part]:
        """What is packed together, in order: `rest`, if it has any, and every epoch or stage, or what `kept` packs have
        left of them."""
        parts = [] if self.rest is None or not self.rest.size else [Part(number=0, rows=self.rest)]
        begun, share, repeats, kept = 0, 1.0, np.array(self.repeats), self.kept
        before = given = start = old = np.zeros(repeats.size)
        if kept is not None:
            begun, share, given, old = len(kept.ends), kept.share_left, kept.given, kept.repeats
            before, start = given, np.array(kept.ended[-1][1] if kept.ended else start)
        if any(each.weight for each in self.shares) and not np.allclose(old, repeats, rtol=1e-9, atol=1e-12):
            start = given + repeats * (share - 1)
        # Kept packs may have more than their epoch is to have now; what is left out now is owed nothing.
        start = np.maximum(np.where(repeats > 0, start, 0.0), given - repeats)
        low = [min(each, position(each)) for each in given.tolist()]  # of what is owed, nothing is before it
        for number in range(begun, self.config.epochs if self.lengths is None else len(self.lengths)):
            if self.lengths is None:
                after = np.maximum(before, start + repeats * (number - begun + 1))
            else:
                tokens = kept.tokens if kept is not None and number == begun else 0
                after = before + self.lengths[number] * max(0.0, 1 - tokens / self.config.stages[number].tokens)
            intervals = tuple(zip(low, map(position, after.tolist()), strict=True))
            parts.append(Part(number=number, place=len(parts), intervals=intervals))
            before, low = after, [last for _, last in intervals]
        return parts

    def ended(self, ends: Sequence[int]) -> list[list[Any]]:
        """`PlanFacts.ended` of the plan whose epochs or stages end so."""
        turns = [[round(high, 12) for _, high in part.intervals] for part in self.parts() if part.rows is None]
        own = zip(ends[len(ends) - len(turns) :], turns, strict=True)
        return [*(self.kept.ended if self.kept is not None else ()), *map(list, own)]

    def rows(self, part: Part, group: str, of_dataset: Callable[[int, float, float], np.ndarray]) -> np.ndarray:
        """Rows of `Samples` that a group has in a part, ``[N]`` int64, in seeded random order. `of_dataset` is that of
        `AllSamples`, or of a band. A row occurs more than once if its data set is repeated within the part. Pieces of a
        sample occur together."""
        if part.rows is not None:
            return np.random.default_rng([self.config.seed, 4]).permutation(part.rows)
        rows = np.concatenate([of_dataset(dataset, *part.intervals[dataset]) for dataset in self.groups[group]])
        place = sorted(self.groups).index(group)
        return np.random.default_rng([self.config.seed, part.number, place, 1, *part.band]).permutation(rows)


def turns(first: float, last: float) -> Iterator[tuple[int, float, float]]:
    """The number of each permutation that an interval has a part of, and the part ``[low, high)``."""
    for turn in range(math.floor(first), math.ceil(last)):
        yield turn, max(first - turn, 0.0), min(last - turn, 1.0)


def shares_of_rows(samples: Samples, config: PlanConfig) -> np.ndarray:
    """As `Samples.amounts`, but each piece counts as its share of the sample, ``[N]`` float64."""
    if config.weights_by == "tokens":
        return samples.sizes.tokens.astype(np.float64)
    of, pieces = np.unique(samples.source, return_inverse=True, return_counts=True)[1:]
    shares: np.ndarray = 1.0 / pieces[of]
    return shares


def stretch(samples: Samples, config: PlanConfig, seed: Sequence[int], low: float, high: float) -> np.ndarray:
    """Rows of some `samples` in the part ``[low, high)`` of one permutation of them; all, in their order, if it is
    whole."""
    if (low, high) == (0.0, 1.0):
        return np.arange(len(samples))
    firsts = np.flatnonzero(np.diff(samples.source, prepend=-1))  # the first row of each sample
    amount = np.add.reduceat(samples.amounts(config.weights_by).astype(np.int64), firsts)
    order = np.random.default_rng([config.seed, *seed]).permutation(firsts.size)
    # A sample belongs to the stretch in which its middle lies, so stretches that meet share no sample.
    after = np.cumsum(amount[order])
    middle = (after - amount[order] / 2) / after[-1]
    chosen = order[(middle >= low) & (middle < high)]
    return gathered(np.append(firsts, len(samples)), chosen)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllSamples:
    """All samples of a plan, from which its parts are drawn."""

    samples: Samples
    config: PlanConfig
    sources: Sources
    kept: Kept | None = None  # packs that have some of them

    def of_dataset(self, dataset: int, first: float, last: float) -> np.ndarray:
        """Rows of `samples` that an interval of a data set's row of permutations has, ``[N]`` int64."""
        start, end = (0, *self.sources.ends_of(self.samples))[dataset : dataset + 2]
        parts = [np.zeros(0, dtype=np.int64)]
        if self.kept is not None and first < min(last, self.kept.times[start:end].max(initial=0)):
            times, given = self.kept.times[start:end], float(self.kept.given[dataset])
            begun = int(times.max())  # permutations, which may lack samples
            random = np.random.default_rng([self.config.seed, dataset, begun, 6])
            lack = [start + np.flatnonzero(times <= turn) for turn in range(int(times.min()), begun)]
            left = np.concatenate([*parts, *map(random.permutation, lack)])  # nobody's second before all firsts
            amount = shares_of_rows(self.samples.take(slice(start, end)), self.config)[left - start]
            after = np.cumsum(amount)
            places = given + (begun - given) * (after - amount / 2) / after[-1:]
            parts.append(left[(places >= first) & ((places < last) | (last >= begun))])
            first = max(first, float(begun))
        for turn, low, high in turns(first, last) if start < end else ():
            own = self.samples.take(slice(start, end))
            parts.append(start + stretch(own, self.config, (dataset, turn, 2), low, high))
        return np.concatenate(parts)

    def content(self, columns: Sequence[str]) -> tuple[list[pa.Table], np.ndarray]:
        """These columns of the index, and the row of each of `samples` there, ``[N]`` int64."""
        return [self.sources.table(at, columns) for at in range(len(self.sources.shard))], self.samples.source

    def kept_packs(self, plan: Plan, first: int, decided: Mapping[str, Any]) -> Kept:
        """The packs of a plan before pack `first`, for one whose packs are `decided` so. Raises UserError: the plan has
        fewer; it has other packs; or a sample of them is not in the index, or is another there."""
        facts, samples, sources = plan.facts, self.samples, self.sources
        if not 0 <= first <= facts.packs:
            raise UserError(f"--from is {first}, and {plan.path} has only {facts.packs} packs.")
        for name in sorted((facts.decided.keys() | decided.keys()) - {"plan", "rest", "extends"}):
            if (before := facts.decided.get(name)) != (now := decided.get(name)):
                what = f"was made with {name} {before!r}, now it is {now!r}"
                raise UserError(f"{plan.path} {what}; restore it for the packs that stay, or plan without --extend.")
        numbers = {record: at for at, record in enumerate(it for each in sources.datasets for it in each.records)}
        of_plan = [[numbers.get(record, -1) for record in each.records] for each in facts.datasets]
        shards = np.array([[*each, *[-1] * (max(map(len, of_plan)) - len(each))] for each in of_plan])
        columns = ("pack", "dataset", "shard", "row", "piece", "length", "second")
        if len(facts.epoch_ends) > facts.epochs:
            raise UserError(f"{plan.path} begins with the rest of an online run; a plan of whole epochs is extended.")
        groups = plan.tables([*columns], 0, first)
        tables = [np.stack([table.column(name).to_numpy().astype(np.int64) for name in columns]) for table in groups]
        rows = np.concatenate([np.zeros((len(columns), 0), np.int64), *tables], axis=1)
        pack, dataset, shard, row, piece, *lengths = rows[:, : np.searchsorted(rows[0], first)]
        number = shards[dataset, shard]
        places = [each.astype(np.int64) << 16 for each in (samples.source, sources.starts[number] + row)]  # and piece
        order = np.searchsorted(places[0] + samples.piece, places[1] + piece)
        held = [samples.source, samples.piece, samples.sizes.length, samples.sizes.second]
        own = np.stack([each[np.minimum(order, len(samples) - 1)] for each in held])
        wrong = (number < 0) | (own != np.stack([sources.starts[number] + row, piece, *lengths])).any(axis=0)
        if wrong.any():
            at = int(wrong.argmax())
            source = facts.datasets[dataset[at]]
            sample = f"sample {row[at]} of {source.shards[shard[at]].name} in {source.root}"
            raise UserError(
                f"pack {pack[at]} of {plan.path} has {sample}, which is not in the index, or has another length there; "
                "give the indexes that it was planned from, with more data sets beside them."
            )
        times, amount = np.bincount(order, minlength=len(samples)), shares_of_rows(samples, self.config)
        parts = [slice(*ends) for ends in pairwise([0, *sources.ends_of(samples)])]
        most = np.array([times[it].max(initial=0) for it in parts])
        number = np.array([max(each, default=-1) for each in of_plan])  # a shard of each data set of the plan
        same = (sources.dataset[number][:, None] == np.arange(most.size)) & (number >= 0)[:, None] & (most > 0)
        ended = [[end, (np.array(turns) @ same).tolist()] for end, turns in facts.ended if end <= first]
        # Epochs that follow stages, or stages that follow epochs, begin with the first pack that is not kept.
        begins = [0, *(end for end, _ in facts.ended[: -len(facts.epoch_ends)])][-1]
        alike = bool(facts.stages) == bool(decided["plan"].get("stages")) and begins <= first
        begun = bisect.bisect_right(facts.epoch_ends, first) if alike else 0
        times, done, of_shard = np.zeros_like(times), 0, sources.shard_of(samples.source)
        for end, turns in ended:
            stop = int(np.searchsorted(pack, end))
            times += np.bincount(order[done:stop], minlength=len(samples))
            found, done = np.bincount(order[:stop], minlength=len(samples)), stop
            for it, turn, cap in zip(parts, turns, most.tolist(), strict=True):
                least = np.maximum(times[it], min(math.floor(position(turn)), cap))
                # Shards of which there is nothing came later; so did others below it, if the rest has all that was due.
                # They are owed nothing of before.
                later = np.bincount(of_shard[it], found[it])[of_shard[it]] == 0
                lacks = np.where(later, 0, np.where(least > times[it], found[it], times[it] - turn)) @ amount[it]
                times[it] = np.where(later | (lacks <= amount[it].max(initial=0)), least, times[it])
        times += np.bincount(order[done:], minlength=len(samples))
        told = facts.summary.get("datasets", [{"per_epoch": 0.0}] * len(facts.datasets))
        changed = facts.decided.get("extends", ["", 0])[1]  # in an epoch that has begun, which is of both settings
        if not alike:
            ended.append([first, [0.0] * most.size])
        start, stop = ended[-1][0] if ended else 0, (*facts.epoch_ends[begun:], first)[0] if alike else first
        return Kept(
            order=order,
            sizes=np.bincount(pack, minlength=first).astype(np.int64),
            times=times,
            given=np.array([(times[it] * amount[it]).sum() / max(amount[it].sum(), 1) for it in parts]),
            repeats=np.array([each["per_epoch"] for each in told]) @ same * (start >= changed),
            tokens=int(samples.sizes.tokens[order[pack >= start]].sum()),
            share_left=(stop - first) / (stop - start) if stop > start else 1.0,
            ends=facts.epoch_ends[:begun],
            ended=ended,
        )


def group_numbers(datasets: Sequence[IndexedDataset], config: PlanConfig) -> np.ndarray:
    """A number of the group of each data set, ``[D]`` int64. Raises as `shares_of`."""
    shares = zip(datasets, shares_of(datasets, config), strict=True)
    names = [group_name(dataset.subflavors) if share.group is None else share.group for dataset, share in shares]
    return np.unique(names, return_inverse=True)[1]


def gathered(offsets: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Positions ``[N]`` int64 of the members of these groups, of which group g is ``[offsets[g], offsets[g + 1])``."""
    counts = offsets[groups + 1] - offsets[groups]
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if ends.size else 0) + np.repeat(offsets[groups] - (ends - counts), counts)


def _repeats(shares: Sequence[Share], amounts: Sequence[float]) -> tuple[float, ...]:
    """How often each data set occurs in an epoch: with weights, as often as the first that reaches its ``epochs``."""
    if not any(share.weight for share in shares if share.epochs > 0):
        return tuple(share.epochs for share in shares)
    pairs = [(each, amount if each.epochs > 0 else 0.0) for each, amount in zip(shares, amounts, strict=True)]
    scale = min((it.epochs * amount / it.weight for it, amount in pairs if it.weight and amount > 0), default=0.0)
    return tuple(scale * (it.weight or 0.0) / amount if amount > 0 else 0.0 for it, amount in pairs)


def position(value: float) -> float:
    """A number of permutations, without the rounding error that would cut a sliver off a whole one."""
    whole = round(value)
    return float(whole) if abs(value - whole) < ROUNDING * max(1.0, abs(value)) else value
