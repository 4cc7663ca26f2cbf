"""Media files of a conversion: resolved inside their root, checked once each, named by their content."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

from energon_packing.conversation import Media, MediaKind
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.tensor_files import TensorFile, check_tensor
from energon_packing.errors import SampleRejected
from energon_packing.media.probe import image_info, probe_video
from energon_packing.wan.record import TensorRole

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://|data:)")
_EXTENSION_OF_IMAGE = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "GIF": "gif",
    "WEBP": "webp",
    "BMP": "bmp",
    "TIFF": "tiff",
    "PPM": "ppm",
    "JPEG2000": "jp2",
    "AVIF": "avif",
}
_EXTENSION_OF_CONTAINER = {
    "mov": "mp4",
    "matroska": "mkv",
    "avi": "avi",
    "mpeg": "mpg",
    "mpegts": "ts",
    "mpegvideo": "mpg",
    "flv": "flv",
    "asf": "wmv",
    "ogg": "ogv",
    "gif": "gif",
}
_CONTAINER_SUFFIXES = frozenset({"mp4", "mov", "m4v", "mkv", "webm", "avi", "mpg", "mpeg", "ts", "flv", "wmv", "ogv"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaFile:
    """One distinct image or video, checked.

    Attributes:
        kind: ``image`` or ``video``.
        path: the file, all links resolved.
        name: its entry in the media store, ``<32 hex digits of its SHA-256>.<extension>``; equal files share one entry.
        size: bytes.
        width, height: pixels as displayed.
        frames, fps, duration: of a video, see `energon_packing.media.probe.VideoInfo`; None for images.
        stored_width, stored_height: pixels as stored, before any rotation.
        format: Pillow's or FFmpeg's name of the format.
        mode: Pillow's pixel mode; empty for videos.
    """

    kind: MediaKind
    path: str
    name: str
    size: int
    width: int
    height: int
    frames: int | None
    fps: float | None
    duration: float | None
    stored_width: int
    stored_height: int
    format: str
    mode: str

    @property
    def extension(self) -> str:
        """Without the dot."""
        return self.name.rsplit(".", 1)[1]


def media_of_file(name: str, file: MediaFile) -> Media:
    """The record's entry for a checked file that is stored under a name."""
    return Media(
        kind=file.kind,
        name=name,
        width=file.width,
        height=file.height,
        frames=file.frames,
        fps=file.fps,
        duration=file.duration,
    )


def resolve_media(reference: str, root: Path) -> Path:
    """The file that a record names, with all links resolved, inside its root.

    Args:
        reference: the path in the record, relative to the root, or absolute inside it.
        root: must be resolved already.

    Raises:
        SampleRejected: ``remote_media``, ``media_outside_root``, ``missing_media``.
    """
    if _ADDRESS.match(reference):
        shown = reference if len(reference) <= 80 else reference[:77] + "..."
        raise SampleRejected("remote_media", f"{shown!r} is not a local file; store it below {root} and name its path")
    if not reference or "\0" in reference:
        raise SampleRejected("missing_media", f"{reference!r} is not a path")
    try:
        path = Path(os.path.realpath(root / reference))
        if not path.is_relative_to(root):
            raise SampleRejected("media_outside_root", f"{reference!r} leads out of the media root {root}")
        if not path.is_file():
            what = "is not a file" if path.exists() else "does not exist"
            raise SampleRejected("missing_media", f"{reference!r} {what} in {root}")
    except OSError as error:
        raise SampleRejected("missing_media", f"{reference!r} cannot be looked up: {error.strerror}") from error
    return path


def check_media(path: Path, kind: MediaKind, config: ConvertConfig) -> MediaFile:
    """Reads and checks one file.

    Raises:
        SampleRejected: ``missing_media`` (unreadable), ``corrupt_media``, ``media_too_large``.
    """
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == 0:
                raise SampleRejected("corrupt_media", "the file is empty")
            if size > config.max_media_bytes:
                raise SampleRejected(
                    "media_too_large", f"{size} bytes, more than the limit of {config.max_media_bytes}"
                )
            digest = hashlib.file_digest(stream, "sha256").hexdigest()[:32]
        decode = config.check_media == "full"
        if kind == "image":
            image = image_info(path, max_pixels=config.max_pixels, decode=decode)
            return MediaFile(
                kind=kind,
                path=str(path),
                name=f"{digest}.{_EXTENSION_OF_IMAGE[image.format]}",
                size=size,
                width=image.width,
                height=image.height,
                frames=None,
                fps=None,
                duration=None,
                stored_width=image.stored_width,
                stored_height=image.stored_height,
                format=image.format,
                mode=image.mode,
            )
        video = probe_video(path, max_pixels=config.max_pixels, decode=decode)
        return MediaFile(
            kind=kind,
            path=str(path),
            name=f"{digest}.{_video_extension(path, video.container)}",
            size=size,
            width=video.width,
            height=video.height,
            frames=video.frames,
            fps=video.fps,
            duration=video.duration,
            stored_width=video.stored_width,
            stored_height=video.stored_height,
            format=video.container,
            mode="",
        )
    except OSError as error:
        raise SampleRejected("missing_media", f"cannot be read: {error.strerror or error}") from error


