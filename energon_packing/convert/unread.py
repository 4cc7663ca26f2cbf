"""What a record holds and nothing reads: the names are counted, so that no column vanishes without a word."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

LONGEST_NAME = 80
"""Characters of a name that are kept; a record may hold any."""


def says_nothing(value: Any) -> bool:
    """Whether a value is empty: null, or text, list or object without content. Tables fill columns up with such."""
    return value is None or value == "" or value == [] or value == {}


def unread(value: Mapping[str, Any], read: Collection[str], place: str = "") -> set[str]:
    """Names of what an object holds besides ``read``, empty values left out.

    Args:
        value: a record, a message, a content part.
        read: names that have a meaning.
        place: what stands before each name, such as ``messages[].``; nothing for columns of the record.
    """
    return {place + name[:LONGEST_NAME] for name, held in value.items() if name not in read and not says_nothing(held)}
