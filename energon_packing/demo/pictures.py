"""Draws the scenes of the demo: images as JPEG, PNG or WebP files, and the single frames of a clip."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from energon_packing.demo import words
from energon_packing.demo.scenes import Clip, Picture

Colour = tuple[int, int, int]
PictureMode = Literal["RGB", "L", "CMYK"]


def draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, colour: Colour, centre: tuple[float, float], radius: float
) -> None:
    """Draws one of `words.SHAPES` so that it touches a circle of `radius` pixels around `centre`."""
    x, y = centre
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "ring":
        draw.ellipse(box, outline=colour, width=max(2, round(radius / 3)))
    elif shape == "square":
        side = radius * 0.8
        draw.rectangle((x - side, y - side, x + side, y + side), fill=colour)
    elif shape == "bar":
        draw.rectangle((x - radius, y - radius * 0.3, x + radius, y + radius * 0.3), fill=colour)
    elif shape == "cross":
        draw.rectangle((x - radius, y - radius * 0.28, x + radius, y + radius * 0.28), fill=colour)
        draw.rectangle((x - radius * 0.28, y - radius, x + radius * 0.28, y + radius), fill=colour)
    else:
        corners = {"triangle": 3, "diamond": 4, "star": 10}[shape]
        points = []
        for corner in range(corners):
            reach = radius * (0.42 if shape == "star" and corner % 2 else 1.0)
            angle = 2 * math.pi * corner / corners - math.pi / 2
            points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
        draw.polygon(points, fill=colour)


@lru_cache(maxsize=16)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


@cache
def _grain() -> NDArray[np.int16]:
    """One tile of noise, ``[128, 128, 3]`` int16 from -10 to 10."""
    return np.random.default_rng(0).integers(-10, 11, size=(128, 128, 3), dtype=np.int16)


def _with_grain(image: Image.Image) -> Image.Image:
    """Adds noise, as a camera does: flat colours alone would be decoded faster than any photograph."""
    pixels = np.asarray(image, dtype=np.int16)
    height, width, _ = pixels.shape
    tiles = np.tile(_grain(), (-(-height // 128), -(-width // 128), 1))[:height, :width]
    return Image.fromarray((pixels + tiles).clip(0, 255).astype(np.uint8))


def render(picture: Picture, width: int, height: int) -> Image.Image:
    """The picture as an RGB image of `width` x `height` pixels."""
    ground = words.COLOURS[picture.background]
    image = Image.new("RGB", (width, height), ground)
    if picture.gradient:
        dark = Image.new("RGB", (width, height), (ground[0] * 2 // 3, ground[1] * 2 // 3, ground[2] * 2 // 3))
        image.paste(dark, mask=Image.linear_gradient("L").resize((width, height)))
        image = _with_grain(image)
    draw = ImageDraw.Draw(image)
    floor = height * (0.85 if picture.caption else 1.0)  # the lowest part is left for the caption
    radius = 0.38 * min(width, floor) / 3
    for figure in picture.figures:
        column, row = figure.place
        centre = ((column + 0.5) * width / 3, (row + 0.5) * floor / 3)
        draw_shape(draw, figure.shape, words.COLOURS[figure.colour], centre, radius)
    if picture.caption:
        ink = (0, 0, 0) if sum(ground) > 380 else (255, 255, 255)
        draw.text((width * 0.04, floor), picture.caption, fill=ink, font=_font(max(8, round(height * 0.11))))
    return image


def save_picture(
    picture: Picture,
    path: Path,
    width: int,
    height: int,
    *,
    mode: PictureMode = "RGB",
    exif_orientation: int = 1,
) -> None:
    """Draws the picture and writes it in the format that the suffix of `path` names.

    Args:
        picture: what to draw.
        path: ends in ``.jpg``, ``.png`` or ``.webp``.
        width: pixels as a viewer shows them.
        height: pixels as a viewer shows them.
        mode: ``L`` writes shades of grey, ``CMYK`` (JPEG only) the four colours of print.
        exif_orientation: 1 (none), 3 (upside down), 6 or 8 (stored on its side): the pixels are stored rotated, and
            the EXIF tag tells the viewer how to rotate them back.
    """
    image = render(picture, width, height)
    if mode != "RGB":
        image = image.convert(mode)
    # Orientation 6 means "turn the stored pixels by 90 degrees clockwise", so they are stored turned the other way.
    turn = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    exif = Image.Exif()
    if exif_orientation != 1:
        image = image.transpose(turn[exif_orientation])
        exif[0x0112] = exif_orientation
    if path.suffix == ".jpg":
        image.save(path, quality=85, exif=exif)
    elif path.suffix == ".webp":
        image.save(path, quality=80, method=0, exif=exif)
    else:
        image.save(path, compress_level=3, exif=exif)


def frame(clip: Clip, progress: float, width: int, height: int) -> Image.Image:
    """One frame of a clip as an RGB image; `progress` runs from 0.0 (first) to 1.0 (last frame)."""
    image = Image.new("RGB", (width, height), words.COLOURS[clip.background])
    step_x, step_y = words.DIRECTIONS[clip.direction]
    centre = (
        width * (0.5 + step_x * 0.35 * (2 * progress - 1)),
        height * (0.5 + step_y * 0.35 * (2 * progress - 1)),
    )
    draw_shape(ImageDraw.Draw(image), clip.shape, words.COLOURS[clip.colour], centre, 0.14 * min(width, height))
    return image
