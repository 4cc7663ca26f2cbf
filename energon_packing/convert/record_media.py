"""The media of one record: paths from its columns and content parts, in the order in which its text names them.

Videos that a record holds as a list of images, already sampled by the data set's authors.

Images and videos of a record whose text has no placeholder for them: put before or after the first question.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from energon_packing.conversation import MediaKind, MediaPart, Part, Turn
from energon_packing.convert.config import MissingPlaceholder
from energon_packing.convert.fields import expect, says_nothing, unread
from energon_packing.errors import SampleRejected
from energon_packing.stored_record import LARGEST_NUMBER, SMALLEST_NUMBER


def frame_rate(value: Any) -> float | None:
    """Frames per second from a record: None, a number, or a number as text.

    Raises:
        SampleRejected: ``bad_frames``.
    """
    if value is None:
        return None
    number = 0.0
    with suppress(ValueError):
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
    if not SMALLEST_NUMBER <= number <= LARGEST_NUMBER:
        raise SampleRejected(
            "bad_frames", f"the frame rate of a list of frames is {value!r:.80}, expected a number above 0"
        )
    return number


def frame_times(value: Any, frames: int) -> tuple[float, ...]:
    """Seconds at which each frame is shown; empty if the record has none.

    Raises:
        SampleRejected: ``bad_frames``.
    """
    if value is None:
        return ()
    numbers: list[Any] = value if isinstance(value, list) else [None]
    wrong = ""
    if not all(isinstance(time, int | float) and not isinstance(time, bool) for time in numbers):
        wrong = "the timestamps of a list of frames are not a list of numbers"
    elif len(numbers) != frames:
        wrong = f"{len(numbers)} timestamps for a list of {frames} frames"
    elif not all(0 <= time <= LARGEST_NUMBER for time in numbers) or any(b <= a for a, b in pairwise(numbers)):
        wrong = "the timestamps of a list of frames are not ascending from 0 or later"
    if wrong:
        raise SampleRejected("bad_frames", wrong)
    return tuple(map(float, numbers))


COLUMNS: Mapping[MediaKind, tuple[str, str]] = {"image": ("images", "image"), "video": ("videos", "video")}
_RATES, _TIMES = "video_fps", "video_timestamps"
READ_COLUMNS = frozenset((*COLUMNS["image"], *COLUMNS["video"], _RATES, _TIMES))
"""Columns of a record that media come from."""
FRAME_TIMING = ("sample_fps", "fps", "timestamps")
"""Fields of a list of frames; a video file contains this information itself."""
_CUTS = ("video_start", "video_end", "start", "end", "start_time", "end_time")
_SIZES = ("resized_height", "resized_width", "min_pixels", "max_pixels", "total_pixels")
_MOST_FRAMES = ("min_frames", "max_frames")
_FRAMES = ("nframes", "fps")  # of a content part; elsewhere they describe the file
_INSTEAD = {
    **dict.fromkeys(_CUTS, "parts of a video are not supported, store the part as a file"),
    **dict.fromkeys(
        _SIZES,
        "which gives one image or video a size of its own, and boxes in an answer may count in it; store the file in "
        "that size, or remove the field and set encoder.max_pixels or encoder.video_max_pixels for all",
    ),
    **dict.fromkeys(
        (*_MOST_FRAMES, *_FRAMES),
        "which chooses the frames of one video alone; store those frames as a list of images, or remove the field and "
        "set encoder.video_fps or encoder.video_max_frames for all",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedBytes:
    """A file that the record itself holds.

    Attributes:
        content: of the file.
        name: that the record gives it; may be empty.
    """

    content: bytes
    name: str

    def __repr__(self) -> str:
        return f"{self.name!r} ({len(self.content)} bytes in the record)"


MediaPath = str | EmbeddedBytes
"""A path or an address, or the bytes themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReference:
    """A file as the record names it, and its required kind; frames are images."""

    kind: MediaKind
    path: MediaPath


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaReference:
    """An image or video as the record names it.

    Attributes:
        kind: ``image`` or ``video``.
        paths: one file, or the frames of a video that is a list of images.
        is_frames: whether the paths are such a list (which may hold a single image).
        fps: rate of a list of frames; None for a file, which states its own.
        times: seconds of each frame, if the record has them.
    """

    kind: MediaKind
    paths: tuple[MediaPath, ...]
    is_frames: bool = False
    fps: float | None = None
    times: tuple[float, ...] = ()

    @property
    def files(self) -> tuple[FileReference, ...]:
        """The files to look at."""
        kind: MediaKind = "image" if self.is_frames else self.kind
        return tuple(FileReference(kind=kind, path=path) for path in self.paths)


