"""Decoding a video that is stored as a list of image files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from energon_packing.errors import SampleRejected
from energon_packing.media.decoded_size import check_decoded_bytes
from energon_packing.media.image import decode_image


def decode_frame_files(
    read: Callable[[str], bytes],
    names: Sequence[str],
    *,
    max_pixels: int,
    max_bytes: int | None = None,
    deadline: float | None = None,
    on_white: bool = True,
) -> torch.Tensor:
    """Decodes images as the frames of one video.

    Args:
        read: returns the bytes of a file by its name; its errors are passed on.
        names: of the wanted frames, in order, at least one.
        max_pixels: a frame with more is refused before it is decoded.
        max_bytes: the most bytes that all frames together may take, checked before the second one is decoded; None
            sets no limit.
        deadline: a `time.monotonic` value after which decoding gives up; None sets no limit.
        on_white: see `energon_packing.media.image.decode_image`.

    Returns:
        uint8 ``[len(names), 3, H, W]``.

    Raises:
        SampleRejected: as `energon_packing.media.image.decode_image`; ``corrupt_media`` if the frames differ in size,
            ``decode_timeout`` after the deadline.
        ValueError: there is no name.
    """
    frames: torch.Tensor | None = None
    for number, name in enumerate(names):
        if deadline is not None and time.monotonic() > deadline:
            raise SampleRejected("decode_timeout", f"frame {number} was not decoded within encoder.decode_seconds")
        frame = decode_image(read(name), max_pixels=max_pixels, max_bytes=max_bytes, on_white=on_white)
        if frames is None:
            check_decoded_bytes(len(names), frame.shape[2], frame.shape[1], max_bytes)
            # Stored as rows of pixels, like images.
            frames = torch.empty((len(names), *frame.shape[1:], 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        if frame.shape != frames.shape[1:]:
            raise SampleRejected(
                "corrupt_media",
                f"frame {number} is {frame.shape[2]}x{frame.shape[1]} pixels, "
                f"but the first is {frames.shape[3]}x{frames.shape[2]}",
            )
        frames[number] = frame
    if frames is None:
        raise ValueError("decode_frame_files needs at least one name")
    return frames
