"""LLaMA-Factory's v1 samples: ``messages``, or ``chosen_messages`` and ``rejected_messages``, of typed parts.

A part is ``{"type", "value"}``; its types are ``text``, ``reasoning``, ``tool_call`` (JSON text), ``image_url``,
``video_url`` and ``audio_url``. As its Qwen3 renderer reads them, the texts of a message are joined, and so are its
thoughts, wherever they stand.
"""

from collections.abc import Mapping
from typing import Any

from energon_packing.convert.fields import says_nothing
from energon_packing.convert.layouts.layout import Layout, without
from energon_packing.convert.turns import parse_function_call_text
from energon_packing.errors import SampleRejected

_PAIR = ("chosen_messages", "rejected_messages")
_MEDIA = {"image_url": "image", "video_url": "video"}


def matches(record: Mapping[str, Any]) -> bool:
    if all(isinstance(record.get(name), list) for name in _PAIR):
        return True
    messages = record.get("messages")
    held = [each.get("content") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    parts = (part for content in held if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and "type" in part and "value" in part for part in parts)


def _restate(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    if not says_nothing(record.get("extra_info")) and "kto" in str(record["extra_info"]):
        raise SampleRejected("unsupported_column", "the column 'extra_info' holds a preference label (KTO) of v1")
    if not all(isinstance(record.get(name), list) for name in _PAIR):
        return {**record, "messages": _messages(record["messages"])}
    chosen, rejected = (_messages(record[name]) for name in _PAIR)
    return {**without(record, *_PAIR), "chosen": chosen, "rejected": rejected}


def _messages(messages: list[Any]) -> list[Any]:
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: Any, number: int) -> Any:
    """A message with OpenAI's fields; one without parts stays as it is."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        value = part.get("value") if isinstance(part, dict) else None
        if not isinstance(value, str):
            raise SampleRejected("non_string_value", f"turn {number}: a part of type {kind!r} has no text in 'value'")
        rest = without(part, "type", "value")
        if kind == "text":
            parts.append({"type": "text", "text": value, **rest})
        elif kind == "reasoning":
            thoughts.append(value)
        elif kind == "tool_call":
            calls += parse_function_call_text(value, set())
        elif isinstance(kind, str) and kind in _MEDIA:
            parts.append({"type": _MEDIA[kind], _MEDIA[kind]: value, **rest})
        else:
            known = ", ".join(("text", "reasoning", "tool_call", *_MEDIA))
            raise SampleRejected("unknown_part", f"turn {number} has a content part of type {kind!r}; known: {known}")
    read: dict[str, Any] = {**message, "content": parts}
    if thoughts:
        read["reasoning_content"] = "".join(thoughts)
    if calls:
        read["tool_calls"] = calls
    return read


_EXPECTS = "'messages' whose content is a list of type/value"
LAYOUT = Layout(name="llamafactory-v1", expects=_EXPECTS, matches=matches, restate=_restate)
