"""Placeholders of media in a rendered chat: what replaces them, and what users may not write."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from energon_packing.chat.template import ChatTemplate, RenderedChat, media_frames
from energon_packing.chat.thinking import TrainedSpan
from energon_packing.conversation import Conversation, MediaKind
from energon_packing.errors import SampleRejected
from energon_packing.families.base import MediaPlan, VisionFamily


class Expanded(NamedTuple):
    """A rendered conversation with the texts of its images and videos in place of their placeholders.

    Attributes:
        text: what is tokenized.
        spans: its trained characters, ascending, and with weight 0 those of ``media``: no trained token touches them.
        media: characters ``[start, end)`` of each image and video in conversation order: everything that its family
            inserts (tokens, times, numbers of frames, sentences about crops, line breaks), and its frame.
        moved: maps a character position of the rendered text to ``text``.
    """

    text: str
    spans: tuple[TrainedSpan, ...]
    media: tuple[tuple[int, int], ...]
    moved: Callable[[int], int]


class Placeholders:
    """Finds and replaces what the chat template writes for an image or video.

    Args:
        family: of the run; it defines the placeholders.
        template: of the run; it defines the frames, which it writes around a placeholder: ``<|vision_start|>``,
            ``Picture 1:``, a line break.
    """

    def __init__(self, family: VisionFamily, template: ChatTemplate) -> None:
        self.family, self._template = family, template
        kinds = sorted(family.placeholders.items())
        self._kinds = [kind for kind, _ in kinds]
        self._pattern = re.compile("|".join(f"({re.escape(text)})" for _, text in kinds) or "(?!)")

    @functools.cached_property
    def _frames(self) -> dict[MediaKind, tuple[re.Pattern[str], re.Pattern[str]]]:
        """What may stand directly before and after a placeholder, by kind; a number may be another one."""
        found = {}
        for kind, sides in media_frames(self._template, self.family.placeholders).items():
            before, after = (re.sub(r"\d+", r"\\d+", re.escape(side)) for side in sides)
            found[kind] = re.compile(rf"(?:{before})\Z"), re.compile(after)
        return found

    def expand(self, chat: RenderedChat, plans: Sequence[MediaPlan]) -> Expanded:
        """Replaces the placeholder of each image and video with its text.

        Raises:
            SampleRejected: ``placeholder_mismatch`` if the placeholders are not those of ``plans``.
        """
        if not plans and not any(text in chat.text for text in self.family.placeholders.values()):
            return Expanded(chat.text, chat.spans, (), lambda at: at)  # the search takes a tenth of the tokenization
        matches = list(self._pattern.finditer(chat.text))
        found = [self._kinds[(match.lastindex or 1) - 1] for match in matches]
        expected = [plan.kind for plan in plans]
        if found != expected:
            raise SampleRejected(
                "placeholder_mismatch",
                f"the chat template writes media {found}, but the conversation has {expected}",
            )
        parts: list[str] = []
        media: list[tuple[int, int]] = []
        ends, shifts = [], [0]
        cursor = framed = 0
        for match, plan in zip(matches, plans, strict=True):
            start, text = match.start(), self.family.replacement(plan)
            before, after = self._frames[plan.kind]
            parts += (chat.text[cursor:start], text)
            cursor = match.end()
            opened, closed = before.search(chat.text, framed, start), after.match(chat.text, cursor)
            framed = closed.end() if closed else cursor
            ends.append(cursor)
            shifts.append(shifts[-1] + len(text) - (cursor - start))
            media.append(((opened.start() if opened else start) + shifts[-2], framed + shifts[-1]))
        parts.append(chat.text[cursor:])

        def moved(at: int) -> int:
            return at + shifts[bisect_right(ends, at)]

        spans = [TrainedSpan(moved(span.start), moved(span.end), span.weight) for span in chat.spans]
        spans += [TrainedSpan(start, end, 0.0) for start, end in media]
        return Expanded("".join(parts), tuple(sorted(spans)), tuple(media), moved)


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
    texts = [f"{turn.thinking or ''}{turn.text}" for turn in conversation.turns]
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
