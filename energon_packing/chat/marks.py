"""Marks in place of what a conversation says, so that a rendering shows where each piece of it went.

A chat template is somebody else's program. To find out what it does with a conversation, the conversation is rendered
twice: as it is, and with every piece (a text, a name, an argument) replaced by a word that occurs nowhere else. White
space around texts and thinking tags stay, since templates strip the former and split at the latter.
"""

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from energon_packing.chat.thinking import CLOSE, OPEN, TAG, joined_answer, split_answer
from energon_packing.conversation import Conversation, MediaPart, Part, Turn
from energon_packing.errors import SampleRejected, some_of

PieceKind = Literal["text", "thinking", "call", "argument", "definition"]
DEFINITIONS = -1  # Turn of the pieces that belong to no turn: tool definitions
MARKUP = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]")
"""What a template may look for in a text: tags, and words in brackets."""
_MARK = re.compile(r"Zq(\d{6})Xv|7083(\d{6})4417(?:\.25)?")
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None  # Messages and tool definitions as a template takes them


class Piece(NamedTuple):
    """One thing that a conversation says; a text (``value``) without surrounding white space, or a number."""

    turn: int
    kind: PieceKind
    value: str | int | float

    def forms(self) -> Iterator[str]:
        """Yields the forms in which a template may write the value: as it is, or escaped for JSON, HTML or Python."""
        if not isinstance(self.value, str):
            yield from dict.fromkeys((json.dumps(self.value), str(self.value)))
            return
        yield self.value
        for ascii_only in (False, True):
            escaped = json.dumps(self.value, ensure_ascii=ascii_only)[1:-1]
            yield escaped
            # Jinja's own tojson, if a template engine keeps it, also escapes its text for HTML.
            yield re.sub("[<>&']", lambda found: f"\\u{ord(found[0]):04x}", escaped)
        yield html.escape(self.value)
        for quoted in (self.value, self.value.replace("\\", "\\\\")):  # in a call written as Python (LFM2)
            yield quoted.replace("'", "\\'")
            yield quoted.replace("'", "\\'").replace("\n", "\\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Passing:
    """How a conversation is passed to a template; templates expect different forms."""

    # The content of an answer that only calls tools is None, not an empty text (DeepSeek-V3).
    no_text_is_none: bool = False
    arguments_as_text: bool = False  # arguments of calls are JSON text, not objects (DeepSeek-V3)
    name_results: bool = False  # a tool's result carries the name of the tool
    thinking_apart: bool = False  # thinking of a field stays a field; otherwise it opens the text
    thinking_split: bool = False  # thinking that opens a text becomes a field (gpt-oss, Gemma 4, Qwen3.8 know no tags)


class Marks:
    """Writes a mark for every piece and collects these in ``pieces``, in the order of the conversation. With
    ``markup``, tags inside texts stay as they are, for templates that look for them; with ``calls``, calls, arguments
    and definitions have marks too."""

    def __init__(self, *, markup: bool = False, calls: bool = True) -> None:
        self.pieces: list[Piece] = []
        self._markup, self._calls = markup, calls
        self._depth = (-1, 0)  # the turn of the last text, and how many thinking tags are open after it

    def _mark(self, turn: int, kind: PieceKind, value: str | int | float) -> str | int | float:
        number = len(self.pieces)
        self.pieces.append(Piece(turn, kind, value))
        if isinstance(value, str):
            return f"Zq{number:06d}Xv"
        return int(f"7083{number:06d}4417") + (0.25 if isinstance(value, float) else 0)

    def core(self, turn: int, kind: PieceKind, text: str) -> str:
        """Returns a text with one mark in place of it, white space around it aside."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        return text[:start] + str(self._mark(turn, kind, core)) + text[start + len(core) :]

    def text(self, turn: int, text: str, *, answer: bool) -> str:
        """Returns a text of a turn with one mark, or one per stretch between tags."""
        depth = self._depth[1] if self._depth[0] == turn else 0  # an image may stand between the tags
        if not self._markup and not (answer and (depth or "think>" in text)):  # nearly all texts
            return self.core(turn, "text", text)
        tags = TAG.findall(text) if answer and "think>" in text else []
        # Thinking models are given the opening tag, so data may hold the closing tag alone.
        depth, pieces = depth or int(tags[:1] == [CLOSE]), []
        split = MARKUP if self._markup else TAG
        for at, run in enumerate(re.split(f"({split.pattern})", text)):
            if at % 2:
                depth += {OPEN: 1, CLOSE: -1}.get(run, 0) if answer else 0
                pieces.append(run)
            else:
                pieces.append(self.core(turn, "thinking" if depth > 0 else "text", run))
        self._depth = (turn, max(depth, 0))
        return "".join(pieces)

    def name(self, turn: int, kind: PieceKind, name: str) -> str:
        """One mark for the name of a call or of a definition."""
        return str(self._mark(turn, kind, name)) if self._calls else name

    def arguments(self, turn: int, value: Any) -> Any:
        """Returns the value with a mark for every key, text and number; booleans and nulls stay."""
        if not self._calls or isinstance(value, bool) or value is None:
            return value
        if isinstance(value, Mapping):
            # Marks ascend like the keys, so a template that sorts keys (Gemma 4's) sorts the marks the same way.
            ascending = sorted(value, key=lambda key: (key.lower(), key))
            keys = {key: self.core(turn, "argument", key) for key in ascending}
            return {keys[key]: self.arguments(turn, entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.arguments(turn, entry) for entry in value]
        return self.core(turn, "argument", value) if isinstance(value, str) else self._mark(turn, "argument", value)


def find_marks(text: str) -> Iterator[tuple[int, int, int]]:
    """Yields ``(start, end, index)``: the characters ``[start, end)`` of every mark in a text, and its piece."""
    for found in _MARK.finditer(text):
        yield found.start(), found.end(), int(found[1] or found[2])


def to_messages(
    conversation: Conversation, marks: Marks | None, passing: Passing, *, as_list: bool
) -> tuple[Messages, Tools]:
    """Returns messages, one per turn, and tool definitions for a chat template (None if there are none). ``marks``
    writes marks in place of what the conversation says; None leaves it as it is. With ``as_list`` every content is a
    list of parts. Raises SampleRejected: ``bad_record`` if a tool call has no name or no arguments."""
    tools = [_definition(tool, marks) for tool in conversation.tools] if conversation.tools else None
    messages: Messages = []
    open_calls: list[tuple[str | None, str]] = []  # id and name
    for number, turn in enumerate(conversation.turns):
        message: dict[str, Any] = {"role": turn.role, "content": None}
        parts = turn.parts
        if turn.role == "assistant":
            thinking = turn.thinking or None
            if thinking is not None and not passing.thinking_apart:
                parts = joined_answer(thinking, parts)
                thinking = None
            elif thinking is None and passing.thinking_split:
                thinking, parts = split_answer(parts)
            if thinking is not None:
                said = marks.core(number, "thinking", thinking) if marks else thinking
                # Each model has its own name for the field; a template reads the one that it knows.
                message |= {"reasoning_content": said, "reasoning": said, "thinking": said}
        message["content"] = _content(conversation, number, turn, parts, marks, as_list)
        if turn.tool_calls:
            calls = [_call(number, call, marks, passing) for call in turn.tool_calls]
            message["tool_calls"] = [call for call, _ in calls]
            open_calls = [(call.get("id"), name) for call, name in calls]
            if passing.no_text_is_none and not parts:
                message["content"] = None
        if turn.tool_call_id is not None:
            message["tool_call_id"] = turn.tool_call_id
        if turn.role == "tool" and passing.name_results and open_calls:
            ids = [call_id for call_id, _ in open_calls]
            at = ids.index(turn.tool_call_id) if turn.tool_call_id and turn.tool_call_id in ids else 0
            message["name"] = open_calls.pop(at)[1]
        messages.append(message)
    return messages, tools


def _content(
    conversation: Conversation, number: int, turn: Turn, parts: tuple[Part, ...], marks: Marks | None, as_list: bool
) -> str | list[dict[str, Any]]:
    has_media = any(isinstance(part, MediaPart) for part in parts)
    if not has_media:
        parts = ("".join(part for part in parts if isinstance(part, str)),)
    content: list[dict[str, Any]] = [
        {"type": conversation.media[part.index].kind}
        if isinstance(part, MediaPart)
        else {"type": "text", "text": marks.text(number, part, answer=turn.role == "assistant") if marks else part}
        for part in parts
    ]
    return content if has_media or as_list else content[0]["text"]


def _call(turn: int, call: Mapping[str, Any], marks: Marks | None, passing: Passing) -> tuple[dict[str, Any], str]:
    """A call as the template takes it, and its name."""
    function = call.get("function")
    inner: Mapping[str, Any] = function if isinstance(function, Mapping) else call
    name, arguments = inner.get("name"), inner.get("arguments")
    if not isinstance(name, str) or "arguments" not in inner:
        raise SampleRejected("bad_record", f"a tool call of turn {turn + 1} has no name or no arguments")
    if marks:
        name, arguments = marks.name(turn, "call", name), marks.arguments(turn, arguments)
    if passing.arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    changed = {**inner, "name": name, "arguments": arguments}
    return ({**call, "function": changed} if inner is function else changed), name


def _definition(tool: Mapping[str, Any], marks: Marks | None) -> dict[str, Any]:
    function = tool.get("function")
    inner: Mapping[str, Any] = function if isinstance(function, Mapping) else {}
    inner = inner if isinstance(inner.get("name"), str) else tool
    if marks is None or not isinstance(inner.get("name"), str):
        return dict(tool)
    named = {**inner, "name": marks.name(DEFINITIONS, "definition", inner["name"])}
    return {**tool, "function": named} if inner is function else named


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A rendering, split at its marks."""

    frames: tuple[str, ...]  # the template's text around the marks, one more than there are marks
    order: tuple[int, ...]  # index of the piece of each mark; a piece that is shown twice has two marks
    pieces: tuple[Piece, ...]  # of the conversation that this was made from

    @classmethod
    def of(cls, marked: str, pieces: Sequence[Piece]) -> Self:
        """Splits a rendering at its marks."""
        frames, order, cursor = [], [], 0
        for start, end, piece in find_marks(marked):
            if piece >= len(pieces):
                continue  # a number in the template that looks like a mark
            frames.append(marked[cursor:start])
            order.append(piece)
            cursor = end
        return cls(frames=(*frames, marked[cursor:]), order=tuple(order), pieces=tuple(pieces))

    def missing(self) -> list[int]:
        """Returns the indices of the pieces that are not shown."""
        return sorted({*range(len(self.pieces))} - {*self.order})

    def disorder(self) -> tuple[int, int] | None:
        """Returns two turns (earlier, later) of which the later one is shown first; None if all are in order."""
        latest = DEFINITIONS
        for _, turn in self._first_marks():
            if turn < latest:
                return turn, latest
            latest = turn
        return None

    def places_of_turns(self) -> dict[int, tuple[int, int]]:
        """Returns the first and last mark of every turn that has one, repetitions left out."""
        places: dict[int, tuple[int, int]] = {}
        for at, turn in self._first_marks():
            places[turn] = (places.get(turn, (at, at))[0], at)
        return places

    def _first_marks(self) -> Iterator[tuple[int, int]]:
        """Yields the first mark of every piece of a turn, and the turn."""
        shown: set[int] = set()
        for at, piece in enumerate(self.order):
            turn = self.pieces[piece].turn
            if piece not in shown and turn != DEFINITIONS:
                shown.add(piece)
                yield at, turn

    def walk(self, text: str, pieces: Sequence[Piece]) -> tuple[list[tuple[int, int]], int | None]:
        """Finds the characters ``[start, end)`` that stand in place of each mark in a rendering of a conversation of
        this structure with these ``pieces``. Returns the places and None; if a piece appears in an unknown form, the
        places before it and its index."""
        places: list[tuple[int, int]] = []
        at = len(self.frames[0])
        if not text.startswith(self.frames[0]):
            return places, self.order[0] if self.order else 0
        for piece, frame in zip(self.order, self.frames[1:], strict=True):
            found = pieces[piece]
            core = found.value
            end = at + len(core) if isinstance(core, str) else -1
            if end < 0 or not text.startswith(core, at) or not text.startswith(frame, end):  # type: ignore[arg-type]
                ends = (at + len(form) for form in found.forms() if text.startswith(form, at))
                end = next((end for end in ends if text.startswith(frame, end)), -1)
                if end < 0:
                    return places, piece
            places.append((at, end))
            at = end + len(frame)
        return places, None if at == len(text) else self.order[-1] if self.order else 0


def names_of(pieces: Sequence[Piece], turns: Sequence[Turn], missing: Sequence[int]) -> str:
    """Returns what is missing, in words: ``the call 'weather' of turn 2 (assistant)``."""
    words: list[str] = []
    called = {pieces[index].turn for index in missing if pieces[index].kind == "call"}
    for index in missing:
        piece = pieces[index]
        if piece.kind == "argument" and piece.turn in called:
            continue  # its call is missing too
        value = str(piece.value)
        short = repr(value if len(value) <= 40 else value[:39] + "…")
        of_turn = f"the {piece.kind} {short} of turn {piece.turn + 1} ({turns[piece.turn].role})"
        words.append(f"the definition of the tool {short}" if piece.kind == "definition" else of_turn)
    return some_of(words, 3)
