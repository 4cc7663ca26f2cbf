"""Placeholders of media in a rendered chat: what replaces them, and what users may not write."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from energon_packing.chat.template import RenderedChat, media_texts
from energon_packing.chat.thinking import TrainedSpan
from energon_packing.conversation import Conversation
from energon_packing.encoders.splitting import MediaText
from energon_packing.errors import SampleRejected
from energon_packing.families.base import MediaPlan, VisionFamily


class Placeholders:
    """Finds and replaces what the chat template writes for an image or video.

    Args:
        family: of the run; it defines the placeholders.
    """

    def __init__(self, family: VisionFamily) -> None:
        self.family = family
        kinds = sorted(family.placeholders.items())
        self._kinds = [kind for kind, _ in kinds]
        self._pattern = re.compile("|".join(f"({re.escape(text)})" for _, text in kinds) or "(?!)")

    @functools.cached_property
    def media_texts(self) -> dict[str, str]:
        """What the processor's template writes per kind of media; see `energon_packing.chat.template.media_texts`."""
        return media_texts(self.family.tokenizer, own_template(self.family.processor), self.family.placeholders)

    @functools.cached_property
    def frames(self) -> dict[str, tuple[str, str]]:
        """What the processor's template writes before and after a placeholder, by kind."""
        frames: dict[str, tuple[str, str]] = {}
        for kind, placeholder in self.family.placeholders.items():
            before, _, after = self.media_texts[kind].partition(placeholder)
            frames[kind] = before, after
        return frames

    def texts(self, chat: str, plans: Sequence[MediaPlan], family: VisionFamily) -> list[MediaText]:
        """Returns the placeholder of each image and video in a rendered chat, with the text that replaces it.

        Args:
            chat: of the sample, with one placeholder for each of ``plans``.
            plans: of its media.
            family: with the limits of the sample.
        """
        return [
            MediaText(start=match.start(), end=match.end(), text=family.replacement(plan), frame=self.frames[plan.kind])
            for match, plan in zip(self._pattern.finditer(chat), plans, strict=True)
        ]

    def replace(self, chat: RenderedChat, plans: tuple[MediaPlan, ...]) -> RenderedChat:
        """Replaces the placeholder of each image and video with its text, and shifts the spans."""
        if not plans and not any(text in chat.text for text in self.family.placeholders.values()):
            return chat  # the search below takes a tenth of the tokenization time
        matches = list(self._pattern.finditer(chat.text))
        found = [self._kinds[(match.lastindex or 1) - 1] for match in matches]
        expected = [plan.kind for plan in plans]
        if found != expected:
            raise SampleRejected(
                "placeholder_mismatch",
                f"the chat template writes media {found}, but the conversation has {expected}",
            )
        if not matches:
            return chat
        pieces: list[str] = []
        ends, shifts = [], []
        cursor = shift = 0
        for match, plan in zip(matches, plans, strict=True):
            text = self.family.replacement(plan)
            pieces += (chat.text[cursor : match.start()], text)
            cursor = match.end()
            shift += len(text) - (match.end() - match.start())
            ends.append(cursor)
            shifts.append(shift)
        pieces.append(chat.text[cursor:])

        def moved(position: int) -> int:
            before = int(np.searchsorted(ends, position, side="right"))
            return position + (shifts[before - 1] if before else 0)

        spans = tuple(
            TrainedSpan(start=moved(span.start), end=moved(span.end), weight=span.weight) for span in chat.spans
        )
        return RenderedChat(text="".join(pieces), spans=spans)


def own_template(processor: Any) -> str | None:
    """Returns a processor's own chat template; None if it has none, or several by name."""
    source = getattr(processor, "chat_template", None)
    return source if isinstance(source, str) else None


def check_reserved(conversation: Conversation, tokens: Sequence[str]) -> None:
    """Refuses a conversation if a text, tool call or tool definition contains a token that stands for media.

    Raises:
        SampleRejected: ``reserved_token``.
    """
    called = [turn for turn in conversation.turns if turn.tool_calls or turn.tool_call_id]
    texts = [turn.text for turn in conversation.turns]
    calls = [text for turn in called for text in _strings([turn.tool_calls, turn.tool_call_id])]
    tools = list(_strings(conversation.tools)) if conversation.tools else []
    everything = "\n".join((*texts, *calls, *tools))
    if not any(token in everything for token in tokens):
        return
    named = [f"a {turn.role} turn" for turn in conversation.turns]
    named += ["a tool call"] * len(calls) + ["a tool definition"] * len(tools)
    for where, text in zip(named, (*texts, *calls, *tools), strict=True):
        for token in tokens:
            if token in text:
                raise SampleRejected("reserved_token", f"{where} holds {token!r}, which stands for media")


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings in nested JSON values, including keys."""
    pending = [value]
    while pending:
        entry = pending.pop()
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, Mapping):
            pending += [*entry.keys(), *entry.values()]
        elif isinstance(entry, list | tuple):
            pending += entry
