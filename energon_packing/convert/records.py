"""Parses one record of a source into turns and the media that they name. Opens no files.

A layout (`energon_packing.convert.layouts`) restates the record as one of two forms: ``conversations`` of
``from``/``value`` (ShareGPT; LLaVA uses the same) or ``messages`` of ``role``/``content`` (OpenAI), each also with the
preference records of `energon_packing.convert.preference`. Media appear in the text as ``<image>`` and ``<video>``,
filled in order from the columns ``images``/``image`` and ``videos``/``video``, or as parts with their own path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from energon_packing.conversation import PREFERENCE, Conversation, Turn
from energon_packing.convert.column_map import ColumnMap
from energon_packing.convert.columns import check_columns
from energon_packing.convert.config import DEFAULT_FRAME_FPS, MissingPlaceholder, RecordFormat
from energon_packing.convert.extras import extra_columns_read, parse_extras
from energon_packing.convert.frame_lists import media_of_frames
from energon_packing.convert.kto_label import read_kto_label
from energon_packing.convert.layouts.layout import TURN_COLUMNS
from energon_packing.convert.layouts.registry import find_layout, unknown_layout
from energon_packing.convert.media_files import MediaFile, media_of_file
from energon_packing.convert.missing_placeholders import place_missing
from energon_packing.convert.near_names import near_name
from energon_packing.convert.preference import find_pair
from energon_packing.convert.record_media import READ_COLUMNS, FileReference, MediaReference, RecordMedia, kind_of
from energon_packing.convert.tool_calls import parse_tools
from energon_packing.convert.turns import read_turns
from energon_packing.errors import SampleRejected

_READ_COLUMNS = frozenset(("id", "system", "tools", "extras", *READ_COLUMNS))
"""Columns that are read from every record, whatever its layout."""


@dataclass(kw_only=True, slots=True)  # made for every record; a frozen one takes four times as long
class ParsedRecord:
    """A parsed record.

    Attributes:
        turns: in order; their `MediaPart` indices count up from 0 over the whole record.
        references: the media that the indices refer to.
        tools: definitions for the chat template, or None.
        warnings: names of oddities that were accepted.
        ignored: filled columns, and fields as ``messages[].name``, that nothing reads; sorted.
        chosen, rejected: for a preference record, the turns of each answer; empty for any other.
        extras: additional values of the trained tokens, see `energon_packing.convert.extras`.
        layout: name of the layout that the record has.
    """

    turns: tuple[Turn, ...]
    references: tuple[MediaReference, ...]
    tools: tuple[Mapping[str, Any], ...] | None
    warnings: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    chosen: tuple[Turn, ...] = ()
    rejected: tuple[Turn, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    layout: str = field(default="", compare=False)

    @property
    def judged(self) -> str:
        """``pair`` for two answers, ``unwanted`` for one whose label says so; empty for any other."""
        return "pair" if self.chosen else "unwanted" if self.extras.get(PREFERENCE, 0) < 0 else ""

    @property
    def media(self) -> tuple[FileReference, ...]:
        """The files that the record names, in order, including each file in a list of frames."""
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
                media.append(media_of_frames(own, fps=reference.fps, times=reference.times))
            else:
                ((name, file),) = own
                media.append(media_of_file(name, file))
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
    column_map: ColumnMap | None = None,
    kto_label: str | None = None,
    missing_placeholder: MissingPlaceholder = "reject",
) -> ParsedRecord:
    """Reads one record.

    Args:
        value: the parsed JSON.
        layout: the name of one rejects all others; ``auto`` detects it.
        extra_columns: columns that hold extras under their own names.
        frame_fps: frames per second of lists of frames that state no rate.
        column_map: other names of columns and roles.
        kto_label: column that says whether the answer is a wanted one.
        missing_placeholder: what happens to images or videos that no text has a placeholder for.

    Raises:
        SampleRejected: ``unknown_layout``, ``ambiguous_layout``, ``unknown_role``, ``empty_turn``,
            ``empty_conversation``, ``non_string_value``, ``nothing_to_learn``, ``placeholder_mismatch``,
            ``bad_tool_call``, ``bad_tools``, ``bad_weight``, ``unsupported_weight``, ``unsupported_column``,
            ``unsupported_field``, ``conflicting_thinking``, ``unknown_part``, ``two_system_prompts``,
            ``conflicting_columns``, ``bad_pair``, ``bad_extra``, ``bad_frames``, ``bad_label``.
    """
    if not isinstance(value, dict):
        raise SampleRejected("unknown_layout", f"the record is {kind_of(value)}, expected an object")
    left: set[str] = set()
    if column_map:
        value, left = column_map.apply(value)
    found_layout = find_layout(value, layout)
    restated = found_layout.restate(value)
    value = restated.record
    pair = find_pair(value)
    columns: tuple[str, ...]
    if pair is None:
        messages, fields, column = _find_turns(value, layout)
        columns = (column,)
    else:
        messages, fields = _of_list(pair.beginning, layout, value)
        columns = pair.columns
    media = RecordMedia.of(value, frame_fps)
    media.ignored |= left
    warnings: list[str] = list(restated.warnings)
    turns = read_turns(messages, fields, media, warnings, columns[0])
    turns = _with_system_column(value, turns)
    read = {*_READ_COLUMNS, *columns, *extra_columns_read(extra_columns, pair=pair is not None)}
    extras = parse_extras(value, extra_columns, pair=pair is not None)
    if kto_label is not None:
        read.add(kto_label)
        extras |= read_kto_label(value, kto_label, warnings, pair=pair is not None)
    if missing_placeholder != "reject":
        turns = place_missing(turns, media, missing_placeholder, warnings)
    # Done before media are compared with placeholders, because an unread column may explain a mismatch.
    media.ignored |= check_columns(value, read, turns, media.references)
    media.check(_hint(media.ignored))
    chosen: list[Turn] = []
    rejected: list[Turn] = []
    if pair is not None:
        chosen = _answer(pair.chosen, warnings, media.ignored, pair.columns[1])
        rejected = _answer(pair.rejected, warnings, media.ignored, pair.columns[2])
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
        ignored=tuple(sorted(media.ignored)),
        chosen=tuple(chosen),
        rejected=tuple(rejected),
        extras=extras,
        layout=(column_map.layout if column_map else "") or found_layout.name,
    )


def _hint(ignored: set[str]) -> str:
    meant = [(name, near) for name in sorted(ignored) if (near := near_name(name)) in READ_COLUMNS]
    return "".join(f"; the column {name!r} is not read, did you mean {near!r}?" for name, near in meant)


Fields = tuple[str, str]
"""Names of the role and of the content of a message."""


def _find_turns(value: Mapping[str, Any], layout: RecordFormat) -> tuple[list[Any], Fields, str]:
    """The list of turns, the names of the two fields of a turn, and the column that holds the list."""
    for column in TURN_COLUMNS:
        turns = value.get(column)
        if not isinstance(turns, list):
            continue
        if not turns:
            raise SampleRejected("empty_conversation", f"the record's {column} list is empty")
        if (fields := turn_fields(turns[0], layout)) is not None:
            return turns, fields, column
    raise _unknown_layout(value, layout)


def _of_list(turns: list[Any], layout: RecordFormat, value: Mapping[str, Any]) -> tuple[list[Any], Fields]:
    """The beginning of a pair, which may come from any column."""
    if not turns:
        raise SampleRejected("bad_pair", "there is no message before the two answers")
    if (fields := turn_fields(turns[0], layout)) is None:
        raise _unknown_layout(value, layout)
    return turns, fields


def turn_fields(message: Any, layout: RecordFormat) -> Fields | None:
    """The field names of a message, inferred from one message; None if they do not fit the layout."""
    first = message if isinstance(message, dict) else {}
    if "from" in first and "role" not in first and layout != "openai":
        return "from", "value"
    if "role" in first and layout != "sharegpt":
        return "role", "content"
    return None


def _unknown_layout(value: Mapping[str, Any], layout: RecordFormat) -> SampleRejected:
    wanted = {
        "sharegpt": "'conversations' of from/value",
        "openai": "'messages' of role/content",
    }
    return unknown_layout(value, wanted.get(layout, " or ".join(wanted.values())))


def _answer(messages: list[Any], warnings: list[str], ignored: set[str], column: str) -> list[Turn]:
    """The turns of one answer of a pair: text only, beginning with the assistant."""
    media = RecordMedia.of({}, DEFAULT_FRAME_FPS)
    fields = turn_fields(messages[0], "auto") if messages else None
    turns = read_turns(messages, fields or ("role", "content"), media, warnings, column)
    ignored |= media.ignored
    if media.references:
        raise SampleRejected("bad_pair", "an answer of the pair contains media; put them before both answers")
    if not turns or turns[0].role != "assistant":
        found = f"a {turns[0].role} turn" if turns else "nothing"
        raise SampleRejected("bad_pair", f"an answer of the pair begins with {found}, expected an assistant turn")
    return turns


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
    """Warnings: consecutive turns with the same role, a late system prompt, a result without a tool call."""
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
