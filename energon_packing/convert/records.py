"""Parses one record of a source into turns and the media that they name, and writes it as JSON. Opens no files.

A layout (`energon_packing.convert.layouts`) restates the record as one of two forms: ``conversations`` of
``from``/``value`` (ShareGPT; LLaVA uses the same) or ``messages`` of ``role``/``content`` (OpenAI). Media appear in the
text as ``<image>`` and ``<video>``, filled in order from the columns ``images``/``image`` and ``videos``/``video``, or
as parts with their own path. Both forms may be preference records:

* ``conversations`` or ``messages`` (the beginning), ``chosen`` and ``rejected`` (a text, a message, or a list of them);
* ``prompt`` (a text or a list of messages), ``chosen`` and ``rejected``;
* ``chosen`` and ``rejected`` alone, two whole conversations that begin alike;
* ``messages`` that include the chosen answer, and ``rejected_response`` or ``rejected_messages``.

Nearly all records without media have an id, turns of text, perhaps a system prompt and tools: `plain_record` writes
their text down, which is a fraction of the work of making objects of their turns, checking these as every reader of a
data set does, and encoding them again. What is not plain takes that road (`parse_record`), mistakes included, so that
each rejection has one place. The tests compare the two roads.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, pairwise, takewhile
from operator import add
from typing import Any

import orjson

from energon_packing.conversation import PREFERENCE, RECORD_VERSION, ROLES, Conversation, Media, Turn
from energon_packing.convert import columns as record_columns
from energon_packing.convert.chunks import RawRecord
from energon_packing.convert.columns import READ_COLUMNS, FileReference, MediaReference, RecordMedia, check_columns
from energon_packing.convert.config import DEFAULT_FRAME_FPS, ColumnMap, MissingPlaceholder, RecordFormat
from energon_packing.convert.fields import ROLE_OF, THINKING_FIELDS, expect
from energon_packing.convert.layouts.conversations import OPENAI, SHAREGPT
from energon_packing.convert.layouts.layout import TURN_COLUMNS, Layout, find_layout, has_turns, unknown_layout, without
from energon_packing.convert.media_files import MediaFile
from energon_packing.convert.turns import holds, joined, parse_call_text, parse_tool_calls, parse_tools, read_turns
from energon_packing.errors import SampleRejected
from energon_packing.stored_record import LARGEST_NUMBER, SMALLEST_NUMBER, check_depth, is_unicode

_ALIASES = {"human": "user", "gpt": "assistant"}
_EXPECTED = {layout.name: layout.expects for layout in (SHAREGPT, OPENAI)}


def find_pair(record: Mapping[str, Any]) -> list[tuple[list[Any], str]]:
    """The parts of a preference record, the beginning and the two answers: the unparsed messages of each, and their
    column; empty for any other record. Raises ``bad_pair`` if a part is missing or the answers do not follow the same
    beginning."""
    answers = {name: record[name] for name in ("chosen", "rejected") if record.get(name) is not None}
    other = [name for name in ("rejected_response", "rejected_messages") if record.get(name) is not None]
    if not answers and not other:
        return []
    if record.get("rejected_images") or record.get("rejected_videos"):
        raise _bad("the rejected answer has its own media; both answers must follow the same media")
    columns = [name for name in (*TURN_COLUMNS, "prompt") if record.get(name) is not None]
    if columns == ["messages", "prompt"] and record["messages"] == answers.get("chosen"):
        columns = ["prompt"]  # UltraFeedback, binarized: the messages are a copy of the chosen conversation
    if len(columns) > 1:
        raise _bad(f"both {columns[0]!r} and {columns[1]!r} contain the beginning; keep one of them")
    common = _messages(record[columns[0]], columns[0], "user") if columns else None
    if other:
        if record.get("chosen_messages") is not None:
            raise _bad(f"'chosen_messages' with {other[0]!r} is not supported; rename them to 'chosen' and 'rejected'")
        if answers or len(other) > 1:
            raise _bad(f"the record has both {other[0]!r} and {(*other[1:], *answers)[0]!r}; keep one of them")
        if common is None:
            raise _bad(f"the record has {other[0]!r} but no 'messages', which must end with the chosen answer")
        return [*zip(_replaced(common, record[other[0]], other[0]), (columns[0], columns[0], other[0]), strict=True)]
    if len(answers) == 1:
        raise _bad(f"the record has only {next(iter(answers))!r}; a pair needs both 'chosen' and 'rejected'")
    chosen, rejected = (_messages(answers[name], name, "assistant") for name in ("chosen", "rejected"))
    if common is None:
        return [*zip(_split(chosen, rejected), ("chosen", "chosen", "rejected"), strict=True)]
    return [(common, columns[0]), (_without(common, chosen), "chosen"), (_without(common, rejected), "rejected")]


def _bad(detail: str) -> SampleRejected:
    return SampleRejected("bad_pair", detail)


def _messages(value: Any, column: str, speaker: str) -> list[Any]:
    """Turns a text into one message by ``speaker``, and a single message into a list."""
    if isinstance(value, str):
        return [{"role": speaker, "content": value}]
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list) or not value:
        raise _bad(f"{column!r} is neither text nor a message nor a list of messages")
    return value


def _speech(message: Any) -> Any:
    """Who speaks and what they say, whatever the names of the fields."""
    if not isinstance(message, dict):
        return message
    role = message.get("role", message.get("from"))
    alias = _ALIASES.get(role) if isinstance(role, str) else None
    said = [message.get(name) or None for name in ("tool_calls", "function_call", *THINKING_FIELDS)]
    return alias or role, message.get("content", message.get("value")), said


def _without(beginning: list[Any], answer: list[Any]) -> list[Any]:
    """Removes the beginning from an answer that repeats it, as some data sets do."""
    repeats = [*map(_speech, answer[: len(beginning)])] == [*map(_speech, beginning)]
    return answer[len(beginning) :] if repeats and len(answer) > len(beginning) else answer


_Parts = tuple[list[Any], list[Any], list[Any]]  # The beginning, the chosen and the rejected answer


def _split(chosen: list[Any], rejected: list[Any]) -> _Parts:
    """Two whole conversations; their shared messages before the first difference are the beginning."""
    most = min(len(chosen), len(rejected)) - 1
    alike = (_speech(one) == _speech(other) for one, other in zip(chosen[:most], rejected[:most], strict=False))
    if (shared := sum(takewhile(bool, alike))) == 0:
        raise _bad("the chosen and the rejected conversation share no beginning, and the record has no 'prompt'")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _replaced(whole: list[Any], rejected: Any, column: str) -> _Parts:
    """``messages`` that end with the chosen answer, and the rejected answer that replaces it."""
    answer = _messages(rejected, column, "assistant")
    if column == "rejected_messages":
        return _split(whole, answer)
    end = len(whole) - 1  # in the place of the last message
    if not isinstance(rejected, str | dict):  # in the place of all that follows the last question
        asked = [at for at, turn in enumerate(whole, 1) if isinstance(turn, dict) and _speech(turn)[0] == "user"]
        end = asked[-1] if asked else 0
    return whole[:end], whole[end:], answer


_READ_COLUMNS = frozenset(("id", "system", "tools", "extras", *READ_COLUMNS))
"""Columns that are read from every record, whatever its layout."""


@dataclass(kw_only=True, slots=True)  # made for every record; a frozen one takes four times as long
class ParsedRecord:
    """One record of a source, its media not looked at yet. The others are those of `Conversation`."""

    turns: tuple[Turn, ...]  # in order; their `MediaPart` indices count up from 0 over the whole record
    references: tuple[MediaReference, ...]  # the media that the indices refer to
    tools: tuple[Mapping[str, Any], ...] | None
    warnings: tuple[str, ...]  # names of oddities that were accepted
    ignored: tuple[str, ...] = ()  # filled columns, and fields as ``messages[].name``, that nothing reads; sorted
    chosen: tuple[Turn, ...] = ()
    rejected: tuple[Turn, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    layout: str = field(default="", compare=False)  # name of the layout that the record has
    source_id: str | None = None

    @property
    def judged(self) -> str:
        """``pair`` for two answers, ``unwanted`` for one whose label says so; empty for any other."""
        return "pair" if self.chosen else "unwanted" if self.extras.get(PREFERENCE, 0) < 0 else ""

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(reference.kind for reference in self.references)

    @property
    def media(self) -> tuple[FileReference, ...]:
        """The files that the record names, in order, including each file in a list of frames."""
        return tuple(file for reference in self.references for file in reference.files)

    def record(self, key: str, names: Sequence[str], files: Sequence[MediaFile]) -> dict[str, Any]:
        """The JSON form of the sample, of whose ``media`` each has a name in the store and has been checked. Raises
        SampleRejected: ``unequal_frames``, and the reasons of `Conversation`."""
        checked = zip(names, files, strict=True)
        media: list[Media] = []
        for reference in self.references:
            own = list(islice(checked, len(reference.paths)))
            if reference.is_frames:
                media.append(media_of_frames(own, fps=reference.fps, times=reference.times))
            else:
                media += [file.media(name) for name, file in own]
        said = ("turns", "tools", "chosen", "rejected", "extras", "source_id")
        return Conversation(key=key, media=tuple(media), **{name: getattr(self, name) for name in said}).to_record()


def media_of_frames(frames: Sequence[tuple[str, MediaFile]], *, fps: float | None, times: tuple[float, ...]) -> Media:
    """A video made of checked images of one size, else ``unequal_frames`` is raised, each with its name in the store.
    ``times`` are the seconds of each frame, or empty; of two or more they override ``fps``."""
    width, height = frames[0][1].width, frames[0][1].height
    for number, (_, file) in enumerate(frames):
        if (file.width, file.height) != (width, height):
            sizes = f"is {file.width}x{file.height} pixels, but the first is {width}x{height}"
            raise SampleRejected("unequal_frames", f"frame {number} of a list {sizes}")
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else fps or DEFAULT_FRAME_FPS
    rate = min(max(rate, SMALLEST_NUMBER), LARGEST_NUMBER)
    names = tuple(name for name, _ in frames)
    seconds = min(max(len(frames) / rate, SMALLEST_NUMBER), LARGEST_NUMBER)
    shape: Any = {"width": width, "height": height, "frames": len(frames), "fps": rate, "duration": seconds}
    return Media(kind="video", name=names[0], **shape, frame_names=names, frame_times=times)


def parse_record(
    value: Any,
    layout: RecordFormat = "auto",
    *,
    extra_columns: Sequence[str] = (),
    frame_fps: float = DEFAULT_FRAME_FPS,
    column_map: ColumnMap | None = None,
    kto_label: str | None = None,
    missing_placeholder: MissingPlaceholder = "reject",
) -> ParsedRecord:
    """Reads one record, the parsed JSON. The name of a ``layout`` rejects all others; ``auto`` detects it. It and the
    other options are those of `energon_packing.convert.config.ConvertConfig`. Raises SampleRejected: with most of the
    reasons that docs/convert.md lists, those of files aside."""
    expect(value, dict, "unknown_layout", "the record is", "an object")
    left: set[str] = set()
    if column_map:
        value, left = column_map.apply(value)
    found_layout = find_layout(value, layout)
    warnings: list[str] = []
    if found_layout.restate is not None:
        value = found_layout.restate(value, warnings)
    (messages, column), *answers = find_pair(value) or [_find_turns(value, layout)]
    if not messages:
        raise _bad("there is no message before the two answers")
    if (conversation := layout_of_turn(messages[0], layout)) is None or conversation.fields is None:
        raise unknown_layout(value, _EXPECTED.get(layout, ""))
    media = RecordMedia.of(value, frame_fps)
    media.ignored |= left
    turns = _with_system_column(value, read_turns(messages, conversation.fields, media, warnings, column))
    is_pair = bool(answers)
    read = {*_READ_COLUMNS, column, *(name for _, name in answers), kto_label or "id"}
    read |= record_columns.extra_columns_read(extra_columns, pair=is_pair)
    extras = record_columns.parse_extras(value, extra_columns, pair=is_pair)
    if kto_label is not None:
        extras |= record_columns.read_kto_label(value, kto_label, warnings, pair=is_pair)
    if missing_placeholder != "reject":
        turns = record_columns.place_missing(turns, media, missing_placeholder, warnings)
    # Done before media are compared with placeholders, because an unread column may explain a mismatch.
    media.ignored |= check_columns(value, read, turns, media.references)
    media.check()
    taught = [_answer(answer, warnings, media.ignored, name) for answer, name in answers]
    warnings += _check_taught(turns, taught)
    chosen, rejected = taught or ((), ())
    return ParsedRecord(
        turns=tuple(turns),
        references=tuple(media.references),
        tools=parse_tools(value.get("tools")),
        warnings=tuple(dict.fromkeys(warnings)),
        ignored=tuple(sorted(media.ignored)),
        chosen=tuple(chosen),
        rejected=tuple(rejected),
        extras=extras,
        layout=(column_map.layout if column_map else "") or found_layout.name,
        source_id=_kept_id(value.get("id")),
    )


def _kept_id(value: Any) -> str | None:
    return value if isinstance(value, str) and not value.isascii() and is_unicode(value) else None


def _check_taught(turns: list[Turn], answers: list[list[Turn]]) -> list[str]:
    """Raises ``nothing_to_learn`` for turns, or the two answers after them, that train nothing; returns warnings."""
    if answers and answers[0] == answers[1]:
        raise SampleRejected("nothing_to_learn", "the chosen and the rejected answer are the same")
    warnings = []
    for answered in answers or [turns]:
        if not any(turn.role == "assistant" and turn.loss_weight != 0.0 for turn in answered):
            raise SampleRejected("nothing_to_learn", "no assistant turn to train on")
        warnings += _oddities([*turns, *answered] if answers else turns)
    return warnings


def parse_conversation(made: Conversation, frame_fps: float = DEFAULT_FRAME_FPS) -> ParsedRecord:
    """Reads a conversation that a reader made; its media are named as records name them, and their sizes are not used.
    ``frame_fps`` is the rate of lists of frames that have none. Raises SampleRejected: ``empty_turn``,
    ``nothing_to_learn``, and the reasons of `Conversation.from_record`."""
    try:
        record, media = made.to_record(), [{"kind": each.kind, "name": "file"} for each in made.media]
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise SampleRejected("bad_record", f"the Conversation cannot be written as JSON: {error}") from error
    # What Python lets pass, such as a number in place of a text, the reader of stored records does not.
    checked = Conversation.from_record(made.key, {**record, **({"media": media} if media else {})})
    parts = filter(None, (checked.turns, checked.chosen, checked.rejected))
    turns, *answers = ([replace(turn, parts=joined(list(turn.parts))) for turn in part] for part in parts)
    for number, turn in enumerate(each for part in (turns, *answers) for each in part):
        if turn.role != "system" and not turn.tool_calls and not holds(turn.parts):
            raise SampleRejected("empty_turn", f"turn {number} ({turn.role}) is empty")
    chosen, rejected = answers or ((), ())
    return ParsedRecord(
        turns=tuple(turns),
        references=tuple(
            MediaReference(
                kind=each.kind,
                paths=tuple(map(str, each.frame_names or (each.name,))),
                is_frames=bool(each.frame_names),
                fps=record_columns.frame_rate(each.fps) or (frame_fps if each.frame_names else None),
                times=record_columns.frame_times([*each.frame_times] or None, len(each.frame_names)),
            )
            for each in made.media
        ),
        tools=checked.tools,
        warnings=tuple(dict.fromkeys(_check_taught(turns, answers))),
        chosen=tuple(chosen),
        rejected=tuple(rejected),
        extras=checked.extras,
        layout="conversation",
        source_id=made.source_id or _kept_id(made.key),
    )


def unlisted(raw: RawRecord) -> Iterable[RawRecord]:
    """The samples of a record that is a list of them, as Qwen's ``pack_data.py`` writes packs; any other itself."""
    if not isinstance(raw.value, list) or not any(isinstance(each, dict) and has_turns(each) for each in raw.value):
        return (raw,)
    return (replace(raw, value=each, where=f"{raw.where}[{at}]") for at, each in enumerate(raw.value))


