"""Where an answer begins and ends in a rendering with marks.

An answer begins after its header, which is what the template writes as generation prompt. It ends with the text at
which generation stops: a token that ends turns or, if the template has none, the token that opens the next turn.
Both are found by comparing renderings, without any knowledge of the template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from energon_packing.chat.marks import Layout, find_marks
from energon_packing.chat.renderer import common_prefix
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
        first: its first mark, an index into `Layout.order`; the answer begins ``before`` characters before it.
        last: its last mark; the answer ends ``after`` characters after it.
        added: the text at which generation stops, if the template writes it only before another turn and none follows.
        opens: whether the answer ends with the token that opens the next turn; the text after it belongs to that turn.
    """

    turn: int
    first: int
    before: int
    last: int
    after: int
    added: str = ""
    opens: bool = False


class StopTokens:
    """The tokens that end an answer, for one tokenizer.

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
        """Offset of the end of the first token that ends a turn; None if there is none."""
        found = self._stop.search(text)
        return found.end() if found else None

    def is_first(self, text: str, end: int) -> bool:
        """Whether the turn-ending token that ends at ``end`` is the first special token of the text."""
        found = self._special.search(text)
        return found is None or found.end() >= end

    def after(self, text: str, start: int) -> int:
        """The end of the turn-ending token that begins at ``start``; ``start`` if there is none."""
        found = self._stop.match(text, start)
        return found.end() if found else start

    def rest(self, text: str, start: int) -> int:
        """The end of tokens from ``start`` on that end the whole text (a turn's, then a sequence's); else ``start``."""
        found = self._rest.match(text, start)
        return found.end() if found else start

    def whole(self, text: str, at: int) -> int:
        """``at``, or the beginning of the special token that a cut at ``at`` would split."""
        return next((found.start() for found in self._special.finditer(text) if found.start() < at < found.end()), at)

    def opening(self, text: str) -> int | None:
        """Offset of the end of the special token that opens a text, after any white space; None if there is none."""
        found = self._special.match(text, len(text) - len(text.lstrip()))
        return found.end() if found else None


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def find_answers(
    layout: Layout, messages: Sequence[dict[str, Any]], render: Render, stops: StopTokens, thinking: str
) -> list[Answer]:
    """All answers with at least one mark.

    Args:
        layout: of the whole conversation.
        messages: with marks, those that the layout was made from.
        render: runs the template.
        stops: of the tokenizer.
        thinking: what the template writes before thinking; a generation prompt that holds it opens the thinking.

    Raises:
        SampleRejected: ``assistant_first`` if the template does not show where a leading answer begins,
            ``unstable_prefix`` if it renders the turns before an answer differently on their own, or writes no
            generation prompt.
    """
    answers = []
    places = layout.places_of_turns()
    for turn, (first, last) in sorted(places.items()):
        if messages[turn].get("role") != "assistant":
            continue
        last = _last_mark(layout, messages, render, turn, last)
        before = len(layout.frames[first]) - _header(layout, messages, render, stops, thinking, turn, first)
        answers.append(Answer(turn, first, before, last, *_end(layout, messages, render, stops, turn, last)))
    return answers


def _header(
    layout: Layout,
    messages: Sequence[dict[str, Any]],
    render: Render,
    stops: StopTokens,
    thinking: str,
    turn: int,
    first: int,
) -> int:
    """Length of the frame before an answer up to the end of its header."""
    try:
        asked = render(messages[:turn], True)
    except SampleRejected as error:
        if turn:
            raise
        # Otherwise the header, and a system prompt that the template adds, would count as part of the answer.
        raise SampleRejected("assistant_first", _LEADING) from error
    frame = layout.frames[first]
    if not turn:
        # Without turns, a template writes no beginning and no default prompt; the frame must hold the whole header.
        opening = asked.partition(thinking)[0]
        if not opening or opening not in frame:
            raise SampleRejected("assistant_first", _LEADING)
        return frame.rindex(opening) + len(opening)
    prompt = _behind(asked, layout.order[first - 1] if first else None)
    if prompt is None:
        raise SampleRejected(
            "unstable_prefix",
            f"the chat template renders the turns before turn {turn + 1} differently on their own; mark the answers in "
            "it with {% generation %} and name the file in encoder.chat_template",
        )
    header = common_prefix(prompt, frame)
    header = min(stops.whole(prompt, header), stops.whole(frame, header))
    # The generation prompt may open the thinking while history does not; thinking belongs to the answer.
    opened = prompt.find(thinking)
    header = header if opened < 0 else min(header, opened)
    # After a tool's result, some templates write a header in history but not in the generation prompt.
    name = _own_header(messages[:turn], render, thinking)
    header += len(name) if name and frame.startswith(name, header) else 0
    # A special token that opens the text is a header if the template has no generation prompt.
    headless = layout.pieces[layout.order[first]].kind == "text" and stops.opening(frame[header:])
    if headless and render(messages[:turn], False) == asked:
        raise SampleRejected(
            "unstable_prefix",
            "the chat template writes no generation prompt, so an answer's header would be trained too; make it write "
            "one for add_generation_prompt, or mark the answers with {% generation %}",
        )
    return header


def _own_header(messages: Sequence[dict[str, Any]], render: Render, thinking: str) -> str:
    """What the generation prompt adds to the last question before an answer."""
    questions = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    if not questions or questions[-1] + 1 == len(messages):
        return ""  # the question directly precedes the answer, so its prompt was already compared
    try:
        without, prompted = (render(messages[: questions[-1] + 1], prompt) for prompt in (False, True))
    except SampleRejected:
        return ""
    name = prompted[len(without) :] if prompted.startswith(without) else ""
    return name.partition(thinking)[0]


def _behind(text: str, piece: int | None) -> str | None:
    """The text after the last mark of a piece; the whole text if ``piece`` is None; None if the piece is not shown."""
    if piece is None:
        return text
    ends = [end for _, end, found in find_marks(text) if found == piece]
    return text[ends[-1] :] if ends else None


def _last_mark(layout: Layout, messages: Sequence[dict[str, Any]], render: Render, turn: int, last: int) -> int:
    """The last mark of an answer, repetitions included, except those in a result that names its call again."""
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
    closing = common_prefix(alone or "", frame)
    if end is not None and end <= closing:
        return end, "", False
    # Of the headers that may follow, only those of a question or a result stop an answer.
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
    """The end of a last answer without a turn-ending token: adding a turn shows where generation stops."""
    content: Any = _PROBE
    if any(isinstance(message.get("content"), list) for message in messages):
        content = [{"type": "text", "text": _PROBE}]
    piece = layout.order[last]
    role = "tool" if messages[-1].get("tool_calls") else "user"
    try:
        followed = _behind(render([*messages, {"role": role, "content": content}], False), piece)
    except SampleRejected:
        return len(frame), "", False
    if followed is None:  # before another turn, the template drops the answer
        return len(frame), "", False
    behind = followed.partition(_PROBE)[0]
    closing = common_prefix(frame, behind)
    if closing < len(frame):
        # The template appends the generation prompt unasked, so the shared prefix may end inside a header.
        return stops.opening(frame) or closing, "", True
    opening = stops.opening(behind[closing:])
    return closing, behind[closing:][:opening] if opening else "", bool(opening)
