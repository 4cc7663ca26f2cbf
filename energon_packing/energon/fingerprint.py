"""Refuses to resume from a loader state that was saved with different settings; the message names the setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_packing.errors import ConfigError


def check_fingerprint(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Compares the settings of a saved state with those of this run.

    Raises:
        ConfigError: a setting differs; the message names the first one in alphabetical order, with both values.
    """
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            raise ConfigError(
                f"The saved loader state was made with {name}={saved.get(name)!r}, but this run has "
                f"{own.get(name)!r}; restore the setting, or start the data over."
            )
