"""Finds names that look like a misspelling or variant of a column or field that would be read."""

from __future__ import annotations

from difflib import get_close_matches

from energon_packing.convert.loss_fields import LOSS_FIELDS
from energon_packing.convert.thinking_fields import THINKING_FIELDS

_COLUMNS = ("messages", "conversations", "system", "tools", "image", "images", "video", "videos", "extras")
_FIELDS = ("content", "tool_calls", "tool_call_id", "function_call", *LOSS_FIELDS, *THINKING_FIELDS)
_OTHER_NAMES = {
    **dict.fromkeys(("img", "imgs", "picture", "pictures", "photo", "photos"), "images"),
    **{f"image_{what}{s}": "images" for what in ("path", "file", "url", "filename") for s in ("", "s")},
    **dict.fromkeys(("clip", "clips", "vid", "vids"), "videos"),
    **{f"video_{what}{s}": "videos" for what in ("path", "file", "url", "filename") for s in ("", "s")},
    **dict.fromkeys(("dialog", "dialogue", "dialogs", "turns"), "conversations"),
}
_OTHER_FIELDS = dict.fromkeys(("think", "thought", "thoughts", "cot", "analysis"), "reasoning_content")
_ALIKE = 0.82
"""Share of common letters, as `difflib` counts them: ``vidoes`` is near (0.83), ``image_ids`` is not (0.80)."""


def near_name(place: str) -> str | None:
    """The name that was probably meant, or None.

    Args:
        place: a column, or a field as ``messages[].name``.
    """
    field = "[]." in place
    name = place.rpartition("[].")[2].strip().lower()
    aliases, known = (_OTHER_FIELDS, _FIELDS) if field else (_OTHER_NAMES, _COLUMNS)
    if name in aliases:
        return aliases[name]
    matches = get_close_matches(name, known, n=1, cutoff=_ALIKE) if len(name) >= 4 else []
    return matches[0] if matches and matches[0] != place.rpartition("[].")[2] else None
