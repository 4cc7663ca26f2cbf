"""Sizes of images and videos, as a later stage will see them, found once at conversion.

Everything here may be called on hostile files: only known formats are opened (never a playlist, nor a format that
starts another program), and the number of pixels is checked from the header before anything is decoded.

Grey images of more than 8 bits per sample are shown as a person sees them: scaled from the file's own black and white.
Pillow converts such modes to RGB by clipping at 255, so a 16-bit image silently becomes white and a float image black.
The value of white follows from the file if its format defines it:

========================================  =====================================================================
PGM with a maxval above 255               maxval; Pillow already scales the samples to 0..65535 (mode ``I``)
PNG, JPEG 2000, AVIF                      the full range; Pillow already scales fewer bits to 0..65535
unsigned TIFF of 12 or 16 bits            ``2**BitsPerSample - 1`` (TIFF 6.0, PhotometricInterpretation)
float TIFF, PFM                           1.0, as ImageMagick, scikit-image and Matplotlib read it; only if every
                                          sample is between 0 and 1
signed TIFF, TIFF of 32-bit integers      no value that readers agree on (counts, labels, depths); refused
========================================  =====================================================================

Colour of 16 bits per channel needs nothing here: Pillow keeps the upper 8 bits of each channel. Transparent pixels are
shown on white. Pillow's conversion to RGB drops the alpha channel, so what is transparent gets the colour that the file
happens to hold there, mostly black: a black drawing on transparency becomes all black.
"""

import contextlib
import io
import math
import mmap
import struct
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image

from energon_packing.conversation import MOST_POINTS, Media, MediaKind
from energon_packing.errors import SampleRejected, UserError, is_machines
from energon_packing.media import DEFAULT_MAX_PIXELS

IMAGE_FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Pillow's names of the formats opened; JPEG includes the multi-picture files of cameras. EPS would run Ghostscript."""
VIDEO_CONTAINERS = ("mov", "mp4", "matroska", "webm", "avi", "mpeg", "mpegts", "mpegvideo", "flv", "asf", "ogg", "gif")
"""FFmpeg's names of the containers opened. Left out on purpose: playlists (hls, concat), which open other files."""

# One packet is one shown frame for these; not for VP8 (hidden frames) or MPEG-4 part 2 (packed B-frames).
_ONE_FRAME_A_PACKET = frozenset({"h264", "hevc", "vp9", "av1", "mjpeg"})
SIZED_CONTAINERS = frozenset({"mov", "mp4", "matroska", "webm"})
_EBML_HEADER = 0x1A45DFA3
_MATROSKA_SEGMENT = 0x18538067
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_SIGNED = 2
_WAY_OUT = "save it with 8 or 16 unsigned bits per sample"


class GreyRange(NamedTuple):
    """What the samples of a deep grey image mean: the value of full intensity (no intensity is 0), and whether 0 is
    shown white instead (PhotometricInterpretation 0 of TIFF)."""

    white: float
    inverted: bool = False


def grey_range(image: Image.Image) -> GreyRange | None:
    """Returns the range of an opened image's samples, from its header alone; None for 8 bits, which are not scaled.
    ``unsupported_depth`` if the format does not define which samples are black and white."""
    white: float | None = {"F": 1.0, "I": None}.get(image.mode, 65535.0 if image.mode in _SIXTEEN_BITS else 0.0)
    inverted = False
    tags = getattr(image, "tag_v2", None)
    if image.format == "TIFF" and tags is not None:
        if _SIGNED in tags.get(_SAMPLE_FORMAT, (1,)):
            raise _undefined("signed TIFF samples")
        if image.mode in _SIXTEEN_BITS:
            white = float(2 ** int(tags.get(_BITS_PER_SAMPLE, (16,))[0]) - 1)
        inverted = tags.get(_PHOTOMETRIC, 0) == 0
    elif image.mode == "I" and image.format in ("PPM", "PNG"):  # PNG: in releases of Pillow before 11
        white = 65535.0
    if white is None:
        raise _undefined(f"32-bit integers in {image.format}")
    return GreyRange(white, inverted) if white else None


