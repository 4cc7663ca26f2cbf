"""Where an answer begins and ends in a rendering with marks.

An answer begins where the header ends that asks for it: what the template writes as generation prompt. It ends with
what generation stops at: a token that ends turns, or, where the template has none, the token that opens the next turn.
Both are found by rendering and comparing; nothing is known about the template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from energon_packing.chat.layout import Layout
from energon_packing.chat.sentinels import find_marks
from energon_packing.chat.thinking import OPEN
from energon_packing.errors import SampleRejected

Render = Callable[[Sequence[dict[str, Any]], bool], str]
"""Renders messages with marks, with or without the generation prompt."""
_PROBE = "Zq999999Xv"
_LEADING = (
    "the conversation begins with an assistant turn, and the chat template cannot show where its text begins; put a "
    "user turn before it, or mark the template with {% generation %}"
)


class Answer(NamedTuple):
    """An assistant turn in a layout.

    Attributes:
        turn: its index.
        first: its first mark; it begins ``before`` characters ahead of it.
        last: its last mark; it ends ``after`` characters behind it.
        added: what generation stops at, where the template writes it only with a turn that follows and none does.
        opens: whether what it ends with opens the next turn: what follows is that turn's.
    """

    turn: int
    first: int
    before: int
    last: int
    after: int
    added: str = ""
    opens: bool = False


class StopTokens:
    """What ends an answer, for one tokenizer.

    Args:
        stops: texts of tokens at which generation stops.
        special: texts of all special tokens, which may open a turn.
    """

    def __init__(self, stops: Sequence[str], special: Sequence[str]) -> None:
        self.stops = tuple(sorted({*stops} - {""}, key=lambda token: (-len(token), token)))
        self._stop = _any_of(self.stops)
        self._special = _any_of(sorted({*special} - {""}, key=lambda token: (-len(token), token)))
        self._rest = re.compile(rf"(?:\s*(?:{self._stop.pattern}))+(?=\s*\Z)")

    def first_end(self, text: str) -> int | None:
        """Characters up to the end of the first token that ends a turn."""
        found = self._stop.search(text)
        return found.end() if found else None

    def is_first(self, text: str, end: int) -> bool:
        """Whether a token that ends turns and ends at a place is the first special one of a text."""
        found = self._special.search(text)
        return found is None or found.end() >= end

    def after(self, text: str, start: int) -> int:
        """The end of a token that ends turns and begins at a place; the place where none does."""
        found = self._stop.match(text, start)
        return found.end() if found else start

    def rest(self, text: str, start: int) -> int:
        """The end of tokens that end the whole text: a turn's and then a sequence's."""
        found = self._rest.match(text, start)
        return found.end() if found else start

    def whole(self, text: str, at: int) -> int:
        """A place in a text, or the beginning of the special token that it would cut in two."""
        return next((found.start() for found in self._special.finditer(text) if found.start() < at < found.end()), at)

    def opening(self, text: str) -> int | None:
        """Characters up to the end of a special token with which a text begins, white space before it included."""
        found = self._special.match(text, len(text) - len(text.lstrip()))
        return found.end() if found else None


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def find_answers(layout: Layout, messages: Sequence[dict[str, Any]], render: Render, stops: StopTokens) -> list[Answer]:
    """All answers with at least one mark.

    Args:
        layout: of the whole conversation.
        messages: with marks, as the layout was made from.
        render: the template.
        stops: of the tokenizer.

    Raises:
        SampleRejected: ``assistant_first`` where the template does not show where a leading answer begins.
    """
    answers = []
    places = layout.places_of_turns()
    for turn, (first, last) in sorted(places.items()):
        if messages[turn].get("role") != "assistant":
            continue
        last = _last_mark(layout, messages, render, turn, last)
        before = len(layout.frames[first]) - _header(layout, messages, render, stops, turn, first)
        answers.append(Answer(turn, first, before, last, *_end(layout, messages, render, stops, turn, last)))
    return answers


def _header(
    layout: Layout, messages: Sequence[dict[str, Any]], render: Render, stops: StopTokens, turn: int, first: int
) -> int:
    """Characters of the frame before an answer that are its header."""
    try:
        asked = render(messages[:turn], True)
    except SampleRejected as error:
        if turn:
            raise
        # Without this the header, and a system prompt that the template adds, would be taken for the answer.
        raise SampleRejected("assistant_first", _LEADING) from error
    frame = layout.frames[first]
    if not turn:
        # Of no turns, a template writes neither a beginning nor a default prompt; the header must stand there whole.
        opening = asked.partition(OPEN)[0]
        if not opening or opening not in frame:
            raise SampleRejected("assistant_first", _LEADING)
        return frame.rindex(opening) + len(opening)
    prompt = _behind(asked, layout.order[first - 1] if first else None)
    if prompt is None:
        raise SampleRejected(
            "unstable_prefix",
            f"the chat template shows the turns before turn {turn + 1} in another way when they stand alone; mark it "
            "with {% generation %} and name the file with encoder.chat_template",
        )
    header = _common(prompt, frame)
    header = min(stops.whole(prompt, header), stops.whole(frame, header))
    # A prompt may open the thinking for the model, and history may not: thinking is the answer's.
    opened = prompt.find(OPEN)
    header = header if opened < 0 else min(header, opened)
    # After a tool's result some templates ask without a header and then write one.
    name = _own_header(messages[:turn], render)
    header += len(name) if name and frame.startswith(name, header) else 0
    # A text that opens with a special token: its header, where the template knows no generation prompt.
    headless = layout.pieces[layout.order[first]].kind == "text" and stops.opening(frame[header:])
    if headless and render(messages[:turn], False) == asked:
        raise SampleRejected(
            "unstable_prefix",
            "the chat template writes no generation prompt, so that the header of an answer would be trained with it; "
            "let it write one with add_generation_prompt, or mark it with {% generation %}",
        )
    return header


def _own_header(messages: Sequence[dict[str, Any]], render: Render) -> str:
    """What the generation prompt of a question adds, of the last question before an answer."""
    questions = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    if not questions or questions[-1] + 1 == len(messages):
        return ""  # the question itself comes before the answer, and its prompt was compared already
    try:
        without, prompted = (render(messages[: questions[-1] + 1], prompt) for prompt in (False, True))
    except SampleRejected:
        return ""
    name = prompted[len(without) :] if prompted.startswith(without) else ""
    return name.partition(OPEN)[0]


def _behind(text: str, piece: int | None) -> str | None:
    """What stands after the last mark of a piece; the whole text for None, None where the piece is not shown."""
    if piece is None:
        return text
    ends = [end for _, end, found in find_marks(text) if found == piece]
    return text[ends[-1] :] if ends else None


def _common(one: str, other: str) -> int:
    """Characters with which both texts begin."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def _last_mark(layout: Layout, messages: Sequence[dict[str, Any]], render: Render, turn: int, last: int) -> int:
    """The last mark of an answer, where it names something twice; a result that names its call again is no part."""
    again = last
    while again + 1 < len(layout.order) and layout.pieces[layout.order[again + 1]].turn == turn:
        again += 1
    if again == last or turn + 1 == len(messages):
        return again
    try:
        alone = render(messages[: turn + 1], False)
    except SampleRejected:
        return last
    whole = list(layout.order[: again + 1])
    shown = [piece for _, _, piece in find_marks(alone)]
    while again > last and shown.count(layout.order[again]) < whole.count(layout.order[again]):
        whole.pop()
        again -= 1
    return again


