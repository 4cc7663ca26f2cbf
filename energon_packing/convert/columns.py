"""Columns of a record that nothing reads: rejected if they change what the record means, counted otherwise.

Columns are rejected if data sets and trainers in use give them a meaning: LLaMA-Factory (``label``/``kto_tag``,
``audios``, ``history``), ms-swift (``label``, ``audios``, ``objects``, ``rejected_images``), TRL (``label``,
``chat_template_kwargs``, ``documents``), OpenAI (``functions``), VideoChat (``start``/``end``).

Additional values of the trained tokens from a record: advantages, log-probabilities, rewards.

A label that marks one answer as wanted or unwanted (KTO): stored as the extra ``preference``, as pairs have it.

LLaMA-Factory calls the column ``kto_tag``, TRL and ms-swift ``label``. It is read only where the user names it: without
a loss that reads ``preference``, unwanted answers would be learned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from energon_packing.conversation import PREFERENCE, Turn, read_extras
from energon_packing.convert.fields import expect, says_nothing, unread
from energon_packing.convert.record_media import MediaReference, refuse_own_view
from energon_packing.errors import SampleRejected

AUDIO = ("audio", "audios", "input_audio", "sound", "sounds", "speech")
_AUDIO_COLUMNS = frozenset((*AUDIO, *(f"audio_{what}{s}" for what in ("path", "file", "url") for s in ("", "s"))))
LABELS = ("label", "labels", "kto_tag", "kto_label", "desirable")
_LABEL_WORDS = ("true", "false", "0", "1", "-1", "desirable", "undesirable", "chosen", "rejected")
_ANSWERS = ("chosen", "rejected")
_GROUNDING = ("<bbox>", "<ref-object>")


def is_preference_label(value: Any) -> bool:
    """Whether a label marks an answer, its steps or its tokens as wanted or unwanted; class names do not."""
    if isinstance(value, str):
        return value.strip().lower() in _LABEL_WORDS
    if isinstance(value, list):
        return -100 in value or (bool(value) and all(isinstance(entry, bool) for entry in value))
    return isinstance(value, bool) or value in (0, 1, -1)


def _weighs(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(entry, bool | int | float | list) for entry in value)
    return isinstance(value, bool | int | float) and value != 1  # True == 1


def _count(turns: Sequence[Turn], tag: str) -> int:
    return sum(turn.text.count(tag) for turn in turns)


_Applies = Callable[[Any, Mapping[str, Any], Sequence[Turn]], bool]
_CHANGE_THE_MEANING: tuple[tuple[Collection[str], _Applies, str], ...] = (
    (_AUDIO_COLUMNS, lambda value, record, turns: True, "holds audio, which is not supported"),
    (
        LABELS,
        lambda value, record, turns: is_preference_label(value),
        "is {value!r:.60}, a preference label (KTO); --kto-label {name} keeps it for a loss that reads 'preference'; "
        "to train on the preferred answers alone, keep only their records and remove the column",
    ),
    (
        (
            *("weight", "weights", "sample_weight", "loss_weight", "loss_scale", "loss_mask"),
            *("loss", "train_mask", "mask", "train"),
        ),
        lambda value, record, turns: _weighs(value),
        "weighs or masks the whole record, which is not supported; write the field 'weight' into its messages",
    ),
    (
        ("functions", "function_definitions", "tool_definitions", "tool_schemas", "available_tools"),
        lambda value, record, turns: says_nothing(record.get("tools")),
        "holds tool definitions; rename it to 'tools'",
    ),
    (
        ("system_prompt", "system_message"),
        lambda value, record, turns: (
            not (isinstance(value, str) and any(t.role == "system" and t.text.strip() == value.strip() for t in turns))
        ),
        "holds a system prompt that the conversation does not; rename it to 'system'",
    ),
    (
        ("history",),
        lambda value, record, turns: isinstance(value, list),
        "holds earlier turns, which are read beside 'instruction' or 'query' only; put them into the list of turns",
    ),
    (
        ("chat_template_kwargs",),
        lambda value, record, turns: True,
        "is an argument of the chat template, which is not supported",
    ),
    (
        ("documents",),
        lambda value, record, turns: isinstance(value, list),
        "is an argument of the chat template, which is not supported",
    ),
    (
        ("objects",),
        lambda value, record, turns: any(_count(turns, tag) for tag in _GROUNDING),
        f"holds the values of {' and '.join(_GROUNDING)} in the text, which are not supported",
    ),
    (
        frozenset(
            f"{answer}_{what}{s}"
            for answer in ("chosen", "rejected", "positive", "negative")
            for what in ("message", "response", "conversation", "answer", "output", "image", "video", "audio", "tool")
            for s in ("", "s")
        ),
        lambda value, record, turns: True,
        "belongs to an unknown layout of pairs; docs/convert.md lists the supported ones",
    ),
)
"""Columns, when they may not be ignored, and why."""


def check_columns(
    record: Mapping[str, Any], read: Collection[str], turns: Sequence[Turn], media: Sequence[MediaReference]
) -> set[str]:
    """Checks every column that nothing reads.

    Args:
        record: the parsed JSON.
        read: the columns that were read.
        turns, media: what was found in them.

    Returns:
        Names of filled columns that do not change the meaning.

    Raises:
        SampleRejected: ``unsupported_column`` for one that changes the meaning, with its name.
    """
    others = {name: record[name] for name in record if name not in read}
    for name in sorted(name for name in others if not says_nothing(record[name])):
        for names, applies, why in _CHANGE_THE_MEANING:
            if name in names and applies(record[name], record, turns):
                raise SampleRejected(
                    "unsupported_column", f"the column {name!r} {why.format(name=name, value=record[name])}"
                )
    if not _AUDIO_COLUMNS.isdisjoint(record) and (count := _count(turns, "<audio>")):
        raise SampleRejected(
            "placeholder_mismatch", f"the text has {count} <audio> placeholder(s), but the record has no audio"
        )
    for kind, is_frames in sorted({(reference.kind, reference.is_frames) for reference in media}):
        refuse_own_view(others, kind, "unsupported_column", "the record", is_frames=is_frames)
    return unread(record, read)


def parse_extras(record: Mapping[str, Any], columns: Sequence[str], *, pair: bool) -> dict[str, Any]:
    """Reads the column ``extras`` (name -> value) and each separately named column.

    A value is one number for all trained tokens, or a list with one number per token. For a pair, it is one number for
    both answers, or ``{"chosen": ..., "rejected": ...}`` of numbers or lists. These may also be in two columns:
    ``chosen_NAME`` and ``rejected_NAME``, or ``NAME_chosen`` and ``NAME_rejected``.

    Args:
        record: the parsed JSON.
        columns: names of further columns; a record may lack any of them.
        pair: whether the record holds a chosen and a rejected answer.

    Raises:
        SampleRejected: ``bad_extra`` for an invalid value, ``conflicting_columns`` if a name has two values.
    """
    given = {} if record.get("extras") is None else record["extras"]
    values = dict(expect(given, dict, "bad_extra", "the extras column is", "name -> value"))
    for name in columns:
        if (value := _column(record, name, pair)) is None:
            continue
        if name in values:
            raise SampleRejected("conflicting_columns", f"{name!r} is a column and also in the extras column")
        values[name] = value
    try:
        extras = read_extras(values)
    except SampleRejected as error:
        raise _bad_extra(error.detail) from error
    if PREFERENCE in extras:
        raise _bad_extra(f"{PREFERENCE!r} is made from the answers of a pair and cannot be given")
    for name, value in extras.items():
        if isinstance(value, Mapping) and (not pair or set(value) != set(_ANSWERS)):
            raise _bad_extra(f"{name!r} has parts other than the two answers of a pair")
        if isinstance(value, list | tuple) and pair:
            raise _bad_extra(f"{name!r} is one list, but a pair has two answers; give one list for each")
    return extras


def _bad_extra(detail: str) -> SampleRejected:
    return SampleRejected("bad_extra", detail)


def extra_columns_read(columns: Sequence[str], *, pair: bool) -> set[str]:
    """Every column that `parse_extras` checks for these names."""
    return {*columns, *(column for name in columns if pair for both in _names_of_pair(name) for column in both)}


def _names_of_pair(name: str) -> tuple[list[str], list[str]]:
    return [f"{answer}_{name}" for answer in _ANSWERS], [f"{name}_{answer}" for answer in _ANSWERS]


def _column(record: Mapping[str, Any], name: str, pair: bool) -> Any:
    value = record.get(name)
    for names in _names_of_pair(name) if pair else ():
        parts = [record.get(column) for column in names]
        if parts == [None, None]:
            continue
        if value is not None:
            raise SampleRejected("conflicting_columns", f"the record has both {name!r} and {names[0]!r}")
        if None in parts:
            raise _bad_extra(f"the record has only one of {names[0]!r} and {names[1]!r}")
        value = dict(zip(_ANSWERS, parts, strict=True))
    return value


_WORDS = {"true": True, "1": True, "desirable": True, "false": False, "0": False, "-1": False, "undesirable": False}


def read_kto_label(record: Mapping[str, Any], column: str, warnings: list[str], *, pair: bool) -> dict[str, float]:
    """The extra of a record: 1 for a wanted answer, -1 for an unwanted one.

    Args:
        record: the parsed JSON.
        column: name of the label.
        warnings: receives ``unpaired_preference``.
        pair: whether the record is a pair, which needs no label.

    Raises:
        SampleRejected: ``bad_label`` if it is missing or is neither true nor false, ``bad_pair`` for a pair.
    """
    if pair:
        raise SampleRejected("bad_pair", f"the record is a pair and has the label {column!r}; convert pairs without it")
    value = record.get(column)
    wanted = value if isinstance(value, bool) else _WORDS.get(str(value).strip().lower())
    if wanted is None:
        what = "is missing" if value is None else f"is {value!r:.60}"
        raise SampleRejected("bad_label", f"the label {column!r} {what}; it must be true or false")
    warnings.append("unpaired_preference")
    return {PREFERENCE: 1.0 if wanted else -1.0}
