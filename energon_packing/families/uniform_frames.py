"""Which frames stand for a clip in the families that spread a number of frames evenly over it."""

from __future__ import annotations

from typing import Any


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
