"""Videos that a record holds as a list of images, already sampled by the data set's authors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from energon_packing.conversation import Media
from energon_packing.convert.config import DEFAULT_FRAME_FPS
from energon_packing.convert.media_files import MediaFile
from energon_packing.errors import SampleRejected
from energon_packing.stored_record import LARGEST_NUMBER, SMALLEST_NUMBER


def frame_rate(value: Any) -> float | None:
    """Frames per second from a record: None, a number, or a number as text.

    Raises:
        SampleRejected: ``bad_frames``.
    """
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
    except ValueError:
        number = 0.0
    if not SMALLEST_NUMBER <= number <= LARGEST_NUMBER:
        raise SampleRejected(
            "bad_frames", f"the frame rate of a list of frames is {value!r:.80}, expected a number above 0"
        )
    return number


def frame_times(value: Any, frames: int) -> tuple[float, ...]:
    """Seconds at which each frame is shown; empty if the record has none.

    Raises:
        SampleRejected: ``bad_frames``.
    """
    if value is None:
        return ()
    numbers: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(time, int | float) and not isinstance(time, bool) for time in numbers):
        raise SampleRejected("bad_frames", "the timestamps of a list of frames are not a list of numbers")
    if len(numbers) != frames:
        raise SampleRejected("bad_frames", f"{len(numbers)} timestamps for a list of {frames} frames")
    if not all(0 <= time <= LARGEST_NUMBER for time in numbers) or any(b <= a for a, b in pairwise(numbers)):
        raise SampleRejected("bad_frames", "the timestamps of a list of frames are not ascending from 0 or later")
    return tuple(float(time) for time in numbers)


def media_of_frames(frames: Sequence[tuple[str, MediaFile]], *, fps: float | None, times: tuple[float, ...]) -> Media:
    """A video made of checked images.

    Args:
        frames: name in the store and file of each frame, in order.
        fps: frames per second.
        times: seconds of each frame, or empty; for two or more frames, they set the rate and override ``fps``.

    Raises:
        SampleRejected: ``unequal_frames`` if the frames differ in size.
    """
    size = frames[0][1].width, frames[0][1].height
    for number, (_, file) in enumerate(frames):
        if (file.width, file.height) != size:
            raise SampleRejected(
                "unequal_frames",
                f"frame {number} of a list is {file.width}x{file.height} pixels, but the first is {size[0]}x{size[1]}",
            )
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else fps or DEFAULT_FRAME_FPS
    rate = min(max(rate, SMALLEST_NUMBER), LARGEST_NUMBER)
    return Media(
        kind="video",
        name=frames[0][0],
        width=size[0],
        height=size[1],
        frames=len(frames),
        fps=rate,
        duration=min(max(len(frames) / rate, SMALLEST_NUMBER), LARGEST_NUMBER),
        frame_names=tuple(name for name, _ in frames),
        frame_times=times,
    )
