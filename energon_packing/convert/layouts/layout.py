"""What a layout is: a name, which records it recognises, and how it restates one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from energon_packing.convert.fields import says_nothing

TURN_COLUMNS = ("messages", "conversations")
"""Columns that hold a list of turns."""
ANSWER_COLUMNS = ("chosen", "rejected", "rejected_response", "rejected_messages")
"""Columns that hold an answer of a preference pair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restated:
    """A record as a conversation.

    Attributes:
        record: the parsed JSON with ``messages``, ``conversations`` or a pair in place of the layout's own columns; all
            other columns are unchanged.
        warnings: names of oddities that were accepted.
    """

    record: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A layout of records.

    Attributes:
        name: for ``--format`` and the report.
        expects: what its records look like, for messages.
        matches: whether a record has this layout. Two layouts that match one record are refused by name.
        restate: the record as a conversation.

            Raises `SampleRejected` with any reason of `energon_packing.convert.records.parse_record`.
    """

    name: str
    expects: str
    matches: Callable[[Mapping[str, Any]], bool]
    restate: Callable[[Mapping[str, Any]], Restated]


def filled(record: Mapping[str, Any], *names: str) -> bool:
    """Whether a record has a value in all of these columns."""
    return all(not says_nothing(record.get(name)) for name in names)


def has_turns(record: Mapping[str, Any]) -> bool:
    """Whether a record has a list of turns."""
    return any(isinstance(record.get(name), list) for name in TURN_COLUMNS)


def without(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A record without some of its columns."""
    return {name: value for name, value in record.items() if name not in names}
