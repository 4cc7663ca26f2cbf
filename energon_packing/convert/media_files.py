"""Media files of a conversion: resolved inside their root, checked once each, named by their content.

Images and videos whose bytes are in the record, beside it or in an object store (Parquet cells, ``data:`` addresses,
members of tars, objects) are written to the working directory of the conversion and are files from there on. The
directory takes as much room as the distinct ones of them, until the data set is published.
"""

import base64
import binascii
import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote, unquote_to_bytes

import orjson

from energon_packing.conversation import Media, MediaKind
from energon_packing.convert.chunks import MemberBytes, hub_blobs
from energon_packing.convert.columns import EmbeddedBytes
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.layout import open_scratch
from energon_packing.convert.layouts.layout import FileKind
from energon_packing.errors import SampleRejected, UserError, fault_of, is_machines, read_again
from energon_packing.remote_files import local_copy, status, within, without_secrets

_BASE64 = re.compile(r"(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR)[A-Za-z0-9+/=\s]{40,}")  # How PNG, JPEG, GIF and WebP begin
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://|data:)")
_FILE_ADDRESS = re.compile("file://(localhost(?=/))?", re.IGNORECASE)
_EXTENSION_OF_IMAGE = {"JPEG": "jpg", "MPO": "jpg", "JPEG2000": "jp2"}  # of all others, the name of their format
_EXTENSION_OF_CONTAINER = {
    "mov": "mp4", "matroska": "mkv", "avi": "avi", "mpeg": "mpg", "mpegts": "ts", "mpegvideo": "mpg", "flv": "flv",
    "asf": "wmv", "ogg": "ogv", "gif": "gif",
}  # fmt: skip
VIDEO_SUFFIXES = frozenset({"mp4", "mov", "m4v", "mkv", "webm", "avi", "mpg", "mpeg", "ts", "flv", "wmv", "ogv"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaFile:
    """One distinct image or video, checked."""

    kind: MediaKind
    path: str  # the file, all links resolved
    # Its entry in the media store, ``<32 hex digits of its SHA-256>.<extension>``; equal files share one entry.
    name: str
    size: int  # bytes
    width: int  # width, height, stored_width, stored_height: pixels as displayed, and as stored, before any rotation
    height: int
    stored_width: int
    stored_height: int
    # frames, fps, duration, container, time_points: of a video, see `energon_packing.media.probe.VideoInfo`.
    frames: int | None = None
    fps: float | None = None
    duration: float | None = None
    container: str = ""
    format: str = ""  # format, mode, transparent, animated: of an image, see `energon_packing.media.probe.ImageInfo`
    mode: str = ""
    transparent: bool = False
    animated: bool = False
    time_points: tuple[float, ...] = ()

    @property
    def metadata(self) -> tuple[str, str]:
        """Type and content of the file in the table of ``energon prepare --media-metadata-by-extension``. Energon would
        decode every file again, and omits a whole shard if one file fails. As in Energon's own table, sizes are those
        of the stored pixels, before EXIF or container rotation; the records hold the displayed sizes."""
        width, height = self.stored_width, self.stored_height
        said: dict[str, Any] = {"width": width, "height": height, "format": self.format, "mode": self.mode}
        if self.kind == "video":
            said = {"video_duration": self.duration, "video_num_frames": self.frames, "video_fps": self.fps}
            said |= {"video_width": width, "video_height": height}
        return "image" if self.kind == "image" else "av", orjson.dumps(said).decode()

    def media(self, name: str) -> Media:
        """The record's entry for the file, which is stored under a name."""
        sizes = {each: getattr(self, each) for each in ("kind", "width", "height", "frames", "fps", "duration")}
        return Media(name=name, **sizes, time_points=tuple(self.time_points))  # a journal has lists


StoredMedia = Any
"""A `MediaFile`, or a checked file of another kind: it has its ``name``, ``path``, ``transparent`` and ``metadata``
(None for what Energon has no table for)."""


def resolve_media(reference: str, root: Path) -> str:
    """The file that a record names, with all links resolved, inside its root, which must be resolved already. Raises
    `SampleRejected`: ``remote_media``, ``media_outside_root``, ``missing_media``; OSError: the place cannot be read."""
    if address := _FILE_ADDRESS.match(reference):
        path_of = reference[address.end() :]  # as qwen_vl_utils reads it; others escape characters
        reference = path_of if "%" not in path_of or (root / path_of).exists() else unquote(path_of)
    if is_address(reference):
        reference = without_secrets(reference)
        shown = reference if len(reference) <= 80 else reference[:77] + "..."
        raise SampleRejected("remote_media", f"{shown!r} is not a local file; store it below {root} and name its path")
    check_path(reference)
    if (plain := _plain_file(reference, str(root))) is not None:
        return plain
    if _BASE64.fullmatch(reference[:1000]):
        fix = "write the prefix of an address before it, such as data:image/png;base64,"
        raise SampleRejected("missing_media", f"{reference[:20]!r}... is a file in base64, not a path; {fix}")
    try:
        path = Path(os.path.realpath(root / reference))
        if not path.is_relative_to(root) and not ((blobs := hub_blobs(root)) and path.is_relative_to(blobs)):
            raise SampleRejected("media_outside_root", f"{reference!r} leads out of the media root {root}")
        if not path.is_file():
            what = "is not a file" if path.exists() else "does not exist"
            raise SampleRejected("missing_media", f"{reference!r} {what} in {root}")
    except OSError as error:
        if is_machines(error):
            raise
        raise SampleRejected("missing_media", f"{reference!r} cannot be looked up: {error.strerror}") from error
    return str(path)


_real_directory = lru_cache(maxsize=4096)(os.path.realpath)


def _plain_file(reference: str, root: str) -> str | None:
    """The resolved path of a file that is no link, in a directory whose links have been resolved before; None for
    anything else, and for a way out of the root."""
    directory, _, name = reference.rpartition("/")
    if name in ("", ".", "..") or reference.startswith("/"):
        return None
    if (real := _real_directory(f"{root}/{directory}")) != root and not real.startswith(root.rstrip("/") + "/"):
        return None
    path = f"{real}/{name}"
    try:
        return path if stat.S_ISREG(os.lstat(path).st_mode) else None
    except (OSError, ValueError):
        return None


def is_address(reference: str) -> bool:
    """Whether a record names an address, not a path."""
    return _ADDRESS.match(reference) is not None


def check_path(reference: str) -> None:
    """Refuses, as ``missing_media``, what the system cannot be asked for; JSON can hold half of a character."""
    with suppress(UnicodeEncodeError):
        if os.fsencode(reference) and "\0" not in reference:
            return
    raise SampleRejected("missing_media", f"{reference!r} is not a path")


def check_media(stream: BinaryIO, path: str, size: int, kind: MediaKind, config: ConvertConfig) -> MediaFile:
    """Reads and checks an open image or video. Raises `SampleRejected`: ``corrupt_media``, ``media_too_large``;
    OSError: it cannot be read."""
    from energon_packing.media.probe import image_info, jpeg_info, probe_video  # text needs neither Pillow nor FFmpeg

    head = stream.peek() if kind == "image" else b""  # type: ignore[attr-defined]
    digest = hashlib.file_digest(stream, "sha256").hexdigest()[:32]  # type: ignore[arg-type]
    decode = config.check_media == "full"
    if kind == "image":
        found: Any = None if decode else jpeg_info(head)
        if found is None or found.width * found.height > config.max_pixels:
            found = image_info(stream, max_pixels=config.max_pixels, decode=decode)
        extension = _EXTENSION_OF_IMAGE.get(found.format, found.format.lower())
    else:
        found = probe_video(stream, max_pixels=config.max_pixels, decode=decode)
        suffix = Path(path).suffix.lower().lstrip(".")
        of_container = filter(None, map(_EXTENSION_OF_CONTAINER.get, found.container.split(",")))
        extension = suffix if suffix in VIDEO_SUFFIXES else next(of_container, "mp4")
    return MediaFile(kind=kind, path=path, name=f"{digest}.{extension}", size=size, **found._asdict())


MEDIA_KINDS: Mapping[str, FileKind] = {
    kind: FileKind(check=check_media, made=MediaFile, corrupt="corrupt_media") for kind in ("image", "video")
}


def open_regular(path: str) -> Any:
    """Opens a resolved path for reading; does not follow a link that has replaced it in the meantime. Raises OSError:
    it cannot be opened, or is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", path)
    return open(path, "rb", opener=lambda *_: descriptor)  # PyAV asks for the name


_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,11}")
FETCHED = "fetched"  # Name of the directory of copies from object stores, in the working directory of the conversion
_MOST_RECENT = 20_000  # outcomes that a process keeps; each takes about a kilobyte


class RecordFiles:
    """The images and videos of records as files of this machine: their own places, or copies that all workers share of
    embedded bytes, members of tars, and objects of stores, in directories of the conversion's working directory."""

    def __init__(self, scratch: Path, *, max_bytes: int) -> None:
        self._directory = scratch.resolve() / "embedded"
        self._directory.mkdir(exist_ok=True)
        self._max_bytes = max_bytes
        fetched = partial(_fetched, directory=scratch.resolve() / FETCHED, max_bytes=max_bytes)
        self._fetched = lru_cache(maxsize=_MOST_RECENT)(fetched)

    def place(self, reference: str | EmbeddedBytes, root: Path | str, members: Mapping[str, MemberBytes]) -> str:
        """The file of one image or video of a record: a path in ``root`` (a directory, or the address of one), a
        ``data:`` address, bytes, or one of ``members``, the files beside the record in its tar, by each name that it
        may use; a record with any has no root. Raises SampleRejected: ``corrupt_media`` for an address that cannot be
        decoded, ``media_too_large``, and the reasons of `resolve_media`; UserError: a store does not answer; the file
        may be in order; OSError: there is no room for a copy."""
        if isinstance(reference, EmbeddedBytes):
            return self._store(reference.content, reference.name)
        if reference.startswith("data:"):
            return self._store(*_decoded(reference, self._max_bytes))
        if reference in members:
            member = members[reference]
            self._check(member.size)
            return self._store(member.read(), member.name)
        if members:
            names = ", ".join(sorted({member.name for member in members.values()})[:20])
            raise SampleRejected("missing_media", f"{reference!r} is not in the sample; it has: {names}")
        if isinstance(root, Path):
            return read_again(str(root), lambda: resolve_media(reference, root))
        return self._fetched(reference, root)

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise SampleRejected("media_too_large", f"{size} bytes in the record; the limit is {self._max_bytes}")

    def _store(self, content: bytes, name: str) -> str:
        self._check(len(content))
        suffix = os.path.splitext(name)[1]
        suffix = suffix.lower() if _SUFFIX.fullmatch(suffix) else ""
        if not (path := self._directory / (hashlib.sha256(content).hexdigest() + suffix)).exists():
            part = self._directory / f".{os.urandom(8).hex()}"
            part.write_bytes(content)
            os.utime(part, (1, 1))  # seconds: nothing else writes these files, so their time stamps need not say when
            os.rename(part, path)
        return str(path)


def _fetched(reference: str, root: str, directory: Path, max_bytes: int) -> str:
    """The copy, in a directory, of a file of an object store below the address ``root``; raises as `RecordFiles.place`
    does. A copy of an interrupted conversion has the time of its original."""
    if is_address(reference) and not reference.startswith(f"{root.rstrip('/')}/"):
        raise SampleRejected("remote_media", f"{without_secrets(reference)[:80]!r} is not in {root}; store it there")
    check_path(reference)
    try:
        if (address := within(root, reference)) is None:
            raise SampleRejected("media_outside_root", f"{reference!r} leads out of the media root {root}")
        if (file := status(address)) is None:
            raise SampleRejected("missing_media", f"{reference!r} does not exist in {root}")
        if file.size > max_bytes:
            detail = f"{reference!r}: {file.size} bytes, more than the limit of {max_bytes}"
            raise SampleRejected("media_too_large", detail)
        return str(local_copy(address, directory, file))
    except OSError as error:
        fault, why = fault_of(error), f"{reference!r} of {root} cannot be read: {error.strerror or error}"
        if fault == "disk":
            raise
        if fault == "file":
            raise SampleRejected("missing_media", why) from error
        raise UserError(f"{why}; start again with --resume when the store answers") from error


def _decoded(address: str, max_bytes: int) -> tuple[bytes, str]:
    """Content and a name of a ``data:`` address (RFC 2397)."""
    head, comma, data = address[len("data:") :].partition(",")
    if not comma:
        raise SampleRejected("corrupt_media", "a data: address has no comma, so it holds no data")
    kind, *options = head.split(";")
    name = "x." + kind.rpartition("/")[2].lower()
    if "base64" not in (option.strip().lower() for option in options):
        try:
            return unquote_to_bytes(data), name
        except UnicodeEncodeError as error:
            raise SampleRejected("corrupt_media", "a data: address holds half of a character") from error
    if len(data) // 4 * 3 > max_bytes + 3:
        raise SampleRejected("media_too_large", f"a data: address of {len(data)} characters; the limit is {max_bytes}")
    try:
        # Blanks and line breaks are allowed; anything else that is not base64 is damage.
        return base64.b64decode("".join(data.split()), validate=True), name
    except (binascii.Error, ValueError) as error:
        raise SampleRejected("corrupt_media", f"a data: address is not base64: {error}") from error


class Stamp(NamedTuple):
    """When a file was checked, and what the file system said about it at that time: bytes, time of the last change of
    the content, time at which the check began; nanoseconds."""

    size: int
    changed: int
    checked: int

    def same_file(self, status: os.stat_result) -> bool:
        """Whether the file still looks as it did."""
        return (status.st_size, status.st_mtime_ns) == (self.size, self.changed)

    @property
    def settled(self) -> bool:
        """Whether a later change would show in the time stamp; one within a clock tick of the check would not."""
        return self.changed < self.checked - 2_000_000_000


_NOT_ITS_OWN = ("missing_media", "decode_timeout")
"""Reasons that another time or machine may not have, so that ``--resume`` tries such a file again."""
Checked = tuple[StoredMedia | SampleRejected, Stamp]  # The result of a check, and when it was made


class MediaChecker:
    """Checks files for one process, and shares the results with the others, and with a run that resumes, in a journal.
    Each process appends its results to the journal, and looks those of the others up in an index of its own."""

    def __init__(self, config: ConvertConfig, journal: Path, index: Path) -> None:
        """``journal`` is the file of results, ``index`` one to make, of what the journal holds."""
        self._config = config
        self._kinds = (config.own_layout and config.own_layout.files) or MEDIA_KINDS
        self._recent: dict[str, Checked] = {}
        self._journal = journal.open("ab", buffering=0)
        self._others = journal.open("rb")
        self._read_to = self._own = 0  # bytes of the journal: in the index, and written here since
        self._index = open_scratch(index)
        self._index.execute("CREATE TABLE checks (place BLOB PRIMARY KEY, entry TEXT) WITHOUT ROWID")

    def check(self, path: str, kind: str, named: object) -> tuple[StoredMedia, Stamp]:
        """The result for one file, which a record has ``named`` so. Raises `SampleRejected`: ``missing_media``
        (unreadable), ``media_too_large``, and what its kind refuses; `UserError`: the machine has no memory for it, or
        cannot read it."""
        key = f"{kind} {path}"
        if (checked := self._recent.get(key)) is None:
            if (checked := self._earlier(key)) is None:
                status, now = _status(key), time.time_ns()
                checked = self._check(path, kind), Stamp(status.st_size, status.st_mtime_ns, now)
                self._note(key, *checked)
            if len(self._recent) >= _MOST_RECENT:
                self._recent.clear()
                self._own = 0
            self._recent[key] = checked
        if isinstance(outcome := checked[0], SampleRejected):
            # A new one each time: a raised exception collects traceback frames.
            raise SampleRejected(outcome.reason, f"{kind} {named!r}: {outcome.detail}")
        return checked

    def _earlier(self, key: str) -> Checked | None:
        """The result that the journal has, if the file has not changed since."""
        if os.fstat(self._others.fileno()).st_size > self._read_to + self._own:
            self._index.executemany("INSERT OR REPLACE INTO checks VALUES (?, ?)", self._news())
            self._own = 0
        row = self._index.execute("SELECT entry FROM checks WHERE place = ?", (os.fsencode(key),)).fetchone()
        checked = None if row is None else self._read(key, row[0])
        return checked if checked is not None and checked[1].same_file(_status(key)) else None

    def _news(self) -> Iterator[tuple[bytes, str]]:
        """Place and entry of each line that the journal has got; those that a killed process left unfinished are not
        JSON, and what is no entry is passed over. A file's name may be any bytes."""
        self._others.seek(self._read_to)
        while (line := self._others.readline()).endswith(b"\n"):
            self._read_to += len(line)
            with suppress(ValueError, TypeError, KeyError):
                place, entry = os.fsencode(json.loads(line)["place"]), line.decode()
                yield place, entry

    def _check(self, path: str, kind: str) -> StoredMedia | SampleRejected:
        try:
            return read_again(os.path.dirname(path), lambda: self._tried(path, kind))
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or "no memory is left; use fewer --workers, or lower --max-pixels"
            raise UserError(f"{path} cannot be checked: {why}; start again with --resume") from error

    def _tried(self, path: str, kind: str) -> StoredMedia | SampleRejected:
        most, of = self._config.max_media_bytes, self._kinds[kind]
        try:
            with open_regular(path) as stream:
                if (size := os.fstat(stream.fileno()).st_size) == 0:
                    return SampleRejected(of.corrupt, "the file is empty")
                if size > most:
                    return SampleRejected("media_too_large", f"{size} bytes, more than the limit of {most}")
                return of.check(stream, path, size, kind, self._config)
        except SampleRejected as error:
            return SampleRejected(error.reason, error.detail)
        except Exception as error:  # a file may do anything to its decoder, and costs itself only
            if isinstance(error, UserError) or is_machines(error):
                raise
            if isinstance(error, OSError):
                return SampleRejected("missing_media", f"cannot be read: {error.strerror or error}")
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return SampleRejected(of.corrupt, f"{Path(path).name} cannot be checked: {why}")

    def _note(self, key: str, outcome: StoredMedia | SampleRejected, stamp: Stamp) -> None:
        entry: dict[str, Any] = {"place": key, "stamp": tuple(stamp)}
        if isinstance(outcome, SampleRejected):
            if outcome.reason in _NOT_ITS_OWN:
                return
            # Releases before wrote "rejected", also of what the machine had failed to read; `_read` passes over that.
            entry["refused"] = [outcome.reason, outcome.detail]
        else:  # `dataclasses.asdict`, without its copies
            entry["file"] = {each.name: getattr(outcome, each.name) for each in fields(outcome)}
        # One write each, so that the lines of several processes do not mix. The line break before it ends a line that a
        # killed process has left unfinished.
        self._own += self._journal.write(f"\n{json.dumps(entry)}\n".encode())

    def _read(self, key: str, entry: str) -> Checked | None:
        try:
            found, kind = json.loads(entry), self._kinds[key.partition(" ")[0]]
            if found.get("file", {}).get("kind") == "video":
                found["file"]["time_points"]  # KeyError: an earlier release did not look for them
            outcome = kind.made(**found["file"]) if "file" in found else SampleRejected(*found["refused"])
            return outcome, Stamp(*found["stamp"])
        except (ValueError, KeyError, TypeError):
            return None

    def close(self) -> None:
        for held in (self._journal, self._others, self._index):
            held.close()


def _status(key: str) -> os.stat_result:
    try:
        return os.stat(key.partition(" ")[2])
    except OSError:
        return os.stat_result((0,) * 10)
