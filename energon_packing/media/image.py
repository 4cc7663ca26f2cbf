"""Decoding an image as a person sees it: upright, RGB, and never larger than allowed."""

from __future__ import annotations

import io
import math
import warnings
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from energon_packing.errors import SampleRejected
from energon_packing.media.decoded_size import check_decoded_bytes
from energon_packing.media.depth import grey_range, to_rgb
from energon_packing.media.jpeg import ORIENTATION, decode_jpeg
from energon_packing.media.probe import known_formats


class ScaledImage(NamedTuple):
    """An image that may have been decoded at a part of its size.

    Attributes:
        pixels: uint8 ``[3, h, w]``, a read-only view of rows of pixels.
        width: of the whole image in pixels, as displayed.
        height: of the whole image in pixels, as displayed.
    """

    pixels: torch.Tensor
    width: int
    height: int


def decode_scaled_image(
    data: bytes,
    least: tuple[float, float],
    *,
    max_pixels: int,
    max_bytes: int | None = None,
    on_white: bool = True,
) -> ScaledImage:
    """Decodes an image; a JPEG file at the smallest of 1/2, 1/4 and 1/8 of its size that is large enough.

    libjpeg computes fewer values of each block of 8x8 pixels instead of all of them.

    Args:
        data: the file's bytes.
        least: height and width, as displayed, that the decoded image has at least, unless the whole one is smaller.
        max_pixels, max_bytes, on_white: as for `decode_image`; the size of the whole image counts.

    Raises:
        SampleRejected: as for `decode_image`.
    """
    return _decode(data, least, max_pixels, max_bytes, on_white)


def decode_image(data: bytes, *, max_pixels: int, max_bytes: int | None = None, on_white: bool = True) -> torch.Tensor:
    """Decodes an encoded image.

    EXIF orientation is applied, as ``transformers.image_utils.load_image`` does. Of an animation, the first frame is
    decoded. Every mode becomes RGB, deep grey ones as `energon_packing.media.depth` describes.

    Args:
        data: the file's bytes.
        max_pixels: an image with more is refused from its header, before any pixel is decoded.
        max_bytes: the same for its bytes, at 3 per pixel; None sets no limit.
        on_white: show transparent pixels on white; else drop their alpha, as ``load_image`` does.

    Returns:
        uint8 ``[3, H, W]``, a read-only view of rows of pixels (channels last), the fastest layout for resizing.

    Raises:
        SampleRejected: ``corrupt_media`` if the image cannot be decoded completely, ``media_too_large`` above a limit,
            ``unsupported_depth`` for samples without a defined black and white.
    """
    return _decode(data, None, max_pixels, max_bytes, on_white).pixels


def _decode(
    data: bytes, least: tuple[float, float] | None, max_pixels: int, max_bytes: int | None, on_white: bool
) -> ScaledImage:
    whole = None
    if not data:
        raise SampleRejected("corrupt_media", "the image file is empty")
    try:
        with warnings.catch_warnings():
            # Pillow warns at a limit of its own; ours is checked below, before decoding.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # torch warns that Pillow's bytes are not writable; nothing writes to them.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            with Image.open(io.BytesIO(data), formats=known_formats()) as image:
                if image.width * image.height > max_pixels:
                    raise SampleRejected(
                        "media_too_large",
                        f"{image.width}x{image.height} pixels are over encoder.max_source_pixels={max_pixels}",
                    )
                check_decoded_bytes(1, image.width, image.height, max_bytes)
                whole = _scale(image, least) if least else None
                if whole is None and (decoded := decode_jpeg(data, image)) is not None:
                    return ScaledImage(decoded, image.width, image.height)
                grey = grey_range(image)
                ImageOps.exif_transpose(image, in_place=True)  # otherwise an upright image would be copied
                pixels = torch.from_numpy(np.asarray(to_rgb(image, grey, on_white=on_white)))
    except Image.DecompressionBombError as error:
        raise SampleRejected("media_too_large", str(error)) from error
    except SampleRejected:
        raise
    except Exception as error:
        # Pillow's plugins raise OSError, SyntaxError, struct.error, zlib.error, IndexError, ... for bad bytes.
        reason = "no known image format" if isinstance(error, UnidentifiedImageError) else str(error) or repr(error)
        raise SampleRejected("corrupt_media", f"the image cannot be decoded: {reason}") from error
    width, height = whole or (pixels.shape[1], pixels.shape[0])
    return ScaledImage(pixels.permute(2, 0, 1), width, height)


def _scale(image: Image.Image, least: tuple[float, float]) -> tuple[int, int] | None:
    """Makes Pillow decode a JPEG file at a part of its size; returns width and height as displayed, None if not."""
    if image.format != "JPEG":
        return None
    turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    height, width = (math.ceil(side) for side in (reversed(least) if turned else least))
    stored = image.size
    image.draft(None, (max(1, width), max(1, height)))
    if image.size == stored:
        return None
    return (stored[1], stored[0]) if turned else stored
