"""The geometry of one image or video."""

from __future__ import annotations

from dataclasses import dataclass

from energon_packing.conversation import MediaKind


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPlan:
    """What one image or video will become, known from its size alone.

    Attributes:
        kind: ``image`` or ``video``.
        grid: patches in time, height and width ``(t, h, w)``.
        runs: number of placeholder tokens of each uninterrupted run that stands for it, in text order.
        frame_indices: frames to decode, ascending, as indices into the clip; empty for images.
        seconds_per_grid: seconds between two steps of ``grid[0]``; None for images.
        timestamps: seconds at which each step of ``grid[0]`` is shown, if the family writes them; else empty.
        tiles: images that the vision encoder sees: the tiles of an image with its thumbnail, or the frames of a video
            that it reads one by one; 1 if the image or video stays in one piece.
    """

    kind: MediaKind
    grid: tuple[int, int, int]
    runs: tuple[int, ...]
    frame_indices: tuple[int, ...] = ()
    seconds_per_grid: float | None = None
    timestamps: tuple[float, ...] = ()
    tiles: int = 1

    @property
    def patches(self) -> int:
        """Rows of the vision encoder's input."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def tokens(self) -> int:
        """Placeholder tokens in all runs."""
        return sum(self.runs)
