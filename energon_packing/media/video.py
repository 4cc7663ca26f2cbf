"""Decoding chosen frames of a video, by index, upright and RGB."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from energon_packing.errors import SampleRejected
from energon_packing.media.frame_stack import FrameStack
from energon_packing.media.packet_runs import PacketRuns, Run, may_have_runs, packet_runs
from energon_packing.media.probe import limit_codec, open_video, video_stream

_BEGINNING = -(1 << 60)
"""A time before every packet, in any unit."""


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
        with _opened(data, frames, max_pixels) as (container, stream):
            if not may_have_runs(container, stream):
                _decode_from_start(container, stream, frames, deadline)
                return frames.tensor()
            if _decode_needed(container, stream, frames, deadline):
                return frames.tensor()
        frames = FrameStack(indices, max_pixels, max_bytes)
        with _opened(data, frames, max_pixels) as (container, stream):
            _decode_from_start(container, stream, frames, deadline)
    except (av.FFmpegError, OSError, ValueError, EOFError, IndexError, OverflowError) as error:
        raise SampleRejected("corrupt_media", f"the video cannot be decoded: {error}") from error
    return frames.tensor()


@contextmanager
def _opened(data: bytes, frames: FrameStack, max_pixels: int) -> Iterator[tuple[Any, Any]]:
    """The container and its video stream, whose announced size is within the limits."""
    with open_video(io.BytesIO(data)) as container:
        stream = video_stream(container)
        frames.check_limits(stream.codec_context.width, stream.codec_context.height)
        limit_codec(stream, max_pixels)
        # One thread, because a loader's worker already has one core.
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        yield container, stream


def _check_deadline(deadline: float | None, index: int) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise SampleRejected("decode_timeout", f"frame {index} was not decoded within encoder.decode_seconds")


def _decode_from_start(container: Any, stream: Any, frames: FrameStack, deadline: float | None) -> None:
    """Decodes every frame up to the last wanted one."""
    for index, frame in enumerate(container.decode(stream)):
        _check_deadline(deadline, index)
        if frame.is_corrupt:
            raise SampleRejected("corrupt_media", f"frame {index} of the video is damaged")
        frames.check_size(frame)
        if index == frames.wanted[-frames.missing]:
            frames.take(frame, index)
            if not frames.missing:
                return


def _decode_needed(container: Any, stream: Any, frames: FrameStack, deadline: float | None) -> bool:
    """Decodes only the packets that the wanted frames need; returns whether the result is that of a full decode."""
    import av

    try:
        found = packet_runs(container, stream, frames.wanted)
        if found is None:
            return False
        stream.codec_context.options |= {"err_detect": "explode"}
        # Back to the beginning; that these are the same packets is checked one by one.
        container.seek(_BEGINNING, stream=stream)
        packets = _same_packets(container.demux(stream), found)
        whole = all(_decode_run(stream.codec_context, packets, run, frames, deadline) for run in found.runs)
        return whole and not frames.missing
    except (av.FFmpegError, _OtherPacketError):
        return False  # decoding from the start says which frame is damaged


class _OtherPacketError(Exception):
    """A packet is not the one that was read there before."""


def _same_packets(packets: Iterable[Any], found: PacketRuns) -> Iterator[tuple[int, Any]]:
    for number, (packet, known) in enumerate(zip(packets, found.packets, strict=False)):
        if (packet.pts, packet.size) != known:
            raise _OtherPacketError
        yield number, packet


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
