"""Columns of a record beside its turns: media, values of the trained tokens, labels, and what nothing reads.

A column that nothing reads is refused if data sets and trainers in use give it a meaning: LLaMA-Factory
(``label``/``kto_tag``, ``audios``, ``history``), ms-swift (``label``, ``audios``, ``objects``, ``rejected_images``),
TRL (``label``, ``chat_template_kwargs``, ``documents``), OpenAI (``functions``), VideoChat (``start``/``end``). Others
are counted. A label of wanted and unwanted answers (KTO) is read only where the user names it: without a loss that
reads ``preference``, unwanted answers would be learned.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

from energon_packing.conversation import PREFERENCE, MediaKind, MediaPart, Turn, read_extras, wrong_extra
from energon_packing.convert.config import MissingPlaceholder
from energon_packing.convert.fields import expect, first_of, near_name, says_nothing, unread
from energon_packing.convert.json_text import parse_part
from energon_packing.errors import SampleRejected
from energon_packing.stored_record import LARGEST_NUMBER, SMALLEST_NUMBER


def frame_rate(value: Any) -> float | None:
    """Frames per second from a record: None, a number, or a number as text; raises ``bad_frames``."""
    if value is None:
        return None
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            if SMALLEST_NUMBER <= (rate := float(value)) <= LARGEST_NUMBER:
                return rate
    detail = f"the frame rate of a list of frames is {value!r:.80}, expected a number above 0"
    raise SampleRejected("bad_frames", detail)


def frame_times(value: Any, frames: int) -> tuple[float, ...]:
    """Seconds at which each frame is shown; empty if the record has none; raises ``bad_frames``."""
    if value is None:
        return ()
    numbers: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(time, int | float) and not isinstance(time, bool) for time in numbers):
        raise SampleRejected("bad_frames", "the timestamps of a list of frames are not a list of numbers")
    if len(numbers) != frames:
        raise SampleRejected("bad_frames", f"{len(numbers)} timestamps for a list of {frames} frames")
    if not all(0 <= time <= LARGEST_NUMBER for time in numbers) or any(b <= a for a, b in pairwise(numbers)):
        raise SampleRejected("bad_frames", "the timestamps of a list of frames are not ascending from 0 or later")
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
    """A file that the record itself holds, and the name that it gives it, which may be empty."""

    content: bytes
    name: str

    def __repr__(self) -> str:
        return f"{self.name!r} ({len(self.content)} bytes in the record)"


MediaPath = str | EmbeddedBytes  # A path or an address, or the bytes themselves


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReference:
    """A file as the record names it, and its required kind; frames are images."""

    kind: str
    path: MediaPath


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaReference:
    """An image or video as the record names it."""

    kind: MediaKind
    paths: tuple[MediaPath, ...]  # one file, or the frames of a video that is a list of images
    is_frames: bool = False  # whether the paths are such a list (which may hold a single image)
    fps: float | None = None  # rate of a list of frames; None for a file, which states its own
    times: tuple[float, ...] = ()  # seconds of each frame, if the record has them

    @property
    def files(self) -> tuple[FileReference, ...]:
        return tuple(FileReference(kind="image" if self.is_frames else self.kind, path=path) for path in self.paths)


@dataclass(slots=True)
class RecordMedia:
    """The media of one record while its turns are read, and the names of fields that nothing reads."""

    columns: dict[MediaKind, list[MediaReference]]
    frame_fps: float
    ignored: set[str] = field(default_factory=set)
    references: list[MediaReference] = field(default_factory=list)
    named: dict[MediaKind, list[int]] = field(default_factory=lambda: {"image": [], "video": []})
    """The entry of the column that each placeholder stands for, which may lie beyond its end."""

    @classmethod
    def of(cls, record: Mapping[str, Any], frame_fps: float) -> Self:
        """The columns of a record; raises ``conflicting_columns``, ``non_string_value``, ``bad_frames``,
        ``unsupported_field``."""
        media = cls(columns={}, frame_fps=frame_fps)
        media.columns |= {kind: _column(record, kind, media) for kind in COLUMNS}
        return media

    def ignore(self, value: Mapping[str, Any], read: Collection[str], place: str) -> None:
        """Records the fields of an object that were not read; ``place`` is where the object is."""
        self.ignored |= unread(value, read, f"{place}.")

    def add(self, reference: MediaReference) -> MediaPart:
        """The place of an image or video that the text names here."""
        self.references.append(reference)
        return MediaPart(index=len(self.references) - 1)

    def next_of_column(self, kind: MediaKind, index: int | None = None) -> MediaPart:
        """The place of the column's next entry, or of the one that a content part counts out (``index``, from 0)."""
        at = len(self.named[kind]) if index is None else index
        self.named[kind].append(at)
        column = self.columns[kind]
        # Too few entries are reported for the record as a whole, with both counts.
        return self.add(column[at] if 0 <= at < len(column) else MediaReference(kind=kind, paths=("",)))

    def check(self) -> None:
        """Checks that each entry of the columns has its placeholder, else raises ``placeholder_mismatch``."""
        for kind, column in self.columns.items():
            if set(entries := self.named[kind]) == set(range(len(column))):
                continue
            count, named = len(entries), f"the record names {len(column)} {kind}(s)"
            with_some = f"the text has {count} <{kind}> placeholder(s), but {named}"
            if count == len(column) or entries != [*range(count)]:
                with_some = f"the content parts name the {kind}s {entries}, counted from 0, but {named}"
            detail = with_some if count else f"{named}, but no text has a <{kind}> placeholder"
            for name in sorted(self.ignored):  # one of them may explain it
                if (meant := near_name(name)) in READ_COLUMNS:
                    detail += f"; the column {name!r} is not read, did you mean {meant!r}?"
            raise SampleRejected("placeholder_mismatch", detail)


