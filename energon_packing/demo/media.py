"""What the demo's images and clips show, what can be said about it, and the files: JPEG, PNG, WebP, MP4 and AVI."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Self

import numpy as np
from PIL import ExifTags, Image, ImageDraw, ImageFont

from energon_packing.demo import words
from energon_packing.media.probe import pyav

Exchange = tuple[str, str]  # A question and its answer, which follows from the picture or from the text before it
_STORED = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
_QUALITY = {".jpg": {"quality": 85}, ".webp": {"quality": 80, "method": 0}, ".png": {"compress_level": 3}}


def a(noun: str) -> str:
    """The noun with its indefinite article: ``an owl``, ``a heron``."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One shape: `place` is (column, row) on a grid of 3 x 3 cells."""

    shape: str
    colour: str
    place: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Picture:
    """An image: figures on a background, with an optional word below them."""

    background: str
    gradient: bool
    figures: tuple[Figure, ...]
    caption: str | None

    @classmethod
    def draw(cls, rng: Random, *, grey: bool = False) -> Self:
        """A random picture with one to six figures in different cells, none in the colour of the background; ``grey``
        are black and white on grey, so that an image in shades of grey shows what is said about it."""
        background = "grey" if grey else rng.choice(sorted(words.COLOURS))
        colours = ["black", "white"] if grey else [name for name in words.COLOURS if name != background]
        places = sorted(rng.sample(sorted(words.PLACES), rng.choice((1, 2, 2, 3, 3, 4, 5, 6))))
        figures = tuple(Figure(rng.choice(list(words.SHAPES)), rng.choice(colours), place) for place in places)
        caption = rng.choice(words.GOODS).upper() if rng.random() < 0.25 else None
        return cls(background, not grey and rng.random() < 0.4, figures, caption)

    def description(self) -> str:
        ground = f"{a(self.background)} background" + (" that fades to a darker shade" if self.gradient else "")
        named = [f"{a(each.colour)} {each.shape} at the {words.PLACES[each.place]}" for each in self.figures]
        below = f' Below it says "{self.caption}".' if self.caption else ""
        return f"The picture shows {', '.join(named)}, on {ground}.{below}"

    def exchanges(self, rng: Random) -> list[Exchange]:
        """Questions about the picture with their answers, in random order."""
        figure = rng.choice(self.figures)
        where = words.PLACES[figure.place]
        exchanges = [
            ("Describe the picture.", self.description()),
            ("How many shapes are there?", f"There are {words.NUMBERS[len(self.figures)]}."),
            (f"What is at the {where}?", f"At the {where} there is {a(figure.colour)} {figure.shape}."),
            ("What colour is the background?", f"The background is {self.background}."),
        ]
        rng.shuffle(exchanges)
        return exchanges

    def render(self, width: int, height: int) -> Image.Image:
        """The picture as an RGB image; with a gradient it has noise, as a camera's, which slows decoding as theirs."""
        ground = words.COLOURS[self.background]
        image = Image.new("RGB", (width, height), ground)
        if self.gradient:
            dark = Image.new("RGB", (width, height), tuple(part * 2 // 3 for part in ground))
            image.paste(dark, mask=Image.linear_gradient("L").resize((width, height)))
            noise = np.random.default_rng(0).integers(-10, 11, (height, width, 3), dtype=np.int16)
            image = Image.fromarray((np.asarray(image, np.int16) + noise).clip(0, 255).astype(np.uint8))
        draw = ImageDraw.Draw(image)
        floor = height * (0.85 if self.caption else 1.0)  # the lowest part is left for the caption
        for figure in self.figures:
            column, row = figure.place
            centre = ((column + 0.5) * width / 3, (row + 0.5) * floor / 3)
            _draw_shape(draw, figure.shape, figure.colour, centre, 0.38 * min(width, floor) / 3)
        if self.caption:
            font = ImageFont.load_default(max(8, round(height * 0.11)))
            draw.text((width * 0.04, floor), self.caption, fill="black" if sum(ground) > 380 else "white", font=font)
        return image

    def save(self, path: Path, width: int, height: int, *, mode: str = "RGB", exif_orientation: int = 1) -> None:
        """Writes the picture in the format that the suffix names: ``.jpg``, ``.png`` or ``.webp``. The mode ``L`` is
        shades of grey, ``CMYK`` (JPEG only) the four colours of print. Under an ``exif_orientation`` other than 1,
        pixels are stored rotated, and the tag tells the viewer how to rotate them back."""
        image = self.render(width, height).convert(mode)
        exif = Image.Exif()
        if exif_orientation != 1:
            # 6 means "turn the stored pixels by 90 degrees clockwise", so they are stored turned the other way.
            image = image.transpose(_STORED[exif_orientation])
            exif[ExifTags.Base.Orientation] = exif_orientation
        image.save(path, None, exif=exif, **_QUALITY[path.suffix])


@dataclass(frozen=True, slots=True)
class Clip:
    """A video: one figure that moves over a background."""

    background: str
    shape: str
    colour: str
    direction: str

    @classmethod
    def draw(cls, rng: Random) -> Self:
        background, colour = rng.sample(sorted(words.COLOURS), 2)
        return cls(background, rng.choice(list(words.SHAPES)), colour, rng.choice(sorted(words.DIRECTIONS)))

    def description(self) -> str:
        what = f"{a(self.colour)} {self.shape}"
        return f"The video shows {what} that moves {self.direction} over {a(self.background)} background."

    def exchanges(self, rng: Random) -> list[Exchange]:
        """Questions about the clip with their answers, in random order."""
        exchanges = [
            ("What happens in the video?", self.description()),
            (f"In which direction does the {self.shape} move?", f"It moves {self.direction}."),
            ("What does the background look like?", f"It is {self.background} all the time."),
        ]
        rng.shuffle(exchanges)
        return exchanges

    def save(self, path: Path, width: int, height: int, *, fps: int, frames: int) -> None:
        """Encodes at least 2 frames of an even size; ``.avi`` is MPEG-4, ``.mp4`` H.264 where FFmpeg can encode it."""
        av = pyav()  # the demo's processors need none
        codec = "libx264" if path.suffix == ".mp4" and "libx264" in av.codecs_available else "mpeg4"
        step_x, step_y = words.DIRECTIONS[self.direction]
        with av.open(str(path), mode="w") as container:
            stream = container.add_stream(codec, rate=fps)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.codec_context.thread_count = 1  # several threads would split the frames differently elsewhere
            if codec == "libx264":
                # Else x264 reads memory that it did not write, and a clip has other bytes now and then.
                stream.options = {"preset": "veryfast", "crf": "26", "x264-params": "cpu-independent=1"}
            for index in range(frames):
                moved = 0.35 * (2 * index / (frames - 1) - 1)
                centre = (width * (0.5 + step_x * moved), height * (0.5 + step_y * moved))
                image = Image.new("RGB", (width, height), words.COLOURS[self.background])
                _draw_shape(ImageDraw.Draw(image), self.shape, self.colour, centre, 0.14 * min(width, height))
                container.mux(stream.encode(av.VideoFrame.from_image(image)))
            container.mux(stream.encode())


@cache
def _outline(shape: str) -> tuple[tuple[float, float], ...]:
    """Corners on and in a circle of radius 1."""
    corners, turn, inner = words.SHAPES[shape]
    angles = [2 * math.pi * corner / corners + math.radians(turn - 90) for corner in range(corners)]
    reach = [1.0 if corner % 2 == 0 else inner for corner in range(corners)]
    return tuple((far * math.cos(angle), far * math.sin(angle)) for far, angle in zip(reach, angles, strict=True))


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, colour: str, at: tuple[float, float], radius: float) -> None:
    draw.polygon([(at[0] + x * radius, at[1] + y * radius) for x, y in _outline(shape)], fill=words.COLOURS[colour])


def save_sound(path: Path) -> None:
    """Writes an ``.mp4`` with a second of a tone and no video: one of the demo's defects."""
    av = pyav()
    rate, size = 16000, 1024
    with av.open(str(path), mode="w") as container:
        stream = container.add_stream("aac", rate=rate)
        stream.layout = "mono"
        for start in range(0, rate, size):
            tone = 0.2 * np.sin(2 * np.pi * 440 * np.arange(start, start + size) / rate)
            sound = av.AudioFrame.from_ndarray(tone.astype(np.float32)[None], format="fltp", layout="mono")
            sound.sample_rate, sound.pts = rate, start
            container.mux(stream.encode(sound))
        container.mux(stream.encode())
