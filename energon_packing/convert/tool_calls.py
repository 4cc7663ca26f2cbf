"""Tool definitions and tool calls: from the forms that data sets use to the one that chat templates read."""

from __future__ import annotations

import json
from typing import Any

from energon_packing.convert.unread import unread
from energon_packing.errors import SampleRejected


def parse_tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    """The ``tools`` column: a list, one definition, or either as JSON text.

    A bare definition (``{"name", "parameters", ...}``) is wrapped as ``{"type": "function", "function": ...}``, the
    form that chat templates expect.

    Returns:
        None if there are no tools.

    Raises:
        SampleRejected: ``bad_tools``.
    """
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SampleRejected("bad_tools", f"the tools column is not JSON: {error}") from error
    if value is None:
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise SampleRejected("bad_tools", f"the tools column is {type(value).__name__}, expected a list of definitions")
    tools = []
    for tool in value:
        if not isinstance(tool, dict):
            raise SampleRejected("bad_tools", f"a tool definition is {type(tool).__name__}, expected an object")
        definition = tool.get("function") if "function" in tool else tool
        if not isinstance(definition, dict) or not isinstance(definition.get("name"), str):
            raise SampleRejected("bad_tools", "a tool definition has no name")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(tools) or None


def parse_function_call_text(text: str, ignored: set[str]) -> tuple[dict[str, Any], ...]:
    """A ``function_call`` turn: ``{"name", "arguments"}`` as JSON text, with or without an ``id``, or a list of these.

    Args:
        text: of the turn.
        ignored: receives the names of all other fields of the calls.

    Raises:
        SampleRejected: ``bad_tool_call``.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SampleRejected("bad_tool_call", f"the function call is not JSON: {error}") from error
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise SampleRejected("bad_tool_call", "the function call is an empty list")
    return tuple(_call(call, ignored) for call in calls)


def parse_tool_calls(value: Any, ignored: set[str]) -> tuple[dict[str, Any], ...]:
    """OpenAI's ``tool_calls`` of an assistant message; ids are kept, since some chat templates require them.

    Args:
        value: the field of the message.
        ignored: receives the names of all other fields of the calls, such as ``index``.

    Raises:
        SampleRejected: ``bad_tool_call``.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise SampleRejected("bad_tool_call", f"tool_calls is {type(value).__name__}, expected a list")
    calls = []
    for call in value:
        if not isinstance(call, dict):
            raise SampleRejected("bad_tool_call", f"a tool call is {type(call).__name__}, expected an object")
        if call.get("type", "function") != "function":
            raise SampleRejected("bad_tool_call", f"a tool call has type {call['type']!r}, expected 'function'")
        calls.append(_call(call.get("function", call), ignored, call.get("id")))
        if "function" in call:
            ignored |= unread(call, ("id", "type", "function"))
    return tuple(calls)


def call_id(value: Any) -> str | None:
    """The id of a call, or None.

    Raises:
        SampleRejected: ``bad_tool_call`` if it is not text.
    """
    if value is not None and not isinstance(value, str):
        raise SampleRejected("bad_tool_call", f"the id of a tool call is {type(value).__name__}, expected text")
    return value or None


def _call(value: Any, ignored: set[str], outer_id: Any = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SampleRejected("bad_tool_call", f"a function call is {type(value).__name__}, expected an object")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise SampleRejected("bad_tool_call", "a function call has no name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise SampleRejected("bad_tool_call", f"the arguments of {name!r} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        found = "missing" if "arguments" not in value else f"{type(arguments).__name__}"
        raise SampleRejected("bad_tool_call", f"the arguments of {name!r} are {found}, expected an object")
    ignored |= unread(value, ("id", "type", "name", "arguments"))
    found_id = call_id(value.get("id") if outer_id is None else outer_id)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if found_id is None else {"id": found_id, **call}
