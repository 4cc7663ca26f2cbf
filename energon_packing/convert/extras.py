"""Additional values of the trained tokens from a record: advantages, log-probabilities, rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from energon_packing.conversation import PREFERENCE, read_extras
from energon_packing.errors import SampleRejected

_ANSWERS = ("chosen", "rejected")


def parse_extras(record: Mapping[str, Any], columns: Sequence[str], *, pair: bool) -> dict[str, Any]:
    """Reads the column ``extras`` (name -> value) and each separately named column.

    A value is one number for all trained tokens, or a list with one number per token. For a pair, it is one number for
    both answers, or ``{"chosen": ..., "rejected": ...}`` of numbers or lists. These may also be in two columns:
    ``chosen_NAME`` and ``rejected_NAME``, or ``NAME_chosen`` and ``NAME_rejected``.

    Args:
        record: the parsed JSON.
        columns: names of further columns; a record may lack any of them.
        pair: whether the record holds a chosen and a rejected answer.

    Raises:
        SampleRejected: ``bad_extra`` for an invalid value, ``conflicting_columns`` if a name has two values.
    """
    found = record.get("extras")
    if found is None:
        found = {}
    if not isinstance(found, dict):
        raise SampleRejected("bad_extra", f"the extras column is a {type(found).__name__}, expected name -> value")
    values = dict(found)
    for name in columns:
        value = _column(record, name, pair)
        if value is None:
            continue
        if name in values:
            raise SampleRejected("conflicting_columns", f"{name!r} is a column and also in the extras column")
        values[name] = value
    try:
        extras = read_extras(values)
    except SampleRejected as error:
        raise SampleRejected("bad_extra", error.detail) from error
    for name, value in extras.items():
        if name == PREFERENCE:
            raise SampleRejected("bad_extra", f"{PREFERENCE!r} is made from the answers of a pair and cannot be given")
        if isinstance(value, Mapping) and (not pair or set(value) != set(_ANSWERS)):
            raise SampleRejected("bad_extra", f"{name!r} has parts other than the two answers of a pair")
        if isinstance(value, list | tuple) and pair:
            raise SampleRejected(
                "bad_extra", f"{name!r} is one list, but a pair has two answers; give one list for each"
            )
    return extras


def extra_columns_read(columns: Sequence[str], *, pair: bool) -> set[str]:
    """Every column that `parse_extras` checks for these names."""
    names = set(columns)
    for name in columns if pair else ():
        names.update(column for both in _names_of_pair(name) for column in both)
    return names


def _names_of_pair(name: str) -> tuple[list[str], list[str]]:
    return [f"{answer}_{name}" for answer in _ANSWERS], [f"{name}_{answer}" for answer in _ANSWERS]


def _column(record: Mapping[str, Any], name: str, pair: bool) -> Any:
    value = record.get(name)
    if not pair:
        return value
    for names in _names_of_pair(name):
        parts = [record.get(column) for column in names]
        if all(part is None for part in parts):
            continue
        if value is not None:
            raise SampleRejected("conflicting_columns", f"the record has both {name!r} and {names[0]!r}")
        if any(part is None for part in parts):
            raise SampleRejected("bad_extra", f"the record has only one of {names[0]!r} and {names[1]!r}")
        value = dict(zip(_ANSWERS, parts, strict=True))
    return value