def _undefined(samples: str) -> SampleRejected:
    return SampleRejected("unsupported_depth", f"{samples} have no defined black and white; {_WAY_OUT}")


def is_transparent(image: Image.Image) -> bool:
    """Whether a decoded image has a pixel that is not opaque."""
    if not image.has_transparency_data:
        return False
    if image.mode in (*_SIXTEEN_BITS, "I"):  # a PNG that names one value as transparent
        return bool((np.asarray(image) == image.info["transparency"]).any())
    return bool(image.convert("RGBA").getchannel("A").getextrema()[0] < 255)  # type: ignore[operator]


def to_rgb(image: Image.Image, grey: GreyRange | None, *, on_white: bool = True) -> Image.Image:
    """Returns a decoded image of any mode, or a part of it, as RGB, by the `grey_range` of the opened file. If
    ``on_white`` is false, the alpha of transparent pixels is dropped. Raises SampleRejected: ``unsupported_depth`` for
    float samples outside 0 to 1; ValueError: Pillow cannot convert the mode to RGB."""
    if grey is not None:
        samples = np.asarray(image)
        if samples.dtype.kind == "f":
            low, high = float(samples.min()), float(samples.max())
            if not (low >= 0.0 and high <= 1.0):  # both are NaN if a sample is
                shown = "that are not numbers" if low != low else f"from {low:g} to {high:g}"
                why = "only 0 (black) to 1 (white) has a defined meaning: scale them, or " + _WAY_OUT
                raise SampleRejected("unsupported_depth", f"float samples {shown}; {why}")
            levels = np.rint(samples * np.float32(255)).astype(np.uint8)
        else:
            levels = (samples.astype(np.uint32) * 255 // int(grey.white)).astype(np.uint8)
            if on_white and "transparency" in image.info:
                levels[samples == image.info["transparency"]] = 255
        image = Image.fromarray(255 - levels if grey.inverted else levels)
    elif on_white and image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


class ImageInfo(NamedTuple):
    """What an image's header says: width and height as displayed, after EXIF orientation, and as stored; Pillow's names
    of format and mode; whether a pixel is not opaque (of an image that is not decoded, whether one may be); whether
    frames or pages follow the first, which alone is used."""

    width: int
    height: int
    format: str
    mode: str
    stored_width: int
    stored_height: int
    transparent: bool = False
    animated: bool = False


class VideoInfo(NamedTuple):
    """What a video holds."""

    # width and height: pixels as displayed, after the container's rotation (which decoders do not apply by themselves).
    width: int
    height: int
    frames: int  # number of frames that decoding from the start yields
    # Average frames per second, the float nearest to the exact fraction: the rate that the container states, as
    # processors read it, where the frames' times agree with it; else ``frames`` over the time that they take.
    fps: float
    duration: float  # seconds of the frames at that rate; the float nearest to the exact fraction
    stored_width: int  # stored_width and stored_height: pixels of a decoded frame, before rotation
    stored_height: int
    container: str  # FFmpeg's name of the container, such as ``"mov,mp4,m4a,3gp,3g2,mj2"``
    time_points: tuple[float, ...] = ()  # of a video whose frames are unevenly spread, as in `Media`; else empty


@cache
def known_formats() -> tuple[str, ...]:
    """Those of `IMAGE_FORMATS` that this build of Pillow can open; on any other name, opening raises KeyError."""
    Image.init()
    return tuple(name for name in IMAGE_FORMATS if name in Image.OPEN)


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width <= 0 or height <= 0:
        raise SampleRejected("corrupt_media", f"the header says {width}x{height} pixels")
    if width * height > max_pixels:
        detail = f"the header says {width}x{height} pixels, more than the limit of {max_pixels}"
        raise SampleRejected("media_too_large", detail)


@contextlib.contextmanager
def pillow_pixel_limit(max_pixels: int) -> Iterator[None]:
    """Lets Pillow open what our limit allows: raises its own limit to ours and silences its warning."""
    before = Image.MAX_IMAGE_PIXELS
    if before is not None and before < max_pixels:
        Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def image_info(stream: BinaryIO, *, max_pixels: int = DEFAULT_MAX_PIXELS, decode: bool = False) -> ImageInfo:
    """Reads the header of an open image and, if ``decode`` is set, decodes all pixels of its (first) frame, which finds
    damaged files. Raises SampleRejected: ``corrupt_media``, ``media_too_large`` (more than ``max_pixels``, checked
    before decoding), ``unsupported_depth`` (see `grey_range`; for float samples only if ``decode`` is
    set); OSError, MemoryError: the file cannot be read; see `is_machines`."""
    try:
        with pillow_pixel_limit(max_pixels), Image.open(stream, formats=known_formats()) as image:
            _check_pixels(image.width, image.height, max_pixels)
            # The same call as in ImageOps.exif_transpose, so that both agree.
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
            stored_width, stored_height = _stored_size(image)
            info = (image.format or "UNKNOWN", image.mode)
            grey = grey_range(image)
            transparent = image.has_transparency_data
            if decode:
                image.load()
                transparent = is_transparent(image)
                # A mode that cannot become RGB would fail later, at every use. All float samples are needed, to
                # check their range.
                to_rgb(image if image.mode == "F" else image.crop((0, 0, 1, 1)), grey)
            animated = True
            with contextlib.suppress(LookupError, struct.error):  # damage after the first frame, which alone counts
                # Cameras put previews and depths behind the picture of a multi-picture JPEG.
                animated = image.format != "MPO" and getattr(image, "is_animated", False)
    except Image.DecompressionBombError as error:
        raise SampleRejected("media_too_large", f"Pillow refuses the image: {error}") from error
    except Exception as error:
        if isinstance(error, SampleRejected) or is_machines(error):
            raise
        # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error, zlib.error, ... for bad bytes.
        reason = str(error) or type(error).__name__
        if "BytesIO object at" in reason or "cannot identify image file" in reason:
            # Without an address: a rejects file is the same in every run.
            reason = f"no known image format{_foreign(stream)}"
        raise SampleRejected("corrupt_media", f"not a readable image: {reason}") from error
    width, height = (stored_height, stored_width) if orientation in (5, 6, 7, 8) else (stored_width, stored_height)
    return ImageInfo(width, height, *info, stored_width, stored_height, transparent, animated)


def _foreign(stream: BinaryIO) -> str:
    """What a reader should know of a file that Pillow cannot identify."""
    stream.seek(0)
    head = stream.read(1024)
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"heim", b"hevc", b"mif1", b"msf1"):
        return ": HEIC is not read; save it as JPEG or PNG"
    return ": SVG is a drawing without pixels; render it to PNG" if b"<svg" in head else ""