def reference_of(
    entry: Any, kind: MediaKind, where: str, frame_fps: float, rate: Any = None, times: Any = None
) -> MediaReference:
    """One image or video: a path or ``{"path": ...}``; for a video also a list of frames or a timed
    ``{"frames": [...]}``, at ``frame_fps`` if neither it nor the columns of ``rate`` and ``times`` state a rate; raises
    ``non_string_value``, ``bad_frames``. ``where`` is the column or part, for messages."""
    own = entry if isinstance(entry, dict) else {}
    frames = first_of(own, "frames", "video") if own else entry
    if kind != "video" or not isinstance(frames, list):
        return MediaReference(kind=kind, paths=(_path(entry, where),))
    if not frames:
        raise SampleRejected("bad_frames", f"{where!r} holds an empty list of frames")
    timed = {**own, _RATES: rate, _TIMES: times}
    given = frame_rate(first_of(timed, "sample_fps", "fps", _RATES))
    paths = tuple(_path(frame, where) for frame in frames)
    seconds = frame_times(first_of(timed, "timestamps", _TIMES), len(frames))
    fps = frame_fps if given is None else given
    return MediaReference(kind=kind, paths=paths, is_frames=True, fps=fps, times=seconds)


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
    for entry in filter(lambda entry: isinstance(entry, dict), entries):
        is_frames = kind == "video" and isinstance(first_of(entry, "frames", "video"), list)
        refuse_own_view(entry, kind, "unsupported_field", f"an entry of {name!r}", is_frames=is_frames)
        of_file = {"path", "bytes"} if isinstance(entry.get("bytes"), bytes) else {"path"}
        media.ignore(entry, {"frames", "video", *FRAME_TIMING} if is_frames else of_file, f"{name}[]")
    timed = zip(entries, rates, times, strict=True)
    return [reference_of(entry, kind, name, media.frame_fps, rate, seconds) for entry, rate, seconds in timed]


