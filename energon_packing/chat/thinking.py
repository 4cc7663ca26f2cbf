"""Thinking: what an assistant wrote before its answer, kept, left out, or not trained.

A conversation holds thinking in a field of its turn, or in its text between ``<think>`` and ``</think>``, which is the
notation of the data. How a chat template writes thinking is not known here but found out: a probe is rendered, and what
surrounds its thinking are the template's marks (`find_form`).
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from energon_packing.conversation import Conversation, Part, Turn
from energon_packing.errors import SampleRejected

OPEN, CLOSE = "<think>", "</think>"
TAG = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")
LINE_ENDS = "\r\n"  # What belongs to a tag beside it; spaces and tabs belong to the text
_EMPTY_OPENING = re.compile(rf"\A\s*{re.escape(OPEN)}\s*{re.escape(CLOSE)}[{LINE_ENDS}]*")
_A_TAG = re.compile(r"\s*(?:<[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]|◁[^◁▷\s]{1,40}▷)")


class TrainedSpan(NamedTuple):
    """Characters ``[start, end)`` of a rendered text whose tokens are trained with ``weight``. With weight 0, no token
    that touches the span is trained."""

    start: int
    end: int
    weight: float = 1.0


class ThinkingForm(NamedTuple):
    """How a chat template writes thinking."""

    field: bool  # whether it shows a field of the message
    inline: bool  # whether it takes tags in the text for the same (gpt-oss, Gemma 4 and Qwen3.8 know the field alone)
    opening: str  # opening and closing: what stands before and after thinking, without the white space around it
    closing: str
    breaks: int  # line ends that belong to an empty thinking with which the template opens an answer that has none

    def before(self, text: str, start: int, end: int) -> int | None:
        """Returns where the marks begin that end at ``end``, white space aside; None if none is in ``[start, end)``."""
        found = re.search(rf"(?:{re.escape(self.opening)}\s*)+\Z", text[start:end])
        return start + found.start() if found else None

    def after(self, text: str, start: int, end: int) -> int | None:
        """Returns where the marks from ``start`` on end, white space aside; None if none is in ``[start, end)``."""
        found = re.compile(rf"(?:\s*{re.escape(self.closing)})+").match(text, start, end)
        return found.end() if found else None

    def empty(self, text: str, start: int, end: int) -> tuple[int, int] | None:
        """Returns the first thinking without words in ``[start, end)``, with the line ends that the template adds."""
        marks = rf"{re.escape(self.opening)}\s*{re.escape(self.closing)}\n{{0,{self.breaks}}}"
        found = re.compile(marks).search(text, start, end)
        return found.span() if found else None


PLAIN = ThinkingForm(field=False, inline=True, opening=OPEN, closing=CLOSE, breaks=2)
"""A template that writes texts as they are, and with them the tags of the data."""


def find_form(render: Callable[[list[dict[str, Any]], bool], str]) -> ThinkingForm:
    """Finds out how a template writes thinking, by probes with a text and with a call after the thinking. ``render``
    returns the text of messages, with or without the generation prompt; empty if the template refuses them."""
    asked = [{"role": "user", "content": "energon packing probe"}]
    header = render(asked, True)[len(render(asked, False)) :].strip()
    thought, said = "Zqthoughtqz", "Zqsaidqz"
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": said, "arguments": {}}}
    # Each model has its own name for the field; a template reads the one that it knows.
    field = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
    for text, calls in ((said, {}), ("", {"tool_calls": [call]})):

        def answer(text: str, fields: dict[str, Any]) -> str:
            return render([*asked, {"role": "assistant", "content": text, **fields}], False)

        shown, without = answer(text, {**field, **calls}), answer(text, calls)
        start, at = shown.find(thought), shown.find(said)
        if not 0 <= start < at or said not in without:
            continue
        inline = answer(f"{OPEN}\n{thought}\n{CLOSE}\n\n{text}", calls)
        after, silent = start + len(thought), without[: without.find(said)]
        close = _A_TAG.match(shown, after, at)
        end = close.end() if close else after
        # Without thinking, a template writes nothing in its place, or its marks with nothing between them.
        opened = next((tag.start() for tag in reversed([*_A_TAG.finditer(shown, 0, start)])), start)
        opening, closing = shown[opened:start].strip(), shown[after:end].strip()
        reads_tags = "".join(inline.split()) == "".join(shown.split())
        form = ThinkingForm(field=True, inline=reads_tags, opening=opening, closing=closing, breaks=0)
        empty = form.empty(silent, 0, len(silent)) if closing else None
        if empty is None:
            # What thinking adds, moved to end with the closing mark: the same text may stand at both ends of it.
            added = len(shown) - len(without)
            opening = shown[max(end - added, 0) : start].strip()
            return form._replace(opening=opening.removeprefix(header).strip())
        rest = silent[empty[1] :]
        return form._replace(breaks=len(rest) - len(rest.lstrip("\n")))
    return PLAIN


def tagged(thinking: str) -> str:
    """Returns thinking of a field as text before an answer, as Qwen3's published template writes it."""
    return f"{OPEN}\n{thinking.strip('\n')}\n{CLOSE}\n\n"


