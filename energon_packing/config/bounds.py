"""Bounds of settings."""

from __future__ import annotations

from collections.abc import Mapping

from energon_packing.errors import ConfigError


def at_least(section: str, values: Mapping[str, float | None], minimum: float) -> None:
    for name, value in values.items():
        if value is not None and value < minimum:
            raise ConfigError(f"{section}.{name} is {value}; it must be at least {minimum}.")
