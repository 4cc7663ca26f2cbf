"""Patches of the Qwen-VL and GLM-V processors as bytes, written once, to their final place.

``Qwen2VLImageProcessor`` and the video processors like it (transformers 5) copy pixels about seven times on the way to
the patches, most of them as 32-bit floats. Here an image or frame is resized by the processor's own function, and its
bytes are sorted into patches. `energon_packing.thd.pixels` turns them into the processor's floats later.

The result must equal the processor's bit for bit. This is checked once, on a probe. If the processor gives anything
else (another release, a subclass, a disabled step), the processor itself is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from energon_packing.families.pixel_forms import RAW, form_of, resized
from energon_packing.media.shared_room import empty_result
from energon_packing.thd.pixels import finish

PROBE_HEIGHT, PROBE_WIDTH = 57, 93
PROBE_FRAMES = 3


class QwenPatches:
    """Makes the patches and grids of an image processor, or of a video processor.

    Args:
        processor: its limits already set.
        kind: ``image`` or ``video``: what the processor takes.
        grid: patches ``(rows, columns)`` of ``(frames, height, width)``; an image is one frame.

    Attributes:
        direct: whether patches are made here; otherwise the processor makes them.
        form: how the bytes become the processor's floats; None if it does not normalise bytes.
    """

    def __init__(self, processor: Any, kind: str, grid: Callable[[int, int, int], tuple[int, int]]) -> None:
        self._processor = processor
        self._grid = grid
        self._kind = kind
        self._pixels, self._grids = (
            ("pixel_values", "image_grid_thw") if kind == "image" else ("pixel_values_videos", "video_grid_thw")
        )
        # The processor repeats an image along the temporal axis; its bytes are carried once.
        repeat = (getattr(processor, "temporal_patch_size", None) or 1) if kind == "image" else 1
        self.form = form_of(processor, "patches", repeat=repeat)
        self.direct = self._equals_the_processor()
        if not self.direct:
            self.form = form_of(processor, "patches")

    def __call__(self, media: Sequence[torch.Tensor], *, raw: bool) -> dict[str, torch.Tensor]:
        """Returns patches and grids.

        Args:
            media: uint8 ``[3, H, W]`` images, or ``[frames, 3, H, W]`` videos.
            raw: whether patches are bytes in ``form``; otherwise they are the processor's floats.

        Returns:
            ``pixel_values`` or ``pixel_values_videos`` ``[patches, values]``; ``image_grid_thw`` or ``video_grid_thw``
            int64 ``[media, 3]``.
        """
        if self.direct and self.form is not None:
            made = self._make(media)
            return made if raw else finish(made, {self._pixels: self.form})
        return self._ask(media, RAW if raw else {})

    def _ask(self, media: Sequence[torch.Tensor], settings: dict[str, bool]) -> dict[str, torch.Tensor]:
        if self._kind == "video":
            made = self._processor(videos=list(media), do_sample_frames=False, return_tensors="pt", **settings)
        else:
            made = self._processor(images=list(media), return_tensors="pt", **settings)
        return {self._pixels: made[self._pixels], self._grids: made[self._grids].to(torch.int64)}

    def _equals_the_processor(self) -> bool:
        if self.form is None or getattr(self._processor, "draw_on_frames", False):
            return False  # a processor that draws the time on frames asks for more than frames
        shape = (3, PROBE_HEIGHT, PROBE_WIDTH)
        if self._kind == "video":
            shape = (PROBE_FRAMES, *shape)  # type: ignore[assignment]
        probe = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        try:
            made = finish(self._make([probe]), {self._pixels: self.form})
            expected = self._ask([probe], {})
        except Exception:  # other settings, or a processor that rejects the probe: call the processor
            return False
        return all(made[name].dtype == each.dtype and torch.equal(made[name], each) for name, each in expected.items())

    def _make(self, media: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        processor = self._processor
        patch = processor.patch_size
        step = processor.temporal_patch_size if self._kind == "video" else 1
        clips = [each if self._kind == "video" else each[None] for each in media]
        grids = [(-(-len(clip) // step), *self._grid(len(clip), *clip.shape[-2:])) for clip in clips]
        counts = [steps * rows * columns for steps, rows, columns in grids]
        pixels = empty_result((sum(counts), 3, step, patch * patch), torch.uint8)
        for clip, (steps, rows, columns), place in zip(clips, grids, pixels.split(counts), strict=True):
            for at in range(steps * step):
                frame = clip[min(at, len(clip) - 1)]  # a short last time step repeats its last frame
                first = at // step * rows * columns
                whole = self.resized(frame, rows * patch, columns * patch)
                self._fill(whole, rows, columns, place[first : first + rows * columns, :, at % step])
        return {
            self._pixels: pixels.view(len(pixels), -1),
            self._grids: torch.tensor(grids, dtype=torch.int64),
        }

    def resized(self, image: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Returns uint8 ``[3, height, width]`` of an image ``[3, H, W]``, as the processor resizes it."""
        return resized(self._processor, image, height, width)

    def _fill(self, image: torch.Tensor, rows: int, columns: int, place: torch.Tensor) -> None:
        """Writes the patches of a resized image; the patches of one merged token are adjacent.

        Args:
            image: uint8 ``[3, rows * patch, columns * patch]``.
            rows: of patches.
            columns: of patches.
            place: uint8 ``[rows * columns, 3, patch * patch]``, overwritten.
        """
        patch, merge = self._processor.patch_size, self._processor.merge_size
        blocks = image.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        ordered = blocks.permute(1, 4, 2, 5, 0, 3, 6)
        place.view(ordered.shape).copy_(ordered)