def as_shown(conversation: Conversation, choice: str) -> Conversation:
    """The conversation as a template shows it under ``encoder.thinking``: with ``strip`` without thinking, its tags and
    the line ends after them, with ``trim_empty`` without empty thinking that begins an answer. Raises SampleRejected:
    ``unclosed_thinking`` if for ``strip`` a tag has no partner in its text, or for ``mask`` an opening one has none."""
    if choice == "mask":
        check_closed(conversation)
    if choice not in ("strip", "trim_empty"):
        return conversation
    change = _without_thinking if choice == "strip" else partial(_EMPTY_OPENING.sub, "")

    def rewritten(turn: Turn) -> Turn:
        thinking = turn.thinking if choice == "trim_empty" and (turn.thinking or "").strip() else None
        parts = turn.parts
        if "think>" in turn.text:
            changed = (change(part) if isinstance(part, str) else part for part in parts)
            parts = tuple(part for part in changed if part != "")
        return dataclasses.replace(turn, parts=parts, thinking=thinking)

    turns = tuple(rewritten(turn) if turn.role == "assistant" else turn for turn in conversation.turns)
    return conversation if turns == conversation.turns else dataclasses.replace(conversation, turns=turns)


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
        cursor = len(text) - len(text[tag.end() :].lstrip("" if depth else LINE_ENDS))
    if depth:
        raise SampleRejected("unclosed_thinking", f"an assistant turn has {OPEN} or {CLOSE} without its matching tag")
    return "".join([*pieces, text[cursor:]])


def split_answer(parts: tuple[Part, ...]) -> tuple[str | None, tuple[Part, ...]]:
    """Returns the thinking at the beginning of an answer, and the answer without it; line ends beside the tags belong
    to them. None and the parts as they are, unless the answer opens with thinking and has no other tag. Data of models
    whose prompt opens the thinking may hold the closing tag alone. Empty thinking is None."""
    first = parts[0] if parts else None
    if not isinstance(first, str) or CLOSE not in first:
        return None, parts
    tags = [tag for part in parts if isinstance(part, str) for tag in TAG.findall(part)]
    before, _, after = first.partition(CLOSE)
    if tags != [CLOSE] and (tags != [OPEN, CLOSE] or not before.lstrip().startswith(OPEN)):
        return None, parts
    thinking = before.lstrip().removeprefix(OPEN).strip(LINE_ENDS)
    answer = after.lstrip(LINE_ENDS)
    return (thinking if thinking.strip() else None), (answer, *parts[1:]) if answer else parts[1:]


def joined_answer(thinking: str, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Returns an answer with the thinking of its field in its text."""
    first, others = (parts[0], parts[1:]) if parts and isinstance(parts[0], str) else ("", parts)
    return tagged(thinking) + first, *others


def check_closed(conversation: Conversation) -> None:
    """Checks that no thinking in a text stays open; raises SampleRejected ``unclosed_thinking``."""
    for turn in conversation.turns:
        depth = 0
        for tag in TAG.findall(turn.text) if turn.role == "assistant" else ():
            depth = depth + 1 if tag == OPEN else max(depth - 1, 0)
        if depth:
            raise SampleRejected("unclosed_thinking", f"an assistant turn has {OPEN} without {CLOSE}")


def without_spans(spans: Sequence[TrainedSpan], hidden: Sequence[tuple[int, int]]) -> list[TrainedSpan]:
    """Returns trained spans, with weight 0 where they meet one of the ascending ranges that are not trained."""
    result: list[TrainedSpan] = []
    for span in spans:
        cursor = span.start
        for start, end in hidden:
            start, end = max(start, cursor), min(end, span.end)
            if start < end:
                result += [span._replace(start=cursor, end=start), TrainedSpan(start, end, 0.0)]
                cursor = end
        result.append(span._replace(start=cursor))
    return result
