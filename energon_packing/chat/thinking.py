"""Thinking spans: what an assistant wrote between ``<think>`` and ``</think>``, kept, left out, or not trained."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from energon_packing.conversation import Conversation, Part, Turn
from energon_packing.errors import SampleRejected

OPEN, CLOSE = "<think>", "</think>"
TAG = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")
EMPTY = re.compile(re.escape(OPEN) + r"\s*" + re.escape(CLOSE) + r"\s*")
_OPENING = re.compile(r"\s*" + EMPTY.pattern)


class TrainedSpan(NamedTuple):
    """Characters ``[start, end)`` of a rendered text whose tokens are trained with ``weight``.

    With weight 0, no token that touches the span is trained.
    """

    start: int
    end: int
    weight: float = 1.0


def strip_thinking(conversation: Conversation) -> Conversation:
    """The conversation without the assistant's thinking spans and the white space after them.

    Raises:
        SampleRejected: ``unclosed_thinking`` if a tag has no partner in its text.
    """
    return _changed(conversation, _without_thinking)


def trim_empty_thinking(conversation: Conversation) -> Conversation:
    """The conversation without empty thinking spans at the beginning of answers."""
    return _changed(conversation, lambda text: text[found.end() :] if (found := _OPENING.match(text)) else text)


def _changed(conversation: Conversation, change: Callable[[str], str]) -> Conversation:
    if not any(CLOSE in turn.text or OPEN in turn.text for turn in conversation.turns if turn.role == "assistant"):
        return conversation
    turns = tuple(_rewritten(turn, change) if turn.role == "assistant" else turn for turn in conversation.turns)
    return dataclasses.replace(conversation, turns=turns)


def _rewritten(turn: Turn, change: Callable[[str], str]) -> Turn:
    parts = tuple(change(part) if isinstance(part, str) else part for part in turn.parts)
    return dataclasses.replace(turn, parts=tuple(part for part in parts if part != ""))


def _without_thinking(text: str) -> str:
    pieces, cursor, depth = [], 0, 0
    for tag in TAG.finditer(text):
        if tag.group() == OPEN:
            if not depth:
                pieces.append(text[cursor : tag.start()])
            depth += 1
            continue
        depth -= 1
        if depth < 0:
            break
        cursor = tag.end()
        while not depth and cursor < len(text) and text[cursor].isspace():
            cursor += 1
    if depth:
        raise SampleRejected("unclosed_thinking", f"an assistant turn has {OPEN} or {CLOSE} without its matching tag")
    return "".join([*pieces, text[cursor:]])


def split_answer(parts: tuple[Part, ...]) -> tuple[str | None, tuple[Part, ...]]:
    """The thinking at the beginning of an answer, and the answer without it.

    Returns:
        None and the parts as they are, unless the answer opens with a non-empty thinking span and has no other tag.
    """
    first = parts[0] if parts else None
    if not isinstance(first, str) or not first.lstrip().startswith(OPEN):
        return None, parts
    tags = [tag for part in parts if isinstance(part, str) for tag in TAG.findall(part)]
    if tags != [OPEN, CLOSE] or CLOSE not in first:
        return None, parts
    thinking, _, answer = first.lstrip()[len(OPEN) :].partition(CLOSE)
    if not thinking.strip():
        return None, parts
    answer = answer.lstrip()
    return thinking.strip(), (answer, *parts[1:]) if answer else parts[1:]


def mask_thinking(text: str, spans: Sequence[TrainedSpan]) -> list[TrainedSpan]:
    """The trained spans, with weight 0 for the thinking in them, tags included.

    A template may write the opening tag itself, right before the trained text; such a span begins with thinking.

    Raises:
        SampleRejected: ``unclosed_thinking`` if a tag has no matching tag.
    """
    result: list[TrainedSpan] = []
    for span in spans:
        cursor, opened, depth = span.start, span.start, 0
        for tag in TAG.finditer(text, span.start, span.end):
            if tag.group() == OPEN:
                opened = tag.start() if not depth else opened
                depth += 1
                continue
            if not depth and (cursor > span.start or not text[: span.start].rstrip().endswith(OPEN)):
                raise SampleRejected("unclosed_thinking", f"an assistant turn has {CLOSE} without {OPEN}")
            depth = max(depth - 1, 0)
            if depth:
                continue
            result += [span._replace(start=cursor, end=opened), TrainedSpan(opened, tag.end(), 0.0)]
            cursor = opened = tag.end()
        if depth:
            raise SampleRejected("unclosed_thinking", f"an assistant turn has {OPEN} without {CLOSE}")
        result.append(span._replace(start=cursor))
    return result