def _check_tensor(path: Path, role: TensorRole, config: ConvertConfig) -> TensorFile:
    try:
        return check_tensor(path, role, config, descriptor=_regular(path))
    except OSError as error:
        raise SampleRejected("missing_media", f"cannot be read: {error.strerror or error}") from error


def open_regular(path: Path) -> Any:
    """Opens a resolved path for reading; does not follow a link that has replaced it in the meantime."""
    return os.fdopen(_regular(path), "rb")


def _regular(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def _video_extension(path: Path, container: str) -> str:
    suffix = path.suffix.lower().lstrip(".")
    if suffix in _CONTAINER_SUFFIXES:
        return suffix
    return next(
        (_EXTENSION_OF_CONTAINER[name] for name in container.split(",") if name in _EXTENSION_OF_CONTAINER), "mp4"
    )


Outcome = MediaFile | TensorFile | SampleRejected
FileKind = MediaKind | TensorRole


class MediaChecker:
    """Checks each distinct file once, in threads, and remembers the result, even across an interruption.

    Pillow and FFmpeg release the GIL while they decode, so threads are enough and nothing needs pickling.
    """

    def __init__(self, config: ConvertConfig, journal: Path | None = None) -> None:
        """
        Args:
            config: limits and the number of threads.
            journal: file of results; read if it exists, then appended to.
        """
        self._config = config
        self._outcomes: dict[tuple[str, FileKind], Outcome | Future[Outcome]] = {}
        self._recalled = _read_journal(journal) if journal is not None else {}
        self._journal: TextIO | None = journal.open("a", encoding="utf-8", buffering=1) if journal is not None else None
        self._pool = ThreadPoolExecutor(config.workers, "probe-media") if config.workers else None
        self.checked = 0
        self.recalled = 0

    def submit(self, path: Path, kind: FileKind) -> None:
        """Submits a file for checking; submitting it twice costs nothing."""
        place = (str(path), kind)
        if place in self._outcomes:
            return
        if (known := self._recalled.get((*place, *_stamp(path)))) is not None:
            self.recalled += 1
            self._outcomes[place] = known
        elif self._pool is None:
            self._outcomes[place] = self._check(path, kind)
            self._note(path, kind, place)
        else:
            self._outcomes[place] = self._pool.submit(self._check, path, kind)

    def result(self, path: Path, kind: FileKind) -> MediaFile | TensorFile:
        """Waits for and returns the result for a submitted file.

        Raises:
            SampleRejected: see `check_media` and `check_tensor`.
        """
        place = (str(path), kind)
        outcome = self._outcomes[place]
        if isinstance(outcome, Future):
            outcome = self._outcomes[place] = outcome.result()
            self._note(path, kind, place)
        if isinstance(outcome, SampleRejected):
            # A new one each time: a raised exception collects traceback frames.
            raise SampleRejected(outcome.reason, outcome.detail)
        return outcome

    def _check(self, path: Path, kind: FileKind) -> Outcome:
        try:
            if kind == "latents" or kind == "context":
                return _check_tensor(path, kind, self._config)
            return check_media(path, kind, self._config)
        except SampleRejected as error:
            return SampleRejected(error.reason, error.detail)

    def _note(self, path: Path, kind: FileKind, place: tuple[str, FileKind]) -> None:
        self.checked += 1
        if self._journal is None:
            return
        outcome = self._outcomes[place]
        if isinstance(outcome, MediaFile):
            entry: dict[str, Any] = {"media": asdict(outcome)}
        elif isinstance(outcome, TensorFile):
            entry = {"tensor": asdict(outcome)}
        else:
            assert isinstance(outcome, SampleRejected)
            entry = {"rejected": [outcome.reason, outcome.detail]}
        self._journal.write(json.dumps({"place": [*place, *_stamp(path)], **entry}) + "\n")

    def close(self) -> None:
        """Stops the threads; results already recorded stay in the journal."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._journal is not None:
            self._journal.close()


def _stamp(path: Path) -> tuple[int, int]:
    """Size in bytes and change time in nanoseconds; a remembered result is valid while they are unchanged."""
    try:
        status = path.stat()
    except OSError:
        return (-1, -1)
    return (status.st_size, status.st_mtime_ns)


def _read_journal(journal: Path) -> dict[tuple[Any, ...], Outcome]:
    recalled: dict[tuple[Any, ...], Outcome] = {}
    if not journal.is_file():
        return recalled
    for line in journal.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            outcome: Outcome
            if "media" in entry:
                outcome = MediaFile(**entry["media"])
            elif "tensor" in entry:
                outcome = TensorFile(**entry["tensor"])
            else:
                outcome = SampleRejected(*entry["rejected"])
            recalled[tuple(entry["place"])] = outcome
        except (ValueError, KeyError, TypeError):
            continue  # the line that was being written when the run was interrupted
    return recalled


@contextmanager
def pillow_pixel_limit(max_pixels: int) -> Iterator[None]:
    """Lets Pillow open what the conversion allows: raises its limit to ours and silences its warning."""
    before = Image.MAX_IMAGE_PIXELS
    if before is not None and before < max_pixels:
        Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before
