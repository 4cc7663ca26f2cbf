"""Gemma 3: one square of 256 tokens per image, and with pan-and-scan one more per crop of an elongated image."""

from collections.abc import Sequence
from typing import Any

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import ConfigError
from energon_packing.families.base import Inputs, MediaPlan, VisionFamily, ask
from energon_packing.families.pixel_forms import form_of
from energon_packing.thd.pixels import PixelForm

SIGLIP_PATCH = 14
"""Pixels along a side of a patch of Gemma 3's vision encoder; its processor does not contain the number."""


class Gemma3(VisionFamily):
    """Geometry of ``Gemma3Processor`` and ``Gemma3ImageProcessor`` (transformers 5). Every image is resized to one
    square of ``image_seq_length`` tokens. With ``encoder.pan_and_scan`` an image whose side ratio is at least
    ``pan_and_scan_min_ratio_to_activate`` is followed by crops of it, each a square of its own between words that the
    processor writes. The processor passes its own defaults for these settings to the image processor, and they override
    those of ``preprocessor_config.json`` (``Gemma3ProcessorKwargs``). So a file cannot turn pan-and-scan on."""

    name = "gemma3"
    processor_classes = ("Gemma3Processor",)
    reads = ("pan_and_scan",)
    causal = False  # the tokens of an image see each other
    mrope = False

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        self._start: str = self.tokenizer.boi_token
        self._end: str = self.tokenizer.eoi_token
        self.image_token: str = self.tokenizer.image_token
        self.stand_for_media({"image": self.image_token}, self._start, self._end)
        self.placeholders = {"image": self._start}  # which the chat template writes for an image
        self.square_tokens: int = processor.image_seq_length
        size = self.images.size
        if not size.height or not size.width:
            needs = f"the family {self.name} needs height and width in preprocessor_config.json."
            raise ConfigError(f"The image processor resizes to {dict(size)}; {needs}")
        self._patches = size.height // SIGLIP_PATCH, size.width // SIGLIP_PATCH
        defaults = getattr(type(processor), "images_kwargs", None)  # from transformers 5.23 on
        if defaults is None:
            from transformers.models.gemma3.processing_gemma3 import Gemma3ProcessorKwargs

            defaults = Gemma3ProcessorKwargs._defaults["images_kwargs"]
        for name, value in defaults.items():
            if name.startswith("pan_and_scan"):
                setattr(self.images, name, value)
        self.images.do_pan_and_scan = bool(config.pan_and_scan)

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        tiles = 1
        if self.images.do_pan_and_scan:
            # Ask the processor, with an image that has no storage: its crops are views, whatever the size.
            blank = torch.empty((1, 3, height, width), dtype=torch.uint8, device="meta")
            names = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
            limits = (getattr(self.images, f"pan_and_scan_{name}") for name in names)
            tiles += len(self.images.pan_and_scan_batched(blank, *limits))
        return MediaPlan(kind="image", grid=(tiles, *self._patches), runs=(self.square_tokens,) * tiles, tiles=tiles)

    def replacement(self, plan: MediaPlan) -> str:
        """Returns each square between its tokens and line breaks; crops follow the processor's words about them."""
        square = f"\n\n{self._start}{self.image_token}{self._end}\n\n"
        if plan.tiles == 1:
            return square
        crops = " ".join([square] * (plan.tiles - 1))
        return f"Here is the original image {square} and here are some crops to help you see better {crops}"

    def byte_forms(self) -> dict[str, PixelForm]:
        return form_of(self.images)

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns ``pixel_values`` ``[squares, 3, H, W]``: each image before its crops."""
        made = ask(self.images, raw, images=list(media), input_data_format="channels_first")
        self.check_tiles(plans, (1 + int(crops) for crops in made["num_crops"]))
        return {"pixel_values": made["pixel_values"]}
