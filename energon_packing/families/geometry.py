"""Geometry that families share: what an image or video becomes, its frames and tiles.

Nothing here is guessed: families call these with their processor's own numbers, and tests compare them with it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media, MediaKind
from energon_packing.errors import ConfigError, SampleRejected


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPlan:
    """What one image or video will become, known from its size alone.

    Attributes:
        grid: patches in time, height and width ``(t, h, w)``.
        runs: number of placeholder tokens of each uninterrupted run that stands for it, in text order.
        frame_indices: frames to decode, ascending, as indices into the clip; empty for images.
        seconds_per_grid: seconds between two steps of ``grid[0]``; None for images.
        timestamps: seconds at which each step of ``grid[0]`` is shown, if the family writes them; else empty.
        tiles: images that the vision encoder sees: the tiles of an image with its thumbnail, or the frames of a video
            that it reads one by one; 1 if the image or video stays in one piece.
        size: height and width, in pixels, of an image that is padded to the largest of its pack; else zeros.
    """

    kind: MediaKind
    grid: tuple[int, int, int]
    runs: tuple[int, ...] = ()
    frame_indices: tuple[int, ...] = ()
    seconds_per_grid: float | None = None
    timestamps: tuple[float, ...] = ()
    tiles: int = 1
    size: tuple[int, int] = (0, 0)

    @property
    def patches(self) -> int:
        """Rows of the vision encoder's input."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def tokens(self) -> int:
        """Placeholder tokens in all runs."""
        return sum(self.runs)


def require[Number: (int, Fraction)](value: Number | None, media: Media, what: str) -> Number:
    """Returns a measured number of an image or video, or rejects the sample and names the missing number."""
    if value is None or value <= 0:
        fix = "convert the data or run `energon prepare-media` to measure it"
        raise SampleRejected("unmeasured_media", f"{media.kind} {media.name!r} has no {what}; {fix}")
    return value


