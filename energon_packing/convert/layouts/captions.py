"""Images or videos with a caption: the media are the user's turn, the caption is the answer, and no text is added.

* ``caption`` beside a column of images or videos: tables, and the tars of img2dataset (``.jpg``, ``.txt``, ``.json``);
* ShareGPT4Video: ``captions``, a list of ``{"idx", "content"}``, and ``video_path``. The caption of the whole video has
  the ``idx`` -1; those of its keyframes describe differences between frames and are left out with a warning.
"""

from collections.abc import Mapping
from typing import Any

from energon_packing.convert.columns import COLUMNS
from energon_packing.convert.layouts.layout import ANSWER_COLUMNS, Layout, filled, has_turns, without
from energon_packing.convert.layouts.texts import media_parts
from energon_packing.errors import SampleRejected

_OTHERS = ("instruction", "query", "question", "answer", "prompt", "text", "texts", *ANSWER_COLUMNS)
"""Columns of other layouts and names, beside which a caption is one more column."""
_WHOLE = ("-1", -1)


def _is_keyframed(record: Mapping[str, Any]) -> bool:
    captions = record.get("captions")
    if not isinstance(record.get("video_path"), str) or not isinstance(captions, list) or not captions:
        return False
    return all(isinstance(each, dict) and {"idx", "content"} <= each.keys() for each in captions)


def _matches(record: Mapping[str, Any]) -> bool:
    if has_turns(record) or any(record.get(name) is not None for name in _OTHERS):
        return False
    has_media = any(filled(record, name) for names in COLUMNS.values() for name in names)
    return _is_keyframed(record) or (isinstance(record.get("caption"), str) and has_media)


def _restate(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    caption = record.get("caption")
    if _is_keyframed(record):
        whole = [each["content"] for each in record["captions"] if each["idx"] in _WHOLE]
        if len(whole) != 1:
            raise SampleRejected("unknown_layout", f"{len(whole)} of its captions have the idx -1, of the whole video")
        if len(record["captions"]) > 1:
            warnings.append("keyframe_captions_left_out")
        caption = whole[0]
        record = {**without(record, "captions", "video_path"), "videos": [record["video_path"]]}
    question = {"role": "user", "content": media_parts(record)}
    return {**without(record, "caption"), "messages": [question, {"role": "assistant", "content": caption}]}


_EXPECTS = "'caption' and an image or video, or 'captions' of idx/content and 'video_path'"
LAYOUT = Layout(name="captions", expects=_EXPECTS, matches=_matches, restate=_restate)
