"""The JSON text of a stored record.

Records of text, written straight from their parsed JSON.

Nearly all records without media have an id, turns of text, perhaps a system prompt and tools, and nothing to warn of.
The general road makes objects of their turns, checks these as every reader of a data set does, and encodes them again:
several times the work of writing their text down. What is not plain is left to the general road, mistakes included, so
that each rejection has one place. The tests compare the two roads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import add
from typing import Any

import orjson

from energon_packing.conversation import RECORD_VERSION, ROLES
from energon_packing.convert.config import DEFAULT_FRAME_FPS, RecordFormat
from energon_packing.convert.fields import ROLE_OF_TEXT
from energon_packing.convert.json_text import parse_quickly
from energon_packing.convert.record_media import RecordMedia
from energon_packing.convert.records import turn_fields
from energon_packing.convert.turns import parse_tools, read_turn
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
_FORMATS = frozenset(("auto", "sharegpt", "openai"))
_BEGINNING = b'{"version": %d, "turns": [' % RECORD_VERSION
_TURN = {role: b'{"role": "%s", "parts": [' % role.encode() for role in ROLES}
_SYSTEM_NAMES = tuple(name for name, role in ROLE_OF_TEXT.items() if role == "system")
_CALL, _FUNCTION = frozenset(("id", "type", "function")), frozenset(("name", "arguments"))
_BEFORE_ARGUMENTS = len('{"turns": [{"tool_calls": [{"function": {')
_AFTER_ARGUMENTS = -len("]}]}")
_MOST_TOOLS, _LONGEST_TOOLS = 64, 1 << 15
"""Lists of definitions that are remembered, and bytes of each; most records of a data set repeat those of others."""
_tools_seen: dict[bytes, bytes] = {}


def plain_record(value: Any, layout: RecordFormat) -> bytes | None:
    """The stored form of a record that holds text alone.

    Args:
        value: the parsed JSON.
        layout: see `parse_record`.

    Returns:
        `ParsedRecord.record` as JSON; None for a record that names media, has any other column, or leads to a warning
        or a rejection.
    """
    if (
        layout not in _FORMATS
        or type(value) is not dict
        or not value.keys() <= _COLUMNS
        or ("messages" in value) == ("conversations" in value)
    ):
        return None
    column = "messages" if "messages" in value else "conversations"
    try:
        turns = _turns(value[column], column, layout, value.get("system"))
        if turns is None:
            return None
        return b"%b%b]%b}" % (_BEGINNING, turns, _tools(value.get("tools")))
    except (SampleRejected, orjson.JSONEncodeError, UnicodeEncodeError):
        return None


def plain_layout(value: Mapping[str, Any]) -> str:
    """The name of the layout of a record that `plain_record` has taken."""
    messages = value["messages"] if "messages" in value else value["conversations"]
    return "openai" if "role" in messages[0] else "sharegpt"


def _turns(messages: Any, column: str, layout: RecordFormat, system: Any) -> bytes | None:
    """The JSON of all turns, commas between them; None if one is not plain."""
    if type(messages) is not list or not messages or (fields := turn_fields(messages[0], layout)) is None:
        return None
    if system is None or system == "":
        return _text_turns(messages, fields) or _mixed_turns(messages, fields, column, "")
    if type(system) is not str or messages[0].get(fields[0]) in _SYSTEM_NAMES:
        return None
    turns = _text_turns(messages, fields) or _mixed_turns(messages, fields, column, "system")
    return turns and b'{"role": "system", "parts": [%b]}, %b' % (orjson.dumps(system), turns)


def _text_turns(messages: list[Any], fields: tuple[str, str]) -> bytes | None:
    """Turns of a role and a text each, which are looked at together; None if one is more."""
    role_field, content_field = fields
    try:
        names = tuple([message[role_field] for message in messages])
        texts = [message[content_field] for message in messages]
        if set(map(len, messages)) != {2} or (turns := _beginnings(names)) is None:
            return None
    except (KeyError, TypeError):  # not an object, a field that is missing, a role that is not text
        return None
    if set(map(type, texts)) != {str} or not all(texts) or any(map(str.isspace, texts)):
        return None
    found = b"]}, ".join(map(add, turns, map(orjson.dumps, texts))) + b"]}"
    return None if b"<image>" in found or b"<video>" in found or b"<img>" in found else found


@lru_cache(maxsize=4096)
def _beginnings(names: tuple[str, ...]) -> tuple[bytes, ...] | None:
    """The JSON of each turn up to its text; None if the order of the roles is worth a warning or a rejection.

    Args:
        names: of the roles in the record.
    """
    roles = [ROLE_OF_TEXT.get(name) for name in names]
    if None in roles or "assistant" not in roles or "system" in roles[1:] or _speaks_twice(roles):
        return None
    return tuple(_TURN[role] for role in roles if role is not None)


def _speaks_twice(roles: Sequence[str | None]) -> bool:
    return any(before == after != "tool" for before, after in pairwise(roles))


def _mixed_turns(messages: list[Any], fields: tuple[str, str], column: str, before: str) -> bytes | None:
    """Turns of which some have calls, results or weights, one after the other; None if one is not plain.

    Args:
        messages, fields, column: see `read_turns`.
        before: role of the turn before them, if there is one.
    """
    role_field, content_field = fields
    media = RecordMedia.of({}, DEFAULT_FRAME_FPS)
    found: list[bytes] = []
    made: set[str] = set()
    answered: set[str] = set()
    trained = False
    for number, message in enumerate(messages):
        if type(message) is not dict:
            return None
        name, text = message.get(role_field), message.get(content_field)
        if type(text) is str and "<img>" in text:  # perhaps Qwen-VL's
            return None
        role = ROLE_OF_TEXT.get(name) if type(name) is str else None
        if role == "assistant" and len(message) == 3 and (calls := message.get("tool_calls")):
            written = _calling_turn(text, calls, made)
        elif name == "function_call" and len(message) == 2 and type(text) is str:
            role, written = "assistant", _calling_turn(None, _calls_of_text(text), made)
        elif not _is_text(text):
            written = None
        elif len(message) == 2 and role is not None:
            written = b"%b%b]}" % (_TURN[role], orjson.dumps(text))
        elif role == "tool" and len(message) == 3 and type(call := message.get("tool_call_id")) is str and call:
            written = b'%b%b], "tool_call_id": %b}' % (_TURN[role], orjson.dumps(text), orjson.dumps(call))
            answered.add(call)
        else:
            written = None
        if written is not None and role is not None:
            found.append(written)
            trained = trained or role == "assistant"
        else:
            turn = read_turn(message, number, fields, media, column)
            role = turn.role
            if media.references or media.ignored or role == "system":
                return None
            # At the depth that it has in a record, so that nesting has one limit.
            found.append(encode_record({"turns": [turn.to_record()]})[len(b'{"turns": [') : -len(b"]}")])
            trained = trained or (role == "assistant" and turn.loss_weight != 0.0)
            made.update(call["id"] for call in turn.tool_calls if "id" in call)
            if turn.tool_call_id is not None:
                answered.add(turn.tool_call_id)
        if before == role != "tool" or (role == "system" and before):
            return None
        before = role
    return b", ".join(found) if trained and answered <= made else None


def _calls_of_text(text: str) -> list[Any]:
    """The calls in the text of a ``function_call``, in the form of OpenAI's; they may be anything."""
    calls = parse_quickly(text.encode())
    return [{"function": call} for call in (calls if type(calls) is list else [calls])]


