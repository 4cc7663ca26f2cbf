"""Columns of a record that nothing reads: rejected if they change what the record means, counted otherwise.

Columns are rejected if data sets and trainers in use give them a meaning: LLaMA-Factory (``label``/``kto_tag``,
``audios``, ``history``), ms-swift (``label``, ``audios``, ``objects``, ``rejected_images``), TRL (``label``,
``chat_template_kwargs``, ``documents``), OpenAI (``functions``), VideoChat (``start``/``end``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from energon_packing.conversation import Turn
from energon_packing.convert.record_media import MediaReference, refuse_own_view
from energon_packing.convert.unread import says_nothing, unread
from energon_packing.errors import SampleRejected

AUDIO = ("audio", "audios", "input_audio", "sound", "sounds", "speech")
_AUDIO_COLUMNS = (*AUDIO, *(f"audio_{what}{s}" for what in ("path", "file", "url") for s in ("", "s")))
_AUDIO_NAMES = frozenset(_AUDIO_COLUMNS)
LABELS = ("label", "labels", "kto_tag", "kto_label", "desirable")
_LABEL_WORDS = ("true", "false", "0", "1", "-1", "desirable", "undesirable", "chosen", "rejected")
_WEIGHTS = (
    "weight",
    "weights",
    "sample_weight",
    "loss_weight",
    "loss_scale",
    "loss_mask",
    "loss",
    "train_mask",
    "mask",
    "train",
)
_TOOLS = ("functions", "function_definitions", "tool_definitions", "tool_schemas", "available_tools")
_SYSTEM = ("system_prompt", "system_message")
_ANSWERS = re.compile(
    r"(chosen|rejected|positive|negative)_"
    r"(messages?|responses?|conversations?|answers?|outputs?|images?|videos?|audios?|tools?)"
)
_GROUNDING = ("<bbox>", "<ref-object>")


def is_preference_label(value: Any) -> bool:
    """Whether a label marks an answer, its steps or its tokens as wanted or unwanted; class names do not."""
    if isinstance(value, str):
        return value.strip().lower() in _LABEL_WORDS
    if isinstance(value, list):
        return -100 in value or (bool(value) and all(isinstance(entry, bool) for entry in value))
    return isinstance(value, bool) or value in (0, 1, -1)


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
    filled = sorted([name for name in record if name not in read and not says_nothing(record[name])])
    for name in filled:
        if (why := _changes_meaning(name, record, turns)) is not None:
            raise SampleRejected("unsupported_column", f"the column {name!r} {why}")
    if not _AUDIO_NAMES.isdisjoint(record) and (count := _count(turns, "<audio>")):
        raise SampleRejected(
            "placeholder_mismatch", f"the text has {count} <audio> placeholder(s), but the record has no audio"
        )
    others = {name: record[name] for name in record if name not in read}
    for kind, is_frames in sorted({(reference.kind, reference.is_frames) for reference in media}):
        refuse_own_view(others, kind, "unsupported_column", "the record", is_frames=is_frames)
    return unread(record, read)


def _changes_meaning(name: str, record: Mapping[str, Any], turns: Sequence[Turn]) -> str | None:
    """Why a filled column may not be ignored; None if it may."""
    value = record[name]
    if name in _AUDIO_COLUMNS:
        return "holds audio, which is not supported"
    if name in LABELS and is_preference_label(value):
        return (
            f"is {value!r:.60}, a preference label (KTO); --kto-label {name} keeps it for a loss that reads "
            "'preference'; to train on the preferred answers alone, keep only their records and remove the column"
        )
    if name in _WEIGHTS and _weighs(value):
        return "weighs or masks the whole record, which is not supported; write the field 'weight' into its messages"
    if name in _TOOLS and says_nothing(record.get("tools")):
        return "holds tool definitions; rename it to 'tools'"
    if name in _SYSTEM and not _is_shown(value, turns):
        return "holds a system prompt that the conversation does not; rename it to 'system'"
    if name == "history" and isinstance(value, list):
        return (
            "holds earlier turns, which are read beside 'instruction' or 'query' only; put them into the list of turns"
        )
    if name == "chat_template_kwargs" or (name == "documents" and isinstance(value, list)):
        return "is an argument of the chat template, which is not supported"
    if name == "objects" and any(_count(turns, tag) for tag in _GROUNDING):
        return f"holds the values of {' and '.join(_GROUNDING)} in the text, which are not supported"
    if _ANSWERS.fullmatch(name):
        return "belongs to an unknown layout of pairs; docs/convert.md lists the supported ones"
    return None


def _weighs(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(entry, bool | int | float | list) for entry in value)
    return isinstance(value, bool | int | float) and value != 1  # True == 1


def _is_shown(value: Any, turns: Sequence[Turn]) -> bool:
    return isinstance(value, str) and any(
        turn.role == "system" and turn.text.strip() == value.strip() for turn in turns
    )


def _count(turns: Sequence[Turn], tag: str) -> int:
    return sum(turn.text.count(tag) for turn in turns)
