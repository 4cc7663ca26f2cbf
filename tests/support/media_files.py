"""Real image and video files of awkward kinds, and a folder to read them from."""

import functools
import io
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import av
import numpy as np
from PIL import Image

from energon_packing.conversation import Media
from energon_packing.media import probe


def _opened(source: bytes | str | Path) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb")


def image_info(source: bytes | str | Path, **options: Any) -> probe.ImageInfo:
    """`probe.image_info` of a file or its bytes."""
    with _opened(source) as stream:
        return probe.image_info(stream, **options)


def probe_video(source: bytes | str | Path, **options: Any) -> probe.VideoInfo:
    """`probe.probe_video` of a file or its bytes."""
    with _opened(source) as stream:
        return probe.probe_video(stream, **options)


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth random colours: what JPEG keeps, and no two corners alike."""
    rng = np.random.default_rng(seed)
    bands = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    small = rng.integers(0, 256, (3, 3, bands), dtype=np.uint8)
    image = Image.merge(mode, [Image.fromarray(small[:, :, band]) for band in range(bands)])
    return image.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def turned_by_exif(width: int, height: int, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(width, height), "JPEG", exif=exif)


def animation(width: int, height: int) -> bytes:
    frames = [picture(width, height, seed=seed) for seed in range(4)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=40)


def palette_with_transparency(width: int, height: int) -> bytes:
    return encoded(picture(width, height).convert("P"), "PNG", transparency=3)


def clip_of(
    pictures: Iterable[np.ndarray],
    times: Sequence[int],
    *,
    codec: str = "libx264",
    container: str = "mp4",
    options: dict[str, str] | None = None,
) -> bytes:
    """A clip that shows each picture ``[H, W, 3]`` at its time, in hundredths of a second."""
    buffer, base = io.BytesIO(), Fraction(1, 100)
    if codec in ("mpeg1video", "mpeg2video"):  # which know a few rates alone
        base, times = Fraction(1, 25), range(len(times))
    name = {"mkv": "matroska", "ts": "mpegts", "mpg": "mpeg"}.get(container, container)
    with av.open(buffer, "w", format=name) as output:
        stream = output.add_stream(codec, rate=25, options=options or {})
        for pixels, time in zip(pictures, times, strict=True):
            if not stream.codec_context.is_open:
                stream.height, stream.width = pixels.shape[:2]
                stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
                stream.time_base = stream.codec_context.time_base = base
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            frame.pts, frame.time_base = time, base
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def noise_clip(times: Sequence[int], size: tuple[int, int] = (48, 32), **options: Any) -> bytes:
    """A clip of noise, another in each frame; ``options`` of `clip_of`."""
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8) for _ in times]
    return clip_of(pictures, times, **options)


def png_of(width: int, height: int, bits: int, colour: int, pixels: bytes, transparent: bytes = b"") -> bytes:
    """A PNG of rows of samples, which may be fewer than the header says."""

    def block(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = block(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    keyed = block(b"tRNS", transparent) if transparent else b""
    return b"\x89PNG\r\n\x1a\n" + header + keyed + block(b"IDAT", zlib.compress(pixels)) + block(b"IEND", b"")


def clip(frames: int, *, size: tuple[int, int] = (96, 64), times: Sequence[int] | None = None) -> bytes:
    """``frames`` pictures, each of another colour, four hundredths of a second apart."""
    pictures = [np.asarray(picture(*size, seed=seed)) for seed in range(frames)]
    return clip_of(pictures, times or range(0, 4 * frames, 4))


def turned_by_container(data: bytes, degrees: int) -> bytes:
    """The clip with a display matrix in its track header, as ISO 14496-12 defines it: degrees clockwise."""
    turn = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    result = bytearray(data)
    matrix = result.index(b"tkhd") + 4 + 40
    values = [turn[0] << 16, turn[1] << 16, 0, turn[2] << 16, turn[3] << 16, 0, 0, 0, 1 << 30]
    for index, value in enumerate(values):
        result[matrix + 4 * index : matrix + 4 * index + 4] = (value & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(result)


def film_after_cover() -> bytes:
    """An MP4 of 20 frames of 48 x 32 pixels, each lighter, whose first video stream is a cover picture of 64 x 64: as
    FFmpeg numbers the streams of a file whose tags lie before its tracks."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        film, cover = output.add_stream("libx264", rate=25), output.add_stream("mjpeg", rate=1)
        film.width, film.height, film.pix_fmt = 48, 32, "yuv420p"
        cover.width, cover.height, cover.pix_fmt = 64, 64, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        for number in range(20):
            output.mux(film.encode(av.VideoFrame.from_ndarray(np.full((32, 48, 3), 10 * number, np.uint8), "rgb24")))
        image = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), "rgb24")
        output.mux([*film.encode(None), *cover.encode(image), *cover.encode(None)])
    data = buffer.getvalue()
    start = data.index(b"moov") + 4
    stop = start - 8 + int.from_bytes(data[start - 8 : start - 4], "big")
    inside, boxes = data[start:stop], []
    while inside:
        boxes.append(inside[: int.from_bytes(inside[:4], "big")])
        inside = inside[len(boxes[-1]) :]
    boxes.sort(key=lambda box: [b"mvhd", b"udta", b"trak"].index(box[4:8]))
    return data[:start] + b"".join(boxes) + data[stop:]


