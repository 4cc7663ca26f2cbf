"""A text-to-video sample as stages after conversion see it: a caption and a clip, or their encoded forms.

It is stored as JSON in the Energon data set (`TextToVideo.to_record`). Clips and tensors are named, never embedded.
Conversion reads their sizes, so that a sample can be measured without its pixels.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from energon_packing.conversation import Media, media_of
from energon_packing.errors import SampleRejected
from energon_packing.stored_record import StoredRecord

TensorRole = Literal["latents", "context"]
RECORD_VERSION = 1
RECORD_KIND = "text_to_video"
SUBFLAVORS = {"energon_packing": "text-to-video-v1"}
"""The mark of text-to-video samples, which no conversation cooker takes."""
FLOATING = ("float16", "bfloat16", "float32", "float64")  # the dtypes of a stored tensor, by torch's names
AXES: Mapping[TensorRole, int] = {"latents": 4, "context": 2}
_RECORD = StoredRecord("text-to-video sample")
_RECORD_FIELDS = {"version", "kind", "caption", "video", "latents", "context", "metadata"}
_CLIP_FIELDS = {
    "video": ("name", "width", "height", "frames", "fps", "duration", "time_points"),
    "image": ("name", "width", "height", "kind"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor that a record names."""

    name: str  # the entry's name in its store; relative, without ``..``; its extension determines how it is read
    tensor: str  # its name inside a file of several tensors; empty if the file is the tensor
    shape: tuple[int, ...]
    """Latents ``(channels, frames, height, width)``, text ``(rows, width)``; an axis of 1 before them is left out."""
    dtype: str
    rows: int | None = None  # of a text, those before trailing rows of zeros, which are padding; None means all

    def to_record(self) -> dict[str, Any]:
        """Returns the JSON form."""
        rows = {} if self.rows is None else {"rows": self.rows}
        return {"name": self.name, "tensor": self.tensor, "shape": list(self.shape), "dtype": self.dtype, **rows}


@dataclass(frozen=True, kw_only=True, slots=True)
class TextToVideo:
    """One training sample of a text-to-video model."""

    key: str  # unique in its data set; letters, digits, ``-`` and ``_`` only
    caption: str | None = None  # the text; None if only its embeddings are stored
    # The clip, with all its sizes, or an image, which is a clip of one frame; None if ``latents`` replaces it.
    video: Media | None = None
    latents: StoredTensor | None = None  # the encoded clip
    # Embeddings of the text, without padding; if None, they are made from the caption.
    context: StoredTensor | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)  # any JSON values, passed on to the batch

    def __post_init__(self) -> None:
        if (self.video is None) == (self.latents is None):
            raise SampleRejected("bad_record", "the record needs either a video or its latents")
        if self.caption is None and self.context is None:
            raise SampleRejected("bad_record", "the record has neither a caption nor caption embeddings")
        clip = self.video
        if clip is not None and any(getattr(clip, name) is None for name in _CLIP_FIELDS[clip.kind]):
            raise SampleRejected("unmeasured_media", f"not all sizes of {reprlib.repr(clip.name)} are known")
        for role, axes in AXES.items():
            stored: StoredTensor | None = getattr(self, role)
            if stored is not None and len(stored.shape) != axes:
                raise SampleRejected("wrong_shape", f"{role} of shape {list(stored.shape)}, expected {axes} axes")

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the entries of the store that the record names, in the order video, latents, context."""
        return tuple(part.name for part in (self.video, self.latents, self.context) if part is not None)

    def to_record(self) -> dict[str, Any]:
        """Returns the JSON form that is stored in the data set; `from_record` reads it back unchanged."""
        clip = {} if self.video is None else self.video.to_record()
        parts = {
            "caption": self.caption,
            "video": self.video and {name: clip[name] for name in _CLIP_FIELDS[self.video.kind] if name in clip},
            "latents": self.latents and self.latents.to_record(),
            "context": self.context and self.context.to_record(),
            "metadata": dict(self.metadata) or None,
        }
        given = {name: part for name, part in parts.items() if part is not None}
        return {"version": RECORD_VERSION, "kind": RECORD_KIND, **given}

    @classmethod
    def from_record(cls, key: str, record: Any) -> "TextToVideo":
        """Reads what `to_record` wrote. Raises SampleRejected: ``bad_record`` if the JSON is not of that form,
        ``media_outside_root`` if a name is absolute or holds ``..``, and the reasons of `TextToVideo` itself."""
        _RECORD.check_keys(record, _RECORD_FIELDS, "the record")
        _RECORD.check_version(record, RECORD_VERSION)
        if record.get("kind") != RECORD_KIND:
            raise _RECORD.bad(f"its kind is {reprlib.repr(record.get('kind'))}")
        caption, metadata = record.get("caption"), record.get("metadata", {})
        if caption is not None and not isinstance(caption, str):
            raise _RECORD.bad(f"the caption is a {type(caption).__name__}")
        if not isinstance(metadata, Mapping):
            raise _RECORD.bad(f"metadata is a {type(metadata).__name__}, expected an object")
        return cls(
            key=key,
            caption=caption,
            video=_read_clip(record["video"]) if "video" in record else None,
            metadata=dict(metadata),
            **{role: _read_tensor(record[role], role) for role in AXES if role in record},
        )


def _read_clip(value: Any) -> Media:
    kind: Any = "image" if isinstance(value, dict) and value.get("kind") == "image" else "video"
    _RECORD.check_keys(value, set(_CLIP_FIELDS[kind]), "the video")
    return media_of({**value, "kind": kind})


def _read_tensor(value: Any, role: TensorRole) -> StoredTensor:
    _RECORD.check_keys(value, {"name", "tensor", "shape", "dtype", "rows"}, role)
    _RECORD.check_name(value.get("name"), role, role)
    tensor, shape, dtype = value.get("tensor", ""), value.get("shape"), value.get("dtype")
    if not isinstance(tensor, str) or dtype not in FLOATING:
        raise _RECORD.bad(f"{role} is of dtype {reprlib.repr(dtype)}, or its tensor's name is not text")
    if not isinstance(shape, list):
        raise _RECORD.bad(f"the shape of {role} is a {type(shape).__name__}")
    for side in shape:
        _RECORD.check_number(side, f"a side of {role}", whole=True)
    rows = value.get("rows")
    if rows is not None:
        _RECORD.check_number(rows, f"the rows of {role}", whole=True)
        if not shape or rows > shape[0]:
            raise _RECORD.bad(f"{role} of shape {shape} has {rows} rows")
    return StoredTensor(name=value["name"], tensor=tensor, shape=tuple(shape), dtype=dtype, rows=rows)