_JFIF, JPEG_SCAN, _QUANTISATION = 0xE0, 0xDA, 0xDB
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended, progressive
_SKIPPED = frozenset((0xC4, 0xDD, 0xFE))  # Huffman tables, restart interval, comment


def jpeg_info(head: bytes) -> ImageInfo | None:
    """Returns what `image_info` says of a JPEG file of the usual form, from its first bytes, in a tenth of the time.
    Pillow keeps every table of a header, and takes a third of the time of hashing the file. Of the usual form are JFIF
    files of 8 bits, grey or with three colours, whose segments are whole. All others (EXIF, colour profiles, four
    colours, several pictures, damage) are left to Pillow, so that its word is the last one on what is an image. None if
    the file is not of the usual form, or if its first scan begins after ``head``."""
    info: ImageInfo | None = None
    for marker, body in jpeg_segments(head):
        if marker == JPEG_SCAN:
            return info
        if marker in _FRAMES and info is None and len(body) >= 6 and len(body) == 6 + 3 * body[5]:
            height, width, mode = body[1] << 8 | body[2], body[3] << 8 | body[4], {1: "L", 3: "RGB"}.get(body[5])
            if body[0] != 8 or not width or not height or mode is None:
                return None
            info = ImageInfo(width, height, "JPEG", mode, width, height)
        elif marker == _QUANTISATION:
            if len(body) % 65 or any(number > 15 for number in body[::65]):  # tables of 8 bits, with their numbers
                return None
        elif marker not in _SKIPPED and (marker != _JFIF or len(body) != 14 or body[:5] != b"JFIF\0"):
            return None
    return None


