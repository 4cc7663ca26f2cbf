"""The content of one message -> text and media in reading order."""

from __future__ import annotations

import re
from typing import Any

from energon_packing.conversation import MediaKind, Part
from energon_packing.convert.record_media import FRAME_TIMING, RecordMedia, kind_of, reference_of, refuse_own_view
from energon_packing.errors import SampleRejected

_TEXTS = ("input_text", "output_text")
"""Types of texts in OpenAI's Responses, beside ``text``."""
_PLACEHOLDER = re.compile(r"<(image|video)>")


def read_content(content: Any, number: int, media: RecordMedia, column: str) -> tuple[Part, ...]:
    """Text and media in reading order; text is kept verbatim, adjacent texts are joined.

    Args:
        content: text, or a list of texts and parts.
        number: of the turn, for messages.
        media: the record's media; receives the media that the content names and the fields that nothing reads.
        column: where the content is, such as ``messages[].content``.

    Raises:
        SampleRejected: ``non_string_value``, ``unknown_part``, ``unsupported_field``, ``bad_frames``.
    """
    if type(content) is str and "<image>" not in content and "<video>" not in content:
        return (content,) if content else ()
    pieces: list[Part] = []
    if isinstance(content, str):
        split_text(content, media, pieces)
    elif isinstance(content, list):
        for part in content:
            _read_part(part, number, media, column, pieces)
    else:
        raise SampleRejected(
            "non_string_value", f"turn {number} is {kind_of(content)}, expected text or a list of parts"
        )
    return joined(pieces)


def joined(pieces: list[Part]) -> tuple[Part, ...]:
    """Parts without empty texts, adjacent texts as one."""
    found: list[Part] = []
    for piece in pieces:
        if piece == "":
            continue
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return tuple(found)


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
            raise SampleRejected(
                "non_string_value", f"turn {number}: a text part {found}; its fields are: {_fields(part)}"
            )
        split_text(part["text"], media, pieces)
        media.ignore(part, {"type", "text"}, f"{column}[]")
    elif kind in ("image", "image_url", "video", "video_url", "input_image"):
        media_kind: MediaKind = "image" if "image" in kind else "video"
        name = "image_url" if kind == "input_image" else kind
        path = part.get(name, part.get(media_kind))
        read = {"type", name, media_kind}
        if kind == "input_image" and part.get("file_id") is not None:
            raise SampleRejected("remote_media", f"turn {number}: an image is a file_id of a service, not a file")
        if isinstance(path, dict):
            media.ignore(path, {"url", "path", "bytes"}, f"{column}[].{kind}")
            if not isinstance(path.get("bytes"), bytes):
                path = path.get("url", path.get("path"))
        own_view = {"is_frames": isinstance(path, list), "is_part": True}
        refuse_own_view(part, media_kind, "unsupported_field", f"turn {number}: a content part", **own_view)
        if path is None and all(value is None for field, value in part.items() if field != "type"):
            # As in tables, which fill the fields that a part lacks with null.
            pieces.append(media.next_of_column(media_kind))  # a bare part stands for the column's next entry
        elif isinstance(path, list):
            pieces.append(media.add(reference_of({**part, "frames": path}, media_kind, kind, media.frame_fps)))
            read.update(FRAME_TIMING)
        else:
            pieces.append(media.add(reference_of(path, media_kind, kind, media.frame_fps)))
        media.ignore(part, read, f"{column}[]")
    else:
        known = "text, image, image_url, video, video_url, input_text, input_image, output_text"
        raise SampleRejected("unknown_part", f"turn {number} has a content part of type {kind!r}; known: {known}")


def _fields(part: dict[str, Any]) -> str:
    return ", ".join(sorted(str(name)[:40] for name in part)[:20])
