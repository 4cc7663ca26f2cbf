"""What a field of a configuration says about itself, besides its type, its default and the text below it."""

from __future__ import annotations

import dataclasses
from typing import Any


def setting[T](default: T, *, unit: str = "", by_family: bool = False, changes_rows: bool = False) -> T:
    """A field of a configuration's dataclass.

    Args:
        default: its value where nobody sets it.
        unit: of a number, for docs/settings.md.
        by_family: vision families refuse another value unless they name the field in their ``reads``.
        changes_rows: tokens or pixels of a sample depend on it, so that another value is another fingerprint of
            stored lengths, plans and loader states. The default leaves fingerprints as they were before the field.
    """
    marks = {"unit": unit, "by_family": by_family, "changes_rows": changes_rows}
    return dataclasses.field(default=default, metadata=marks)


def marked(config: Any, mark: str) -> tuple[str, ...]:
    """Returns the fields of a configuration, or of its class, that have a mark: ``by_family`` or ``changes_rows``."""
    return tuple(entry.name for entry in dataclasses.fields(config) if entry.metadata.get(mark))


def marked_and_set(config: Any, mark: str) -> dict[str, Any]:
    """Returns the fields of a configuration that have a mark and another value than their default."""
    found = {entry.name: entry.default for entry in dataclasses.fields(config) if entry.metadata.get(mark)}
    return {name: getattr(config, name) for name, default in found.items() if getattr(config, name) != default}
