"""Tiles of images and frames of InternVL's processors as bytes, written once, to their final place.

``GotOcr2ImageProcessor`` and ``InternVLVideoProcessor`` (transformers 5) stack images before they resize them and tiles
after it, plane by plane. Here the processor's own function resizes rows of pixels, which torch filters faster, and each
tile is copied to its place in the tensor of the sample.

The result must equal the processor's bit for bit. This is checked once, on probes; if the processor gives anything else
(another release, a disabled step), the processor itself is used.
"""

from __future__ import annotations

from typing import Any

import torch

from energon_packing.families.pixel_forms import RAW

PROBES = ((57, 93), (60, 60))
"""Height and width of images: one of several tiles and a thumbnail, one of a single tile."""
PROBE_FRAMES = 3


class InternVLTiles:
    """Makes tiles for an image processor and a video processor.

    Args:
        images: the image processor, its limits already set.
        videos: the video processor; None if there is none.

    Attributes:
        direct: whether tiles are made here; otherwise the processors have to make them.
    """

    def __init__(self, images: Any, videos: Any | None) -> None:
        self._images = images
        self._videos = videos
        self.direct = self._equals_the_processors()

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a tile."""
        return int(self._images.size["height"]), int(self._images.size["width"])

    def count(self, image: torch.Tensor) -> int:
        """Returns the tiles of an image ``[3, H, W]``, its thumbnail included."""
        columns, rows = self._grid(image)
        return columns * rows + (columns * rows > 1)

    def fill_image(self, image: torch.Tensor, place: torch.Tensor) -> None:
        """Writes the tiles of an image, row by row, and its thumbnail.

        Args:
            image: uint8 ``[3, H, W]``.
            place: uint8 ``[tiles, 3, height, width]``, overwritten.
        """
        (columns, rows), (height, width) = self._grid(image), self.shape
        whole = _resized(self._images, image, rows * height, columns * width)
        tiles = whole.reshape(3, rows, height, columns, width).permute(1, 3, 0, 2, 4)
        place[: rows * columns].view(tiles.shape).copy_(tiles)
        if rows * columns > 1:
            place[-1] = _resized(self._images, image, height, width)

    def fill_clip(self, clip: torch.Tensor, place: torch.Tensor) -> None:
        """Writes each frame of a clip.

        Args:
            clip: uint8 ``[frames, 3, H, W]``.
            place: uint8 ``[frames, 3, height, width]``, overwritten.
        """
        for frame, each in zip(clip, place, strict=True):
            each.copy_(_resized(self._videos, frame, *self.shape))

    def _grid(self, image: torch.Tensor) -> tuple[int, int]:
        from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

        size = int(image.shape[-2]), int(image.shape[-1])
        columns, rows = get_optimal_tiled_canvas(size, self.shape, self._images.min_patches, self._images.max_patches)
        return columns, rows

    def _equals_the_processors(self) -> bool:
        generator = torch.Generator().manual_seed(0)
        try:
            for height, width in PROBES:
                image = torch.randint(256, (3, height, width), dtype=torch.uint8, generator=generator)
                made = torch.empty((self.count(image), 3, *self.shape), dtype=torch.uint8)
                self.fill_image(image, made)
                asked = self._images(images=[image], crop_to_patches=True, return_tensors="pt", **RAW)["pixel_values"]
                if asked.dtype != torch.uint8 or not torch.equal(made, asked):
                    return False
            if self._videos is None:
                return True
            clip = torch.randint(256, (PROBE_FRAMES, 3, *PROBES[0]), dtype=torch.uint8, generator=generator)
            made = torch.empty((len(clip), 3, *self.shape), dtype=torch.uint8)
            self.fill_clip(clip, made)
            asked = self._videos(videos=[clip], do_sample_frames=False, return_tensors="pt", **RAW)
        except Exception:  # other settings, or a processor that rejects a probe: call the processor
            return False
        frames = asked["pixel_values_videos"]
        return frames.dtype == torch.uint8 and torch.equal(made[None], frames)


def _resized(processor: Any, image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    from transformers.image_utils import SizeDict

    rows_of_pixels = image[None].contiguous(memory_format=torch.channels_last)
    size = SizeDict(height=height, width=width)
    resized: torch.Tensor = processor.resize(rows_of_pixels, size, resample=processor.resample)
    return resized[0]
