"""Pixtral, Mistral Small 3.1 and Ministral 3: native resolution, one run of placeholders per row of the image."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.base import Inputs, MediaPlan, VisionFamily, ask
from energon_packing.families.pixel_forms import form_of
from energon_packing.thd.pixels import PixelForm


class Pixtral(VisionFamily):
    """Geometry of ``PixtralProcessor`` and ``PixtralImageProcessor`` (transformers 5). An image whose longer side
    exceeds ``longest_edge`` is scaled down, and both sides are rounded up to whole tokens of ``patch_size *
    spatial_merge_size`` pixels. A break token ends each row of tokens, and an end token the last one. Neither is
    trained, and the vision encoder has no feature for them. ``encoder.max_pixels`` sets ``longest_edge`` to the side of
    the largest square of whole tokens that it allows."""

    name = "pixtral"
    processor_classes = ("PixtralProcessor",)
    reads = ("max_pixels",)
    mrope = False
    padded = ("pixel_values",)

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        self.image_token: str = processor.image_token
        self._break: str = processor.image_break_token
        self._end: str = processor.image_end_token
        self.stand_for_media({"image": self.image_token}, self._break, self._end)
        self.merge: int = processor.spatial_merge_size
        self.side: int = processor.patch_size * self.merge
        if not self.images.size.longest_edge:
            needs = f"the family {self.name} needs longest_edge in preprocessor_config.json."
            raise ConfigError(f"The image processor resizes to {dict(self.images.size)}; {needs}")
        if config.max_pixels is not None:
            edge = math.isqrt(config.max_pixels) // self.side * self.side
            if not edge:
                token = f"one token of {self.side}x{self.side} pixels"
                raise ConfigError(f"encoder.max_pixels={config.max_pixels} is smaller than {token}.")
            self.images.size = type(self.images.size)(longest_edge=min(edge, self.images.size.longest_edge))

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        """Returns the rows and columns of tokens after the processor's own resizing."""
        from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

        edge = self.images.size.longest_edge
        resized = get_resize_output_image_size(
            np.broadcast_to(np.uint8(0), (3, height, width)),  # it takes an image, but reads only its shape
            size=(edge, edge),
            patch_size=(self.side, self.side),
            input_data_format="channels_first",  # or it is guessed, and a side of 1 or 3 pixels taken for channels
        )
        rows, columns = resized[0] // self.side, resized[1] // self.side
        if not rows or not columns:
            why = f"with its longer side resized to {edge}, its shorter side becomes 0 pixels"
            detail = f"image {media.name!r} of {width}x{height} pixels is too narrow: {why}"
            raise SampleRejected("media_geometry", detail)
        grid, size = (1, rows * self.merge, columns * self.merge), (rows * self.side, columns * self.side)
        return MediaPlan(kind="image", grid=grid, runs=(columns,) * rows, size=size)

    def replacement(self, plan: MediaPlan) -> str:
        """Returns one placeholder per row, each followed by the token that ends the row or the image."""
        return (self.image_token + self._break) * (len(plan.runs) - 1) + self.image_token + self._end

    def byte_forms(self) -> dict[str, PixelForm]:
        """Returns the form of images; their padding is 0 after normalisation and is found by ``image_sizes``."""
        return form_of(self.images, sizes="image_sizes")

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns ``pixel_values`` ``[images, 3, H, W]``, or ``[bytes]`` if ``raw``, and ``image_sizes`` ``[images,
        2]`` (height, width without padding). Numbers are padded below and to the right to the largest of the sample;
        the models cut the padding off."""
        form: dict[str, Any] = {"patch_size": self.side, "input_data_format": "channels_first"}
        if raw:  # each for itself: one call pads all to the largest
            each = [ask(self.images, raw, images=[image], **form) for image in media]
            made = {"image_sizes": torch.cat([one["image_sizes"] for one in each])}
            made["pixel_values"] = torch.cat([one["pixel_values"].flatten() for one in each])
        else:
            made = ask(self.images, raw, images=list(media), **form)
        patch = self.side // self.merge
        planned = [[plan.grid[1] * patch, plan.grid[2] * patch] for plan in plans]  # `size` is 0 in rows of before
        if (sizes := made["image_sizes"].tolist()) != planned:
            raise SampleRejected("media_changed", f"the images became {sizes} pixels, but {planned} were measured")
        return {"pixel_values": made["pixel_values"], "image_sizes": made["image_sizes"]}
