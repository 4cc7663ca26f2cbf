"""The first checks of a data set's fields: names, types, and settings that have only one value here."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Mapping
from typing import Any

from megatron.bridge.training.config import ConfigContainer

from energon_packing.config import from_mapping
from energon_packing.errors import ConfigError


def check_types(dataset: Any) -> None:
    """Checks the fields outside the sections against their annotations, as for a configuration file."""
    hints = typing.get_type_hints(type(dataset))
    plain = [entry.name for entry in dataclasses.fields(dataset) if hints[entry.name] is not Any]
    shape = dataclasses.make_dataclass("Dataset", [(name, hints[name], None) for name in plain])
    from_mapping(shape, {name: getattr(dataset, name) for name in plain}, where="dataset")


def refuse_unknown_names(dataset: Any, sections: Mapping[str, type]) -> None:
    """Refuses an attribute that was meant as a setting: a misspelt one, or one that belongs to a section.

    Other attributes pass: Bridge itself attaches objects to a data set (its tokenizer, paddings).

    Args:
        sections: class of each section by the name of its field.
    """
    known = {entry.name for entry in dataclasses.fields(dataset)}
    for name in set(vars(dataset)) - known:
        if name.startswith("_"):
            continue
        for section, twin in sections.items():
            if name in {entry.name for entry in dataclasses.fields(twin)}:
                raise ConfigError(f"dataset.{name} is not a setting; use dataset.{section}.{name}.")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near:
            raise ConfigError(f"dataset.{name} is not a setting; did you mean dataset.{near[0]}?")


FIXED_SETTINGS = {
    "data_sharding": "replicas always read different samples",
    "pin_memory": "Energon's loader always pins memory if there is a GPU",
    "drop_last": "the stream of packs is endless, so there is no last batch to keep",
    "persistent_workers": "Energon keeps its loader processes for the whole run",
}
"""Settings that Bridge gives every data set and that its other loaders read; here each must be true."""


def refuse_fixed_settings(dataset: Any) -> None:
    """Refuses a value that nothing would read. Bridge itself unsets ``persistent_workers`` where there is no worker."""
    for name, reason in FIXED_SETTINGS.items():
        unset_by_bridge = name == "persistent_workers" and dataset.num_workers == 0
        if not getattr(dataset, name) and not unset_by_bridge:
            raise ConfigError(f"dataset.{name} is false, which this data set does not support: {reason}. Leave it out.")


def container_under_validation() -> ConfigContainer | None:
    """The ``ConfigContainer`` whose ``validate()`` is calling ``finalize()``; None for a direct call.

    ``finalize()`` takes no argument, and a data set never learns of the model: the caller's frame is the only place
    where both are visible before any GPU is taken. It is used to enforce rules; the layout is read later, see
    `PackProvider.follow`. A test checks this against the installed Bridge.
    """
    frame = sys._getframe(1)
    for _ in range(9):
        container = frame.f_locals.get("self")
        if isinstance(container, ConfigContainer):
            return container
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