@dataclass(slots=True)
class RecordMedia:
    """The media of one record while its turns are read, and the names of fields that nothing reads."""

    columns: dict[MediaKind, list[MediaReference]]
    frame_fps: float
    ignored: set[str] = field(default_factory=set)
    references: list[MediaReference] = field(default_factory=list)
    placeholders: dict[MediaKind, int] = field(default_factory=lambda: {"image": 0, "video": 0})

    @classmethod
    def of(cls, record: Mapping[str, Any], frame_fps: float) -> RecordMedia:
        """The columns of a record.

        Args:
            record: the parsed JSON.
            frame_fps: frames per second of lists of frames that state no rate.

        Raises:
            SampleRejected: ``conflicting_columns``, ``non_string_value``, ``bad_frames``, ``unsupported_field``.
        """
        media = cls(columns={}, frame_fps=frame_fps)
        for kind in COLUMNS:
            media.columns[kind] = _column(record, kind, media)
        return media

    def ignore(self, value: Mapping[str, Any], read: Collection[str], place: str) -> None:
        """Records the fields of an object that were not read; ``place`` is where the object is."""
        self.ignored |= unread(value, read, f"{place}.")

    def add(self, reference: MediaReference) -> MediaPart:
        """The place of an image or video that the text names here."""
        self.references.append(reference)
        return MediaPart(index=len(self.references) - 1)

    def next_of_column(self, kind: MediaKind) -> MediaPart:
        """The place of the column's next entry."""
        index = self.placeholders[kind]
        self.placeholders[kind] += 1
        column = self.columns[kind]
        # Too few entries are reported for the record as a whole, with both counts.
        return self.add(column[index] if index < len(column) else MediaReference(kind=kind, paths=("",)))

    def check(self, hint: str = "") -> None:
        """Checks that each entry of the columns has its placeholder.

        Args:
            hint: added to the message if the check fails.

        Raises:
            SampleRejected: ``placeholder_mismatch``.
        """
        for kind, column in self.columns.items():
            count = self.placeholders[kind]
            if count == len(column):
                continue
            if count == 0:
                detail = f"the record names {len(column)} {kind}(s), but no text has a <{kind}> placeholder"
            else:
                detail = f"the text has {count} <{kind}> placeholder(s), but the record names {len(column)} {kind}(s)"
            raise SampleRejected("placeholder_mismatch", detail + hint)


def reference_of(
    entry: Any, kind: MediaKind, where: str, frame_fps: float, rate: Any = None, times: Any = None
) -> MediaReference:
    """One image or video: a path or ``{"path": ...}``; for a video also a list of frames or a timed
    ``{"frames": [...]}``.

    Args:
        entry: value of a column or a content part.
        kind: ``image`` or ``video``.
        where: column or part, for messages.
        frame_fps: frames per second if no rate is stated.
        rate, times: of a list of frames, from separate columns; those in the entry take precedence.

    Raises:
        SampleRejected: ``non_string_value``, ``bad_frames``.
    """
    own = entry if isinstance(entry, dict) else {}
    frames = own.get("frames", own.get("video")) if own else entry
    if kind != "video" or not isinstance(frames, list):
        return MediaReference(kind=kind, paths=(_path(entry, where),))
    if not frames:
        raise SampleRejected("bad_frames", f"{where!r} holds an empty list of frames")
    given = frame_rate(own.get("sample_fps", own.get("fps", rate)))
    return MediaReference(
        kind=kind,
        paths=tuple(_path(frame, where) for frame in frames),
        is_frames=True,
        fps=frame_fps if given is None else given,
        times=frame_times(own.get("timestamps", times), len(frames)),
    )


def _column(record: Mapping[str, Any], kind: MediaKind, media: RecordMedia) -> list[MediaReference]:
    """The record's entries for one kind; empty if it lists none."""
    if (name := filled_column(record, COLUMNS[kind])) is None:
        return []
    entries = record[name] if isinstance(record[name], list) else [record[name]]
    count = len(entries)
    rates, times = (record.get(column) if kind == "video" else None for column in (_RATES, _TIMES))
    rates = rates if isinstance(rates, list) else [rates] * count
    times = [None] * count if times is None else times
    for column, values in ((_RATES, rates), (_TIMES, times)):
        if not isinstance(values, list) or len(values) != count:
            raise SampleRejected("bad_frames", f"{column!r} must have one entry for each of the {count} video(s)")
    for entry in entries:
        if isinstance(entry, dict):
            _look_at_entry(entry, kind, name, media)
    return [
        reference_of(entry, kind, name, media.frame_fps, rate, seconds)
        for entry, rate, seconds in zip(entries, rates, times, strict=True)
    ]


