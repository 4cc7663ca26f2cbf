"""Image patches of the Qwen-VL processors: the same values in less than half the time.

``Qwen2VLImageProcessor`` (transformers 5) copies an image's pixels about seven times on the way to its patches. Most
copies are 32-bit floats and contain the image twice, because it is repeated for the temporal axis before its pixels are
sorted into patches. Here bytes are sorted, and floats are written once, to their final place.

The result must equal the processor's bit for bit. This is checked once, on a probe image. If the processor gives
anything else (another release, a subclass, a disabled step), the processor itself is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

PROBE_HEIGHT, PROBE_WIDTH = 57, 93


class QwenImagePatches:
    """Makes ``pixel_values`` and ``image_grid_thw`` for an image processor.

    Args:
        processor: a ``Qwen2VLImageProcessor``, its limits already set.
        grid: patches ``(rows, columns)`` of an image of ``(height, width)`` pixels.
    """

    def __init__(self, processor: Any, grid: Callable[[int, int], tuple[int, int]]) -> None:
        self._processor = processor
        self._grid = grid
        self.direct = self._equals_the_processor()

    def __call__(self, images: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Patches of images, uint8 ``[3, H, W]`` each.

        Returns:
            ``pixel_values`` float32 ``[patches, 3 * temporal * patch * patch]``, ``image_grid_thw`` int64
            ``[images, 3]``.
        """
        if not self.direct:
            made = self._processor(images=list(images), return_tensors="pt")
            return {name: made[name] for name in ("pixel_values", "image_grid_thw")}
        return self._make(images)

    def _equals_the_processor(self) -> bool:
        probe = torch.randint(
            256, (3, PROBE_HEIGHT, PROBE_WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        try:
            made = self._make([probe])
            expected = self._processor(images=[probe], return_tensors="pt")
        except Exception:  # other settings, or a processor that rejects the probe: call the processor
            return False
        return all(
            made[name].dtype == expected[name].dtype and torch.equal(made[name], expected[name])
            for name in ("pixel_values", "image_grid_thw")
        )

    def _make(self, images: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        processor = self._processor
        patch, steps = processor.patch_size, processor.temporal_patch_size
        grids = [self._grid(*image.shape[-2:]) for image in images]
        counts = [rows * columns for rows, columns in grids]
        pixels = torch.empty((sum(counts), 3, steps, patch * patch), dtype=torch.float32)
        for image, (rows, columns), place in zip(images, grids, pixels.split(counts), strict=True):
            self._fill(self._resized(image, rows * patch, columns * patch), rows, columns, place)
        return {
            "pixel_values": pixels.view(len(pixels), -1),
            "image_grid_thw": torch.tensor([[1, rows, columns] for rows, columns in grids], dtype=torch.int64),
        }

    def _resized(self, image: torch.Tensor, height: int, width: int) -> torch.Tensor:
        # The processor's own resize, but channels last: torch filters that three times as fast as three planes.
        from transformers.image_utils import SizeDict

        rows_of_pixels = image[None].contiguous(memory_format=torch.channels_last)
        size = SizeDict(height=height, width=width)
        resized: torch.Tensor = self._processor.resize(rows_of_pixels, size, resample=self._processor.resample)
        return resized[0]

    def _fill(self, image: torch.Tensor, rows: int, columns: int, place: torch.Tensor) -> None:
        """Writes the patches of a resized image; those of one merged token are adjacent, as the vision encoder expects.

        Args:
            image: uint8 ``[3, rows * patch, columns * patch]``.
            rows: of patches.
            columns: of patches.
            place: float32 ``[rows * columns, 3, temporal, patch * patch]``, overwritten.
        """
        processor = self._processor
        patch, merge = processor.patch_size, processor.merge_size
        blocks = image.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        bytes_in_order = blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(len(place), 3, 1, patch * patch)
        # As in the processor: rescaling is folded into the normalisation, and operations have the same order.
        scale = 1.0 / processor.rescale_factor
        mean, deviation = (
            (torch.tensor(values) * scale).view(3, 1, 1) for values in (processor.image_mean, processor.image_std)
        )
        place.copy_(bytes_in_order.to(torch.float32).sub_(mean).div_(deviation).expand_as(place))
