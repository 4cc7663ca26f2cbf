"""Decoding chosen frames of a video, by index, upright and RGB."""

from __future__ import annotations

import io
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import torch

from energon_packing.errors import SampleRejected
from energon_packing.media.decoded_size import check_decoded_bytes
from energon_packing.media.probe import limit_codec, open_video


def decode_frames(
    data: bytes,
    indices: Sequence[int],
    *,
    max_pixels: int,
    max_bytes: int | None = None,
    deadline: float | None = None,
) -> torch.Tensor:
    """Decodes the requested frames of a clip.

    Frames are counted in display order. Decoding starts at the first frame, since only that order is the same for every
    container, and stops after the last requested one; the rest is never decoded or converted.

    Args:
        data: the file's bytes.
        indices: frame numbers from 0, ascending, at least one; a number may occur twice.
        max_pixels: a frame with more is refused before it is decoded.
        max_bytes: the most bytes that the requested frames together may take; checked before decoding, and again with
            the size of the first decoded frame, before memory is allocated. None sets no limit.
        deadline: a `time.monotonic` value after which decoding gives up; None sets no limit.

    Returns:
        uint8 ``[len(indices), 3, H, W]``, rotated as the container says; a view of rows of pixels (channels last).

    Raises:
        SampleRejected: ``corrupt_media`` if the clip cannot be read or is shorter than measured,
            ``media_too_large`` for too many pixels or bytes, ``decode_timeout`` after the deadline.
        ValueError: there is no index.
    """
    import av
    import av.video.reformatter

    wanted = sorted(set(indices))
    if not wanted:
        raise ValueError("decode_frames needs at least one index")
    # Our own: PyAV's shared one keeps a thread pool, which deadlocks in a worker that was forked after its use.
    reformatter = av.video.reformatter.VideoReformatter()
    frames: np.ndarray | None = None  # rows of pixels, like images
    found = 0
    try:
        with open_video(io.BytesIO(data)) as container:
            if not container.streams.video:
                raise SampleRejected("corrupt_media", "the file has no video stream")
            stream = container.streams.video[0]
            if (stream.disposition & stream.disposition.attached_pic).value:
                raise SampleRejected("corrupt_media", "the file has no video stream, only audio with a cover image")
            size = stream.codec_context.width, stream.codec_context.height
            _check_pixels(size, max_pixels)
            check_decoded_bytes(len(indices), *size, max_bytes)
            limit_codec(stream, max_pixels)
            # One thread, because a loader's worker already has one core.
            stream.thread_type = "NONE"
            stream.codec_context.thread_count = 1
            for index, frame in enumerate(container.decode(stream)):
                if deadline is not None and time.monotonic() > deadline:
                    raise SampleRejected(
                        "decode_timeout", f"frame {index} was not decoded within encoder.decode_seconds"
                    )
                if frame.is_corrupt:
                    raise SampleRejected("corrupt_media", f"frame {index} of the video is damaged")
                if index == 0:
                    # The container only announced a size; that of the decoded frame counts.
                    size = frame.width, frame.height
                    _check_pixels(size, max_pixels)
                    check_decoded_bytes(len(indices), *size, max_bytes)
                elif (frame.width, frame.height) != size:
                    raise SampleRejected(
                        "corrupt_media",
                        f"the video changes from {size[0]}x{size[1]} to {frame.width}x{frame.height} pixels",
                    )
                if index == wanted[found]:
                    rgb = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
                    pixels = np.rot90(rgb, quarter_turns(frame.rotation))
                    if frames is None:
                        frames = np.empty((len(indices), *pixels.shape), dtype=np.uint8)
                    if pixels.shape != frames.shape[1:]:
                        raise SampleRejected(
                            "corrupt_media", f"frame {index} is rotated differently from the first requested frame"
                        )
                    first, last = bisect_left(indices, index), bisect_right(indices, index)
                    frames[first:last] = pixels
                    found += 1
                    if found == len(wanted):
                        break
    except (av.FFmpegError, OSError, ValueError, EOFError, IndexError, OverflowError) as error:
        raise SampleRejected("corrupt_media", f"the video cannot be decoded: {error}") from error
    if frames is None or found < len(wanted):
        raise SampleRejected(
            "corrupt_media", f"the video ends before frame {wanted[found]}, but more frames were measured"
        )
    return torch.from_numpy(frames).permute(0, 3, 1, 2)


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    if size[0] * size[1] > max_pixels:
        raise SampleRejected(
            "media_too_large", f"frames of {size[0]}x{size[1]} pixels are over encoder.max_source_pixels={max_pixels}"
        )


def quarter_turns(degrees: float) -> int:
    """Counter-clockwise quarter turns that make a frame upright; ``frame.rotation`` is counter-clockwise degrees."""
    return round(degrees / 90) % 4
