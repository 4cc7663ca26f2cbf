"""Decoding chosen frames of a video, by index, upright and RGB."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from energon_packing.errors import SampleRejected
from energon_packing.media.frame_stack import FrameStack
from energon_packing.media.packet_runs import Run, packet_runs
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

    Frames are counted in display order. Where `packet_runs` knows which packets the frames need, only these are
    decoded; the times of the frames are checked. Otherwise, or if a check fails, decoding starts at the first frame and
    stops after the last requested one. Both give the same pixels.

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

    if not len(indices):
        raise ValueError("decode_frames needs at least one index")
    frames = FrameStack(indices, max_pixels, max_bytes)
    try:
        if _decode_needed(data, frames, max_pixels, deadline):
            return frames.tensor()
        frames = FrameStack(indices, max_pixels, max_bytes)
        _decode_from_start(data, frames, max_pixels, deadline)
    except (av.FFmpegError, OSError, ValueError, EOFError, IndexError, OverflowError) as error:
        raise SampleRejected("corrupt_media", f"the video cannot be decoded: {error}") from error
    return frames.tensor()


@contextmanager
def _opened(data: bytes, frames: FrameStack, max_pixels: int) -> Iterator[tuple[Any, Any]]:
    """The container and its video stream, whose announced size is within the limits."""
    with open_video(io.BytesIO(data)) as container:
        if not container.streams.video:
            raise SampleRejected("corrupt_media", "the file has no video stream")
        stream = container.streams.video[0]
        if (stream.disposition & stream.disposition.attached_pic).value:
            raise SampleRejected("corrupt_media", "the file has no video stream, only audio with a cover image")
        frames.check_limits(stream.codec_context.width, stream.codec_context.height)
        limit_codec(stream, max_pixels)
        # One thread, because a loader's worker already has one core.
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        yield container, stream


def _check_deadline(deadline: float | None, index: int) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise SampleRejected("decode_timeout", f"frame {index} was not decoded within encoder.decode_seconds")


def _decode_from_start(data: bytes, frames: FrameStack, max_pixels: int, deadline: float | None) -> None:
    """Decodes every frame up to the last wanted one."""
    wanted = frames.wanted
    with _opened(data, frames, max_pixels) as (container, stream):
        for index, frame in enumerate(container.decode(stream)):
            _check_deadline(deadline, index)
            if frame.is_corrupt:
                raise SampleRejected("corrupt_media", f"frame {index} of the video is damaged")
            frames.check_size(frame)
            if index == wanted[-frames.missing]:
                frames.take(frame, index)
                if not frames.missing:
                    return


def _decode_needed(data: bytes, frames: FrameStack, max_pixels: int, deadline: float | None) -> bool:
    """Decodes only the packets that the wanted frames need; returns whether the result is that of a full decode."""
    import av

    try:
        with _opened(data, frames, max_pixels) as (container, stream):
            runs = packet_runs(container, stream, frames.wanted)
        if runs is None:
            return False
        # Opened again, because seeking back is not exact in every container format.
        with _opened(data, frames, max_pixels) as (container, stream):
            stream.codec_context.options |= {"err_detect": "explode"}
            packets = enumerate(packet for packet in container.demux(stream) if packet.size)
            for run in runs:
                if not _decode_run(stream.codec_context, packets, run, frames, deadline):
                    return False
    except av.FFmpegError:
        return False  # decoding from the start says which frame is damaged
    return not frames.missing


def _decode_run(
    codec: Any, packets: Iterator[tuple[int, Any]], run: Run, frames: FrameStack, deadline: float | None
) -> bool:
    """Decodes one run and empties the decoder; returns whether every packet became its frame, in the order of time."""
    expected, found = [], []
    first = None

    def see(decoded: Sequence[Any]) -> bool:
        for frame in decoded:
            if frame.is_corrupt or frame.pts is None:
                return False
            frames.check_size(frame)
            found.append(frame.pts)
            if frame.pts in run.frames:
                frames.take(frame, run.frames[frame.pts])
        return True

    for number, packet in packets:
        if number < run.start:
            continue
        if number not in run.left_out:
            _check_deadline(deadline, next(iter(run.frames.values()), 0))
            first = packet.pts if first is None else first
            if not packet.is_discard and packet.pts >= first:
                expected.append(packet.pts)
            if not see(codec.decode(packet)):
                return False
        if number == run.stop:
            break
    if not see(codec.decode(None)):
        return False
    codec.flush_buffers()
    # Frames that are stored after the first one and shown before it may need earlier ones: the decoder drops them.
    return [time for time in found if first is not None and time >= first] == sorted(expected)
