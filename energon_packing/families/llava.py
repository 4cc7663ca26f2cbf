"""LLaVA-1.5: every image becomes one square, so every image costs the same."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import ConfigError
from energon_packing.families.base import Inputs, MediaPlan, VisionFamily, ask
from energon_packing.families.pixel_forms import image_forms
from energon_packing.thd.pixels import PixelForm


class Llava(VisionFamily):
    """Geometry of ``LlavaProcessor`` with a CLIP or SigLIP image processor (transformers 5)."""

    name = "llava"
    processor_classes: ClassVar[tuple[str, ...]] = ("LlavaProcessor",)
    mrope = False

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        self.image_token: str = processor.image_token
        self.stand_for_media({"image": self.image_token})
        self.tile = self._tile_size()
        """Height and width of what the vision encoder sees, in pixels."""
        self.tile_grid = self._tile_grid()
        """The same in patches."""

    def _tile_size(self) -> tuple[int, int]:
        """Returns the one size to which the image processor resizes two small images of different shapes."""
        made = [
            self.images(images=[torch.zeros(3, *size, dtype=torch.uint8)], return_tensors="pt")["pixel_values"]
            for size in ((16, 24), (24, 16))
        ]
        first, second = (tuple(pixels.shape[-2:]) for pixels in made)
        if first != second:
            raise ConfigError(
                f"The image processor makes images of different sizes ({first}, {second}), which cannot share a "
                "tensor; set do_center_crop and crop_size in preprocessor_config.json."
            )
        return int(first[0]), int(first[1])

    def _tile_grid(self) -> tuple[int, int]:
        patch = self._setting("patch_size")
        return self.tile[0] // patch, self.tile[1] // patch

    def _setting(self, name: str) -> int:
        value = getattr(self.processor, name, None)
        if value is None:
            raise ConfigError(
                f"The {type(self.processor).__name__} has no {name}, which is needed to count the tokens of an image; "
                "set it in processor_config.json to the vision encoder's."
            )
        return int(value)

    @property
    def _dropped(self) -> int:
        """Tokens that feature selection drops: the strategy ``default`` leaves out the encoder's class token."""
        return int(self.processor.vision_feature_select_strategy == "default")

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        edge = getattr(self.images.size, "shortest_edge", None)
        if edge is not None:  # the long side is scaled too, before the square is cut out of the middle
            self.check_area(edge, edge * max(height, width) // min(height, width))
        rows, columns = self.tile_grid
        tokens = rows * columns + self.processor.num_additional_image_tokens - self._dropped
        return MediaPlan(kind="image", grid=(1, rows, columns), runs=(tokens,))

    def check_area(self, height: int, width: int) -> None:
        """Refuses an image whose intermediate size exceeds ``encoder.max_source_pixels``, by a ValueError. An image one
        pixel wide becomes huge if it is resized by its short side or padded to a square."""
        if height * width > self.config.max_source_pixels:
            raise ValueError(
                f"resizing makes it {width}x{height} pixels, over encoder.max_source_pixels="
                f"{self.config.max_source_pixels}"
            )

    def replacement(self, plan: MediaPlan) -> str:
        return self.image_token

    def byte_forms(self) -> dict[str, PixelForm]:
        return image_forms(self.images)

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns ``pixel_values`` ``[images, 3, H, W]``."""
        made = ask(self.images, raw, images=list(media), input_data_format="channels_first")
        return {"pixel_values": made["pixel_values"]}
