"""Which frames stand for a video: every family asks `chosen_frames`, so a new way to choose them goes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media


def chosen_frames(
    media: Media, config: EncoderConfig, by_processor: Callable[[], tuple[int, ...]], *, most: int | None = None
) -> tuple[int, ...]:
    """Indices of the frames that stand for a video: all of a list of images, else the processor's choice.

    Args:
        media: the video.
        config: of the encoder; what it says about the choice of frames is read here.
        by_processor: the family's own choice, as its video processor makes it.
        most: frames that a list is thinned out to; by default ``video_max_frames``.
    """
    listed = listed_frames(media, config.video_max_frames if most is None else most)
    return by_processor() if listed is None else listed


def uniform_frames(
    processor: Any, total: int, fps: float, *, rate: float | None, fewest: int, most: int
) -> tuple[int, ...]:
    """Indices of the sampled frames, ascending and distinct, as the video processor itself spreads them.

    Args:
        processor: a Hugging Face video processor whose ``sample_frames`` takes ``num_frames``.
        total: frames of the clip, at least 1.
        fps: frames a second of the clip.
        rate: frames a second that are wanted; None wants ``most`` frames of every clip.
        fewest: frames of a short clip under ``rate``, where it has so many.
        most: frames of a long clip.

    Returns:
        at least one and at most ``min(most, total)`` indices.
    """
    from transformers.video_utils import VideoMetadata

    wanted = most if rate is None else int(total / fps * rate)
    wanted = max(1, min(max(wanted, fewest), most, total))
    indices = processor.sample_frames(VideoMetadata(total_num_frames=total, fps=fps), num_frames=wanted)
    # Its float32 steps can reach one index too many, the clip's length (transformers 5.12), which is no frame.
    return tuple(sorted({int(index) for index in indices if 0 <= int(index) < total}))[:wanted]


def listed_frames(media: Media, most: int | None) -> tuple[int, ...] | None:
    """Indices of the frames of a video that is a list of images; None for any other video.

    Such a list was sampled by whoever made it, and the processors take it as it is: every frame stands for the video.

    Args:
        media: the video.
        most: ``encoder.video_max_frames``; a longer list is thinned out evenly, first and last frame included.
    """
    if not media.frame_names:
        return None
    count = len(media.frame_names)
    if most is None or count <= most:
        return tuple(range(count))
    if most == 1:
        return (count // 2,)
    return tuple(round(at * (count - 1) / (most - 1)) for at in range(most))
