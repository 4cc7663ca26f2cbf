"""LLaVA-NeXT: the whole image, and the same image at the best of several resolutions, cut into tiles."""

from collections.abc import Sequence
from typing import Any

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.families.base import Inputs, MediaPlan
from energon_packing.families.geometry import check_pinpoints
from energon_packing.families.llava import Llava
from energon_packing.families.pixel_forms import RAW


class LlavaNext(Llava):
    """Geometry of ``LlavaNextProcessor`` (transformers 5).

    An image is fitted into the best of ``image_grid_pinpoints`` and padded. The tokens of the padding are left out, and
    one token ends each row. The processor itself counts the tokens, because its rounding decides.
    """

    name = "llava_next"
    processor_classes = ("LlavaNextProcessor",)

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        check_pinpoints(processor.image_processor.image_grid_pinpoints, config.max_source_pixels)
        super().__init__(processor, config)  # reads the tile size from the image processor

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        """Returns the image, and its tiles at the best resolution."""
        from transformers.image_processing_utils import select_best_resolution

        best = select_best_resolution((height, width), self.images.image_grid_pinpoints)
        if best is None:  # every resolution leaves a side below one pixel
            raise ValueError("none of the image_grid_pinpoints fits its aspect ratio")
        tokens = int(self.processor._get_number_of_features(height, width, *self.tile)) - self._dropped
        rows, columns = (-(-side // tile) for side, tile in zip(best, self.tile, strict=True))
        tiles = 1 + rows * columns
        return MediaPlan(kind="image", grid=(tiles, *self.tile_grid), runs=(tokens,), tiles=tiles)

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns ``pixel_values`` ``[tiles, 3, H, W]`` and ``image_sizes`` ``[images, 2]`` (height, width).

        By default the processor pads all images of a call to equally many tiles, ``[images, tiles, 3, H, W]``, which
        samples of one pack could not share. The models also take the tiles without that padding.
        """
        images = [(plan, tensor) for plan, tensor in zip(plans, media, strict=True) if plan.kind == "image"]
        if not images:
            return {}
        made = self.images(
            images=[[tensor for _, tensor in images]],
            do_pad=False,
            input_data_format="channels_first",
            **(RAW if raw else {}),
        )
        tiles = list(made["pixel_values"])
        self.check_tiles([plan for plan, _ in images], map(len, tiles))
        result = {
            "pixel_values": torch.cat(tiles) if len(tiles) > 1 else tiles[0],
            "image_sizes": torch.tensor([list(size) for size in made["image_sizes"]], dtype=torch.int64),
        }
        if "batch_num_images" in made:
            result["batch_num_images"] = torch.tensor(made["batch_num_images"], dtype=torch.int64)
        return result
