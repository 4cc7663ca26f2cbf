"""Decoding an image as a person sees it: upright, RGB, and never larger than allowed."""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from energon_packing.errors import SampleRejected
from energon_packing.media.decoded_size import check_decoded_bytes
from energon_packing.media.depth import grey_range, to_rgb
from energon_packing.media.jpeg import decode_jpeg
from energon_packing.media.probe import known_formats


def decode_image(data: bytes, *, max_pixels: int, max_bytes: int | None = None) -> torch.Tensor:
    """Decodes an encoded image.

    EXIF orientation is applied, as ``transformers.image_utils.load_image`` does. Of an animation, the first frame is
    decoded. Every mode becomes RGB, deep grey ones as `energon_packing.media.depth` describes.

    Args:
        data: the file's bytes.
        max_pixels: an image with more is refused from its header, before any pixel is decoded.
        max_bytes: the same for its bytes, at 3 per pixel; None sets no limit.

    Returns:
        uint8 ``[3, H, W]``, a read-only view of rows of pixels (channels last), the fastest layout for resizing.

    Raises:
        SampleRejected: ``corrupt_media`` if the image cannot be decoded completely, ``media_too_large`` above a limit,
            ``unsupported_depth`` for samples without a defined black and white.
    """
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
                if (decoded := decode_jpeg(data, image)) is not None:
                    return decoded
                grey = grey_range(image)
                ImageOps.exif_transpose(image, in_place=True)  # otherwise an upright image would be copied
                pixels = torch.from_numpy(np.asarray(image if image.mode == "RGB" else to_rgb(image, grey)))
    except Image.DecompressionBombError as error:
        raise SampleRejected("media_too_large", str(error)) from error
    except SampleRejected:
        raise
    except Exception as error:
        # Pillow's plugins raise OSError, SyntaxError, struct.error, zlib.error, IndexError, ... for bad bytes.
        reason = "no known image format" if isinstance(error, UnidentifiedImageError) else str(error) or repr(error)
        raise SampleRejected("corrupt_media", f"the image cannot be decoded: {reason}") from error
    return pixels.permute(2, 0, 1)