def filled_column(record: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Which of some columns of one meaning has a value, or None.

    Raises:
        SampleRejected: ``conflicting_columns`` if several have.
    """
    filled = [name for name in names if record.get(name) not in (None, "", [])]
    if len(filled) > 1:
        raise SampleRejected("conflicting_columns", f"the record has both {filled[0]!r} and {filled[1]!r}")
    return filled[0] if filled else None


def _look_at_entry(entry: Mapping[str, Any], kind: MediaKind, column: str, media: RecordMedia) -> None:
    is_frames = kind == "video" and isinstance(entry.get("frames", entry.get("video")), list)
    refuse_own_view(entry, kind, "unsupported_field", f"an entry of {column!r}", is_frames=is_frames)
    read = {"path", "bytes"} if isinstance(entry.get("bytes"), bytes) else {"path"}
    media.ignore(entry, {"frames", "video", *FRAME_TIMING} if is_frames else read, f"{column}[]")


def refuse_own_view(
    value: Mapping[str, Any],
    kind: MediaKind,
    reason: str,
    where: str,
    *,
    is_frames: bool = False,
    is_part: bool = False,
) -> None:
    """Rejects an object that asks for a part of a video, for a size or for frames of its own: it would be shown whole,
    in another size or with other frames, and the answer, its boxes and times, would be about something else.

    Fields as ``qwen_vl_utils.fetch_image`` and ``fetch_video`` read them.

    Args:
        value: a record, an entry of a column, or a content part.
        kind: ``image`` or ``video``; images have no parts and no frames.
        reason: reason of the rejection.
        where: what the object is, for the message.
        is_frames: whether the video is a list of frames, which is used as it is; its rate says when they are shown.
        is_part: whether this is a content part.

    Raises:
        SampleRejected: ``reason``.
    """
    names: tuple[str, ...] = _SIZES
    if kind == "video" and not is_frames:
        names += _CUTS + _MOST_FRAMES + (_FRAMES if is_part else ())
    for name in names:
        asked = value.get(name)
        if not says_nothing(asked) and asked != 0:  # a table may write 0 where nothing is asked
            raise SampleRejected(reason, f"{where} has {name!r} {asked!r:.40}; {_INSTEAD[name]}")


def _path(entry: Any, name: str) -> MediaPath:
    if isinstance(entry, bytes):
        return EmbeddedBytes(content=entry, name="")
    if isinstance(entry, dict):
        path = entry.get("path")
        if isinstance(entry.get("bytes"), bytes):  # as Hugging Face stores images, with or without a path
            return EmbeddedBytes(content=entry["bytes"], name=path if isinstance(path, str) else "")
        if isinstance(path, str):
            entry = path
    return expect(entry, str, "non_string_value", f"{name!r} holds", "a path")


def place_missing(turns: list[Turn], media: RecordMedia, how: MissingPlaceholder, warnings: list[str]) -> list[Turn]:
    """Turns that name every image and video of a kind that no text has a placeholder for.

    A text with some placeholders, but too few, stays as it is: nobody can say which of the images it means.

    Args:
        turns: of the record.
        media: of the record; its references are put into the order of the new turns.
        how: ``prepend`` to or ``append`` to the first turn of the user; images come before videos.
        warnings: receives ``placeholder_added``.
    """
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    missing = [kind for kind, column in media.columns.items() if column and media.placeholders[kind] == 0]
    if first is None or not missing:
        return turns
    added = [media.next_of_column(kind) for kind in missing for _ in media.columns[kind]]
    parts = turns[first].parts
    together = (*added, *parts) if how == "prepend" else (*parts, *added)
    changed = [*turns[:first], replace(turns[first], parts=together), *turns[first + 1 :]]
    order = [part.index for turn in changed for part in turn.parts if isinstance(part, MediaPart)]
    place = {old: new for new, old in enumerate(order)}
    media.references[:] = [media.references[old] for old in order]
    warnings.append("placeholder_added")

    def moved(part: Part) -> Part:
        return MediaPart(index=place[part.index]) if isinstance(part, MediaPart) else part

    return [replace(turn, parts=tuple(map(moved, turn.parts))) for turn in changed]
