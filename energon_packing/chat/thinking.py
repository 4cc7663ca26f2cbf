"""Thinking spans: what an assistant wrote between ``<think>`` and ``</think>``, kept, left out, or not trained."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from energon_packing.conversation import Conversation, Part, Turn
from energon_packing.errors import SampleRejected

if TYPE_CHECKING:
    from energon_packing.chat.template import TrainedSpan

OPEN, CLOSE = "<think>", "</think>"
_SPAN = re.compile(re.escape(OPEN) + ".*?" + re.escape(CLOSE) + r"\s*", re.DOTALL)
_TAG = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")


def strip_thinking(conversation: Conversation) -> Conversation:
    """The conversation without thinking spans of the assistant and the white space behind them.

    Raises:
        SampleRejected: ``unclosed_thinking`` where a tag has no partner in its text.
    """
    if not any(CLOSE in turn.text or OPEN in turn.text for turn in conversation.turns if turn.role == "assistant"):
        return conversation
    turns = tuple(_stripped(turn) if turn.role == "assistant" else turn for turn in conversation.turns)
    return dataclasses.replace(conversation, turns=turns)


def _stripped(turn: Turn) -> Turn:
    parts: list[Part] = []
    for part in turn.parts:
        if isinstance(part, str):
            part = _SPAN.sub("", part)
            if _TAG.search(part):
                raise SampleRejected(
                    "unclosed_thinking", f"an assistant turn has {OPEN} or {CLOSE} without its partner"
                )
            if not part:
                continue
        parts.append(part)
    return dataclasses.replace(turn, parts=tuple(parts))


def mask_thinking(text: str, spans: Sequence[TrainedSpan]) -> list[TrainedSpan]:
    """The trained spans without the thinking in them, its tags included.

    A template may write the opening tag itself, before what is trained: a span that closes first is thinking from its
    beginning on.

    Raises:
        SampleRejected: ``unclosed_thinking`` where a span opens and does not close.
    """
    result: list[TrainedSpan] = []
    for span in spans:
        cursor, opened = span.start, None
        for tag in _TAG.finditer(text, span.start, span.end):
            if tag.group() == OPEN:
                opened = tag.start() if opened is None else opened
                continue
            result.append(span._replace(start=cursor, end=cursor if opened is None else opened))
            cursor, opened = tag.end(), None
        if opened is not None:
            raise SampleRejected("unclosed_thinking", f"an assistant turn opens {OPEN} and never closes it")
        result.append(span._replace(start=cursor))
    return result
