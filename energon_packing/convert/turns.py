"""Messages of a record -> turns. Every field of a message is read, refused by name, or counted as ignored."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from itertools import groupby
from typing import Any

from energon_packing.chat.thinking import tagged
from energon_packing.conversation import MediaKind, MediaPart, Part, Role, Turn
from energon_packing.convert import columns
from energon_packing.convert import fields as record_fields
from energon_packing.convert.columns import RecordMedia, always, is_preference_label, reference_of, refuse_own_view
from energon_packing.convert.fields import expect, first_of, kind_of, loss_weight, says_nothing, thinking_of, unread
from energon_packing.convert.json_text import parse_part
from energon_packing.errors import SampleRejected


def parse_tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    """The ``tools`` column: a list, one definition, or either as JSON text. A bare definition (``{"name", "parameters",
    ...}``) is wrapped as ``{"type": "function", "function": ...}``, the form that chat templates expect. None if there
    are no tools; raises ``bad_tools``."""
    if isinstance(value, str):
        value = _parsed(value, "bad_tools", "the tools column is") if value.strip() else None
    if says_nothing(value):
        return None
    tools = []
    listed = [value] if isinstance(value, dict) else value
    for tool in expect(listed, list, "bad_tools", "the tools column is", "a list of definitions"):
        wrapped = "function" in expect(tool, dict, "bad_tools", "a tool definition is", "an object")
        definition = tool["function"] if wrapped else tool
        if not isinstance(definition, dict) or not isinstance(definition.get("name"), str):
            raise SampleRejected("bad_tools", "a tool definition has no name")
        tools.append(tool if wrapped else {"type": "function", "function": tool})
    return tuple(tools) or None


def _parsed(text: str, reason: str, what: str) -> Any:
    try:
        return parse_part(text)
    except (ValueError, RecursionError) as error:
        raise SampleRejected(reason, f"{what} not JSON: {error}") from error


def parse_call_text(text: str, ignored: set[str]) -> tuple[dict[str, Any], ...]:
    """A ``function_call`` turn: ``{"name", "arguments"}`` as JSON text, with or without an ``id``, or a list of these.
    ``ignored`` receives the names of all other fields of the calls; raises ``bad_tool_call``."""
    value = _parsed(text, "bad_tool_call", "the function call is")
    if not (calls := value if isinstance(value, list) else [value]):
        raise SampleRejected("bad_tool_call", "the function call is an empty list")
    return tuple(_call(call, ignored) for call in calls)


def parse_tool_calls(value: Any, ignored: set[str]) -> tuple[dict[str, Any], ...]:
    """OpenAI's ``tool_calls`` of an assistant message; ids are kept, since some chat templates require them.
    ``ignored`` receives the names of all other fields of the calls, such as ``index``; raises ``bad_tool_call``."""
    calls = []
    for call in expect(() if value is None else value, (list, tuple), "bad_tool_call", "tool_calls is", "a list"):
        expect(call, dict, "bad_tool_call", "a tool call is", "an object")
        if (kind := call.get("type")) not in (None, "function"):
            raise SampleRejected("bad_tool_call", f"a tool call has type {kind!r}, expected 'function'")
        inner = call.get("function")
        calls.append(_call(call if inner is None else inner, ignored, call.get("id")))
        if inner is not None:
            ignored |= unread(call, ("id", "type", "function"))
    return tuple(calls)


def call_id(value: Any) -> str | None:
    """The id of a call, or None; raises ``bad_tool_call`` if it is not text."""
    return expect("" if value is None else value, str, "bad_tool_call", "the id of a tool call is", "text") or None


def _call(value: Any, ignored: set[str], outer_id: Any = None) -> dict[str, Any]:
    expect(value, dict, "bad_tool_call", "a function call is", "an object")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise SampleRejected("bad_tool_call", "a function call has no name")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, "bad_tool_call", f"the arguments of {name!r} are")
    if not isinstance(arguments, dict):
        what = kind_of(arguments) if "arguments" in value else "missing"
        raise SampleRejected("bad_tool_call", f"the arguments of {name!r} are {what}, expected an object")
    ignored |= unread(value, ("id", "type", "name", "arguments"))
    id_of_call = call_id(value.get("id") if outer_id is None else outer_id)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if id_of_call is None else {"id": id_of_call, **call}


_TEXTS = ("input_text", "output_text")  # Types of texts in OpenAI's Responses, beside ``text``
_PLACEHOLDER = re.compile(r"<(image|video)>")


def read_content(content: Any, number: int, media: RecordMedia, column: str) -> tuple[Part, ...]:
    """Text and media in reading order; text is kept verbatim, adjacent texts are joined. ``media`` receives the media
    that the content names, and the fields that nothing reads, which ``column`` precedes (``messages[].content``).
    Raises ``non_string_value``, ``unknown_part``, ``unsupported_field``, ``bad_frames``."""
    if type(content) is str and "<image>" not in content and "<video>" not in content:
        return (content,) if content else ()
    pieces: list[Part] = []
    parts = expect(content, (str, list), "non_string_value", f"turn {number} is", "text or a list of parts")
    for part in [parts] if isinstance(parts, str) else parts:
        _read_part(part, number, media, column, pieces)
    return joined(pieces)


def joined(pieces: list[Part]) -> tuple[Part, ...]:
    """Parts without empty texts, adjacent texts as one."""
    parts: list[Part] = []
    for are_texts, group in groupby((piece for piece in pieces if piece != ""), lambda piece: isinstance(piece, str)):
        run = list(group)
        parts += ["".join(map(str, run))] if are_texts else run
    return tuple(parts)


def split_text(text: str, media: RecordMedia, pieces: list[Part]) -> None:
    """Appends a text to ``pieces``, with its placeholders replaced by media."""
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        pieces.append(text[end : match.start()])
        pieces.append(media.next_of_column("image" if match[1] == "image" else "video"))
        end = match.end()
    pieces.append(text[end:])


def _read_part(part: Any, number: int, media: RecordMedia, column: str, pieces: list[Part]) -> None:
    if isinstance(part, str):
        split_text(part, media, pieces)
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" or kind in _TEXTS:
        if not isinstance(part.get("text"), str):
            found = f"holds {kind_of(part['text'])}" if "text" in part else "has no 'text'"
            fields = ", ".join(sorted(str(name)[:40] for name in part)[:20])
            raise SampleRejected("non_string_value", f"turn {number}: a text part {found}; its fields are: {fields}")
        split_text(part["text"], media, pieces)
        media.ignore(part, {"type", "text"}, f"{column}[]")
    elif kind in ("image", "image_url", "video", "video_url", "input_image"):
        media_kind: MediaKind = "image" if "image" in kind else "video"
        name = "image_url" if kind == "input_image" else kind
        # The last two are what transformers reads.
        path_field = next((each for each in (name, media_kind, "path", "url") if part.get(each) is not None), name)
        path, read = part.get(path_field), {"type", name, media_kind, path_field}
        if kind == "input_image" and part.get("file_id") is not None:
            raise SampleRejected("remote_media", f"turn {number}: an image is a file_id of a service, not a file")
        if isinstance(path, dict):
            media.ignore(path, {"url", "path", "bytes"}, f"{column}[].{kind}")
            if not isinstance(path.get("bytes"), bytes):
                path = first_of(path, "url", "path")
        own_view = {"is_frames": isinstance(path, list), "is_part": True}
        refuse_own_view(part, media_kind, "unsupported_field", f"turn {number}: a content part", **own_view)
        index = part.get("index") if path is None else None
        if type(index) is int and all(part.get(field) is None for field in (name, media_kind, "text")):
            pieces.append(media.next_of_column(media_kind, index))  # as TRL's examples and HuggingFaceH4's vsft sets
            read.add("index")
        elif path is None and all(value is None for field, value in part.items() if field != "type"):
            # As in tables, which fill the fields that a part lacks with null.
            pieces.append(media.next_of_column(media_kind))  # a bare part stands for the column's next entry
        elif isinstance(path, list):
            pieces.append(media.add(reference_of({**part, "frames": path}, media_kind, kind, media.frame_fps)))
            read.update(columns.FRAME_TIMING)
        else:
            pieces.append(media.add(reference_of(path, media_kind, kind, media.frame_fps)))
        media.ignore(part, read, f"{column}[]")
    else:
        known = "text, image, image_url, video, video_url, input_text, input_image, output_text"
        raise SampleRejected("unknown_part", f"turn {number} has a content part of type {kind!r}; known: {known}")


_CALLS = ("tool_calls", "function_call")
_MEANINGS: tuple[tuple[Collection[str], Callable[[Any, Mapping[str, Any]], bool], str], ...] = (
    (columns.AUDIO, always, "but audio is not supported"),
    (
        ("image", "images", "image_url", "video", "videos", "video_url"),
        always,
        "which is not read; name the file in a content part, or in the column 'images' or 'videos' of the record",
    ),
    (("tools", "functions"), always, "which is not read; tool definitions belong in the record's column 'tools'"),
    (_CALLS, always, "but only an assistant calls tools"),
    (
        ("train_detail", "mask", "masked", "loss_mask", "train_mask", "loss_scale", "training"),
        always,
        "which is not read; 'weight', 'loss', 'loss_weight' or 'train' of a message sets how much it is trained",
    ),
    (
        columns.LABELS,
        lambda value, message: is_preference_label(value),
        "a preference label, which is not supported; a weight of 0 excludes a message from training",
    ),
    (
        ("channel",),
        lambda value, message: bool(value != "final"),
        "{value!r:.60}; thinking belongs in 'reasoning_content', calls in 'tool_calls'",
    ),
    (("tool_plan",), always, "which is not read; thinking belongs in 'reasoning_content'"),
    (
        ("reasoning_details",),
        lambda value, message: not any(message.get(name) for name in record_fields.THINKING_FIELDS),
        "which is not read; thinking belongs in 'reasoning_content'",
    ),
)
_CHANGE_THE_MEANING = {name: (applies, why) for names, applies, why in _MEANINGS for name in names}
"""Fields of a message, when they may not be left out, and why."""


def read_turns(
    messages: list[Any], fields: tuple[str, str], media: RecordMedia, warnings: list[str], column: str
) -> list[Turn]:
    """The turns of a list of messages, which a column holds; ``fields`` hold the role and the content of a message.
    ``media`` of the record receives the media that the turns name and the fields that nothing reads, and ``warnings``
    ``empty_system_turn_kept`` for every system turn without text. Raises SampleRejected: ``unknown_role``,
    ``empty_turn``, ``non_string_value``, ``bad_tool_call``, ``bad_weight``, ``unsupported_weight``,
    ``unsupported_field``, ``conflicting_thinking``, ``unknown_part``, ``bad_frames``."""
    role_field, content_field = fields
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        # Nearly all turns: text and a role, no other field, no media. `read_turn` would find nothing else in them.
        content: Any = message.get(content_field) if type(message) is dict and len(message) == 2 else None
        name = message.get(role_field) if type(content) is str else None
        role = record_fields.ROLE_OF_TEXT.get(name) if type(name) is str else None
        if role and content and not content.isspace() and "<image>" not in content and "<video>" not in content:
            turns.append(Turn(role=role, parts=(content,)))
        else:
            turns.append(read_turn(message, number, fields, media, column))
    for turn in turns:
        if turn.role == "system" and not holds(turn.parts):
            warnings.append("empty_system_turn_kept")
    return turns


def read_turn(message: Any, number: int, fields: tuple[str, str], media: RecordMedia, column: str) -> Turn:
    """One turn; see `read_turns`, ``number`` counts from 0."""
    role_field, content_field = fields
    expect(message, dict, "non_string_value", f"turn {number} is", "an object")
    role_name = message.get(role_field)
    role = record_fields.ROLE_OF.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        known = ", ".join(record_fields.ROLE_OF)
        raise SampleRejected("unknown_role", f"turn {number} has the role {role_name!r}; known: {known}")
    _check_fields(message, number, fields, role, media, column)
    content = message.get(content_field)
    calls: tuple[dict[str, Any], ...] = ()
    in_calls: set[str] = set()
    if role_name == "function_call":
        expect(content, str, "non_string_value", f"turn {number} ({role_name}) is", "text")
        calls, content = parse_call_text(content, in_calls), ""
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
    if role != "system" and not calls and not holds(parts):
        raise SampleRejected("empty_turn", f"turn {number} ({role_name}) is empty")
    return Turn(
        role=role,
        parts=joined([*around, *parts]) if around else parts,
        tool_calls=calls,
        loss_weight=loss_weight(message, number, role),
        tool_call_id=call_id(message.get("tool_call_id")) if role == "tool" else None,
        thinking=thought,
    )


def holds(parts: tuple[Part, ...]) -> bool:
    """Whether parts have an image, a video, or text other than white space."""
    return any(isinstance(part, MediaPart) or part.strip() for part in parts)


def _plain_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


def _check_fields(
    message: Mapping[str, Any], number: int, names: tuple[str, str], role: Role, media: RecordMedia, column: str
) -> None:
    """Refuses unsupported fields that change the meaning, and records the others that nothing reads."""
    if message.keys() <= (read := _fields_read(names, role)):
        return
    for name, value in message.items():
        if name in _CHANGE_THE_MEANING and name not in read and not says_nothing(value):
            applies, why = _CHANGE_THE_MEANING[name]
            if applies(value, message):
                said = f"turn {number} ({role}) has the field {name!r}, {why.format(value=value)}"
                raise SampleRejected("unsupported_field", said)
    media.ignore(message, read, f"{column}[]")


@cache
def _fields_read(names: tuple[str, str], role: Role) -> frozenset[str]:
    """Fields of a message that have a meaning, whether or not this one has them."""
    read = {*names, *record_fields.LOSS_FIELDS}
    if role == "assistant":
        read.update(_CALLS, record_fields.THINKING_FIELDS)
    elif role == "tool":
        read.add("tool_call_id")
    return frozenset(read)
