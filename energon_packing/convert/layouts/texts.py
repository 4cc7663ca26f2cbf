"""The rows of the_cauldron and FineVision: ``texts``, a list of ``{"user", "assistant"}``, and ``images``.

Their texts name no images. As nanoVLM (``data/datasets.py``) and Idefics 2 train them, all images stand before the
first question; where the texts hold placeholders, these count instead.
"""

from collections.abc import Mapping
from typing import Any

from energon_packing.convert.columns import COLUMNS, filled_column
from energon_packing.convert.layouts.layout import Layout, has_turns, without

_SPEAKERS = ("user", "assistant")


def _matches(record: Mapping[str, Any]) -> bool:
    texts = record.get("texts")
    if not isinstance(texts, list) or not texts or has_turns(record):
        return False
    return all(isinstance(text, dict) and set(_SPEAKERS) <= text.keys() for text in texts)


def _restate(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    messages = [
        {"role": role, "content": text[role], **(without(text, *_SPEAKERS) if role == "user" else {})}
        for text in record["texts"]
        for role in _SPEAKERS
    ]
    if not any("<image>" in str(message["content"]) for message in messages):
        messages[0]["content"] = [*media_parts(record), {"type": "text", "text": messages[0]["content"]}]
    return {**without(record, "texts"), "messages": messages}


def media_parts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A bare content part for each image and video of a record's columns; images come first."""
    columns = ((kind, filled_column(record, names)) for kind, names in COLUMNS.items())
    held = ((kind, record[name]) for kind, name in columns if name is not None)
    return [{"type": kind} for kind, value in held for _ in (value if isinstance(value, list) else [value])]


_EXPECTS = "'texts', a list of user/assistant, and 'images'"
LAYOUT = Layout(name="texts", expects=_EXPECTS, matches=_matches, restate=_restate)