def _end(
    layout: Layout,
    messages: Sequence[dict[str, Any]],
    render: Render,
    stops: StopTokens,
    turn: int,
    last: int,
) -> tuple[int, str, bool]:
    """`Answer.after`, `Answer.added` and `Answer.opens`."""
    frame = layout.frames[last + 1]
    end = stops.first_end(frame)
    is_last = last + 1 == len(layout.order) and turn + 1 == len(messages)
    if end is not None and (is_last or stops.is_first(frame, end)):
        return (stops.rest(frame, end) if is_last else end), "", False
    if is_last:
        return _open_end(layout, messages, render, stops, last, frame)
    try:
        alone = _behind(render(messages[: turn + 1], False), layout.order[last])
    except SampleRejected:
        alone = None
    closing = _common(alone or "", frame)
    if end is not None and end <= closing:
        return end, "", False
    # Of the headers that may follow, an answer stops at those of a question and of a result.
    follows = messages[turn + 1].get("role") in ("user", "tool") if turn + 1 < len(messages) else False
    opening = stops.opening(frame[closing:]) if follows else None
    return closing + (opening or 0), "", bool(opening)


def _open_end(
    layout: Layout,
    messages: Sequence[dict[str, Any]],
    render: Render,
    stops: StopTokens,
    last: int,
    frame: str,
) -> tuple[int, str, bool]:
    """The end of a last answer that no token ends: a turn that follows shows where generation stops."""
    content: Any = _PROBE
    if any(isinstance(message.get("content"), list) for message in messages):
        content = [{"type": "text", "text": _PROBE}]
    piece = layout.order[last]
    role = "tool" if messages[-1].get("tool_calls") else "user"
    try:
        followed = _behind(render([*messages, {"role": role, "content": content}], False), piece)
    except SampleRejected:
        return len(frame), "", False
    if followed is None:  # what follows makes the template take the answer back
        return len(frame), "", False
    behind = followed.partition(_PROBE)[0]
    closing = _common(frame, behind)
    if closing < len(frame):
        # The template appends the generation prompt unasked: what the two have in common may be half a header.
        return stops.opening(frame) or closing, "", True
    opening = stops.opening(behind[closing:])
    return closing, behind[closing:][:opening] if opening else "", bool(opening)
