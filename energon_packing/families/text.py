"""Text alone: any Hugging Face tokenizer with a chat template."""

from collections.abc import Sequence
from typing import Any

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import SampleRejected
from energon_packing.families.base import IMAGE_SIZES, VIDEO_SIZES, Inputs, MediaPlan, VisionFamily
from energon_packing.families.geometry import VIDEO_FRAMES


class Text(VisionFamily):
    """Text only: a conversation with an image or video is rejected, never stripped."""

    name = "text"
    reads = (*IMAGE_SIZES, *VIDEO_SIZES, *VIDEO_FRAMES)
    """Accepted without effect, so that a configuration for a vision model also works for text alone."""
    special_tokens = False

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        self.stand_for_media({})

    def plan(self, media: Media) -> MediaPlan:
        why = f"the family {self.name} accepts only text; set encoder.family"
        raise SampleRejected("unsupported_media", f"{media.kind} {media.name!r}: {why}")

    def replacement(self, plan: MediaPlan) -> str:
        return ""

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        return {}
