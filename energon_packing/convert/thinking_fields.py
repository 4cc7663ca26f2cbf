"""Thinking in a field of a message -> thinking in its text, in the form that chat templates read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_packing.chat.thinking import CLOSE, OPEN
from energon_packing.convert.record_media import kind_of
from energon_packing.errors import SampleRejected

THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Written by DeepSeek, Qwen and vLLM; by OpenRouter and newer vLLM; by gpt-oss and TRL, in this order."""


def thinking_text(message: Mapping[str, Any], text: str, number: int) -> str:
    """The text to write before that of an assistant's message: ``<think>\\n...\\n</think>\\n\\n``, or nothing.

    Qwen3's published template writes ``reasoning_content`` in this form, with line breaks around the thinking stripped,
    and splits it again if it finds it in the text.

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
            given[name] = value.strip("\n")
    if not given:
        return ""
    first, *others = given
    thought = given[first]
    for other in others:
        if given[other] != thought:
            raise SampleRejected("conflicting_thinking", f"turn {number} has {first} and {other}, and they differ")
    if OPEN in thought or CLOSE in thought:
        raise SampleRejected("conflicting_thinking", f"turn {number} has {first} with {OPEN} or {CLOSE} in it")
    if OPEN not in text and CLOSE not in text:
        return f"{OPEN}\n{thought}\n{CLOSE}\n\n"
    inner, closed, rest = text.lstrip().removeprefix(OPEN).partition(CLOSE)
    if text.lstrip().startswith(OPEN) and closed and inner.strip("\n") == thought and OPEN not in rest + inner:
        return ""  # the text holds it already
    raise SampleRejected("conflicting_thinking", f"turn {number} has {first} and different thinking in its text")
