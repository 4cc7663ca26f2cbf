"""Decoding chosen frames of a video, by index, upright and RGB."""

from __future__ import annotations

import io
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from energon_packing.errors import SampleRejected
from energon_packing.media import check_decoded_bytes
from energon_packing.media.image import decode_image
from energon_packing.media.packet_runs import Run, may_have_runs, packet_runs
from energon_packing.media.probe import decodable

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
    try:
        for quick in (True, False):
            frames = FrameStack(indices, max_pixels, max_bytes)
            with decodable(io.BytesIO(data), max_pixels, frames.check_limits) as (container, stream):
                if not (quick and may_have_runs(container, stream)):
                    _decode_from_start(container, stream, frames, deadline)
                    break
                if _decode_needed(container, stream, frames, deadline):
                    break
    except (av.FFmpegError, OSError, ValueError, EOFError, IndexError, OverflowError) as error:
        raise SampleRejected("corrupt_media", f"the video cannot be decoded: {error}") from error
    return frames.tensor()


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
        clip = packet_runs(container, stream, frames.wanted)
        if clip is None:
            return False
        stream.codec_context.options |= {"err_detect": "explode"}
        whole = all(_decode_run(stream.codec_context, clip.packets, run, frames, deadline) for run in clip.runs)
        return whole and not frames.missing
    except av.FFmpegError:
        return False  # decoding from the start says which frame is damaged


def _decode_run(codec: Any, packets: Sequence[Any], run: Run, frames: FrameStack, deadline: float | None) -> bool:
    """Decodes one run and empties the decoder; returns whether every packet became its frame, in the order of time."""
    first = packets[run.start].pts
    given = [packets[number] for number in range(run.start, run.stop + 1) if number not in run.left_out]
    times: list[int] = []
    whole = run.start == 0  # as a full decode does
    for packet in (*given, None):
        _check_deadline(deadline, next(iter(run.frames.values()), 0))
        for frame in codec.decode(packet):
            if frame.is_corrupt or frame.pts is None:
                return False
            frames.check_size(frame)
            times.append(frame.pts)
            whole = whole or (frame.pts == first and frame.key_frame)
            if frame.pts in run.frames:
                frames.take(frame, run.frames[frame.pts])
    codec.flush_buffers()
    # Frames that are stored after the first one and shown before it may need earlier ones: the decoder drops them.
    expected = [packet.pts for packet in given if packet.pts >= first and not packet.is_discard]
    return whole and times == sorted(times) and [time for time in times if time >= first] == sorted(expected)


class FrameStack:
    """Takes decoded frames and keeps the pixels of the wanted ones.

    Args:
        indices: numbers of the wanted frames, ascending, at least one; a number may occur twice.
        max_pixels: a frame with more is refused.
        max_bytes: the most bytes that all wanted frames may take; None sets no limit.

    Attributes:
        wanted: the numbers without repetition, ascending.
        missing: how many of them were not taken yet.
    """

    def __init__(self, indices: Sequence[int], max_pixels: int, max_bytes: int | None) -> None:
        import av.video.reformatter

        self.wanted = sorted(set(indices))
        self.missing = len(self.wanted)
        self._indices = indices
        self._max_pixels = max_pixels
        self._max_bytes = max_bytes
        self._size: tuple[int, int] | None = None
        self._frames: np.ndarray | None = None  # rows of pixels, like images
        # Our own: PyAV's shared one keeps a thread pool, which deadlocks in a worker that was forked after its use.
        self._reformatter = av.video.reformatter.VideoReformatter()

    def check_limits(self, width: int, height: int, max_pixels: int) -> None:
        """Refuses frames that are too large.

        Raises:
            SampleRejected: ``media_too_large``.
        """
        if width * height > max_pixels:
            raise SampleRejected(
                "media_too_large",
                f"frames of {width}x{height} pixels are over encoder.max_source_pixels={max_pixels}",
            )
        check_decoded_bytes(len(self._indices), width, height, self._max_bytes)

    def check_size(self, frame: Any) -> None:
        """Refuses a frame, wanted or not, whose size differs from that of the first one that was decoded.

        Raises:
            SampleRejected: ``corrupt_media``, or ``media_too_large`` for the first frame.
        """
        size = frame.width, frame.height
        if self._size is None:
            # The container only announced a size; that of the decoded frame counts.
            self.check_limits(*size, self._max_pixels)
            self._size = size
        elif size != self._size:
            raise SampleRejected(
                "corrupt_media",
                f"the video changes from {self._size[0]}x{self._size[1]} to {size[0]}x{size[1]} pixels",
            )

    def take(self, frame: Any, index: int) -> None:
        """Keeps the pixels of a wanted frame.

        Raises:
            SampleRejected: ``corrupt_media`` for a frame that is rotated differently from the first one taken.
        """
        rgb = self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
        pixels = np.rot90(rgb, quarter_turns(frame.rotation))
        if self._frames is None:
            self._frames = np.empty((len(self._indices), *pixels.shape), dtype=np.uint8)
        if pixels.shape != self._frames.shape[1:]:
            raise SampleRejected(
                "corrupt_media", f"frame {index} is rotated differently from the first requested frame"
            )
        self._frames[bisect_left(self._indices, index) : bisect_right(self._indices, index)] = pixels
        self.missing -= 1

    def tensor(self) -> torch.Tensor:
        """Returns uint8 ``[indices, 3, H, W]``, a view of rows of pixels (channels last).

        Raises:
            SampleRejected: ``corrupt_media`` if a wanted frame is missing.
        """
        if self._frames is None or self.missing:
            first = self.wanted[len(self.wanted) - self.missing]
            raise SampleRejected("corrupt_media", f"the video ends before frame {first}, but more frames were measured")
        return torch.from_numpy(self._frames).permute(0, 3, 1, 2)


def quarter_turns(degrees: float) -> int:
    """Counter-clockwise quarter turns that make a frame upright; ``frame.rotation`` is counter-clockwise degrees."""
    return round(degrees / 90) % 4


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
