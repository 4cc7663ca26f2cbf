"""Media files of a conversion: resolved inside their root, checked once each, named by their content."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from energon_packing.conversation import Media, MediaKind
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.layouts.layout import FileKind
from energon_packing.errors import SampleRejected

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
        transparent: see `energon_packing.media.probe.ImageInfo`; False for videos.
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
    transparent: bool = False

    @property
    def metadata(self) -> tuple[str, str]:
        """Type and content of the file in the table of ``energon prepare --media-metadata-by-extension``.

        Energon would decode every file again, and omits a whole shard if one file fails. As in Energon's own table,
        sizes are those of the stored pixels, before EXIF or container rotation; the records hold the displayed sizes.
        """
        width, height = self.stored_width, self.stored_height
        if self.kind == "image":
            image = {"width": width, "height": height, "format": self.format, "mode": self.mode}
            return "image", orjson.dumps(image).decode()
        video = {
            "video_duration": self.duration,
            "video_num_frames": self.frames,
            "video_fps": self.fps,
            "video_width": width,
            "video_height": height,
        }
        return "av", orjson.dumps(video).decode()

    def media(self, name: str) -> Media:
        """The record's entry for the file, which is stored under a name."""
        shown = {field: getattr(self, field) for field in ("kind", "width", "height", "frames", "fps", "duration")}
        return Media(name=name, **shown)


StoredMedia = Any
"""A `MediaFile`, or a checked file of another kind: it has its ``name``, ``path``, ``transparent`` and ``metadata``
(None for what Energon has no table for)."""


def resolve_media(reference: str, root: Path) -> str:
    """The file that a record names, with all links resolved, inside its root.

    Args:
        reference: the path in the record, relative to the root, or absolute inside it.
        root: must be resolved already.

    Raises:
        SampleRejected: ``remote_media``, ``media_outside_root``, ``missing_media``.
    """
    if is_address(reference):
        shown = reference if len(reference) <= 80 else reference[:77] + "..."
        raise SampleRejected("remote_media", f"{shown!r} is not a local file; store it below {root} and name its path")
    check_path(reference)
    try:
        path = Path(os.path.realpath(root / reference))
        if not path.is_relative_to(root):
            raise SampleRejected("media_outside_root", f"{reference!r} leads out of the media root {root}")
        if not path.is_file():
            what = "is not a file" if path.exists() else "does not exist"
            raise SampleRejected("missing_media", f"{reference!r} {what} in {root}")
    except OSError as error:
        raise SampleRejected("missing_media", f"{reference!r} cannot be looked up: {error.strerror}") from error
    return str(path)


def is_address(reference: str) -> bool:
    """Whether a record names an address, not a path."""
    return _ADDRESS.match(reference) is not None


def check_path(reference: str) -> None:
    """Refuses what the system cannot be asked for; JSON can hold half of a character.

    Raises:
        SampleRejected: ``missing_media``.
    """
    with suppress(UnicodeEncodeError):
        if os.fsencode(reference) and "\0" not in reference:
            return
    raise SampleRejected("missing_media", f"{reference!r} is not a path")


def check_media(stream: BinaryIO, path: str, size: int, kind: MediaKind, config: ConvertConfig) -> MediaFile:
    """Reads and checks an open image or video.

    Raises:
        SampleRejected: ``corrupt_media``, ``media_too_large``.
        OSError: it cannot be read.
    """
    from energon_packing.media.probe import image_info, jpeg_info, probe_video  # text needs neither Pillow nor FFmpeg

    head = stream.peek() if kind == "image" else b""  # type: ignore[attr-defined]
    digest = _digest(stream)
    decode = config.check_media == "full"
    found: Any
    if kind == "image":
        found = None if decode else jpeg_info(head)
        if found is None or found.width * found.height > config.max_pixels:
            with _pillow_pixel_limit(config.max_pixels):
                found = image_info(path, max_pixels=config.max_pixels, decode=decode)
        extension, form = _EXTENSION_OF_IMAGE[found.format], found.format
    else:
        found = probe_video(path, max_pixels=config.max_pixels, decode=decode)
        extension, form = _video_extension(Path(path), found.container), found.container
    return MediaFile(
        kind=kind,
        path=path,
        name=f"{digest}.{extension}",
        size=size,
        width=found.width,
        height=found.height,
        frames=getattr(found, "frames", None),
        fps=getattr(found, "fps", None),
        duration=getattr(found, "duration", None),
        stored_width=found.stored_width,
        stored_height=found.stored_height,
        format=form,
        mode=getattr(found, "mode", ""),
        transparent=getattr(found, "transparent", False),
    )


MEDIA_KINDS: Mapping[str, FileKind] = {
    kind: FileKind(check=check_media, made=MediaFile, corrupt="corrupt_media") for kind in ("image", "video")
}

_BLOCK = bytearray(1 << 16)
"""Read into again and again: a new buffer for each file would cost as much as hashing it, and so does a larger one,
which a processor's cache does not hold."""


def _digest(stream: BinaryIO) -> str:
    """The first 32 hexadecimal digits of a file's SHA-256."""
    digest = hashlib.sha256()
    view = memoryview(_BLOCK)
    while size := stream.readinto(view):  # type: ignore[attr-defined]
        digest.update(view[:size])
    return digest.hexdigest()[:32]


def open_regular(path: str) -> Any:
    """Opens a resolved path for reading; does not follow a link that has replaced it in the meantime.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _video_extension(path: Path, container: str) -> str:
    suffix = path.suffix.lower().lstrip(".")
    if suffix in _CONTAINER_SUFFIXES:
        return suffix
    return next(
        (_EXTENSION_OF_CONTAINER[name] for name in container.split(",") if name in _EXTENSION_OF_CONTAINER), "mp4"
    )


@contextmanager
def _pillow_pixel_limit(max_pixels: int) -> Iterator[None]:
    """Lets Pillow open what the conversion allows: raises its limit to ours and silences its warning."""
    from PIL import Image

    before = Image.MAX_IMAGE_PIXELS
    if before is not None and before < max_pixels:
        Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before
