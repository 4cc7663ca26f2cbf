"""The wanted frames of a clip, gathered upright and RGB in one array while the clip is decoded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from energon_packing.errors import SampleRejected
from energon_packing.media.decoded_size import check_decoded_bytes


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

    def check_limits(self, width: int, height: int) -> None:
        """Refuses frames that are too large.

        Raises:
            SampleRejected: ``media_too_large``.
        """
        if width * height > self._max_pixels:
            raise SampleRejected(
                "media_too_large",
                f"frames of {width}x{height} pixels are over encoder.max_source_pixels={self._max_pixels}",
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
            self.check_limits(*size)
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
