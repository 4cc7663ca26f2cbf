"""Configuration dataclasses from plain YAML values, with strict keys and types, and back."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from datetime import date
from typing import Any, Literal

from energon_packing.errors import ConfigError


def from_mapping[T](cls: type[T], values: Any, *, where: str) -> T:
    """Builds a configuration dataclass from plain YAML values, with strict keys and types.

    Args:
        cls: a configuration dataclass, nested ones included.
        values: mapping of field names to scalars, lists or mappings.
        where: source of the values, for messages; for example ``"run.yaml"`` or ``"packing"``.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a wrong type, or a value that the class refuses.
    """
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} holds {type(values).__name__}; expected a mapping of settings.")
    hints = typing.get_type_hints(cls)
    known = [entry.name for entry in dataclasses.fields(cls)]  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}."
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
        arguments[key] = _convert(hints[key], value, where=f"{where}: {key}")
    return cls(**arguments)


_SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}")


def _convert(hint: Any, value: Any, *, where: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return from_mapping(typing.cast("type[Any]", hint), value, where=where)
    if origin in (typing.Union, types.UnionType):
        members = typing.get_args(hint)
        if value is None and type(None) in members:
            return None
        return _convert(next(m for m in members if m is not type(None)), value, where=where)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
            hint_text = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{where} is {_shown(value)}; it must be one of {', '.join(map(repr, choices))}.{hint_text}"
            )
        return value
    if origin in (dict, Mapping):
        kind = typing.get_args(hint)[1]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {_shown(value)}; expected a mapping of names.")
        return {str(name): _convert(kind, entry, where=f"{where}: {name}") for name, entry in value.items()}
    if origin is tuple:
        kind = typing.get_args(hint)[0]
        if isinstance(value, str) and (kind is str or typing.get_origin(kind) is Literal):
            value = [value]  # a single name stands for a list of one
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {_shown(value)}; expected a list.")
        return tuple(_convert(kind, entry, where=where) for entry in value)
    if hint is str and type(value) is date:
        return value.isoformat()  # YAML 1.1 takes 2026-01-31 for a date
    if hint is float and isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
        return float(value)  # YAML 1.1, which PyYAML reads, takes 1e-3 for a text
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} is {_shown(value)}; expected {hint.__name__}.")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def to_mapping(config: Any) -> dict[str, Any]:
    """The plain values of a configuration dataclass; `from_mapping` reads them back to an equal object."""
    result = dataclasses.asdict(config)

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, tuple) else value

    return typing.cast("dict[str, Any]", plain(result))
