"""Which samples occur in which epoch of a plan, when data sets have weights or are repeated.

The share of a data set is what the section ``plan`` says, or else the metadataset that was measured. Every data set is
an endless row of seeded permutations of its samples, and each epoch takes the next stretch of it. So a data set that
occurs half a time in an epoch is complete after two, and no sample occurs twice before all have occurred. What is
packed together is a `Part`: an epoch, or a band of a large one (`energon_packing.offline.bands`).
"""

import difflib
import math
import os.path
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from energon_packing.config.run import PlanConfig, PlannedDatasetConfig, group_name
from energon_packing.errors import ConfigError
from energon_packing.offline.index import IndexedDataset
from energon_packing.offline.plan import ROUNDING
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
    settings = _named_settings(datasets, config)
    epochs = [_epochs(dataset, setting, config) for dataset, setting in zip(datasets, settings, strict=True)]
    used = [number for number, each in enumerate(epochs) if each > 0]
    if not used:
        raise ConfigError("plan.datasets: epochs is 0 for every data set; nothing is left to plan.")
    weights = [setting.weight for setting in settings]
    missing = [datasets[number].name for number in used if weights[number] is None]
    if len(missing) == len(used):
        weights = _weights_of_the_blend(datasets, used, config)
    elif missing:
        raise ConfigError(
            f"plan.datasets: {', '.join(missing)} has no weight, but others have; give a weight to all, or to none."
        )
    return [
        Share(weight=weight, epochs=epoch, group=setting.group)
        for weight, epoch, setting in zip(weights, epochs, settings, strict=True)
    ]


def _epochs(dataset: IndexedDataset, setting: PlannedDatasetConfig, config: PlanConfig) -> float:
    if setting.epochs is not None:
        return setting.epochs
    if config.weights_by != "none" and setting.weight is None:
        if dataset.weight == 0:
            return 0.0
        if dataset.repetitions is not None:
            return dataset.repetitions
    return 1.0


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
        raise ConfigError(
            f"{blends[0]} gives its data sets weights, and {beside}; give each data set a weight in plan.datasets, "
            "or set plan.weights_by to none."
        )
    return [dataset.weight for dataset in datasets]


def _named_settings(datasets: Sequence[IndexedDataset], config: PlanConfig) -> list[PlannedDatasetConfig]:
    """The entry of each data set under ``plan.datasets``, by any of its names."""
    names: defaultdict[str, list[int]] = defaultdict(list)
    short: defaultdict[str, list[int]] = defaultdict(list)
    for number, dataset in enumerate(datasets):
        for name in dataset.names:
            names[name].append(number)
        for name in {os.path.basename(path) for path in dataset.names} - dataset.names:
            short[name].append(number)
    settings = [PlannedDatasetConfig()] * len(datasets)
    named: dict[int, str] = {}
    for name, setting in config.datasets.items():
        spelled = (name, os.path.abspath(name))
        numbers = next((known[each] for known in (names, short) for each in spelled if each in known), [])
        if not numbers:
            near = difflib.get_close_matches(name, [*names, *short], n=1)
            known = ", ".join(dataset.name for dataset in datasets)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {known}."
            raise ConfigError(f"plan.datasets: no index has the data set {name!r}; {hint}")
        if len(numbers) > 1:
            several = ", ".join(f"{datasets[at].name} in {datasets[at].root}" for at in numbers)
            raise ConfigError(f"plan.datasets: {name!r} names several data sets ({several}); name the one you mean.")
        if numbers[0] in named:
            raise ConfigError(f"plan.datasets: {named[numbers[0]]!r} and {name!r} are the same data set; name it once.")
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
    band: tuple[
        int, ...
    ] = ()  # its number from 0 if it is one of several bands of such an interval; for random choices
    ends: bool = True  # whether the epoch ends with it