def _find_turns(value: Mapping[str, Any], layout: RecordFormat) -> tuple[list[Any], str]:
    """The list of turns, and the column that holds it; a column that repeats them is not read."""
    listed = {column: value[column] for column in TURN_COLUMNS if isinstance(value.get(column), list)}
    fitting = [(turns, column) for column, turns in listed.items() if turns and layout_of_turn(turns[0], layout)]
    said = [[*map(_speech, turns)] for turns, _ in fitting] if len(fitting) > 1 else [[]]
    if said[0] != said[-1] and layout in ("auto", *_EXPECTED):  # another layout's turns were put into one column
        both = "'messages' and 'conversations' hold different turns"
        raise SampleRejected("ambiguous_layout", f"{both}; keep one, or name its layout with --format")
    if fitting:
        return fitting[0]
    if listed and not any(listed.values()):
        raise SampleRejected("empty_conversation", f"the record's {next(iter(listed))} list is empty")
    raise unknown_layout(value, _EXPECTED.get(layout, ""))


def layout_of_turn(message: Any, layout: str) -> Layout | None:
    """The layout of a conversation, inferred from its first message; None if it is another than the named one."""
    if not isinstance(message, dict):
        return None
    found = SHAREGPT if "from" in message and "role" not in message else OPENAI if "role" in message else None
    return None if found is not None and layout in _EXPECTED and layout != found.name else found


