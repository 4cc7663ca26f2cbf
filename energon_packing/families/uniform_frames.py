"""Which frames stand for a video: spread evenly over a clip, or those that a list of images holds."""

from __future__ import annotations

from typing import Any

from energon_packing.conversation import Media


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
