"""What a field of a configuration says about itself, besides its type, its default and the text below it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal

from energon_packing.errors import ConfigError

Effect = Literal["lengths", "drops", "rows", "packs", "nothing"]
"""The most that another value of a setting changes. ``lengths``: tokens of samples. ``drops``: which samples are
refused when they are measured, and no row. ``rows``: what else a row holds (weights, positions, pixels, what becomes of
a sample that is longer than a row). ``packs``: which samples are read and share a row, in which order, and how wide it
is. Each of them changes packs."""


def setting[T](
    default: T,
    *,
    unit: str = "",
    least: float | None = None,
    most: float = sys.float_info.max,
    changes: Effect = "lengths",
    stated: str = "",
    place: bool = False,
    entries: tuple[str, ...] = (),
    by_family: bool = False,
    newer: bool = False,
) -> T:
    """A field of a configuration's dataclass.

    Args:
        default: its value where nobody sets it.
        unit: of a number, for docs/settings.md.
        least, most: bounds of a number, see `check_bounds`.
        changes: what depends on it. A field that does not say so counts as one that changes lengths.
        stated: entry of a loader's fingerprint that says what the value names; compared in place of the value.
        place: the value is an address, so that only ``stated`` tells two of them apart.
        entries: of the encoder's fingerprint that depend on it; one of its own name if empty.
        by_family: vision families refuse another value unless they name the field in their ``reads``.
        newer: its default leaves fingerprints as they were before the field, which stored lengths, plans and states
            have.
    """
    marks = {"changes": changes, "stated": stated, "place": place, "entries": entries, "by_family": by_family}
    bounds = {"unit": unit, "least": least, "most": most}
    return dataclasses.field(default=default, metadata={**marks, **bounds, "newer": newer})


def check_bounds(section: str, config: Any) -> None:
    """Checks the numbers of a section; None is within any bounds.

    Raises:
        ConfigError: the first that is less than its ``least`` or more than its ``most``, or infinite.
    """
    for entry in dataclasses.fields(config):
        value, least = getattr(config, entry.name), entry.metadata.get("least")
        if value is not None and least is not None and not least <= value <= entry.metadata["most"]:
            most = entry.metadata["most"]
            bounds = f"at least {least}" if most == sys.float_info.max else f"from {least} to {most}"
            raise ConfigError(f"{section}.{entry.name} is {value}; it must be {bounds}.")


def marked(config: Any, mark: str) -> tuple[str, ...]:
    """Returns the fields of a configuration, or of its class, that have a mark, such as ``by_family``."""
    return tuple(entry.name for entry in dataclasses.fields(config) if entry.metadata.get(mark))


def marked_and_set(config: Any, mark: str) -> dict[str, Any]:
    """Returns the fields of a configuration that have a mark and another value than their default."""
    found = {entry.name: entry.default for entry in dataclasses.fields(config) if entry.metadata.get(mark)}
    return {name: getattr(config, name) for name, default in found.items() if getattr(config, name) != default}


def changing(config: Any, *effects: Effect) -> tuple[str, ...]:
    """Returns the fields of a configuration, or of its class, whose effect is one of these."""
    return tuple(
        entry.name for entry in dataclasses.fields(config) if entry.metadata.get("changes", "lengths") in effects
    )


def length_free_of(encoder: Any) -> tuple[str, ...]:
    """Returns the fields of the section ``encoder`` on which neither lengths nor drops depend when it measures."""
    return changing(encoder, "rows", "packs", "nothing")


def entries_of(config: Any) -> dict[str, tuple[str, ...]]:
    """Returns the fields of an encoder's configuration that its fingerprint states, each with its entries there."""
    return {
        entry.name: entry.metadata.get("entries") or (entry.name,)
        for entry in dataclasses.fields(config)
        if entry.name in changing(config, "lengths", "rows") and not entry.metadata.get("stated")
    }
