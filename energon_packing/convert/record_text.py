"""The JSON text of a stored record, and the records whose text can be written straight from their parsed JSON.

Nearly all records without media have an id, turns of text, perhaps a system prompt and tools, and nothing to warn of.
The road of all others makes objects of their turns, checks these as every reader of a data set does, and encodes them
again: several times the work of writing their text down. What is not plain takes that road, mistakes included, so that
each rejection has one place. The tests compare the two roads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from operator import add
from typing import Any

import orjson

from energon_packing.conversation import RECORD_VERSION, ROLES
from energon_packing.convert.fields import ROLE_OF_TEXT
from energon_packing.convert.records import layout_of_turn
from energon_packing.convert.turns import parse_tools
from energon_packing.errors import SampleRejected
from energon_packing.stored_record import check_depth

# What a record holds was parsed from JSON or is a row of a table, so it has no cycles.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)


def encode_record(record: Mapping[str, Any]) -> bytes:
    """A record, or a part of one, as JSON in UTF-8, as it is stored.

    Raises:
        SampleRejected: ``bad_text``, or ``too_deep``.
    """
    try:
        text = _ENCODER.encode(record).encode()
    except RecursionError as error:
        raise SampleRejected("too_deep", "objects and lists lie too deep inside each other for Python") from error
    except (TypeError, ValueError) as error:  # dates and bytes of a table, lone surrogates, NaN
        raise SampleRejected("bad_text", f"the record cannot be written as UTF-8 JSON: {error}") from error
    check_depth(text, record)
    return text


_COLUMNS = frozenset(("id", "messages", "conversations", "system", "tools"))
_BEGINNING = b'{"version": %d, "turns": [' % RECORD_VERSION
_TURN = {role: b'{"role": "%s", "parts": [' % role.encode() for role in ROLES}
_MOST_TOOLS, _LONGEST_TOOLS = 64, 1 << 15
"""Lists of definitions that are remembered, and bytes of each; most records of a data set repeat those of others."""
_tools_seen: dict[bytes, bytes] = {}


def plain_record(value: Any, layout: str) -> tuple[bytes, str] | None:
    """The stored form of a record that holds turns of text alone.

    Args:
        value: the parsed JSON.
        layout: see `parse_record`.

    Returns:
        `ParsedRecord.record` as JSON, and the name of the layout; None for a record that names media, calls tools, has
        any other column, or leads to a warning or a rejection.
    """
    if type(value) is not dict or not value.keys() <= _COLUMNS or ("messages" in value) == ("conversations" in value):
        return None
    messages = value["messages"] if "messages" in value else value["conversations"]
    if type(messages) is not list or not messages or (found := layout_of_turn(messages[0], layout)) is None:
        return None
    assert found.fields is not None, "the layout is a conversation"
    role_field, content_field = found.fields
    system = value.get("system")
    try:
        names = [message[role_field] for message in messages]
        texts = [message[content_field] for message in messages]
        if set(map(len, messages)) != {2}:
            return None
        if system is not None and system != "":
            names.insert(0, "system")
            texts.insert(0, system)
        if (turns := _beginnings(tuple(names))) is None:
            return None
        if set(map(type, texts)) != {str} or not all(texts) or any(map(str.isspace, texts)):
            return None
        content = b"]}, ".join(map(add, turns, map(orjson.dumps, texts))) + b"]}"
        if b"<image>" in content or b"<video>" in content or b"<img>" in content:
            return None
        return b"%b%b]%b}" % (_BEGINNING, content, _tools(value.get("tools"))), found.name
    except (KeyError, TypeError, SampleRejected, UnicodeEncodeError):  # orjson's errors are of these
        return None


@lru_cache(maxsize=4096)
def _beginnings(names: tuple[str, ...]) -> tuple[bytes, ...] | None:
    """The JSON of each turn up to its text; None if the order of the roles is worth a warning or a rejection.

    Args:
        names: of the roles in the record.
    """
    roles = [ROLE_OF_TEXT.get(name) for name in names]
    if None in roles or "assistant" not in roles or "system" in roles[1:]:
        return None
    if any(before == after != "tool" for before, after in pairwise(roles)):
        return None
    return tuple(_TURN[role] for role in roles if role is not None)


def _tools(value: Any) -> bytes:
    """The member ``tools`` of a record, a comma before it; empty if there are no tools."""
    if value is None:
        return b""
    seen = orjson.dumps(value)  # equal texts for equal values, infinities aside, which become null
    if (text := _tools_seen.get(seen)) is None:
        tools = parse_tools(value)
        text = b"" if tools is None else b", %b" % encode_record({"tools": [dict(tool) for tool in tools]})[1:-1]
        if len(seen) <= _LONGEST_TOOLS and b"null" not in seen:
            if len(_tools_seen) >= _MOST_TOOLS:
                _tools_seen.clear()
            _tools_seen[seen] = text
    return text
