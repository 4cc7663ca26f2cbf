"""Marks in place of what a conversation says, so that a rendering shows where each piece of it went.

A chat template is somebody else's program. To find out what it does with a conversation, the conversation is rendered
twice: as it is, and with every piece (a text, a name, an argument) replaced by a word that occurs nowhere else. White
space around texts and thinking tags stay, since templates strip the former and split at the latter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from energon_packing.chat.thinking import CLOSE, OPEN, TAG, joined_answer, split_answer
from energon_packing.conversation import Conversation, MediaPart, Part, Turn
from energon_packing.errors import SampleRejected

PieceKind = Literal["text", "thinking", "call", "argument", "definition", "result_name"]
DEFINITIONS = -1
"""Turn of the pieces that belong to no turn: tool definitions."""
MARKUP = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]")
"""What a template may look for in a text: tags, and words in brackets."""
_MARK = re.compile(r"Zq(\d{6})Xv|7083(\d{6})4417(?:\.25)?")


class Piece(NamedTuple):
    """One thing that a conversation says.

    Attributes:
        turn: index of its turn, or `DEFINITIONS`.
        kind: what it is.
        value: a text without surrounding white space, or a number.
    """

    turn: int
    kind: PieceKind
    value: str | int | float

    def forms(self) -> Iterator[str]:
        """The forms in which a template may write the value: as it is, or escaped for JSON, HTML or Python."""
        import html
        import json

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
    """How a conversation is passed to a template; templates expect different forms.

    Attributes:
        no_text_is_none: the content of an answer that only calls tools is None, not an empty text (DeepSeek-V3).
        arguments_as_text: arguments of calls are JSON text, not objects (DeepSeek-V3).
        name_results: a tool's result carries the name of the tool.
        thinking_apart: thinking of a field stays a field; otherwise it opens the text.
        thinking_split: thinking that opens a text becomes a field, for templates that know no tags (gpt-oss, Gemma 4,
            Qwen3.8).
    """

    no_text_is_none: bool = False
    arguments_as_text: bool = False
    name_results: bool = False
    thinking_apart: bool = False
    thinking_split: bool = False


class Words:
    """Writes the pieces of a conversation as they are."""

    def text(self, turn: int, text: str, *, answer: bool) -> str:
        """A text of a turn; thinking tags count only in an ``answer``."""
        return text

    def thinking(self, turn: int, text: str) -> str:
        """Thinking that is a field of the message."""
        return text

    def call(self, turn: int, number: int, name: str) -> str:
        """The name of a turn's call."""
        return name

    def arguments(self, turn: int, value: Any) -> Any:
        """Arguments of a call."""
        return value

    def result_name(self, turn: int, call: tuple[int, int], name: str) -> str:
        """The name of the tool that a result comes from; ``call`` is the turn and number of its call."""
        return name

    def definition(self, name: str) -> str:
        """The name of a tool's definition."""
        return name


