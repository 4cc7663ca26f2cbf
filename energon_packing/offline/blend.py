"""Which samples occur in which epoch of a plan, when data sets have weights or are repeated.

Every data set is an endless row of seeded permutations of its samples, and each epoch takes the next stretch of it. So
a data set that occurs half a time in an epoch is complete after two, and no sample occurs twice before all have
occurred.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from energon_packing.config.plan import PlanConfig
from energon_packing.energon.samples import group_name
from energon_packing.offline.fitting_samples import Samples
from energon_packing.offline.index import IndexedDataset
from energon_packing.offline.shares import Share, shares_of

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blend:
    """Draws the samples of each epoch.

    Attributes:
        ends: ``[data sets]`` int64: for each data set, the number of rows of `Samples` up to its end.
        repeats: how often each data set occurs in one epoch.
        groups: for each group, the numbers of its data sets, by name of the group.
        samples: what can be packed.
        config: seed and unit of the weights.
    """

    ends: tuple[int, ...]
    repeats: tuple[float, ...]
    groups: Mapping[str, tuple[int, ...]]
    samples: Samples
    config: PlanConfig

    @classmethod
    def of(
        cls, datasets: Sequence[IndexedDataset], source_ends: np.ndarray, samples: Samples, config: PlanConfig
    ) -> Blend:
        """The blend of these data sets.

        Args:
            source_ends: ``[data sets]``, the number of sources up to the end of each data set.

        Raises:
            ConfigError: as `shares_of`.
        """
        shares = shares_of(datasets, config)
        ends = np.searchsorted(samples.source, source_ends, side="left").tolist()
        amount = _tokens if config.weights_by == "tokens" else _samples
        amounts = [amount(samples, start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        groups: dict[str, list[int]] = {}
        for number, share in enumerate(shares):
            group = group_name(datasets[number].subflavors) if share.group is None else share.group
            groups.setdefault(group, []).append(number)
        return cls(
            ends=tuple(ends),
            repeats=_repeats(shares, amounts),
            groups={name: tuple(numbers) for name, numbers in groups.items()},
            samples=samples,
            config=config,
        )

    def epoch(self, number: int, group: str) -> np.ndarray:
        """Rows of `Samples` that a group has in an epoch, ``[N]`` int64, in seeded random order.

        A row occurs more than once if its data set is repeated within the epoch. Pieces of a sample occur together.
        """
        parts = [self._of_dataset(dataset, number) for dataset in self.groups[group]]
        rows = np.concatenate(parts)
        place = sorted(self.groups).index(group)
        return np.random.default_rng([self.config.seed, number, place, 1]).permutation(rows)

    def _of_dataset(self, dataset: int, epoch: int) -> np.ndarray:
        start, end = (self.ends[dataset - 1] if dataset else 0), self.ends[dataset]
        if start == end:
            return np.zeros(0, dtype=np.int64)
        repeats = self.repeats[dataset]
        first, last = (_position(number * repeats) for number in (epoch, epoch + 1))
        parts = []
        for turn in range(math.floor(first), math.ceil(last)):
            low, high = max(first - turn, 0.0), min(last - turn, 1.0)
            whole = low == 0.0 and high == 1.0
            parts.append(np.arange(start, end) if whole else self._stretch(dataset, turn, start, end, low, high))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _stretch(self, dataset: int, turn: int, start: int, end: int, low: float, high: float) -> np.ndarray:
        """Rows in the part ``[low, high)`` of one permutation of a data set."""
        source = self.samples.source[start:end]
        firsts = np.flatnonzero(np.diff(source, prepend=-1))  # the first row of each sample
        amount = np.ones(firsts.size, dtype=np.int64)
        if self.config.weights_by == "tokens":
            amount = np.add.reduceat(self.samples.sizes.take(slice(start, end)).tokens, firsts)
        order = np.random.default_rng([self.config.seed, dataset, turn, 2]).permutation(firsts.size)
        # A sample belongs to the stretch in which its middle lies, so stretches that meet share no sample.
        after = np.cumsum(amount[order])
        middle = (after - amount[order] / 2) / after[-1]
        chosen = order[(middle >= low) & (middle < high)]
        rows = np.append(firsts, end - start)
        counts = rows[chosen + 1] - rows[chosen]
        inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return start + np.repeat(rows[chosen], counts) + inside


def _tokens(samples: Samples, start: int, end: int) -> float:
    return float(samples.sizes.take(slice(start, end)).tokens.sum())


def _samples(samples: Samples, start: int, end: int) -> float:
    """Number of samples in rows ``[start, end)``; pieces of one count once."""
    return float(np.count_nonzero(np.diff(samples.source[start:end], prepend=-1)))


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


def _position(value: float) -> float:
    """A number of permutations, without the rounding error that would cut a sliver off a whole one."""
    whole = round(value)
    return float(whole) if abs(value - whole) < _ROUNDING * max(1.0, abs(value)) else value