def filled_column(record: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Which of some columns of one meaning has a value, or None; raises ``conflicting_columns`` if several have."""
    if len(filled := [name for name in names if not says_nothing(record.get(name))]) > 1:
        raise SampleRejected("conflicting_columns", f"the record has both {filled[0]!r} and {filled[1]!r}")
    return filled[0] if filled else None


def refuse_own_view(
    value: Mapping[str, Any], kind: MediaKind, reason: str, what: str, *, is_frames: bool = False, is_part: bool = False
) -> None:
    """Rejects an object that asks for a part of a video, for a size or for frames of its own: it would be shown whole,
    in another size or with other frames, and the answer, its boxes and times, would be about something else. Fields as
    ``qwen_vl_utils.fetch_image`` and ``fetch_video`` read them. ``what`` names the object: a record, an entry of a
    column, or a content part (``is_part``). A list of frames (``is_frames``) is used as it is, shown at its rate."""
    of_video = _CUTS + _MOST_FRAMES + (_FRAMES if is_part else ()) if kind == "video" and not is_frames else ()
    for name in _SIZES + of_video:
        asked = value.get(name)
        if not says_nothing(asked) and asked not in (0, "0"):  # a table may write 0 where nothing is asked
            raise SampleRejected(reason, f"{what} has {name!r} {asked!r:.40}; {_INSTEAD[name]}")


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
    """Turns that name every image and video of a kind that no text has a placeholder for. A text with some
    placeholders, but too few, stays as it is: nobody can say which of the images it means. They come before or after
    the first turn of the user, images before videos, and ``media.references`` in the order of the new turns.
    ``warnings`` receives ``placeholder_added``."""
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    missing = [kind for kind, column in media.columns.items() if column and not media.named[kind]]
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
    for number, turn in enumerate(changed):
        parts = tuple(MediaPart(index=place[p.index]) if isinstance(p, MediaPart) else p for p in turn.parts)
        changed[number] = replace(turn, parts=parts)
    return changed


AUDIO = ("audio", "audios", "input_audio", "sound", "sounds", "speech")
_AUDIO_COLUMNS = frozenset((*AUDIO, *(f"audio_{what}{s}" for what in ("path", "file", "url") for s in ("", "s"))))
LABELS = ("label", "labels", "kto_tag", "kto_label", "desirable")
_ANSWERS = ("chosen", "rejected")
_WANTED = {"true": True, "1": True, "desirable": True, "chosen": True}
_WANTED |= {"false": False, "0": False, "-1": False, "undesirable": False, "rejected": False}
_GROUNDING = ("<bbox>", "<ref-object>")


def _wanted(label: Any) -> bool | None:
    """Whether a label says that an answer is wanted; None if it says something else. Tables may write 1 as 1.0."""
    return _WANTED.get(str(label).strip().lower().removesuffix(".0"))


def is_preference_label(value: Any) -> bool:
    """Whether a label marks an answer, its steps or its tokens as wanted or unwanted; class names do not."""
    if isinstance(value, list):
        return -100 in value or (bool(value) and all(isinstance(entry, bool) for entry in value))
    return _wanted(value) is not None


def _weighs(value: Any) -> bool:
    if isinstance(value, str):  # a cell of CSV
        with suppress(ValueError, RecursionError):
            value = parse_part(value.strip().lower())
    if isinstance(value, list):
        return any(isinstance(entry, bool | int | float | list) for entry in value)
    return isinstance(value, bool | int | float) and value != 1  # True == 1


def _count(turns: Sequence[Turn], tag: str) -> int:
    return sum(turn.text.count(tag) for turn in turns)


_Applies = Callable[[Any, Mapping[str, Any], Sequence[Turn]], bool]
_OF_TEMPLATE = "is an argument of the chat template, which is not supported"


def always(*_: Any) -> bool:
    """For a name that may never be ignored."""
    return True


_MEANINGS: tuple[tuple[Collection[str], _Applies, str], ...] = (
    (_AUDIO_COLUMNS, always, "holds audio, which is not supported"),
    (
        LABELS,
        lambda value, *_: is_preference_label(value),
        "is {value!r:.60}, a preference label (KTO); --kto-label {name} keeps it for a loss that reads 'preference'; "
        "to train on the preferred answers alone, keep only their records and remove the column",
    ),
    (
        (
            *("weight", "weights", "sample_weight", "loss_weight", "loss_scale", "loss_mask"),
            *("loss", "train_mask", "mask", "train"),
        ),
        lambda value, *_: _weighs(value),
        "weighs or masks the whole record, which is not supported; write the field 'weight' into its messages",
    ),
    (
        ("functions", "function_definitions", "tool_definitions", "tool_schemas", "available_tools"),
        lambda value, record, turns: says_nothing(record.get("tools")),
        "holds tool definitions; rename it to 'tools'",
    ),
    (
        ("system_prompt", "system_message"),
        lambda value, record, turns: (
            not (isinstance(value, str) and any(t.role == "system" and t.text.strip() == value.strip() for t in turns))
        ),
        "holds a system prompt that the conversation does not; rename it to 'system'",
    ),
    (
        ("history",),
        lambda value, *_: isinstance(value, list),
        "holds earlier turns, which are read beside 'instruction' or 'query' only; put them into the list of turns",
    ),
    (("chat_template_kwargs",), always, _OF_TEMPLATE),
    (("documents",), lambda value, *_: isinstance(value, list), _OF_TEMPLATE),
    (
        ("objects",),
        lambda value, record, turns: any(_count(turns, tag) for tag in _GROUNDING),
        f"holds the values of {' and '.join(_GROUNDING)} in the text, which are not supported",
    ),
    (
        [
            f"{answer}_{what}{s}"
            for answer in ("chosen", "rejected", "positive", "negative")
            for what in ("message", "response", "conversation", "answer", "output", "image", "video", "audio", "tool")
            for s in ("", "s")
        ],
        always,
        "belongs to an unknown layout of pairs; docs/convert.md lists the supported ones",
    ),
)
_CHANGE_THE_MEANING = {name: (applies, why) for names, applies, why in _MEANINGS for name in names}
"""Columns, when they may not be ignored, and why."""


def check_columns(
    record: Mapping[str, Any], read: Collection[str], turns: Sequence[Turn], media: Sequence[MediaReference]
) -> set[str]:
    """Names of the filled columns other than ``read``; raises ``unsupported_column`` for one that changes the meaning
    of the turns and media."""
    others = {name: record[name] for name in record if name not in read}
    for name in sorted(_CHANGE_THE_MEANING.keys() & others.keys()):
        (applies, why), value = _CHANGE_THE_MEANING[name], record[name]
        if not says_nothing(value) and applies(value, record, turns):
            raise SampleRejected("unsupported_column", f"the column {name!r} {why.format(name=name, value=value)}")
    if not _AUDIO_COLUMNS.isdisjoint(record) and (count := _count(turns, "<audio>")):
        detail = f"the text has {count} <audio> placeholder(s), but the record has no audio"
        raise SampleRejected("placeholder_mismatch", detail)
    for kind, is_frames in sorted({(reference.kind, reference.is_frames) for reference in media}):
        refuse_own_view(others, kind, "unsupported_column", "the record", is_frames=is_frames)
    return unread(record, read)


def parse_extras(record: Mapping[str, Any], columns: Sequence[str], *, pair: bool) -> dict[str, Any]:
    """Reads the column ``extras`` (name -> value) and each separately named column. A value is one number for all
    trained tokens, or a list with one number per token. For a pair, it is one number for both answers, or ``{"chosen":
    ..., "rejected": ...}`` of numbers or lists. These may also be in two columns: ``chosen_NAME`` and
    ``rejected_NAME``, or ``NAME_chosen`` and ``NAME_rejected``. Raises SampleRejected: ``bad_extra`` for an invalid
    value, ``conflicting_columns`` if a name has two values."""
    given = {} if says_nothing(record.get("extras")) else record["extras"]
    values = {**expect(given, dict, "bad_extra", "the extras column is", "name -> value")}
    for name in columns:
        if (value := _extra_column(record, name, pair)) is None:
            continue
        if name in values:
            raise SampleRejected("conflicting_columns", f"{name!r} is a column and also in the extras column")
        values[name] = value
    try:
        extras = read_extras(values)
    except SampleRejected as error:
        raise SampleRejected("bad_extra", error.detail) from error
    if PREFERENCE in extras:
        raise SampleRejected("bad_extra", f"{PREFERENCE!r} is made from the answers of a pair and cannot be given")
    for name, value in extras.items():
        if wrong := wrong_extra(value, is_pair=pair):
            raise SampleRejected("bad_extra", f"{name!r} {wrong}")
    return extras


def extra_columns_read(columns: Sequence[str], *, pair: bool) -> set[str]:
    """Every column that `parse_extras` checks for these names."""
    return {*columns, *(column for name in columns if pair for both in _names_of_pair(name) for column in both)}


def _names_of_pair(name: str) -> tuple[list[str], list[str]]:
    return [f"{answer}_{name}" for answer in _ANSWERS], [f"{name}_{answer}" for answer in _ANSWERS]


def _extra_column(record: Mapping[str, Any], name: str, pair: bool) -> Any:
    value = record.get(name)
    for names in _names_of_pair(name) if pair else ():
        if (parts := [record.get(column) for column in names]) == [None, None]:
            continue
        if value is not None:
            raise SampleRejected("conflicting_columns", f"the record has both {name!r} and {names[0]!r}")
        if None in parts:
            raise SampleRejected("bad_extra", f"the record has only one of {names[0]!r} and {names[1]!r}")
        value = dict(zip(_ANSWERS, parts, strict=True))
    return value


def read_kto_label(record: Mapping[str, Any], column: str, warnings: list[str], *, pair: bool) -> dict[str, float]:
    """The extra ``preference``, as pairs have it: 1 for a wanted answer, -1 for an unwanted one. Raises SampleRejected:
    ``bad_label`` if it is missing or is neither true nor false, ``bad_pair`` for a pair."""
    if pair:
        raise SampleRejected("bad_pair", f"the record is a pair and has the label {column!r}; convert pairs without it")
    if (wanted := _wanted(value := record.get(column))) is None:
        what = "is missing" if value is None else f"is {value!r:.60}"
        raise SampleRejected("bad_label", f"the label {column!r} {what}; it must be true or false")
    warnings.append("unpaired_preference")
    return {PREFERENCE: 1.0 if wanted else -1.0}