def _answer(messages: list[Any], warnings: list[str], ignored: set[str], column: str) -> list[Turn]:
    """The turns of one answer of a pair: text only, beginning with the assistant."""
    media = RecordMedia.of({}, DEFAULT_FRAME_FPS)
    found = layout_of_turn(messages[0], "auto") if messages else None
    turns = read_turns(messages, (found and found.fields) or ("role", "content"), media, warnings, column)
    ignored |= media.ignored
    if media.references:
        raise _bad("an answer of the pair contains media; put them before both answers")
    if not turns or turns[0].role != "assistant":
        begins = f"a {turns[0].role} turn" if turns else "nothing"
        raise _bad(f"an answer of the pair begins with {begins}, expected an assistant turn")
    return turns


def _with_system_column(value: Mapping[str, Any], turns: list[Turn]) -> list[Turn]:
    if (system := value.get("system")) is None or system == "":
        return turns
    expect(system, str, "non_string_value", "the system column is", "text")
    if turns and turns[0].role == "system":
        if turns[0].parts == (system,):
            return turns
        raise SampleRejected("two_system_prompts", "the system column and the first turn differ; keep one of them")
    return [Turn(role="system", parts=(system,)), *turns]


def _oddities(turns: list[Turn]) -> list[str]:
    """Warnings: consecutive turns with the same role, a late system prompt, a result without a tool call."""
    made = {None, *(call.get("id") for turn in turns for call in turn.tool_calls)}
    found = [] if all(turn.tool_call_id in made for turn in turns) else ["unknown_tool_call_id"]
    for before, after in pairwise(turns):
        if before.role == after.role in ("user", "assistant"):
            found.append(f"consecutive_{after.role}_turns")
        if after.role == "system":
            found.append("late_system_turn")
    return found


