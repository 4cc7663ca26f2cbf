"""Which frames represent a video: every family calls `chosen_frames`, so a new way to choose them belongs there."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media

VIDEO_FRAMES = ("video_fps", "video_min_frames", "video_max_frames")
"""Settings of the choice of frames, for the ``reads`` of families; those that `chosen_frames` reads hold for all."""


def chosen_frames(
    media: Media, config: EncoderConfig, by_processor: Callable[[], tuple[int, ...]], *, most: int | None = None
) -> tuple[int, ...]:
    """Returns the indices of the frames that represent a video: all of a list of images, else the processor's choice.

    Args:
        media: the video.
        config: of the encoder; its settings for the choice of frames are read here.
        by_processor: the family's own choice, as its video processor makes it.
        most: frames that a list is thinned out to; by default ``video_max_frames``.
    """
    listed = listed_frames(media, config.video_max_frames if most is None else most)
    return by_processor() if listed is None else listed


def uniform_frames(
    processor: Any, total: int, fps: Fraction, *, rate: float | None, fewest: int, most: int
) -> tuple[int, ...]:
    """Returns the indices of the sampled frames, ascending and distinct, as the video processor itself spreads them.

    Args:
        processor: a Hugging Face video processor whose ``sample_frames`` takes ``num_frames``.
        total: frames of the clip, at least 1.
        fps: frames per second of the clip; processors compute with the nearest float.
        rate: frames per second to sample; None samples ``most`` frames of every clip.
        fewest: minimum frames of a clip under ``rate``, if it has that many.
        most: maximum frames of a clip.

    Returns:
        At least one and at most ``min(most, total)`` indices.
    """
    from transformers.video_utils import VideoMetadata

    wanted = most if rate is None else int(total / float(fps) * rate)
    wanted = max(1, min(max(wanted, fewest), most, total))
    indices = processor.sample_frames(VideoMetadata(total_num_frames=total, fps=float(fps)), num_frames=wanted)
    # Its float32 steps can reach one index too many, the clip's length (transformers 5.12), which is not a frame.
    return tuple(sorted({int(index) for index in indices if 0 <= int(index) < total}))[:wanted]


def listed_frames(media: Media, most: int | None) -> tuple[int, ...] | None:
    """Returns the frame indices of a video that is a list of images; None for any other video.

    The author of such a list has already sampled it, and the processors use every frame of it.

    Args:
        media: the video.
        most: ``encoder.video_max_frames``; a longer list is thinned out evenly and keeps its first and last frame.
    """
    if not media.frame_names:
        return None
    count = len(media.frame_names)
    if most is None or count <= most:
        return tuple(range(count))
    if most == 1:
        return (count // 2,)
    return tuple(round(at * (count - 1) / (most - 1)) for at in range(most))
