"""Qwen-VL's conversations, whose text holds the paths of images: ``Picture 1: <img>a.jpg</img>``.

Everything around the tags stays in the text, boxes too: ``<box>(12,30),(480,720)</box>`` counts in thousandths of the
image for Qwen-VL, and in pixels for later models, so no number of it is changed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from energon_packing.convert.layouts.layout import TURN_COLUMNS, Layout

_IMAGE = re.compile(r"<img>(.+?)</img>", re.DOTALL)
_FIELDS = ("value", "content")


def matches(record: Mapping[str, Any]) -> bool:
    """Whether the text of a turn names an image in tags."""
    return any("<img>" in text and _IMAGE.search(text) for text in _texts(record))


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    for column in TURN_COLUMNS:
        turns = record.get(column)
        for turn in turns if isinstance(turns, list) else ():
            for field in _FIELDS if isinstance(turn, dict) else ():
                if isinstance(text := turn.get(field), str):
                    yield text


def _restate(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    if any("<box>" in text for text in _texts(record)):
        warnings.append("boxes_kept_as_text")
    columns = [column for column in TURN_COLUMNS if isinstance(record.get(column), list)]
    return {**record, **{column: [_turn(turn) for turn in record[column]] for column in columns}}


def _turn(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    return {name: _parts(value) if name in _FIELDS else value for name, value in turn.items()}


def _parts(text: Any) -> Any:
    """Text with image tags as a list of parts; any other value as it is."""
    if not isinstance(text, str) or not _IMAGE.search(text):
        return text
    pieces = _IMAGE.split(text)  # text and paths in turn
    return [
        {"type": "image", "image": piece} if number % 2 else {"type": "text", "text": piece}
        for number, piece in enumerate(pieces)
    ]


LAYOUT = Layout(name="qwen-vl", expects="turns with <img>path</img> in their text", matches=matches, restate=_restate)
