"""Decoding an image as a person sees it: upright, RGB, and never larger than allowed."""

import functools
import io
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from energon_packing.errors import SampleRejected, is_machines
from energon_packing.media import check_decoded_bytes
from energon_packing.media.probe import JPEG_SCAN, grey_range, jpeg_segments, known_formats, pillow_pixel_limit, to_rgb

_PNG = b"\x89PNG\r\n\x1a\n"
_SEQUENTIAL = (0xC0, 0xC1)  # baseline and extended, with Huffman codes
_NOT_PLAIN = frozenset((0x01, *range(0xD0, 0xD9)))  # without a length
Sides = tuple[float, float]  # Height and width


class ScaledImage(NamedTuple):
    """An image that may have been decoded at a part of its size: uint8 ``[3, h, w]``, a read-only view of rows of
    pixels; and the width and height of the whole image in pixels, as displayed."""

    pixels: torch.Tensor
    width: int
    height: int


def decode_scaled_image(
    data: bytes, least: Sides | None, *, max_pixels: int, max_bytes: int | None = None, on_white: bool = True
) -> ScaledImage:
    """Decodes an image as `decode_image` does; a JPEG file at the smallest of 1/2, 1/4 and 1/8 of its size that is at
    least ``least`` (height, width as displayed), the size of the whole image unless that is None. libjpeg then computes
    fewer values of each block of 8x8 pixels. Limits hold for the whole image."""
    whole = None
    try:
        with pillow_pixel_limit(max_pixels), warnings.catch_warnings():
            # torch warns that Pillow's bytes are not writable; nothing writes to them.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            with Image.open(io.BytesIO(data), formats=known_formats()) as image:
                if image.width * image.height > max_pixels:
                    limit = f"encoder.max_source_pixels={max_pixels}"
                    raise SampleRejected("media_too_large", f"{image.width}x{image.height} pixels are over {limit}")
                check_decoded_bytes(1, image.width, image.height, max_bytes)
                whole = _scale(image, least) if least else None
                if whole is None and (decoded := decode_jpeg(data, image)) is not None:
                    return ScaledImage(decoded, image.width, image.height)
                grey = grey_range(image)
                ImageOps.exif_transpose(image, in_place=True)  # otherwise an upright image would be copied
                pixels = torch.from_numpy(np.asarray(to_rgb(image, grey, on_white=on_white)))
    except Image.DecompressionBombError as error:
        raise SampleRejected("media_too_large", str(error)) from error
    except Exception as error:
        if isinstance(error, SampleRejected) or is_machines(error):
            raise
        # Pillow's plugins raise OSError, SyntaxError, struct.error, zlib.error, IndexError, ... for bad bytes.
        reason = "no known image format" if isinstance(error, UnidentifiedImageError) else str(error) or repr(error)
        raise SampleRejected("corrupt_media", f"the image cannot be decoded: {reason}") from error
    width, height = whole or (pixels.shape[1], pixels.shape[0])
    return ScaledImage(pixels.permute(2, 0, 1), width, height)


def decode_image(data: bytes, *, max_pixels: int, max_bytes: int | None = None, on_white: bool = True) -> torch.Tensor:
    """Decodes an encoded image. EXIF orientation is applied, as ``transformers.image_utils.load_image`` does. Of an
    animation, the first frame is decoded. Every mode becomes RGB, deep grey ones as `energon_packing.media.probe`
    describes. Returns uint8 ``[3, H, W]``, a read-only view of rows of pixels (channels last), the fastest layout for
    resizing. Raises SampleRejected: ``corrupt_media`` if the image cannot be decoded completely, ``media_too_large``
    above a limit, ``unsupported_depth`` for samples without a defined black and white.

    Args:
        max_pixels: an image with more is refused from its header, before any pixel is decoded.
        max_bytes: the same for its bytes, at 3 per pixel; None sets no limit.
        on_white: show transparent pixels on white; else drop their alpha, as ``load_image`` does.
    """
    return decode_scaled_image(data, None, max_pixels=max_pixels, max_bytes=max_bytes, on_white=on_white).pixels


def _scale(image: Image.Image, least: Sides) -> tuple[int, int] | None:
    """Makes Pillow decode a JPEG file at a part of its size; returns width and height as displayed, None if not."""
    if image.format != "JPEG":
        return None
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    height, width = (math.ceil(side) for side in (reversed(least) if turned else least))
    stored = image.size
    image.draft(None, (max(1, width), max(1, height)))
    if image.size == stored:
        return None
    return (stored[1], stored[0]) if turned else stored


def decode_jpeg(data: bytes, image: Image.Image) -> torch.Tensor | None:
    """Decodes an upright JPEG file of three components with torchvision, a quarter faster than Pillow, to its pixels.
    Both call libjpeg-turbo; torchvision writes to the tensor itself. They may ship different versions of the library,
    so the two are compared on a probe once in each process. Returns uint8 ``[3, H, W]``, a view of rows of pixels; None
    if Pillow has to decode it, or to say what is wrong with it."""
    if image.format != "JPEG" or image.mode != "RGB" or image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        return None
    if (decode := _decoder()) is None:
        return None
    try:
        pixels = decode(data)
    except RuntimeError:
        return None
    return pixels if pixels.shape == (3, image.height, image.width) else None


@functools.cache
def _decoder() -> Callable[[bytes], torch.Tensor] | None:
    """Returns torchvision's decoder; None if it is not installed or gives other pixels than Pillow."""
    try:
        from torchvision.io import ImageReadMode
        from torchvision.io import decode_jpeg as decode
    except ImportError:
        return None

    def decoded(data: bytes) -> torch.Tensor:
        return decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)

    noise = np.random.default_rng(0).integers(0, 256, (45, 61, 3), dtype=np.uint8)
    for subsampling in (0, 2):
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG", quality=80, subsampling=subsampling)
        try:
            made = decoded(file.getvalue())
        except RuntimeError:
            return None
        if not np.array_equal(made.permute(1, 2, 0).numpy(), np.asarray(Image.open(file))):
            return None
    return decoded


def is_plain(data: bytes) -> bool:
    """Whether decoding takes a time known from the size: one pass over the data, and no loop that these steer. These
    are PNG files, and JPEG files of one sequential scan. A progressive file may hold thousands of scans, each of which
    takes as long as the whole picture; so may a sequential one of several scans. Other formats have decoders that are
    younger, larger or both. False wherever it cannot be told."""
    if data[:8] == _PNG:
        return True
    layers = 0
    for marker, body in jpeg_segments(data):
        if marker == JPEG_SCAN:
            return layers > 0 and body[:1] == bytes([layers])
        if marker in _SEQUENTIAL and not layers and len(body) >= 6:
            layers = body[5]
        elif marker in _NOT_PLAIN or (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):
            return False
    return False
