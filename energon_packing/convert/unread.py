"""Columns and fields that nothing reads: their names are counted, so that no column silently disappears."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

LONGEST_NAME = 80
"""Characters of a name that are kept; a record may hold any."""


def says_nothing(value: Any) -> bool:
    """Whether a value is empty: null, or an empty text, list or object. Tables fill columns with such values."""
    return value is None or value == "" or value == [] or value == {}


def unread(value: Mapping[str, Any], read: Collection[str], place: str = "") -> set[str]:
    """Names of an object's non-empty fields other than ``read``.

    Args:
        value: a record, a message, a content part.
        read: names that have a meaning.
        place: prefix of each name, such as ``messages[].``; empty for columns of the record.
    """
    return {place + name[:LONGEST_NAME] for name, held in value.items() if name not in read and not says_nothing(held)}