# What a record holds was parsed from JSON or is a row of a table, so it has no cycles.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)


def encode_record(record: Mapping[str, Any]) -> bytes:
    """A record, or a part of one, as JSON in UTF-8, as it is stored; raises ``bad_text`` or ``too_deep``."""
    try:
        text = _ENCODER.encode(record).encode()
    except RecursionError as error:
        raise SampleRejected("too_deep", "objects and lists lie too deep inside each other for Python") from error
    except (TypeError, ValueError) as error:  # dates and bytes of a table, lone surrogates, NaN
        raise SampleRejected("bad_text", f"the record cannot be written as UTF-8 JSON: {error}") from error
    check_depth(text, record)
    return text


_SAID = ("turns", "chosen", "rejected")


def said_in(record: Mapping[str, Any]) -> bytes:
    """What a record says, apart from its media, as JSON: its turns, and the answers of a pair. Definitions of tools and
    extra values are left out; records that are no conversations say all that they hold but names of files."""
    if "turns" in record:
        return encode_record({name: record[name] for name in _SAID if name in record})
    unnamed = {name: without(part, "name") if isinstance(part, dict) else part for name, part in record.items()}
    return encode_record(unnamed)


_COLUMNS = frozenset(("id", "messages", "conversations", "system", "tools"))
_BEGINNING = b'{"version": %d, "turns": [' % RECORD_VERSION
_TURN = {role: b'{"role": "%s", "parts": [' % role.encode() for role in ROLES}
_MOST_TOOLS, _LONGEST_TOOLS = 64, 1 << 15
"""Lists of definitions that are remembered, and bytes of each; most records of a data set repeat those of others."""
_tools_seen: dict[bytes, bytes] = {}


