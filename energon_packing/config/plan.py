"""The section ``plan`` of a configuration: how ``energon-packing plan`` mixes, orders and repeats data sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from energon_packing.config.setting import check_bounds, setting
from energon_packing.errors import ConfigError

WeightsBy = Literal["samples", "tokens", "none"]
LARGEST_EPOCHS = 100_000
"""Bound on ``epochs``, against a plan of unintended size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDatasetConfig:
    """One data set of a plan."""

    weight: float | None = setting(None, unit="number")
    """Share of the data set in an epoch relative to the others' weights, in the unit of ``weights_by``. Set it for all
    data sets or for none. None for all takes the weights of the ``blend`` of a metadataset that was measured; without
    one, every data set occurs ``epochs`` times."""
    epochs: float | None = setting(None, unit="epochs", least=0, most=LARGEST_EPOCHS)
    """How often each sample occurs in one epoch of the plan; with weights, how often at most. 0.5 takes every sample in
    every second epoch; 0 leaves the data set out. None takes the ``repetitions`` of a ``blend_epochized`` that was
    measured, else 1."""
    group: str | None = None
    """Data sets of one group share packs; those of different groups never do. None takes ``group`` of the data set's
    subflavors, as online."""

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ConfigError(f"plan.datasets: weight is {self.weight}; it must be a number above 0.")
        check_bounds("plan.datasets", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """How a plan is made from an index; see docs/offline.md."""

    epochs: int = setting(1, unit="epochs", least=1, most=LARGEST_EPOCHS)
    """Passes over the blend of all data sets that the plan holds; each has other packs."""
    weights_by: WeightsBy = "samples"
    """What the weights of data sets share out: ``samples`` (as the ``blend`` of a metadataset does) or ``tokens``.
    ``none``: weights of a metadataset do not count, and every data set occurs ``epochs`` times."""
    datasets: Mapping[str, PlannedDatasetConfig] = field(default_factory=dict)
    """Settings of single data sets, by their name in the index, their path, that of their shards, or the last part of
    one of these paths."""
    max_data_parallel: int = setting(512, unit="ranks", least=1)
    """The packs of a step cost nearly the same for every data-parallel size that divides this number."""
    seed: int = setting(0, unit="number", least=0)
    """Determines packs, blend and order."""

    def __post_init__(self) -> None:
        check_bounds("plan", self)
        weighted = [name for name, setting in self.datasets.items() if setting.weight is not None]
        if weighted and self.weights_by == "none":
            raise ConfigError(f"plan.datasets: {weighted[0]} has a weight, but plan.weights_by is none; leave one out.")
