"""Media files of a conversion: resolved inside their root, checked once each, named by their content."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from energon_packing.conversation import Media, MediaKind
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.jpeg_header import JpegHeader, read_jpeg_header
from energon_packing.convert.tensor_files import TensorFile, TensorRole, check_tensor
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
    if not reference or "\0" in reference or not is_path(reference):
        raise SampleRejected("missing_media", f"{reference!r} is not a path")
    if (plain := _plain_file(reference, str(root))) is not None:
        return plain
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


def is_path(reference: str) -> bool:
    """Whether the system can be asked for it; JSON can hold half of a character."""
    try:
        os.fsencode(reference)
    except UnicodeEncodeError:
        return False
    return True


@lru_cache(maxsize=4096)
def _real_directory(directory: str) -> str:
    return os.path.realpath(directory)


def _plain_file(reference: str, root: str) -> str | None:
    """The resolved path of a file that is no link, in a directory whose links have been resolved before.

    Returns:
        None for anything else: a link, another kind of file, a way out of the root.
    """
    directory, _, name = reference.rpartition("/")
    if name in ("", ".", "..") or reference.startswith("/"):
        return None
    real = _real_directory(f"{root}/{directory}")
    if real != root and not real.startswith(root.rstrip("/") + "/"):
        return None
    path = f"{real}/{name}"
    try:
        return path if stat.S_ISREG(os.lstat(path).st_mode) else None
    except (OSError, ValueError):
        return None


def check_media(path: str, kind: MediaKind, config: ConvertConfig) -> MediaFile:
    """Reads and checks one file.

    Raises:
        SampleRejected: ``missing_media`` (unreadable), ``corrupt_media``, ``media_too_large``.
    """
    from energon_packing.media.probe import ImageInfo, image_info, probe_video  # text needs neither Pillow nor FFmpeg

    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == 0:
                raise SampleRejected("corrupt_media", "the file is empty")
            if size > config.max_media_bytes:
                raise SampleRejected(
                    "media_too_large", f"{size} bytes, more than the limit of {config.max_media_bytes}"
                )
            found, jpeg = _digest(stream)
            digest = found[:32]
        decode = config.check_media == "full"
        if kind == "image":
            if jpeg is not None and not decode and jpeg.width * jpeg.height <= config.max_pixels:
                width, height, mode = jpeg
                image = ImageInfo(width, height, "JPEG", mode, width, height)
            else:
                with _pillow_pixel_limit(config.max_pixels):
                    image = image_info(path, max_pixels=config.max_pixels, decode=decode)
            return MediaFile(
                kind=kind,
                path=path,
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
                transparent=image.transparent,
            )
        video = probe_video(path, max_pixels=config.max_pixels, decode=decode)
        return MediaFile(
            kind=kind,
            path=path,
            name=f"{digest}.{_video_extension(Path(path), video.container)}",
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


_BLOCK = bytearray(1 << 16)
"""Read into again and again: a new buffer for each file would cost as much as hashing it, and so does a larger one,
which a processor's cache does not hold."""


def _digest(stream: BinaryIO) -> tuple[str, JpegHeader | None]:
    """SHA-256 of a file, hexadecimal, and what `read_jpeg_header` finds in its first block."""
    digest = hashlib.sha256()
    view = memoryview(_BLOCK)
    size = stream.readinto(view)  # type: ignore[attr-defined]
    jpeg = read_jpeg_header(view[:size])
    while size:
        digest.update(view[:size])
        size = stream.readinto(view)  # type: ignore[attr-defined]
    return digest.hexdigest(), jpeg


def check_tensor_file(path: str, role: TensorRole, config: ConvertConfig) -> TensorFile:
    """Reads and checks one file of a tensor.

    Raises:
        SampleRejected: ``missing_media`` (unreadable), and the reasons of `check_tensor`.
    """
    try:
        return check_tensor(Path(path), role, config, descriptor=_regular(path))
    except OSError as error:
        raise SampleRejected("missing_media", f"cannot be read: {error.strerror or error}") from error


def open_regular(path: str) -> Any:
    """Opens a resolved path for reading; does not follow a link that has replaced it in the meantime."""
    return os.fdopen(_regular(path), "rb", buffering=0)


def _regular(path: str) -> int:
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
