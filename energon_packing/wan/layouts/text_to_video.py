"""Text-to-video data, which is no conversation.

One record of text-to-video data -> a caption and the files that it names. Opens no file.

A record is one JSON object; each column may have any one of its names::

    {"caption": "a red ball rolls", "video": "clips/0001.mp4"}
    {"prompt": "a red ball rolls", "latents": "0001.safetensors", "context": "0001.text.npy", "metadata": {"fps": 16}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from energon_packing.conversation import Media
from energon_packing.convert.columns import refuse_own_view
from energon_packing.convert.fields import unread
from energon_packing.convert.layouts.layout import FileKind, Layout
from energon_packing.convert.media_files import MEDIA_KINDS, MediaFile
from energon_packing.errors import SampleRejected
from energon_packing.wan.config import SUBFLAVORS
from energon_packing.wan.record import StoredTensor, TextToVideo
from energon_packing.wan.tensor_files import NAMES, TensorFile, check_tensor

Column = Literal["caption", "video", "latents", "context"]
COLUMNS: Mapping[Column, tuple[str, ...]] = {
    "caption": ("caption", "prompt", "text"),
    "video": ("video", "video_path", "videos"),
    "latents": NAMES["latents"],
    "context": NAMES["context"],
}

_READ_COLUMNS = frozenset(("id", "metadata", *(name for names in COLUMNS.values() for name in names)))


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoReference:
    """A file as the record names it."""

    kind: Literal["video", "latents", "context"]
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedVideoRecord:
    """A parsed record.

    Attributes:
        caption: None if there are only embeddings.
        media: the files, in the order video, latents, context.
        metadata: the object that the record holds under this name.
        warnings: names of oddities that were accepted.
        ignored: columns that hold something but that nothing reads, sorted.
        layout, judged: for the report; a clip has no answers that anybody judges.
    """

    caption: str | None
    media: tuple[VideoReference, ...]
    metadata: Mapping[str, Any]
    warnings: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    layout: str = "text-to-video"
    judged: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each file."""
        return tuple(reference.kind for reference in self.media)

    def record(self, key: str, names: Sequence[str], files: Sequence[MediaFile | TensorFile]) -> dict[str, Any]:
        """The JSON form of the sample.

        Args:
            key: of the sample.
            names: the entry of each file in the store.
            files: one for each entry of ``media``.
        """
        video: Media | None = None
        tensors: dict[str, StoredTensor] = {}
        for name, file in zip(names, files, strict=True):
            if isinstance(file, TensorFile):
                tensors[file.kind] = file.stored(name)
            else:
                video = file.media(name)
        sample = TextToVideo(
            key=key,
            caption=self.caption,
            video=video,
            latents=tensors.get("latents"),
            context=tensors.get("context"),
            metadata=self.metadata,
        )
        return sample.to_record()


def parse_text_to_video(value: Any) -> ParsedVideoRecord:
    """Parses one record.

    A record with both a video and its latents keeps the latents, with the warning ``video_not_stored``.

    Raises:
        SampleRejected: ``unknown_layout`` (not an object, or neither video nor latents), ``empty_caption`` (and no
            embeddings), ``conflicting_columns``, ``non_string_value``, ``unsupported_column`` (asks for a part of the
            video).
    """
    if not isinstance(value, dict):
        raise SampleRejected("unknown_layout", f"the record is a {type(value).__name__}, expected an object")
    found = {column: _column(value, column) for column in COLUMNS}
    caption = found["caption"]
    if not (found["video"] or found["latents"]):
        keys = ", ".join(sorted(key[:40] for key in value)[:20]) or "none"
        raise SampleRejected("unknown_layout", f"expected 'video' or 'latents'; the record's keys are: {keys}")
    if (caption is None or not caption.strip()) and not found["context"]:
        raise SampleRejected("empty_caption", "the record has neither a caption nor caption embeddings ('context')")
    metadata = value.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise SampleRejected("non_string_value", f"'metadata' is a {type(metadata).__name__}, expected an object")
    warnings = []
    if found["video"] and found["latents"]:
        found["video"] = None
        warnings.append("video_not_stored")
    if found["video"]:
        refuse_own_view(value, "video", "unsupported_column", "the record")
    kinds: tuple[Literal["video", "latents", "context"], ...] = ("video", "latents", "context")
    return ParsedVideoRecord(
        caption=caption,
        media=tuple(VideoReference(kind=kind, path=path) for kind in kinds if (path := found[kind])),
        metadata=metadata or {},
        warnings=tuple(warnings),
        ignored=tuple(sorted(unread(value, _READ_COLUMNS))),
    )


def _column(value: Mapping[str, Any], column: Column) -> str | None:
    filled = [name for name in COLUMNS[column] if value.get(name) not in (None, "", [])]
    if len(filled) > 1:
        raise SampleRejected("conflicting_columns", f"the record has both {filled[0]!r} and {filled[1]!r}")
    if not filled:
        return None
    entry = value[filled[0]]
    if column != "caption":
        if isinstance(entry, list) and len(entry) == 1:
            entry = entry[0]
        if isinstance(entry, dict):
            entry = entry.get("path")
    if not isinstance(entry, str):
        what = f"a {type(entry).__name__}" if not isinstance(entry, list) else f"a list of {len(entry)}"
        raise SampleRejected("non_string_value", f"{filled[0]!r} holds {what}, expected text")
    return entry


_TENSOR = FileKind(check=check_tensor, made=TensorFile, corrupt="corrupt_tensor")
LAYOUT = Layout(
    name="text-to-video",
    expects="'video' or 'latents'",
    parse=parse_text_to_video,
    files={**MEDIA_KINDS, "latents": _TENSOR, "context": _TENSOR},
    subflavors=SUBFLAVORS,
)
