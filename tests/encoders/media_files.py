"""Real image and video files of awkward kinds, and a folder to read them from."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from energon_packing.conversation import Media
from energon_packing.media.probe import probe_image, probe_video


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


def sixteen_bits(width: int, height: int) -> bytes:
    grey = np.asarray(picture(width, height, "L"), dtype=np.uint16) * 257
    return encoded(Image.fromarray(grey), "PNG")


def animation(width: int, height: int) -> bytes:
    frames = [picture(width, height, seed=seed) for seed in range(4)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=40)


def palette_with_transparency(width: int, height: int) -> bytes:
    return encoded(picture(width, height).convert("P"), "PNG", transparency=3)


def clip_of(pictures: Sequence[Image.Image], times: Sequence[int], path: Path, *, codec: str = "libx264") -> bytes:
    """A clip that shows each picture at its time, in hundredths of a second."""
    base = Fraction(1, 100)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(25))
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = base
        for image, time in zip(pictures, times, strict=True):
            frame = av.VideoFrame.from_image(image)
            frame.pts, frame.time_base = time, base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path.read_bytes()


def clip(folder: Path, frames: int, *, size: tuple[int, int] = (96, 64), times: Sequence[int] | None = None) -> bytes:
    """``frames`` pictures, each of another colour, four hundredths of a second apart."""
    pictures = [picture(*size, seed=seed) for seed in range(frames)]
    return clip_of(pictures, times or [4 * number for number in range(frames)], folder / "clip.mp4")


def turned_by_container(data: bytes, degrees: int) -> bytes:
    """The clip with a display matrix in its track header, as ISO 14496-12 defines it: degrees clockwise."""
    turn = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    result = bytearray(data)
    matrix = result.index(b"tkhd") + 4 + 40
    values = [turn[0] << 16, turn[1] << 16, 0, turn[2] << 16, turn[3] << 16, 0, 0, 0, 1 << 30]
    for index, value in enumerate(values):
        result[matrix + 4 * index : matrix + 4 * index + 4] = (value & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(result)


def sound(path: Path) -> bytes:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        for start in range(0, 16000, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.rate, frame.pts = 16000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path.read_bytes()


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
    **{f"exif {turn}": lambda turn=turn: turned_by_exif(120, 64, turn) for turn in range(1, 9)},
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
            return Media(
                kind="video",
                name=name,
                width=video.width,
                height=video.height,
                frames=video.frames,
                fps=video.fps,
                duration=video.duration,
            )
        width, height = probe_image(data)
        return Media(kind="image", name=name, width=width, height=height)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()
