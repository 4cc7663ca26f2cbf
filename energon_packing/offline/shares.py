"""The share of each data set in a plan: what the section ``plan`` says, or else the metadataset that was measured."""

from __future__ import annotations

import difflib
import os.path
from collections.abc import Sequence
from dataclasses import dataclass

from energon_packing.config.plan import PlanConfig, PlannedDatasetConfig
from energon_packing.convert.layout import TEXT_DIRECTORY
from energon_packing.errors import ConfigError
from energon_packing.offline.index import IndexedDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Of one data set.

    Attributes:
        weight: relative to those of the others; None for all or for none.
        epochs: how often an epoch has each of its samples; with weights, how often at most.
        group: that it shares packs with; None takes that of its subflavors.
    """

    weight: float | None
    epochs: float
    group: str | None


def shares_of(datasets: Sequence[IndexedDataset], config: PlanConfig) -> list[Share]:
    """The share of each data set.

    Raises:
        ConfigError: a name that no data set has, or that two have; weights for only some of the data sets.
    """
    settings = _settings(datasets, config)
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
    """The weights that a metadataset gives these data sets; None for all if none does, or it shall not count.

    Raises:
        ConfigError: it has data sets beside it.
    """
    blended = [number for number in used if datasets[number].weight is not None]
    if not blended or config.weights_by == "none":
        return [None] * len(datasets)
    blends = sorted({f"{datasets[number].path} ({datasets[number].split})" for number in blended})
    if len(blended) < len(used) or len(blends) > 1:
        others = [datasets[number].name for number in used if number not in blended]
        beside = f"{', '.join(others)} has none" if others else f"so does {blends[1]}"
        raise ConfigError(
            f"{blends[0]} gives its data sets weights, and {beside}; give each data set a weight in plan.datasets, "
            "or set plan.weights_by to none."
        )
    return [dataset.weight for dataset in datasets]


def _settings(datasets: Sequence[IndexedDataset], config: PlanConfig) -> list[PlannedDatasetConfig]:
    """The entry of each data set under ``plan.datasets``, by any of its names."""
    names: dict[str, list[int]] = {}
    short: dict[str, list[int]] = {}
    for number, dataset in enumerate(datasets):
        whole = {dataset.name, dataset.path, dataset.root}
        for name in whole:
            names.setdefault(name, []).append(number)
        above = [os.path.dirname(dataset.root)] if os.path.basename(dataset.root) == TEXT_DIRECTORY else []
        for name in {*above, *(os.path.basename(path) for path in (dataset.path, dataset.root, *above))} - whole:
            short.setdefault(name, []).append(number)
    settings = [PlannedDatasetConfig()] * len(datasets)
    named: dict[int, str] = {}
    for name, setting in config.datasets.items():
        full = os.path.abspath(name)
        numbers = next((found[each] for found in (names, short) for each in (name, full) if each in found), [])
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