def sound(cover: bool = False) -> bytes:
    """An MP4 of silence, with or without a cover picture."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        picture = container.add_stream("mjpeg", rate=1) if cover else None
        if picture is not None:
            picture.width, picture.height, picture.pix_fmt = 32, 32, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic
        for start in range(0, 16000, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.rate, frame.pts = 16000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if picture is not None:
            image = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")
            container.mux([*picture.encode(image), *picture.encode(None)])
    return buffer.getvalue()


IMAGES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: encoded(picture(200, 120), "JPEG", quality=90),
    "grey jpeg": lambda: encoded(picture(90, 70, "L"), "JPEG"),
    "cmyk jpeg": lambda: encoded(picture(120, 80, "CMYK"), "JPEG"),
    "png with alpha": lambda: encoded(picture(64, 100, "RGBA"), "PNG"),
    "grey png with alpha": lambda: encoded(picture(64, 100, "LA"), "PNG"),
    "palette png with transparency": lambda: palette_with_transparency(80, 60),
    "one bit png": lambda: encoded(picture(80, 60, "L").convert("1"), "PNG"),
    "animated gif": lambda: animation(70, 50),
    "transparent webp": lambda: encoded(picture(100, 64, "RGBA"), "WEBP"),
    "webp": lambda: encoded(picture(100, 64), "WEBP"),
    **{f"exif {turn}": functools.partial(turned_by_exif, 120, 64, turn) for turn in range(1, 9)},
    "1x1": lambda: encoded(picture(1, 1), "PNG"),
    "2000x20": lambda: encoded(picture(2000, 20), "PNG"),
}


class Folder:
    """Named bytes in a real directory: `add` measures a file, `read` gives its bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, data: bytes) -> Media:
        (self.path / name).write_bytes(data)
        if name.endswith((".mp4", ".avi")):
            video = probe_video(data)
            names = ("width", "height", "frames", "fps", "duration")
            return Media(kind="video", name=name, **{each: getattr(video, each) for each in names})
        width, height = image_info(data)[:2]
        return Media(kind="image", name=name, width=width, height=height)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()


def write_clip(path: Path, *, frames: int, width: int, height: int, fps: float = 16, codec: str = "libx264") -> Path:
    """A clip of moving colours; frame i is darker than frame i + 1."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        across = np.linspace(0, 60, width)[None, :, None] + np.linspace(0, 40, height)[:, None, None]
        for index in range(frames):
            pixels = np.clip(across + np.array([20.0, 10.0, 0.0]) + 4 * index, 0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path