MASK_BYTES = 1_200_000_000
"""Of a mask over all pairs of patches of a pack in bfloat16, at most; two images of 1540 x 1540 pixels fit."""
MOST_PATCHES = {"pixtral": math.isqrt(MASK_BYTES // 2)}
"""What ``packing.max_patches_per_pack`` is where it is not set, by family (plans know its name only): for vision
encoders that mask all patches of a pack against each other, and take its images padded to the largest."""
VIDEO_FRAMES = ("video_fps", "video_min_frames", "video_max_frames")
"""Settings of the choice of frames, for the ``reads`` of families; those that `chosen_frames` reads hold for all."""


def chosen_frames(
    media: Media, config: EncoderConfig, by_processor: Callable[[], tuple[int, ...]], *, most: int | None = None
) -> tuple[int, ...]:
    """Returns the indices of the frames that represent a video: all of a list of images, else the processor's choice.
    The author of such a list has already sampled it, and the processors use every frame of it. A list of more than
    ``most`` frames (by default ``video_max_frames``) is thinned out evenly and keeps its first and last one."""
    count, most = len(media.frame_names), config.video_max_frames if most is None else most
    if not count:
        return by_processor()
    if most is None or count <= most:
        return tuple(range(count))
    return (count // 2,) if most == 1 else tuple(round(at * (count - 1) / (most - 1)) for at in range(most))


def shown_frames(
    media: Media, config: EncoderConfig, chosen: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Returns the frames of an uneven video that are on the screen at the times of the chosen ones, had it a constant
    rate, and their seconds: its own of a frame, and of one that is still shown the time at which it is chosen again.
    The frames chosen, and no seconds, for any other video, and where ``video_times`` is ``processor``."""
    if not media.time_points or config.video_times == "processor":
        return chosen, ()
    wanted = np.asarray(chosen) / float(require(media.rate, media, "fps"))
    shown = frames_at(media.time_points, wanted)
    again = np.diff(shown, prepend=-1) == 0
    own = np.where(again, wanted, np.interp(shown, media.time_points[::2], media.time_points[1::2]))
    return tuple(shown.tolist()), tuple(own.tolist())


def frames_at(points: tuple[float, ...], wanted: np.ndarray) -> np.ndarray:
    """The frames, int64, that are on the screen at some seconds, by the `Media.time_points` of a video."""
    # Seconds are rounded to thousandths.
    return np.floor(np.interp(wanted + 0.001, points[1::2], points[::2]) + 1e-9).astype(np.int64)


def sampled_frames(
    processor: Any, total: int, rate: Fraction, /, *, duration: float | None = None, **how: Any
) -> list[int]:
    """The frames that a Hugging Face video processor samples of a clip; ``how`` goes to its ``sample_frames``."""
    from transformers.video_utils import VideoMetadata

    clip = VideoMetadata(total_num_frames=total, fps=float(rate), duration=duration)
    # Float32 steps can reach the clip's length (transformers 5.12), which is not a frame: the processor itself fails.
    return [int(index) for index in processor.sample_frames(clip, **how) if 0 <= int(index) < total]


def spread_frames(
    media: Media,
    config: EncoderConfig,
    processor: Any,
    *,
    rate: float | None,
    fewest: int,
    most: int | None,
    listed: int | None = None,
) -> tuple[int, ...]:
    """Returns the indices of the frames of a video, as the video processor itself spreads them, ascending and distinct,
    shown at their times (`shown_frames`): at least one and at most ``most``, or all frames if that is None. Of a list
    of images at most ``listed`` (`chosen_frames`).

    Args:
        processor: a Hugging Face video processor whose ``sample_frames`` takes ``num_frames``; processors compute with
            the float nearest to the clip's frames per second.
        rate: frames per second to sample; None samples ``most`` frames of every clip.
        fewest: minimum frames of a clip under ``rate``, if it has that many.
    """
    total, fps = require(media.frames, media, "frame count"), require(media.rate, media, "fps")
    wanted = most or total if rate is None else int(total / float(fps) * rate)
    wanted = max(1, min(max(wanted, fewest), most or total, total))

    def spread() -> tuple[int, ...]:
        return tuple(sorted(set(sampled_frames(processor, total, fps, num_frames=wanted))))[:wanted]

    return shown_frames(media, config, chosen_frames(media, config, spread, most=listed))[0]


MOST_TILES = 4096
"""The maximum number of tiles per image, whatever a processor's file or a configuration says.

The processors list every grid of tiles up to their limit ``n``. The first time this takes time in the order of ``n**2``
and for every image ``n log n``: 4,096 tiles take half a second and then 5 ms per image, 100,000 tiles five minutes, and
a number meant as "no limit" never ends. 4,096 tiles of 448 pixels a side are 822 million pixels, seven times
``encoder.max_source_pixels``.
"""


def check_tiles(tiles: Any, where: str) -> None:
    """Refuses a tile limit above `MOST_TILES`, up to which listing the grids would take too long."""
    if isinstance(tiles, int | float) and tiles > MOST_TILES:
        why = f"{where} allows {tiles} tiles per image; more than {MOST_TILES} take too long to list, so lower it."
        raise ConfigError(why)


def check_pinpoints(pinpoints: Any, most_pixels: int) -> None:
    """Refuses grid resolutions ``[[height, width], ...]`` that are missing, malformed, too many or too large. Each
    image is compared with all of them, and padded to the one that is chosen for it. Raises ConfigError: the list is
    empty or not one of pairs of whole numbers above 0, has more than `MOST_TILES` of them, or one of them exceeds
    ``most_pixels`` (``encoder.max_source_pixels``)."""
    where = "image_grid_pinpoints of the image processor"
    if not isinstance(pinpoints, Sequence) or isinstance(pinpoints, str) or not pinpoints:
        raise ConfigError(f"{where} must be a list of [height, width], not {str(pinpoints)[:40]!r}.")
    if len(pinpoints) > MOST_TILES:
        why = f"every image is compared with each of them, so the limit is {MOST_TILES}."
        raise ConfigError(f"{where} lists {len(pinpoints)} resolutions; {why}")
    for pair in pinpoints:
        sides = list(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else []
        if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
            raise ConfigError(f"{where} contains {str(pair)[:40]!r}, which is not a [height, width] in pixels.")
        if sides[0] * sides[1] > most_pixels:
            raise ConfigError(
                f"{where} contains {sides[0]}x{sides[1]} pixels, over encoder.max_source_pixels={most_pixels}; images "
                "are padded to that size, so remove it or raise the limit."
            )


def set_pixel_limits(processor: Any, smallest: int | None, largest: int | None) -> None:
    """Replaces the pixel limits of an image or video processor, so that geometry and pixels follow the same numbers.
    Its ``size`` has ``shortest_edge`` and ``longest_edge``, areas in pixels; None keeps the processor's."""
    if smallest is None and largest is None:
        return
    size = processor.size
    low = size["shortest_edge"] if smallest is None else smallest
    high = size["longest_edge"] if largest is None else largest
    if low > high:
        raise ConfigError(
            f"The lower pixel limit {low} exceeds the upper limit {high}; set both encoder.min_pixels and "
            "encoder.max_pixels (or encoder.video_min_pixels and encoder.video_max_pixels)."
        )
    processor.size = type(size)(shortest_edge=low, longest_edge=high)