class Marks(Words):
    """Writes a mark for every piece and remembers what it stands for.

    Args:
        markup: leave tags inside texts as they are, for templates that look for them.
        calls: mark calls, arguments and definitions too.

    Attributes:
        pieces: what was marked, in the order of the conversation.
    """

    def __init__(self, *, markup: bool = False, calls: bool = True) -> None:
        self.pieces: list[Piece] = []
        self._markup, self._calls = markup, calls
        self._named: dict[tuple[int, int], str] = {}
        self._depth = (-1, 0)  # the turn of the last text, and how many thinking tags are open after it

    def _mark(self, turn: int, kind: PieceKind, value: str | int | float) -> str | int | float:
        number = len(self.pieces)
        self.pieces.append(Piece(turn, kind, value))
        if isinstance(value, str):
            return f"Zq{number:06d}Xv"
        return int(f"7083{number:06d}4417") + (0.25 if isinstance(value, float) else 0)

    def _core(self, turn: int, kind: PieceKind, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        if len(core) == len(text):  # nearly all texts
            return str(self._mark(turn, kind, text))
        start = text.index(core)
        return text[:start] + str(self._mark(turn, kind, core)) + text[start + len(core) :]

    def text(self, turn: int, text: str, *, answer: bool) -> str:
        """A text of a turn with one mark, or one per stretch between tags."""
        depth = self._depth[1] if self._depth[0] == turn else 0  # an image may stand between the tags
        if not self._markup and not (answer and (depth or "think>" in text)):  # nearly all texts
            return self._core(turn, "text", text)
        tags = TAG.findall(text) if answer and "think>" in text else []
        # Thinking models are given the opening tag, so data may hold the closing tag alone.
        depth, pieces = depth or int(tags[:1] == [CLOSE]), []
        split = MARKUP if self._markup else TAG
        for at, run in enumerate(re.split(f"({split.pattern})", text)):
            if at % 2:
                depth += {OPEN: 1, CLOSE: -1}.get(run, 0) if answer else 0
                pieces.append(run)
            else:
                pieces.append(self._core(turn, "thinking" if depth > 0 else "text", run))
        self._depth = (turn, max(depth, 0))
        return "".join(pieces)

    def thinking(self, turn: int, text: str) -> str:
        """One mark."""
        return self._core(turn, "thinking", text)

    def call(self, turn: int, number: int, name: str) -> str:
        """One mark, used again for the results of the call."""
        if not self._calls:
            return name
        self._named[turn, number] = str(self._mark(turn, "call", name))
        return self._named[turn, number]

    def arguments(self, turn: int, value: Any) -> Any:
        """A mark for every key, text and number; booleans and nulls stay."""
        if not self._calls:
            return value
        if isinstance(value, Mapping):
            # Marks ascend like the keys, so a template that sorts keys (Gemma 4's) sorts the marks the same way.
            ascending = sorted(value, key=lambda key: (key.lower(), key))
            keys = {key: self._core(turn, "argument", key) for key in ascending}
            return {keys[key]: self.arguments(turn, entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.arguments(turn, entry) for entry in value]
        if isinstance(value, str):
            return self._core(turn, "argument", value)
        if isinstance(value, bool) or value is None:
            return value
        return self._mark(turn, "argument", value)

    def result_name(self, turn: int, call: tuple[int, int], name: str) -> str:
        """The mark of the call."""
        return self._named.get(call, name)

    def definition(self, name: str) -> str:
        """One mark."""
        return str(self._mark(DEFINITIONS, "definition", name)) if self._calls else name


def find_marks(text: str) -> Iterator[tuple[int, int, int]]:
    """Yields ``(start, end, index)``: the characters ``[start, end)`` of every mark in a text, and its piece."""
    for found in _MARK.finditer(text):
        yield found.start(), found.end(), int(found[1] or found[2])


def to_messages(
    conversation: Conversation, words: Words, passing: Passing, *, as_list: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tool definitions for a chat template.

    Args:
        words: writes each piece.
        passing: the form that the template expects.
        as_list: whether every content is a list of parts.

    Returns:
        Messages, one per turn, and the definitions, or None if there are none.

    Raises:
        SampleRejected: ``bad_record`` if a tool call has no name or no arguments.
    """
    tools = [_definition(tool, words.definition) for tool in conversation.tools] if conversation.tools else None
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[tuple[int, int], str | None, str]] = []
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
                said = words.thinking(number, thinking)
                # Each model has its own name for the field; a template reads the one that it knows.
                message |= {"reasoning_content": said, "reasoning": said, "thinking": said}
        message["content"] = _content(conversation, number, turn, parts, words, as_list)
        if turn.tool_calls:
            open_calls = []
            message["tool_calls"] = [
                _call(number, at, call, words, passing, open_calls) for at, call in enumerate(turn.tool_calls)
            ]
            if passing.no_text_is_none and not parts:
                message["content"] = None
        if turn.tool_call_id is not None:
            message["tool_call_id"] = turn.tool_call_id
        if turn.role == "tool" and passing.name_results and open_calls:
            at = next(
                (i for i, (_, call_id, _) in enumerate(open_calls) if call_id and call_id == turn.tool_call_id), 0
            )
            call, _, name = open_calls.pop(at)
            message["name"] = words.result_name(number, call, name)
        messages.append(message)
    return messages, tools


def _content(
    conversation: Conversation, number: int, turn: Turn, parts: tuple[Part, ...], words: Words, as_list: bool
) -> str | list[dict[str, Any]]:
    answer = turn.role == "assistant"
    if len(parts) == 1 and isinstance(parts[0], str):  # nearly all turns
        alone = words.text(number, parts[0], answer=answer)
        return [{"type": "text", "text": alone}] if as_list else alone
    if any(isinstance(part, MediaPart) for part in parts):
        return [
            {"type": "text", "text": words.text(number, part, answer=answer)}
            if isinstance(part, str)
            else {"type": conversation.media[part.index].kind}
            for part in parts
        ]
    text = words.text(number, "".join(part for part in parts if isinstance(part, str)), answer=answer)
    return [{"type": "text", "text": text}] if as_list else text


def _call(
    turn: int,
    number: int,
    call: Mapping[str, Any],
    words: Words,
    passing: Passing,
    made: list[tuple[tuple[int, int], str | None, str]],
) -> dict[str, Any]:
    import json

    function = call.get("function")
    inner: Mapping[str, Any] = function if isinstance(function, Mapping) else call
    name, arguments = inner.get("name"), inner.get("arguments")
    if not isinstance(name, str) or "arguments" not in inner:
        raise SampleRejected("bad_record", f"a tool call of turn {turn + 1} has no name or no arguments")
    made.append(((turn, number), call.get("id"), name))
    name, written = words.call(turn, number, name), words.arguments(turn, arguments)
    if passing.arguments_as_text and not isinstance(written, str):
        written = json.dumps(written, ensure_ascii=False)
    changed = {**inner, "name": name, "arguments": written}
    return {**call, "function": changed} if inner is function else changed


def _definition(tool: Mapping[str, Any], write: Callable[[str], str]) -> dict[str, Any]:
    function = tool.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return {**tool, "function": {**function, "name": write(function["name"])}}
    return {**tool, "name": write(tool["name"])} if isinstance(tool.get("name"), str) else dict(tool)
