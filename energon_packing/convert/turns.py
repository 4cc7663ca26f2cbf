"""Messages of a record -> turns. Every field of a message is read, refused by name, or counted as ignored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from energon_packing.chat.thinking import tagged
from energon_packing.conversation import MediaPart, Part, Role, Turn, text_turn
from energon_packing.convert.columns import AUDIO, LABELS, is_preference_label
from energon_packing.convert.content_parts import joined, read_content, split_text
from energon_packing.convert.loss_fields import LOSS_FIELDS, loss_weight
from energon_packing.convert.record_media import RecordMedia, kind_of
from energon_packing.convert.role_names import ROLE_OF, ROLE_OF_TEXT
from energon_packing.convert.thinking_fields import THINKING_FIELDS, thinking_of
from energon_packing.convert.tool_calls import call_id, parse_function_call_text, parse_tool_calls
from energon_packing.convert.unread import says_nothing
from energon_packing.errors import SampleRejected

_CALLS = ("tool_calls", "function_call")
_IMAGES = ("image", "images", "image_url", "video", "videos", "video_url")
_PART_OF_A_TURN = ("train_detail", "mask", "masked", "loss_mask", "train_mask", "loss_scale", "training")


def read_turns(
    messages: list[Any], fields: tuple[str, str], media: RecordMedia, warnings: list[str], column: str
) -> list[Turn]:
    """The turns of a list of messages.

    Args:
        messages: as the record holds them.
        fields: names of the fields that hold the role and the content of a message.
        media: of the record; receives the media that the turns name and the fields that nothing reads.
        warnings: receives ``empty_system_turn_kept`` for every system turn without text.
        column: the one that holds the messages.

    Raises:
        SampleRejected: ``unknown_role``, ``empty_turn``, ``non_string_value``, ``bad_tool_call``, ``bad_weight``,
            ``unsupported_weight``, ``unsupported_field``, ``conflicting_thinking``, ``unknown_part``, ``bad_frames``.
    """
    role_field, content_field = fields
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        # Nearly all turns: text and a role, no other field, no media. `read_turn` would find nothing else in them.
        if type(message) is dict and len(message) == 2:
            content, role_name = message.get(content_field), message.get(role_field)
            if (
                type(content) is str
                and content
                and type(role_name) is str
                and (role := ROLE_OF_TEXT.get(role_name)) is not None
                and not content.isspace()
                and "<image>" not in content
                and "<video>" not in content
            ):
                turns.append(text_turn(role, content))
                continue
        turns.append(read_turn(message, number, fields, media, column))
    for turn in turns:
        if turn.role == "system" and not _holds(turn.parts):
            warnings.append("empty_system_turn_kept")
    return turns


def read_turn(message: Any, number: int, fields: tuple[str, str], media: RecordMedia, column: str) -> Turn:
    """One turn; see `read_turns`, ``number`` counts from 0."""
    role_field, content_field = fields
    if not isinstance(message, dict):
        raise SampleRejected("non_string_value", f"turn {number} is {kind_of(message)}, expected an object")
    role_name = message.get(role_field)
    role = ROLE_OF.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        raise SampleRejected("unknown_role", f"turn {number} has the role {role_name!r}; known: {', '.join(ROLE_OF)}")
    _check_fields(message, number, fields, role, media, column)
    content = message.get(content_field)
    calls: tuple[dict[str, Any], ...] = ()
    in_calls: set[str] = set()
    if role_name == "function_call":
        if not isinstance(content, str):
            raise SampleRejected(
                "non_string_value", f"turn {number} ({role_name}) is {kind_of(content)}, expected text"
            )
        calls, content = parse_function_call_text(content, in_calls), ""
    elif role == "assistant":
        calls = parse_tool_calls(message.get("tool_calls"), in_calls)
        if message.get("function_call") is not None:
            calls += parse_tool_calls([{"function": message["function_call"]}], in_calls)
        if calls and content is None:
            content = ""
    if in_calls:
        media.ignored |= {f"{column}[].tool_calls[].{name}" for name in in_calls}
    thought = thinking_of(message, _plain_text(content), number) if role == "assistant" else None
    around: list[Part] = []
    if thought and any(tag in thought for tag in ("<image>", "<video>")):
        split_text(tagged(thought), media, around)  # a field cannot hold media
        thought = None
    parts = read_content(content, number, media, f"{column}[].{content_field}")
    # With an empty system turn, a conversation keeps the template's own system prompt out.
    if role != "system" and not calls and not _holds(parts):
        raise SampleRejected("empty_turn", f"turn {number} ({role_name}) is empty")
    return Turn(
        role=role,
        parts=joined([*around, *parts]) if around else parts,
        tool_calls=calls,
        loss_weight=loss_weight(message, number, role),
        tool_call_id=call_id(message.get("tool_call_id")) if role == "tool" else None,
        thinking=thought,
    )


def _holds(parts: tuple[Part, ...]) -> bool:
    return any(isinstance(part, MediaPart) or part.strip() for part in parts)


def _plain_text(content: Any) -> str:
    """The text of a content that is not parsed yet."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _check_fields(
    message: Mapping[str, Any], number: int, names: tuple[str, str], role: Role, media: RecordMedia, column: str
) -> None:
    """Refuses unsupported fields that change the meaning, and records the others that nothing reads."""
    read = _fields_read(names, role)
    if message.keys() <= read:
        return
    for name, value in message.items():
        if name not in read and not says_nothing(value) and (why := _changes_meaning(name, value, message)) is not None:
            raise SampleRejected("unsupported_field", f"turn {number} ({role}) has the field {name!r}, {why}")
    media.ignore(message, read, f"{column}[]")


@cache
def _fields_read(names: tuple[str, str], role: Role) -> frozenset[str]:
    """Fields of a message that have a meaning, whether or not this one has them."""
    read = {*names, *LOSS_FIELDS}
    if role == "assistant":
        read.update(_CALLS, THINKING_FIELDS)
    elif role == "tool":
        read.add("tool_call_id")
    return frozenset(read)


def _changes_meaning(name: str, value: Any, message: Mapping[str, Any]) -> str | None:
    """Why a filled field may not be left out; None if it may."""
    if name in AUDIO:
        return "but audio is not supported"
    if name in _IMAGES:
        return "which is not read; name the file in a content part, or in the column 'images' or 'videos' of the record"
    if name in ("tools", "functions"):
        return "which is not read; tool definitions belong in the record's column 'tools'"
    if name in _CALLS:
        return "but only an assistant calls tools"
    if name in _PART_OF_A_TURN:
        return "which is not read; 'weight', 'loss', 'loss_weight' or 'train' of a message sets how much it is trained"
    if name in LABELS and is_preference_label(value):
        return "a preference label, which is not supported; a weight of 0 excludes a message from training"
    if name == "channel" and value != "final":
        return f"{value!r:.60}; thinking belongs in 'reasoning_content', calls in 'tool_calls'"
    if name == "tool_plan" or (name == "reasoning_details" and not any(message.get(n) for n in THINKING_FIELDS)):
        return "which is not read; thinking belongs in 'reasoning_content'"
    return None
