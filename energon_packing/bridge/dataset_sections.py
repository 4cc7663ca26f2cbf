"""The sections of our Bridge data sets: mutable twins of our frozen configuration classes.

Bridge and Hydra set attributes of nested dataclasses in place, which a frozen one ignores with a warning. The twins are
generated, so a field that is added to a frozen class can be overridden in Bridge at once. The twins validate nothing:
`frozen` hands their values to the classes that do. Imports neither torch nor Bridge.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, from_mapping
from energon_packing.config.metrics import MetricsConfig
from energon_packing.errors import ConfigError

SECTIONS: dict[str, type] = {}
"""Every generated class by its name in this module, which Bridge's YAML uses in ``_target_``."""


def twin(config: type, left_out: tuple[str, ...] = (), *, module: str = __name__) -> Any:
    """A mutable dataclass with the fields and defaults of ``config``, added to this module under its name.

    It has slots, so that setting a misspelt field raises at once.

    Args:
        config: one of our frozen dataclasses, nested ones allowed.
        left_out: fields that are set elsewhere.
        module: that holds the class under its name; other modules than this one assign it themselves.
    """
    name = config.__name__.removesuffix("Config") + "Section"
    hints = typing.get_type_hints(config)
    fields: list[tuple[str, Any, Any]] = []
    for entry in dataclasses.fields(config):
        if entry.name in left_out:
            continue
        hint = hints[entry.name]
        if dataclasses.is_dataclass(hint):
            nested = twin(typing.cast("type", hint), module=module)
            fields.append((entry.name, nested, dataclasses.field(default_factory=nested)))
        elif entry.default_factory is not dataclasses.MISSING:
            fields.append((entry.name, hint, dataclasses.field(default_factory=entry.default_factory)))
        else:
            fields.append((entry.name, hint, dataclasses.field(default=entry.default)))
    made = dataclasses.make_dataclass(name, fields, kw_only=True, slots=True, module=module)
    made.__doc__ = f"The fields of `{config.__module__}.{config.__name__}`" + (
        f", except {', '.join(left_out)}, which the data set has itself." if left_out else "."
    )
    if module == __name__:
        globals()[name] = SECTIONS[name] = made
    return made


EncoderSection: Any = twin(EncoderConfig, left_out=("processor", "trust_remote_code"))
PackingSection: Any = twin(PackingConfig, left_out=("seq_length", "pad_to_max_length"))
# Bridge's iterators never end: there is no ``repeat`` and no end of an epoch.
DataSection: Any = twin(DataConfig, left_out=("path", "workers", "repeat", "epoch_end"))
MetricsSection: Any = twin(MetricsConfig)


def values_of(section: Any) -> Any:
    """The plain values of a section, nested ones included."""
    if dataclasses.is_dataclass(section) and not isinstance(section, type):
        return {entry.name: values_of(getattr(section, entry.name)) for entry in dataclasses.fields(section)}
    return section


def frozen[T](config: type[T], section: Any, *, where: str, **others: Any) -> T:
    """The frozen twin of a section, validated.

    Args:
        config: the class that the section was made from.
        section: a section, or a mapping of its fields.
        where: its name in the run's configuration, for messages.
        others: the fields that the section leaves out.

    Raises:
        ConfigError: no section, an unknown field, a wrong type, or a value that the class refuses.
    """
    values = values_of(section)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where} is {values!r}; it must be a section with its own fields, such as {where}.{_some(config)}."
        )
    return from_mapping(config, {**values, **others}, where=where)


def _some(config: Any) -> str:
    return dataclasses.fields(config)[-1].name
