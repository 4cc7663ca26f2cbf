"""Thinking in a field of a message: which field holds it, and whether the text holds other thinking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_packing.chat.thinking import CLOSE, OPEN
from energon_packing.convert.record_media import kind_of
from energon_packing.errors import SampleRejected

THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Written by DeepSeek, Qwen and vLLM; by OpenRouter and newer vLLM; by gpt-oss and TRL, in this order."""


def thinking_of(message: Mapping[str, Any], text: str, number: int) -> str | None:
    """The thinking of an assistant's message as the field holds it; None if there is none, or the text holds it too.

    Args:
        message: as the record holds it.
        text: of the message's content.
        number: of the turn, for error messages.

    Raises:
        SampleRejected: ``non_string_value`` if a field is not text, ``conflicting_thinking`` if two fields differ, if
            the text holds other thinking, or if a field itself holds tags.
    """
    given: dict[str, str] = {}
    for name in THINKING_FIELDS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise SampleRejected("non_string_value", f"turn {number} has {name} that is {kind_of(value)}, not text")
        if value.strip():
            given[name] = value
    if not given:
        return None
    first, *others = given
    thought = given[first]
    for other in others:
        if given[other].strip("\n") != thought.strip("\n"):
            raise SampleRejected("conflicting_thinking", f"turn {number} has {first} and {other}, and they differ")
    if OPEN in thought or CLOSE in thought:
        raise SampleRejected("conflicting_thinking", f"turn {number} has {first} with {OPEN} or {CLOSE} in it")
    if OPEN not in text and CLOSE not in text:
        return thought
    inner, closed, rest = text.lstrip().removeprefix(OPEN).partition(CLOSE)
    same = inner.strip("\n") == thought.strip("\n")
    if text.lstrip().startswith(OPEN) and closed and same and OPEN not in rest + inner:
        return None
    raise SampleRejected("conflicting_thinking", f"turn {number} has {first} and different thinking in its text")
