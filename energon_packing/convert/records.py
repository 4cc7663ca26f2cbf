"""One record of a source -> turns and the media that they name. Looks at no file.

Two layouts are read: ShareGPT (``conversations`` of ``from``/``value``; LLaVA writes the same) and OpenAI
(``messages`` of ``role``/``content``). Media stand in the text as ``<image>`` and ``<video>``, filled in order from the
columns ``images``/``image`` and ``videos``/``video``, or as parts that carry their own path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from energon_packing.conversation import MediaKind, MediaPart, Part, Role, Turn
from energon_packing.convert.config import RecordFormat
from energon_packing.convert.tool_calls import parse_function_call_text, parse_tool_calls, parse_tools
from energon_packing.errors import SampleRejected

_ROLE_OF: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
}
_PLACEHOLDER = re.compile(r"<(image|video)>")
_COLUMNS: Mapping[MediaKind, tuple[str, str]] = {"image": ("images", "image"), "video": ("videos", "video")}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaReference:
    """A medium as the record names it."""

    kind: MediaKind
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRecord:
    """A record that was understood.

    Attributes:
        turns: in order; their `MediaPart` indices count up from 0 over the whole record.
        media: what the indices stand for.
        tools: definitions for the chat template, or None.
        warnings: names of what was odd, but accepted.
    """

    turns: tuple[Turn, ...]
    media: tuple[MediaReference, ...]
    tools: tuple[Mapping[str, Any], ...] | None
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Media:
    """The media of one record while its turns are read."""

    columns: dict[MediaKind, list[str]]
    references: list[MediaReference] = field(default_factory=list)
    placeholders: dict[MediaKind, int] = field(default_factory=lambda: {"image": 0, "video": 0})

    def add(self, kind: MediaKind, path: str) -> MediaPart:
        self.references.append(MediaReference(kind=kind, path=path))
        return MediaPart(index=len(self.references) - 1)

    def next_of_column(self, kind: MediaKind) -> MediaPart:
        index = self.placeholders[kind]
        self.placeholders[kind] += 1
        column = self.columns[kind]
        # Too few entries are reported for the record as a whole, with both counts.
        return self.add(kind, column[index] if index < len(column) else "")

    def check(self) -> None:
        for kind, column in self.columns.items():
            count = self.placeholders[kind]
            if count == len(column):
                continue
            if count == 0:
                detail = f"the record names {len(column)} {kind}(s), but no text has a <{kind}> placeholder"
            else:
                detail = f"the text has {count} <{kind}> placeholder(s), but the record names {len(column)} {kind}(s)"
            raise SampleRejected("placeholder_mismatch", detail)


def parse_record(value: Any, layout: RecordFormat = "auto") -> ParsedRecord:
    """Reads one record.

    Args:
        value: the parsed JSON.
        layout: ``sharegpt`` or ``openai`` refuse the other one; ``auto`` looks.

    Raises:
        SampleRejected: ``unknown_layout``, ``unknown_role``, ``empty_turn``, ``empty_conversation``,
            ``non_string_value``, ``nothing_to_learn``, ``placeholder_mismatch``, ``bad_tool_call``, ``bad_tools``,
            ``bad_weight``, ``unknown_part``, ``two_system_prompts``, ``conflicting_columns``.
    """
    messages, role_field, content_field = _find_turns(value, layout)
    media = _Media(columns={kind: _column(value, kind) for kind in _COLUMNS})
    warnings: list[str] = []
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        turn = _turn(message, number, role_field, content_field, media)
        if turn is None:
            warnings.append("empty_system_turn")
        else:
            turns.append(turn)
    media.check()
    turns = _with_system_column(value, turns)
    if not turns:
        raise SampleRejected("empty_conversation", "the record has no turns")
    if not any(turn.role == "assistant" and turn.loss_weight != 0.0 for turn in turns):
        raise SampleRejected("nothing_to_learn", "no assistant turn to train on")
    warnings.extend(_oddities(turns))
    return ParsedRecord(
        turns=tuple(turns),
        media=tuple(media.references),
        tools=parse_tools(value.get("tools")),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _find_turns(value: Any, layout: RecordFormat) -> tuple[list[Any], str, str]:
    """The list of turns and the names of the two fields of a turn."""
    if not isinstance(value, dict):
        raise SampleRejected("unknown_layout", f"the record is {_kind(value)}, expected an object")
    for column in ("messages", "conversations"):
        turns = value.get(column)
        if not isinstance(turns, list):
            continue
        if not turns:
            raise SampleRejected("empty_conversation", f"the record's {column} list is empty")
        first = turns[0] if isinstance(turns[0], dict) else {}
        if "from" in first and "role" not in first and layout != "openai":
            return turns, "from", "value"
        if "role" in first and layout != "sharegpt":
            return turns, "role", "content"
    keys = ", ".join(sorted(key[:40] for key in value)[:20]) or "none"
    wanted = {
        "auto": "'conversations' of from/value or 'messages' of role/content",
        "sharegpt": "'conversations' of from/value",
        "openai": "'messages' of role/content",
    }[layout]
    raise SampleRejected("unknown_layout", f"expected {wanted}; the record's keys are: {keys}")


def _column(value: Mapping[str, Any], kind: MediaKind) -> list[str]:
    """The paths that a record lists for one kind; empty where it lists none."""
    filled = [name for name in _COLUMNS[kind] if value.get(name) not in (None, "", [])]
    if not filled:
        return []
    if len(filled) > 1:
        raise SampleRejected("conflicting_columns", f"the record has both {filled[0]!r} and {filled[1]!r}")
    column = value[filled[0]]
    return [_path(entry, filled[0]) for entry in (column if isinstance(column, list) else [column])]


def _path(entry: Any, name: str) -> str:
    if isinstance(entry, dict) and isinstance(entry.get("path"), str):
        entry = entry["path"]
    if not isinstance(entry, str):
        raise SampleRejected("non_string_value", f"{name!r} holds {_kind(entry)}, expected a path")
    return entry


def _turn(message: Any, number: int, role_field: str, content_field: str, media: _Media) -> Turn | None:
    """One turn; None for a system prompt without text, which says nothing."""
    if not isinstance(message, dict):
        raise SampleRejected("non_string_value", f"turn {number} is {_kind(message)}, expected an object")
    role_name = message.get(role_field)
    role = _ROLE_OF.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        raise SampleRejected("unknown_role", f"turn {number} has the role {role_name!r}; known: {', '.join(_ROLE_OF)}")
    content = message.get(content_field)
    calls: tuple[dict[str, Any], ...] = ()
    if role_name == "function_call":
        if not isinstance(content, str):
            raise SampleRejected("non_string_value", f"turn {number} ({role_name}) is {_kind(content)}, expected text")
        calls, content = parse_function_call_text(content), ""
    elif role == "assistant":
        calls = parse_tool_calls(message.get("tool_calls"))
        if message.get("function_call") is not None:
            calls += parse_tool_calls([{"type": "function", "function": message["function_call"]}])
        if calls and content is None:
            content = ""
    parts = _parts(content, number, media)
    if not calls and not any(isinstance(part, MediaPart) or part.strip() for part in parts):
        if role == "system":
            return None
        raise SampleRejected("empty_turn", f"turn {number} ({role_name}) is empty")
    return Turn(role=role, parts=parts, tool_calls=calls, loss_weight=_weight(message, number))


def _parts(content: Any, number: int, media: _Media) -> tuple[Part, ...]:
    """Text and media in reading order; text is kept to the letter, adjacent texts are joined."""
    pieces: list[Part] = []
    if isinstance(content, str):
        _split_text(content, media, pieces)
    elif isinstance(content, list):
        for part in content:
            _content_part(part, number, media, pieces)
    else:
        raise SampleRejected("non_string_value", f"turn {number} is {_kind(content)}, expected text or a list of parts")
    joined: list[Part] = []
    for piece in pieces:
        if piece == "":
            continue
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return tuple(joined)


def _split_text(text: str, media: _Media, pieces: list[Part]) -> None:
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        pieces.append(text[end : match.start()])
        pieces.append(media.next_of_column("image" if match[1] == "image" else "video"))
        end = match.end()
    pieces.append(text[end:])


def _content_part(part: Any, number: int, media: _Media, pieces: list[Part]) -> None:
    if isinstance(part, str):
        _split_text(part, media, pieces)
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise SampleRejected("non_string_value", f"turn {number}: a text part holds {_kind(part.get('text'))}")
        _split_text(part["text"], media, pieces)
    elif kind in ("image", "image_url", "video", "video_url"):
        medium: MediaKind = "image" if kind.startswith("image") else "video"
        path = part.get(kind, part.get(medium))
        if isinstance(path, dict):
            path = path.get("url", path.get("path"))
        if path is None and set(part) == {"type"}:
            pieces.append(media.next_of_column(medium))  # a bare part stands for the column's next entry
        else:
            pieces.append(media.add(medium, _path(path, kind)))
    else:
        known = "text, image, image_url, video, video_url"
        raise SampleRejected("unknown_part", f"turn {number} has a content part of type {kind!r}; known: {known}")


def _weight(message: Mapping[str, Any], number: int) -> float | None:
    weight = message.get("weight")
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise SampleRejected("bad_weight", f"turn {number} has the weight {weight!r}, expected a number of 0 or more")
    return float(weight)


def _with_system_column(value: Mapping[str, Any], turns: list[Turn]) -> list[Turn]:
    system = value.get("system")
    if system is None or system == "":
        return turns
    if not isinstance(system, str):
        raise SampleRejected("non_string_value", f"the system column is {_kind(system)}, expected text")
    if turns and turns[0].role == "system":
        if turns[0].parts == (system,):
            return turns
        raise SampleRejected("two_system_prompts", "the system column and the first turn differ; keep one of them")
    return [Turn(role="system", parts=(system,)), *turns]


def _oddities(turns: list[Turn]) -> list[str]:
    """Warnings: two turns of a role in a row, a system prompt that does not come first."""
    found = []
    for before, after in pairwise(turns):
        if before.role == after.role == "user":
            found.append("consecutive_user_turns")
        if before.role == after.role == "assistant":
            found.append("consecutive_assistant_turns")
        if after.role == "system":
            found.append("late_system_turn")
    return found


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "text", "bool": "a truth value"}
    return names.get(type(value).__name__, "a number")
