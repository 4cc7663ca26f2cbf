"""One record of text-to-video data -> a caption and the files that it names. Opens no file.

A record is one JSON object; each column may have any one of its names::

    {"caption": "a red ball rolls", "video": "clips/0001.mp4"}
    {"prompt": "a red ball rolls", "latents": "0001.safetensors", "context": "0001.text.npy", "metadata": {"fps": 16}}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from energon_packing.convert.columns import FileReference, filled_column, refuse_own_view
from energon_packing.convert.fields import expect, unread
from energon_packing.convert.layouts.layout import FileKind, Layout
from energon_packing.convert.media_files import MEDIA_KINDS, MediaFile
from energon_packing.errors import SampleRejected
from energon_packing.wan.record import SUBFLAVORS, TextToVideo
from energon_packing.wan.tensor_files import NAMES, TensorFile, check_tensor

FileRole = Literal["video", "image", "latents", "context"]
COLUMNS: Mapping[Literal["caption"] | FileRole, tuple[str, ...]] = {
    "caption": ("caption", "prompt", "text"),
    "video": ("video", "video_path", "videos"),
    "image": ("image", "image_path", "images"),
    "latents": NAMES["latents"],
    "context": NAMES["context"],
}

_READ_COLUMNS = frozenset(("id", "metadata", *(name for names in COLUMNS.values() for name in names)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedVideoRecord:
    """A parsed record, as `energon_packing.convert.records.ParsedRecord`; a clip has no answers that anybody judges."""

    caption: str | None  # None if there are only embeddings
    media: tuple[FileReference, ...]  # the files, in the order video or image, latents, context
    metadata: Mapping[str, Any]
    warnings: tuple[str, ...]
    ignored: tuple[str, ...] = ()  # columns that hold something but that nothing reads, sorted
    layout: str = "text-to-video"
    judged: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each file."""
        return tuple(reference.kind for reference in self.media)

    def record(self, key: str, names: Sequence[str], files: Sequence[MediaFile | TensorFile]) -> dict[str, Any]:
        """Returns the JSON form of the sample, whose files have these entries in the store."""
        parts: dict[str, Any] = {
            "video" if file.kind == "image" else file.kind: (
                replace(file, name=name) if isinstance(file, TensorFile) else file.media(name)
            )
            for name, file in zip(names, files, strict=True)
        }
        return TextToVideo(key=key, caption=self.caption, metadata=self.metadata, **parts).to_record()


def parse_text_to_video(value: Any) -> ParsedVideoRecord:
    """Parses one record. An image is a clip of one frame; beside a video or latents it is not read. A record with both
    a video and its latents keeps the latents, with the warning ``video_not_stored``. Raises SampleRejected:
    ``unknown_layout`` (not an object, or no video, image or latents), ``empty_caption`` (and no embeddings),
    ``conflicting_columns``, ``non_string_value``, ``unsupported_column`` (asks for a part of the video)."""
    expect(value, dict, "unknown_layout", "the record is", "an object")
    found: dict[str, str | None] = {column: _column(value, column) for column in COLUMNS if column != "image"}
    if still := not (found["video"] or found["latents"]):
        found["image"] = _column(value, "image")
    caption = found["caption"]
    if still and not found["image"]:
        keys = ", ".join(sorted(key[:40] for key in value)[:20]) or "none"
        raise SampleRejected("unknown_layout", f"expected 'video', 'image' or 'latents'; the record's keys are: {keys}")
    if (caption is None or not caption.strip()) and not found["context"]:
        raise SampleRejected("empty_caption", "the record has neither a caption nor caption embeddings ('context')")
    metadata = {} if value.get("metadata") is None else value["metadata"]
    expect(metadata, dict, "non_string_value", "'metadata' is", "an object")
    both = bool(found["video"] and found["latents"])
    kinds: tuple[FileRole, ...] = ("latents", "context") if both else ("video", "image", "latents", "context")
    if found["video"] and not both:
        refuse_own_view(value, "video", "unsupported_column", "the record")
    return ParsedVideoRecord(
        caption=caption,
        media=tuple(FileReference(kind=kind, path=path) for kind in kinds if (path := found.get(kind))),
        metadata=metadata,
        warnings=("video_not_stored",) * both,
        ignored=tuple(sorted(unread(value, _READ_COLUMNS.difference(() if still else COLUMNS["image"])))),
    )


def _column(value: Mapping[str, Any], column: Literal["caption"] | FileRole) -> str | None:
    if (name := filled_column(value, COLUMNS[column])) is None:
        return None
    entry = value[name]
    if column != "caption":
        if isinstance(entry, list) and len(entry) == 1:
            entry = entry[0]
        if isinstance(entry, dict):
            entry = entry.get("path")
    return expect(entry, str, "non_string_value", f"{name!r} holds", "text")


_TENSOR = FileKind(check=check_tensor, made=TensorFile, corrupt="corrupt_tensor")
LAYOUT = Layout(
    name="text-to-video",
    expects="'video', 'image' or 'latents'",
    parse=parse_text_to_video,
    files={**MEDIA_KINDS, "latents": _TENSOR, "context": _TENSOR},
    subflavors=SUBFLAVORS,
)
