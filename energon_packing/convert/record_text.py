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
from energon_packing.convert.fields import ROLE_OF
from energon_packing.convert.records import layout_of_turn
from energon_packing.convert.turns import parse_function_call_text, parse_tool_calls, parse_tools
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
    """The stored form of a record that holds text alone, calls of tools included.

    Args:
        value: the parsed JSON.
        layout: see `parse_record`.

    Returns:
        `ParsedRecord.record` as JSON, and the name of the layout; None for a record that names media, has any other
        column, or leads to a warning or a rejection.
    """
    if type(value) is not dict or not value.keys() <= _COLUMNS or ("messages" in value) == ("conversations" in value):
        return None
    messages = value["messages"] if "messages" in value else value["conversations"]
    if type(messages) is not list or not messages or (found := layout_of_turn(messages[0], layout)) is None:
        return None
    assert found.fields is not None, "the layout is a conversation"
    system = value.get("system")
    try:
        if system is not None and system != "":
            role_field, content_field = found.fields
            messages = [{role_field: "system", content_field: system}, *messages]
        if (turns := _text_turns(messages, *found.fields) or _turns(messages, *found.fields)) is None:
            return None
        if b"<image>" in turns or b"<video>" in turns or b"<img>" in turns:
            return None
        return b"%b%b]%b}" % (_BEGINNING, turns, _tools(value.get("tools"))), found.name
    except (KeyError, TypeError, SampleRejected, UnicodeEncodeError):  # orjson's errors are of these
        return None


def _text_turns(messages: list[Any], role_field: str, content_field: str) -> bytes | None:
    """The JSON of turns of a role and a text each, looked at together, which takes a third of the time; None if one is
    more."""
    if set(map(len, messages)) != {2} or (turns := _beginnings(tuple([each[role_field] for each in messages]))) is None:
        return None
    texts = [message[content_field] for message in messages]
    if set(map(type, texts)) != {str} or not all(texts) or any(map(str.isspace, texts)):
        return None
    return b"]}, ".join(map(add, turns, map(orjson.dumps, texts))) + b"]}"


@lru_cache(maxsize=4096)
def _beginnings(names: tuple[str, ...]) -> tuple[bytes, ...] | None:
    """The JSON of each turn up to its text; None if the order of the roles is worth a warning or a rejection, or if a
    turn holds calls.

    Args:
        names: of the roles in the record.
    """
    roles = [ROLE_OF.get(name) for name in names]
    if None in roles or "assistant" not in roles or "system" in roles[1:] or "function_call" in names:
        return None
    if any(before == after != "tool" for before, after in pairwise(roles)):
        return None
    return tuple(_TURN[role] for role in roles if role is not None)


def _turns(messages: list[Any], role_field: str, content_field: str) -> bytes | None:
    """The JSON of turns of which some call tools or hold results; None if one is more."""
    names = [message[role_field] for message in messages]
    # What calls is an assistant's turn, whatever the name of its role.
    if (begun := _beginnings(tuple(["gpt" if name == "function_call" else name for name in names]))) is None:
        return None
    turns: list[bytes] = []
    made: set[Any] = set()
    answered: set[str] = set()
    ignored: set[str] = set()
    for message, name, beginning in zip(messages, names, begun, strict=True):
        text, further, known = message.get(content_field), b"", 2
        calls: tuple[dict[str, Any], ...] = ()
        if name == "function_call":
            calls, text = (parse_function_call_text(text, ignored), None) if type(text) is str else ((), text)
        elif beginning is _TURN["assistant"] and (given := message.get("tool_calls")):
            calls, known = parse_tool_calls(given, ignored), 3
        elif beginning is _TURN["tool"] and type(call := message.get("tool_call_id")) is str and call:
            further, known = b', "tool_call_id": %b' % orjson.dumps(call), 3
            answered.add(call)
        if calls:
            made.update(call.get("id") for call in calls)
            # At the depth that they have in a record, so that nesting has one limit.
            further = b", " + encode_record({"turns": [{"tool_calls": calls}]})[len(b'{"turns": [{') : -len(b"}]}")]
        elif type(text) is not str or not text:
            return None
        if len(message) != known or (text and (type(text) is not str or text.isspace())):
            return None
        turns.append(b"%b%b]%b}" % (beginning, orjson.dumps(text) if text else b"", further))
    return b", ".join(turns) if not ignored and answered <= made else None


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