def plain_record(value: Any, layout: str) -> tuple[bytes, str, bytes] | None:
    """The stored form of a record that holds text alone, calls of tools included: `ParsedRecord.record` as JSON, the
    name of the layout, and `said_in` of the record. None for a record that names media, has any other column, or leads
    to a warning or a rejection."""
    if type(value) is not dict or not value.keys() <= _COLUMNS or ("messages" in value) == ("conversations" in value):
        return None
    if _kept_id(value.get("id")) is not None:
        return None
    messages = value["messages"] if "messages" in value else value["conversations"]
    if type(messages) is not list or not messages or (found := layout_of_turn(messages[0], layout)) is None:
        return None
    assert found.fields is not None, "the layout is a conversation"
    system = value.get("system")
    try:
        if system is not None and system != "":
            role_field, content_field = found.fields
            messages = [{role_field: "system", content_field: system}, *messages]
        if (turns := _text_turns(messages, *found.fields) or _turns(messages, *found.fields)) is None:
            return None
        # One byte is found at the speed of memory, a word is not.
        if b"<" in turns and (b"<image>" in turns or b"<video>" in turns or b"<img>" in turns):
            return None
        return b"%b%b]%b}" % (_BEGINNING, turns, _tools(value.get("tools"))), found.name, b'{"turns": [%b]}' % turns
    except (KeyError, TypeError, SampleRejected, UnicodeEncodeError):  # orjson's errors are of these
        return None