class Drawn(Protocol):
    """Where the samples of parts come from."""

    @property
    def samples(self) -> Samples:
        """The rows that they are drawn from."""

    def of_dataset(self, dataset: int, first: float, last: float) -> np.ndarray:
        """Rows of `samples` that an interval of a data set's row of permutations has, ``[N]`` int64."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blend:
    """Which samples the parts of a plan have."""

    shares: tuple[Share, ...]  # of each data set, as the plan or its metadataset says
    repeats: tuple[float, ...]  # how often each data set occurs in one epoch
    groups: Mapping[str, tuple[int, ...]]  # for each group, the numbers of its data sets, by name of the group
    config: PlanConfig  # seed and unit of the weights
    # ``[N]`` rows of `Samples` that come first, as a part of their own; None or none begins with a whole epoch
    rest: np.ndarray | None = None

    @classmethod
    def of(cls, datasets: Sequence[IndexedDataset], amounts: Sequence[float], config: PlanConfig) -> "Blend":
        """The blend of these data sets, each with the sum of `amounts_of` its samples. Raises as `shares_of`."""
        shares = shares_of(datasets, config)
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for number, share in enumerate(shares):
            group = group_name(datasets[number].subflavors) if share.group is None else share.group
            groups[group].append(number)
        return cls(
            shares=tuple(shares),
            repeats=_repeats(shares, amounts),
            groups={name: tuple(numbers) for name, numbers in groups.items()},
            config=config,
        )

    def parts(self) -> list[Part]:
        """What is packed together, in order: `rest`, if it has any, and every epoch."""
        ahead = [] if self.rest is None or not self.rest.size else [Part(number=0, rows=self.rest)]
        return ahead + [
            Part(
                number=epoch,
                place=len(ahead) + epoch,
                intervals=tuple((position(epoch * each), position((epoch + 1) * each)) for each in self.repeats),
            )
            for epoch in range(self.config.epochs)
        ]

    def rows(self, part: Part, group: str, drawn: Drawn) -> np.ndarray:
        """Rows of `Samples` that a group has in a part, ``[N]`` int64, in seeded random order. A row occurs more than
        once if its data set is repeated within the part. Pieces of a sample occur together."""
        if part.rows is not None:
            return np.random.default_rng([self.config.seed, 4]).permutation(part.rows)
        rows = np.concatenate([drawn.of_dataset(dataset, *part.intervals[dataset]) for dataset in self.groups[group]])
        place = sorted(self.groups).index(group)
        return np.random.default_rng([self.config.seed, part.number, place, 1, *part.band]).permutation(rows)


def turns(first: float, last: float) -> Iterator[tuple[int, float, float]]:
    """The number of each permutation that an interval has a part of, and the part ``[low, high)``."""
    for turn in range(math.floor(first), math.ceil(last)):
        yield turn, max(first - turn, 0.0), min(last - turn, 1.0)


def amounts_of(samples: Samples, config: PlanConfig) -> np.ndarray:
    """What weights count of each row, ``[N]``: its tokens, or 1 of each sample, whose pieces count once."""
    firsts: np.ndarray = np.diff(samples.source, prepend=-1) != 0
    return samples.sizes.tokens if config.weights_by == "tokens" else firsts


def stretch(samples: Samples, config: PlanConfig, seed: Sequence[int], low: float, high: float) -> np.ndarray:
    """Rows of some `samples` in the part ``[low, high)`` of one permutation of them."""
    firsts = np.flatnonzero(np.diff(samples.source, prepend=-1))  # the first row of each sample
    amount = np.add.reduceat(amounts_of(samples, config).astype(np.int64), firsts)
    order = np.random.default_rng([config.seed, *seed]).permutation(firsts.size)
    # A sample belongs to the stretch in which its middle lies, so stretches that meet share no sample.
    after = np.cumsum(amount[order])
    middle = (after - amount[order] / 2) / after[-1]
    chosen = order[(middle >= low) & (middle < high)]
    return gathered(np.append(firsts, len(samples)), chosen)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllSamples:
    """A `Drawn` of all samples of a plan."""

    samples: Samples
    ends: tuple[int, ...]  # for each data set, the number of rows of `samples` up to its end
    config: PlanConfig
    sources: Sources

    def of_dataset(self, dataset: int, first: float, last: float) -> np.ndarray:
        start, end = (0, *self.ends)[dataset : dataset + 2]
        parts = [np.zeros(0, dtype=np.int64)]
        for turn, low, high in turns(first, last) if start < end else ():
            whole, own = low == 0.0 and high == 1.0, self.samples.take(slice(start, end))
            within = np.arange(len(own)) if whole else stretch(own, self.config, (dataset, turn, 2), low, high)
            parts.append(start + within)
        return np.concatenate(parts)

    def content(self, columns: Sequence[str]) -> tuple[list[pa.Table], np.ndarray]:
        """These columns of the index, and the row of each of `samples` there, ``[N]`` int64."""
        return [table for _, table in self.sources.tables(columns)], self.samples.source


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
    scales = [
        share.epochs * amount / share.weight
        for share, amount in zip(shares, amounts, strict=True)
        if share.weight and share.epochs > 0 and amount > 0
    ]
    scale = min(scales, default=0.0)
    return tuple(
        scale * (share.weight or 0.0) / amount if amount > 0 and share.epochs > 0 else 0.0
        for share, amount in zip(shares, amounts, strict=True)
    )


def position(value: float) -> float:
    """A number of permutations, without the rounding error that would cut a sliver off a whole one."""
    whole = round(value)
    return float(whole) if abs(value - whole) < ROUNDING * max(1.0, abs(value)) else value
