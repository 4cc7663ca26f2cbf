"""One record of a source -> turns and the media that they name. Looks at no file.

Two layouts are read: ShareGPT (``conversations`` of ``from``/``value``; LLaVA writes the same) and OpenAI
(``messages`` of ``role``/``content``), and of both the preference records of `energon_packing.convert.preference`.
Media stand in the text as ``<image>`` and ``<video>``, filled in order from the columns ``images``/``image`` and
``videos``/``video``, or as parts that carry their own path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from energon_packing.conversation import Conversation, MediaKind, MediaPart, Part, Role, Turn
from energon_packing.convert.config import DEFAULT_FRAME_FPS, RecordFormat
from energon_packing.convert.extras import parse_extras
from energon_packing.convert.frame_lists import medium_of_frames
from energon_packing.convert.media_files import MediaFile, medium_of_file
from energon_packing.convert.preference import TURN_COLUMNS, find_pair
from energon_packing.convert.record_media import FileReference, MediaReference, RecordMedia, kind_of, reference_of
from energon_packing.convert.tool_calls import call_id, parse_function_call_text, parse_tool_calls, parse_tools
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRecord:
    """A record that was understood.

    Attributes:
        turns: in order; their `MediaPart` indices count up from 0 over the whole record.
        references: what the indices stand for.
        tools: definitions for the chat template, or None.
        warnings: names of what was odd, but accepted.
        chosen, rejected: of a preference record, the turns of each answer; empty for any other.
        extras: further values of the trained tokens, see `energon_packing.convert.extras`.
    """

    turns: tuple[Turn, ...]
    references: tuple[MediaReference, ...]
    tools: tuple[Mapping[str, Any], ...] | None
    warnings: tuple[str, ...]
    chosen: tuple[Turn, ...] = ()
    rejected: tuple[Turn, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def media(self) -> tuple[FileReference, ...]:
        """The files that the record names, in order; of a list of frames each one."""
        return tuple(file for reference in self.references for file in reference.files)

    def record(self, key: str, names: Sequence[str], files: Sequence[object]) -> dict[str, Any]:
        """The JSON form of the sample.

        Args:
            key: of the sample.
            names: the entry of each file in the store.
            files: one for each of ``media``, checked.

        Raises:
            SampleRejected: ``unequal_frames``, and the reasons of `Conversation`.
        """
        checked = ((name, file) for name, file in zip(names, files, strict=True) if isinstance(file, MediaFile))
        media = []
        for reference in self.references:
            own = list(islice(checked, len(reference.paths)))
            if reference.is_frames:
                media.append(medium_of_frames(own, fps=reference.fps, times=reference.times))
            else:
                ((name, file),) = own
                media.append(medium_of_file(name, file))
        conversation = Conversation(
            key=key,
            turns=self.turns,
            media=tuple(media),
            tools=self.tools,
            chosen=self.chosen,
            rejected=self.rejected,
            extras=self.extras,
        )
        return conversation.to_record()


def parse_record(
    value: Any,
    layout: RecordFormat = "auto",
    *,
    extra_columns: Sequence[str] = (),
    frame_fps: float = DEFAULT_FRAME_FPS,
) -> ParsedRecord:
    """Reads one record.

    Args:
        value: the parsed JSON.
        layout: ``sharegpt`` or ``openai`` refuse the other one; ``auto`` looks.
        extra_columns: columns that hold extras under their own names.
        frame_fps: frames a second of lists of frames that do not say their own.

    Raises:
        SampleRejected: ``unknown_layout``, ``unknown_role``, ``empty_turn``, ``empty_conversation``,
            ``non_string_value``, ``nothing_to_learn``, ``placeholder_mismatch``, ``bad_tool_call``, ``bad_tools``,
            ``bad_weight``, ``unknown_part``, ``two_system_prompts``, ``conflicting_columns``, ``bad_pair``,
            ``bad_extra``, ``bad_frames``.
    """
    if not isinstance(value, dict):
        raise SampleRejected("unknown_layout", f"the record is {kind_of(value)}, expected an object")
    pair = find_pair(value)
    messages, fields = _find_turns(value, layout) if pair is None else _of_list(pair.beginning, layout, value)
    media = RecordMedia.of(value, frame_fps)
    warnings: list[str] = []
    turns = _turns(messages, fields, media, warnings)
    media.check()
    turns = _with_system_column(value, turns)
    chosen: list[Turn] = []
    rejected: list[Turn] = []
    if pair is not None:
        chosen, rejected = (_answer(answer, warnings) for answer in (pair.chosen, pair.rejected))
        if chosen == rejected:
            raise SampleRejected("nothing_to_learn", "the chosen and the rejected answer are the same")
    if not turns:
        raise SampleRejected("empty_conversation", "the record has no turns")
    for taught in [chosen, rejected] if pair is not None else [turns]:
        if not any(turn.role == "assistant" and turn.loss_weight != 0.0 for turn in taught):
            raise SampleRejected("nothing_to_learn", "no assistant turn to train on")
        warnings.extend(_oddities([*turns, *taught] if pair is not None else taught))
    return ParsedRecord(
        turns=tuple(turns),
        references=tuple(media.references),
        tools=parse_tools(value.get("tools")),
        warnings=tuple(dict.fromkeys(warnings)),
        chosen=tuple(chosen),
        rejected=tuple(rejected),
        extras=parse_extras(value, extra_columns, pair=pair is not None),
    )


Fields = tuple[str, str]
"""Names of the role and of the content of a message."""


def _find_turns(value: Mapping[str, Any], layout: RecordFormat) -> tuple[list[Any], Fields]:
    """The list of turns and the names of the two fields of a turn."""
    for column in TURN_COLUMNS:
        turns = value.get(column)
        if not isinstance(turns, list):
            continue
        if not turns:
            raise SampleRejected("empty_conversation", f"the record's {column} list is empty")
        if (fields := _fields(turns[0], layout)) is not None:
            return turns, fields
    raise _unknown_layout(value, layout)


def _of_list(turns: list[Any], layout: RecordFormat, value: Mapping[str, Any]) -> tuple[list[Any], Fields]:
    """The beginning of a pair, which may come from any column."""
    if not turns:
        raise SampleRejected("bad_pair", "no message stands before the two answers")
    if (fields := _fields(turns[0], layout)) is None:
        raise _unknown_layout(value, layout)
    return turns, fields


def _fields(message: Any, layout: RecordFormat) -> Fields | None:
    """The names of the fields of a message, from one of them; None where they are not of the layout."""
    first = message if isinstance(message, dict) else {}
    if "from" in first and "role" not in first and layout != "openai":
        return "from", "value"
    if "role" in first and layout != "sharegpt":
        return "role", "content"
    return None


def _unknown_layout(value: Mapping[str, Any], layout: RecordFormat) -> SampleRejected:
    keys = ", ".join(sorted(key[:40] for key in value)[:20]) or "none"
    wanted = {
        "auto": "'conversations' of from/value or 'messages' of role/content",
        "sharegpt": "'conversations' of from/value",
        "openai": "'messages' of role/content",
    }[layout]
    return SampleRejected("unknown_layout", f"expected {wanted}; the record's keys are: {keys}")


def _turns(messages: list[Any], fields: Fields, media: RecordMedia, warnings: list[str]) -> list[Turn]:
    turns = []
    for number, message in enumerate(messages):
        turn = _turn(message, number, *fields, media)
        if turn is None:
            warnings.append("empty_system_turn")
        else:
            turns.append(turn)
    return turns


def _answer(messages: list[Any], warnings: list[str]) -> list[Turn]:
    """The turns of one answer of a pair: text that begins with the assistant."""
    media = RecordMedia.of({}, DEFAULT_FRAME_FPS)
    fields = _fields(messages[0], "auto") if messages else None
    turns = _turns(messages, fields or ("role", "content"), media, warnings)
    if media.references:
        raise SampleRejected("bad_pair", "an answer of the pair names media; they stand before both answers")
    if not turns or turns[0].role != "assistant":
        found = f"a {turns[0].role} turn" if turns else "nothing"
        raise SampleRejected("bad_pair", f"an answer of the pair begins with {found}, expected an assistant turn")
    return turns


def _turn(message: Any, number: int, role_field: str, content_field: str, media: RecordMedia) -> Turn | None:
    """One turn; None for a system prompt without text, which says nothing."""
    if not isinstance(message, dict):
        raise SampleRejected("non_string_value", f"turn {number} is {kind_of(message)}, expected an object")
    role_name = message.get(role_field)
    role = _ROLE_OF.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        raise SampleRejected("unknown_role", f"turn {number} has the role {role_name!r}; known: {', '.join(_ROLE_OF)}")
    content = message.get(content_field)
    calls: tuple[dict[str, Any], ...] = ()
    if role_name == "function_call":
        if not isinstance(content, str):
            raise SampleRejected(
                "non_string_value", f"turn {number} ({role_name}) is {kind_of(content)}, expected text"
            )
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
    answered = call_id(message.get("tool_call_id")) if role == "tool" else None
    return Turn(role=role, parts=parts, tool_calls=calls, loss_weight=_weight(message, number), tool_call_id=answered)


def _parts(content: Any, number: int, media: RecordMedia) -> tuple[Part, ...]:
    """Text and media in reading order; text is kept to the letter, adjacent texts are joined."""
    pieces: list[Part] = []
    if isinstance(content, str):
        _split_text(content, media, pieces)
    elif isinstance(content, list):
        for part in content:
            _content_part(part, number, media, pieces)
    else:
        raise SampleRejected(
            "non_string_value", f"turn {number} is {kind_of(content)}, expected text or a list of parts"
        )
    joined: list[Part] = []
    for piece in pieces:
        if piece == "":
            continue
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return tuple(joined)


def _split_text(text: str, media: RecordMedia, pieces: list[Part]) -> None:
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        pieces.append(text[end : match.start()])
        pieces.append(media.next_of_column("image" if match[1] == "image" else "video"))
        end = match.end()
    pieces.append(text[end:])


def _content_part(part: Any, number: int, media: RecordMedia, pieces: list[Part]) -> None:
    if isinstance(part, str):
        _split_text(part, media, pieces)
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise SampleRejected("non_string_value", f"turn {number}: a text part holds {kind_of(part.get('text'))}")
        _split_text(part["text"], media, pieces)
    elif kind in ("image", "image_url", "video", "video_url"):
        medium: MediaKind = "image" if kind.startswith("image") else "video"
        path = part.get(kind, part.get(medium))
        if isinstance(path, dict):
            path = path.get("url", path.get("path"))
        if path is None and set(part) == {"type"}:
            pieces.append(media.next_of_column(medium))  # a bare part stands for the column's next entry
        elif isinstance(path, list):
            pieces.append(media.add(reference_of({**part, "frames": path}, medium, kind, media.frame_fps)))
        else:
            pieces.append(media.add(reference_of(path, medium, kind, media.frame_fps)))
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
        raise SampleRejected("non_string_value", f"the system column is {kind_of(system)}, expected text")
    if turns and turns[0].role == "system":
        if turns[0].parts == (system,):
            return turns
        raise SampleRejected("two_system_prompts", "the system column and the first turn differ; keep one of them")
    return [Turn(role="system", parts=(system,)), *turns]


def _oddities(turns: list[Turn]) -> list[str]:
    """Warnings: two turns of a role in a row, a late system prompt, an answer to a tool call that nobody made."""
    found = []
    made = {call.get("id") for turn in turns for call in turn.tool_calls}
    if any(turn.tool_call_id is not None and turn.tool_call_id not in made for turn in turns):
        found.append("unknown_tool_call_id")
    for before, after in pairwise(turns):
        if before.role == after.role == "user":
            found.append("consecutive_user_turns")
        if before.role == after.role == "assistant":
            found.append("consecutive_assistant_turns")
        if after.role == "system":
            found.append("late_system_turn")
    return found