def _text_turns(messages: list[Any], role_field: str, content_field: str) -> bytes | None:
    """The JSON of turns of a role and a text each, taken together in a third of the time; None if one is more."""
    if set(map(len, messages)) != {2} or (turns := _beginnings(tuple([each[role_field] for each in messages]))) is None:
        return None
    texts = [message[content_field] for message in messages]
    if set(map(type, texts)) != {str} or not all(texts) or any(map(str.isspace, texts)):
        return None
    return b"]}, ".join(map(add, turns, map(orjson.dumps, texts))) + b"]}"


@lru_cache(maxsize=4096)
def _beginnings(names: tuple[str, ...]) -> tuple[bytes, ...] | None:
    """The JSON of each turn up to its text; None for an order of roles worth a warning or rejection, and for calls."""
    roles = [ROLE_OF.get(name) for name in names]
    if None in roles or "assistant" not in roles or "system" in roles[1:] or "function_call" in names:
        return None
    if any(before == after != "tool" for before, after in pairwise(roles)):
        return None
    return tuple(_TURN[role] for role in roles if role is not None)


def _turns(messages: list[Any], role_field: str, content_field: str) -> bytes | None:
    """The JSON of turns of which some call tools or hold results; None if one is more."""
    names = [message[role_field] for message in messages]
    # What calls is an assistant's turn, whatever the name of its role.
    if (begun := _beginnings(tuple(["gpt" if name == "function_call" else name for name in names]))) is None:
        return None
    turns: list[bytes] = []
    made: set[Any] = set()
    answered: set[str] = set()
    ignored: set[str] = set()
    for message, name, beginning in zip(messages, names, begun, strict=True):
        text, further, known = message.get(content_field), b"", 2
        calls: tuple[dict[str, Any], ...] = ()
        if name == "function_call":
            calls, text = (parse_call_text(text, ignored), None) if type(text) is str else ((), text)
        elif beginning is _TURN["assistant"] and (given := message.get("tool_calls")):
            calls, known = parse_tool_calls(given, ignored), 3
        elif beginning is _TURN["tool"] and type(call := message.get("tool_call_id")) is str and call:
            further, known = b', "tool_call_id": %b' % orjson.dumps(call), 3
            answered.add(call)
        if calls:
            made.update(call.get("id") for call in calls)
            # At the depth that they have in a record, so that nesting has one limit.
            further = b", " + encode_record({"turns": [{"tool_calls": calls}]})[len(b'{"turns": [{') : -len(b"}]}")]
        elif type(text) is not str or not text:
            return None
        if len(message) != known or (text and (type(text) is not str or text.isspace())):
            return None
        turns.append(b"%b%b]%b}" % (beginning, orjson.dumps(text) if text else b"", further))
    return b", ".join(turns) if not ignored and answered <= made else None


def _tools(value: Any) -> bytes:
    """The member ``tools`` of a record, a comma before it; empty if there are no tools."""
    if value is None:
        return b""
    seen = orjson.dumps(value)  # equal texts for equal values, infinities aside, which become null
    if (text := _tools_seen.get(seen)) is None:
        tools = parse_tools(value)
        text = b"" if tools is None else b", %b" % encode_record({"tools": [dict(tool) for tool in tools]})[1:-1]
        if len(seen) <= _LONGEST_TOOLS and b"null" not in seen:
            if len(_tools_seen) >= _MOST_TOOLS:
                _tools_seen.clear()
            _tools_seen[seen] = text
    return text