def jpeg_segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields marker and content of the segments at the beginning of a JPEG file, as far as they are whole."""
    at = 2 if data[:3] == b"\xff\xd8\xff" else len(data)
    while at + 4 <= len(data) and data[at] == 0xFF:
        if data[at + 1] == 0xFF:  # a fill byte
            at += 1
            continue
        size = data[at + 2] << 8 | data[at + 3]
        body = data[at + 4 : at + 2 + size]
        if size < 2 or len(body) != size - 2:
            return
        yield data[at + 1], body
        at += 2 + size


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """Returns width and height before any orientation: recent releases of Pillow report a TIFF's size after its
    orientation, older ones (10.3) the stored size; the tags hold the stored size in all of them."""
    tags = getattr(image, "tag_v2", None)
    if image.format == "TIFF" and tags is not None:
        return int(tags[ExifTags.Base.ImageWidth]), int(tags[ExifTags.Base.ImageLength])
    return image.size


class _Count(NamedTuple):
    frames: int
    first: Fraction | None  # seconds; None if the stream has no time stamps
    last: Fraction | None
    last_length: Fraction  # seconds that the last frame is shown; 0 if unknown
    times: Any  # array of float64, seconds of the frames, as they are shown


_MOST_DECODED, _DECODED_A_BYTE = 1 << 31, 1 << 20
"""Pixels that a file may be decoded to, and more for each of its bytes. A film of one still picture of 1920x1080 has a
byte for 66,000 pixels in AV1, and for 30,000 in H.264; a GIF that was made to keep a decoder busy for 4,000,000."""
_SECONDS, _BYTES_A_SECOND = 60, 1 << 18
"""What decoding a file may take: a film of two hours in 500 MB may take half an hour."""


class _Work:
    """What decoding a file of ``size`` bytes may cost. Called with a number of frames and their size, it refuses too
    many pixels as ``media_too_large``, and all once the time is over as ``decode_timeout``."""

    def __init__(self, size: int) -> None:
        self._bytes, self._seconds = size, _SECONDS + size / _BYTES_A_SECOND
        self._deadline = time.monotonic() + self._seconds

    def __call__(self, frames: int, width: int, height: int) -> None:
        if frames * width * height > _MOST_DECODED + _DECODED_A_BYTE * self._bytes:
            much = f"{frames} frames of {width}x{height} pixels in {self._bytes} bytes"
            raise SampleRejected("media_too_large", f"{much} are more work for a decoder than the file explains")
        if time.monotonic() > self._deadline:
            late = f"frame {frames} was not decoded within {self._seconds:.0f} seconds"
            raise SampleRejected("decode_timeout", f"{late}, which is what a file of {self._bytes} bytes may take")


def _count(shown: Iterable[Any], what: str, work: _Work, size: tuple[int, int] | None = None) -> _Count:
    """Counts shown packets, or decoded frames (of ``size``), which is the only count that is right for every codec."""
    frames, last, length, stamps, base = 0, -math.inf, 0, array("q"), Fraction()
    for each in shown:
        work(frames, *(size or (0, 0)))
        if each.is_corrupt:
            raise SampleRejected("corrupt_media", f"{what} {frames} of the video is damaged")
        if size is not None and (each.width, each.height) != size:
            raise size_changes(size, each)
        frames += 1
        if (stamp := each.pts) is None:
            continue
        stamps.append(stamp)
        if stamp > last:  # most are: fractions, which are slow, are made of the last one only
            last, length, base = stamp, each.duration or 0, each.time_base
    if not stamps:
        return _Count(frames, None, None, Fraction(), [])
    times = array("d", (stamp * base.numerator / base.denominator for stamp in stamps))
    return _Count(frames, min(stamps) * base, max(stamps) * base, length * base, times if size else np.sort(times))


def size_changes(size: tuple[int, int], frame: Any) -> SampleRejected:
    """Why a video is refused whose frames do not all have one size."""
    detail = f"the video changes from {size[0]}x{size[1]} to {frame.width}x{frame.height} pixels"
    return SampleRejected("corrupt_media", detail)


def _rate(count: _Count, stated: Fraction | None) -> Fraction | None:
    """Average frames per second; None if there are neither time stamps nor a stated rate. Times may be rounded:
    Matroska's are whole milliseconds, so 24 frames of 24000/1001 a second take exactly one. The stated rate is the
    right one as long as it would fit as many frames into their time, give or take one."""
    if count.first is None or count.last is None or (count.frames > 1 and count.first == count.last):
        return stated  # no time stamps, or all frames have the same
    span = count.last - count.first
    length = count.last_length or (span / (count.frames - 1) if count.frames > 1 else 1 / stated if stated else 0)
    if stated and abs((span + length) * stated - count.frames) <= 1:
        return stated
    return count.frames / (span + length) if span + length > 0 else None


_EVEN = 0.1
"""Seconds, and frames, that a frame of an even video may be off its place; numbers and seconds of `time_points`."""


def _time_points(times: Any, frames: int, rate: Fraction, work: Callable[..., None]) -> tuple[float, ...]:
    """Times as `Media.time_points`, right to a hundredth of a second, or as `MOST_POINTS` allow (a 240th of the film).
    Empty where each is within `_EVEN`, or a frame, of its number by the rate, or times are missing or mixed up."""
    seconds = np.asarray(times, dtype=np.float64) - (times[0] if len(times) else 0.0)
    if len(times) != frames or (np.diff(seconds) < 0).any():
        return ()
    if np.abs(seconds - np.arange(frames) / float(rate)).max() <= max(_EVEN, 1 / float(rate)):
        return ()
    tolerance = 0.01
    while len(corners := _corners(memoryview(seconds), tolerance)) > MOST_POINTS:
        tolerance *= 2
        work(frames, 0, 0)  # its deadline
    return tuple(part for at in corners for part in (at, round(float(seconds[at]), 3)))


def _corners(seconds: memoryview, tolerance: float) -> list[int]:
    """The frames between which straight lines pass all others within a tolerance, in one pass."""
    corners, low, high = [0], -math.inf, math.inf  # slopes of lines from the last corner that pass all frames since
    for at, second in enumerate(seconds[1:], start=1):
        slope = (second - seconds[corners[-1]]) / (at - corners[-1])
        if not low <= slope <= high:
            corners.append(at - 1)
            slope, low, high = second - seconds[at - 1], -math.inf, math.inf
        slack = tolerance / (at - corners[-1])
        low, high = max(low, slope - slack), min(high, slope + slack)
    return [*corners, len(seconds) - 1]


def probe_video(stream: BinaryIO, *, max_pixels: int = DEFAULT_MAX_PIXELS, decode: bool = False) -> VideoInfo:
    """Returns size, exact number of frames and average rate of the first video stream of an open file. The first frame
    is always decoded. Frames are counted as packets if container and codec are known to hold one frame per packet and
    the container's own count, if any, agrees; otherwise, and if ``decode`` is set, by decoding the whole stream, which
    also finds damage after the first frame. Raises SampleRejected: ``corrupt_media`` (no known container, no video
    stream, truncated, no frame, no time base), ``media_too_large`` (a frame of more than ``max_pixels``, checked before
    decoding, or more frames of that size than the file's bytes explain), ``decode_timeout``; OSError, MemoryError: the
    file cannot be read; see `is_machines`; UserError: PyAV is not installed."""
    av = pyav()
    try:
        return _probe_video(stream, max_pixels, decode)
    except (av.FFmpegError, ValueError, EOFError, IndexError, OverflowError) as error:
        check_memory(error, max_pixels)
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise SampleRejected("corrupt_media", f"not a readable video: {words}") from error


def media_file(path: str | Path, kind: MediaKind = "image") -> Media:
    """Returns a file as a conversation names it: the file's own name and its sizes; for a video its frames are counted.
    Raises SampleRejected: as `image_info` and `probe_video`."""
    with open(path, "rb") as stream:
        info: Any = image_info(stream) if kind == "image" else probe_video(stream)
    sizes = ("width", "height") if kind == "image" else ("width", "height", "frames", "fps", "duration", "time_points")
    return Media(kind=kind, name=Path(path).name, **{name: getattr(info, name) for name in sizes})


def check_memory(error: Exception, max_pixels: int) -> None:
    """Raises ``OSError`` (ENOMEM) if FFmpeg has no memory because the machine has none for frames of that size; it says
    the same of a file that asks for an impossible amount."""
    if isinstance(error, MemoryError):
        mmap.mmap(-1, 16 * max_pixels).close()  # no page of it is used


def pyav() -> Any:
    """Returns PyAV, which only videos need. Raises `UserError`: it cannot be imported, whatever the file holds."""
    try:
        import av
    except ImportError as error:
        how = "run pip install '.[video]' in the checkout"
        raise UserError(f"Videos are read with PyAV, which cannot be imported ({error}); {how}") from error
    return av


def open_video(file: BinaryIO) -> Any:
    """Opens a container of a known format that can reach nothing but its own bytes; close it after use."""
    # The whitelists also apply to what a container refers to: no other file and no URL is ever opened.
    options = {"format_whitelist": ",".join(VIDEO_CONTAINERS), "protocol_whitelist": "none"}
    return pyav().open(file, "r", container_options=options)


def video_stream(container: Any) -> Any:
    """The first video stream of a container that is no cover picture; ``corrupt_media`` if none can be decoded."""
    pictured = [bool((each.disposition & each.disposition.attached_pic).value) for each in container.streams.video]
    if all(pictured):
        cover = ", only audio with a cover image" if pictured else ""
        raise SampleRejected("corrupt_media", f"the file has no video stream{cover}")
    stream = container.streams.video[pictured.index(False)]
    if stream.codec_context is None:  # the file names a codec that nobody knows
        raise SampleRejected("corrupt_media", "the video stream has an unknown codec")
    return stream


@contextlib.contextmanager
def decodable(file: BinaryIO, max_pixels: int, check: Callable[[int, int, int], None]) -> Iterator[tuple[Any, Any]]:
    """Yields the container, opened at its beginning because seeking is not exact in every format, and its video stream.
    Its decoder refuses frames far above ``max_pixels`` before it allocates memory for them. ``check`` refuses a size
    that the container announces: its width, its height and ``max_pixels``."""
    file.seek(0)
    with open_video(file) as container:
        stream = video_stream(container)
        codec = stream.codec_context
        check(codec.width, codec.height, max_pixels)
        # A stream may state another size than its container. Codecs round sides up to blocks, hence twice the limit;
        # the exact limit is checked on the first frame.
        codec.options = {"max_pixels": str(2 * max_pixels + 2**16)}
        # One thread: the converter runs one file per thread, and a loader's worker already has one core.
        codec.thread_type, codec.thread_count = "NONE", 1
        yield container, stream


def _probe_video(file: BinaryIO, max_pixels: int, decode: bool) -> VideoInfo:
    wanted = named_size(file)
    size_in_bytes = file.seek(0, io.SEEK_END)
    if wanted is not None and size_in_bytes < wanted:
        detail = f"truncated: the header states {wanted} bytes, but the file has {size_in_bytes}"
        raise SampleRejected("corrupt_media", detail)
    work = _Work(size_in_bytes)
    with decodable(file, max_pixels, _check_pixels) as (container, stream):
        container_name, named_frames, stated = container.format.name, stream.frames, stream.average_rate or None
        codec = stream.codec_context
        names = set(container_name.split(","))
        exact = decode or not names & SIZED_CONTAINERS or codec.name not in _ONE_FRAME_A_PACKET
        packets, first = 0, None  # also packets that decoding drops
        for packet in container.demux(stream):  # takes a hundredth of the time of decoding
            packets += packet.size > 0
            if first is None:
                first = next(iter(packet.decode()), None)
            elif not exact:
                break
        if first is None:
            raise SampleRejected("corrupt_media", "the video has no frame")
        _check_pixels(first.width, first.height, max_pixels)
        size = (first.width, first.height)
        turned = round(first.rotation / 90) % 2 == 1
        if exact:
            work(packets, *size)

    def shown() -> Iterator[Any]:
        nonlocal packets
        packets = 0
        for packet in container.demux(stream):
            packets += packet.size > 0
            if packet.size and not packet.is_discard:
                yield packet

    with decodable(file, max_pixels, _check_pixels) as (container, stream):
        count = _count(container.decode(stream), "frame", work, size) if exact else _count(shown(), "packet", work)
        if "mov" in names and packets < named_frames:
            detail = f"truncated: the container states {named_frames} frames, but holds {packets}"
            raise SampleRejected("corrupt_media", detail)
    if not exact and named_frames not in (0, count.frames):
        # An edit list or a broken index: only decoding tells.
        with decodable(file, max_pixels, _check_pixels) as (container, stream):
            count = _count(container.decode(stream), "frame", work, size)
    if count.frames == 0:
        raise SampleRejected("corrupt_media", "the video has no frame")
    if not (rate := _rate(count, stated)):
        raise SampleRejected("corrupt_media", "the video has neither time stamps nor a frame rate")
    width, height = (size[1], size[0]) if turned else size
    points = _time_points(count.times, count.frames, rate, work)
    duration = float(count.frames / rate)
    return VideoInfo(width, height, count.frames, float(rate), duration, *size, container_name, points)


def named_size(file: BinaryIO) -> int | None:
    """Returns the fewest bytes that the file should have, from its outermost header; None if the header does not say. A
    container without a frame count has no other sign that it was cut off. Reads RIFF (AVI) and EBML (Matroska, WebM).
    Live recordings leave the size open, which also gives None. Moves the file's position."""
    file.seek(0)
    head = file.read(12)
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        size = int.from_bytes(head[4:8], "little")
        return None if size in (0, 0xFFFFFFFF) else 8 + size
    file.seek(0)
    with contextlib.suppress(ValueError):
        identifier, length = _element(file)
        if identifier == _EBML_HEADER and length is not None:
            file.seek(length, 1)
            identifier, length = _element(file)
            if identifier == _MATROSKA_SEGMENT and length is not None:
                return file.tell() + length
    return None


def _element(file: BinaryIO) -> tuple[int, int | None]:
    """Returns id and size of the EBML element that begins here (RFC 8794, sections 4 to 6); the size is None if
    unknown. Raises ValueError if there is none."""
    numbers: list[int] = []
    for longest in (4, 8):
        first = file.read(1)
        width = 9 - first[0].bit_length() if first else 9  # bytes: the zeros before the first 1 bit encode the width
        data = first + file.read(width - 1)
        if width > longest or len(data) < width:
            raise ValueError("no EBML number")
        numbers.append(int.from_bytes(data, "big"))
    value = numbers[1] & ((1 << 7 * width) - 1)  # without the marker of the width
    return numbers[0], None if value == (1 << 7 * width) - 1 else value
