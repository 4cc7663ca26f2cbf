"""Rows of images or videos without a list of turns: with a caption, or with ``texts`` of a user and an assistant.

* ``caption`` beside a column of images or videos: tables, and the tars of img2dataset (``.jpg``, ``.txt``, ``.json``);
  the media are the user's turn, the caption is the answer, and no text is added;
* ShareGPT4Video: ``captions``, a list of ``{"idx", "content"}``, and ``video_path``. The caption of the whole video has
  the ``idx`` -1; those of its keyframes describe differences between frames and are left out with a warning;
* the_cauldron and FineVision: ``texts``, a list of ``{"user", "assistant"}``, and ``images``. Their texts name no
  images. As nanoVLM (``data/datasets.py``) and Idefics 2 train them, all images stand before the first question; where
  the texts hold placeholders, these count instead.
"""

from collections.abc import Mapping
from typing import Any

from energon_packing.convert.columns import COLUMNS, filled_column
from energon_packing.convert.layouts.layout import ANSWER_COLUMNS, Layout, filled, has_turns, without
from energon_packing.errors import SampleRejected

_OTHERS = ("instruction", "query", "question", "answer", "prompt", "text", "texts", *ANSWER_COLUMNS)
"""Columns of other layouts and names, beside which a caption is one more column."""
_WHOLE = ("-1", -1)
_SPEAKERS = ("user", "assistant")


def _is_keyframed(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("video_path"), str) and _are_objects(record.get("captions"), "idx", "content")


def _are_objects(value: Any, *keys: str) -> bool:
    """Whether it is a list of objects, at least one, which all have these keys."""
    has_any = isinstance(value, list) and bool(value)
    return has_any and all(isinstance(each, dict) and {*keys} <= each.keys() for each in value)


def _has_caption(record: Mapping[str, Any]) -> bool:
    if has_turns(record) or any(record.get(name) is not None for name in _OTHERS):
        return False
    has_media = any(filled(record, name) for names in COLUMNS.values() for name in names)
    return _is_keyframed(record) or (isinstance(record.get("caption"), str) and has_media)


def _restate_caption(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    caption = record.get("caption")
    if _is_keyframed(record):
        if len(whole := [each["content"] for each in record["captions"] if each["idx"] in _WHOLE]) != 1:
            raise SampleRejected("unknown_layout", f"{len(whole)} of its captions have the idx -1, of the whole video")
        if len(record["captions"]) > 1:
            warnings.append("keyframe_captions_left_out")
        caption = whole[0]
        record = {**without(record, "captions", "video_path"), "videos": [record["video_path"]]}
    question = {"role": "user", "content": _media_parts(record)}
    return {**without(record, "caption"), "messages": [question, {"role": "assistant", "content": caption}]}


def _has_texts(record: Mapping[str, Any]) -> bool:
    return not has_turns(record) and _are_objects(record.get("texts"), *_SPEAKERS)


def _restate_texts(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    messages = [
        {"role": role, "content": text[role], **(without(text, *_SPEAKERS) if role == "user" else {})}
        for text in record["texts"]
        for role in _SPEAKERS
    ]
    if not any("<image>" in str(message["content"]) for message in messages):
        messages[0]["content"] = [*_media_parts(record), {"type": "text", "text": messages[0]["content"]}]
    return {**without(record, "texts"), "messages": messages}


def _media_parts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A bare content part for each image and video of a record's columns; images come first."""
    columns = ((kind, filled_column(record, names)) for kind, names in COLUMNS.items())
    held = ((kind, record[name]) for kind, name in columns if name is not None)
    return [{"type": kind} for kind, value in held for _ in (value if isinstance(value, list) else [value])]


_CAPTIONS = Layout(
    name="captions",
    expects="'caption' and an image or video, or 'captions' of idx/content and 'video_path'",
    matches=_has_caption,
    restate=_restate_caption,
)
_TEXTS = Layout(
    name="texts", expects="'texts', a list of user/assistant, and 'images'", matches=_has_texts, restate=_restate_texts
)
DECLARED = (_CAPTIONS, _TEXTS)
