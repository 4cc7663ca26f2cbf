"""Thinking that a message holds in a field of its own -> thinking in its text, as chat templates read it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_packing.chat.thinking import CLOSE, OPEN
from energon_packing.convert.record_media import kind_of
from energon_packing.errors import SampleRejected

THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""DeepSeek, Qwen, vLLM; OpenRouter and newer vLLM; gpt-oss and TRL."""


def thinking_text(message: Mapping[str, Any], text: str, number: int) -> str:
    """What to write before the text of an assistant's message: ``<think>\\n...\\n</think>\\n\\n``, or nothing.

    This is what Qwen3's published template writes of ``reasoning_content``, line breaks around the thinking left out,
    and what it takes apart again where it meets it in the text.

    Args:
        message: as the record holds it.
        text: what its content says.
        number: of the turn, for messages.

    Raises:
        SampleRejected: ``non_string_value`` where a field is no text, ``conflicting_thinking`` where two fields differ,
            where the text holds thinking of its own that differs, or where a field holds tags itself.
    """
    given: dict[str, str] = {}
    for name in THINKING_FIELDS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise SampleRejected("non_string_value", f"turn {number} has a {name} that is {kind_of(value)}, not text")
        if value.strip():
            given[name] = value.strip("\n")
    if not given:
        return ""
    first, *others = given
    thought = given[first]
    for other in others:
        if given[other] != thought:
            raise SampleRejected("conflicting_thinking", f"turn {number} has a {first} and another {other}")
    if OPEN in thought or CLOSE in thought:
        raise SampleRejected("conflicting_thinking", f"turn {number} has a {first} with {OPEN} or {CLOSE} in it")
    if OPEN not in text and CLOSE not in text:
        return f"{OPEN}\n{thought}\n{CLOSE}\n\n"
    inner, closed, rest = text.lstrip().removeprefix(OPEN).partition(CLOSE)
    if text.lstrip().startswith(OPEN) and closed and inner.strip("\n") == thought and OPEN not in rest + inner:
        return ""  # said twice
    raise SampleRejected("conflicting_thinking", f"turn {number} has a {first} and other thinking in its text")