def _calling_turn(text: Any, calls: Any, made: set[str]) -> bytes | None:
    """An assistant's turn that calls tools; None if it is not plain.

    Args:
        text: its content, as the record has it.
        calls: in the form of OpenAI's.
        made: receives their ids.
    """
    if type(calls) is not list or not calls or not (text is None or text == "" or _is_text(text)):
        return None
    found: list[bytes] = []
    for call in calls:
        if type(call) is not dict or not call.keys() <= _CALL or call.get("type", "function") != "function":
            return None
        function, given = call.get("function"), call.get("id")
        if type(function) is not dict or function.keys() != _FUNCTION or type(name := function["name"]) is not str:
            return None
        arguments = function["arguments"]
        if type(arguments) is str:
            arguments = parse_quickly(arguments.encode())
        if not name or type(arguments) is not dict or not (given is None or (type(given) is str and given)):
            return None
        # At the depth that they have in a record, so that nesting has one limit.
        nested = encode_record({"turns": [{"tool_calls": [{"function": {"arguments": arguments}}]}]})
        named = b'"type": "function", "function": {"name": %b, ' % orjson.dumps(name)
        if given is not None:
            made.add(given)
            named = b'"id": %b, %b' % (orjson.dumps(given), named)
        found.append(b"{%b%b" % (named, nested[_BEFORE_ARGUMENTS:_AFTER_ARGUMENTS]))
    parts = orjson.dumps(text) if text else b""
    return b'%b%b], "tool_calls": [%b]}' % (_TURN["assistant"], parts, b", ".join(found))


def _is_text(content: Any) -> bool:
    return (
        type(content) is str
        and bool(content)
        and not content.isspace()
        and "<image>" not in content
        and "<video>" not in content
    )


def _tools(value: Any) -> bytes:
    """The member ``tools`` of a record, a comma before it; empty if there are no tools."""
    if value is None:
        return b""
    seen = orjson.dumps(value)  # equal texts for equal values, infinities aside, which become null
    if (known := _tools_seen.get(seen)) is not None:
        return known
    tools = parse_tools(value)
    text = b"" if tools is None else b", %b" % encode_record({"tools": [dict(tool) for tool in tools]})[1:-1]
    if len(seen) <= _LONGEST_TOOLS and b"null" not in seen:
        if len(_tools_seen) >= _MOST_TOOLS:
            _tools_seen.clear()
        _tools_seen[seen] = text
    return text
