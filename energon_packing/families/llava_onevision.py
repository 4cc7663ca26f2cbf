"""LLaVA-OneVision: anyres tiles for a single image, one square per image for several, pooled frames for a video."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from energon_packing.config import MODALITIES, EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import ConfigError
from energon_packing.families.base import Inputs, MediaPlan, ask, require
from energon_packing.families.geometry import chosen_frames, shown_frames, uniform_frames
from energon_packing.families.llava_next import LlavaNext
from energon_packing.families.pixel_forms import form_of
from energon_packing.thd.pixels import PixelForm

DEFAULT_VIDEO_FRAMES = 32
"""Frames of a video if the video processor has no ``num_frames``; the published number."""


class LlavaOneVision(LlavaNext):
    """Geometry of ``LlavaOnevisionProcessor`` (transformers 5).

    The cost of an image depends on its sample: a single image is cut into tiles (`LlavaNext`), but each of several is
    padded to a square and seen once. Frames of a video are pooled two by two, and one token ends the video.
    """

    name = "llava_onevision"
    processor_classes = ("LlavaOnevisionProcessor",)

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        if self.videos is not None:
            self.video_token: str = processor.video_token
            self.stand_for_media({"image": self.image_token, "video": self.video_token})
            size = self.videos.size
            if (size.get("height"), size.get("width")) != self.tile:
                raise ConfigError(
                    f"The processor resizes images to {self.tile} and frames to {dict(size)}; the vision encoder takes "
                    "one size: set both in preprocessor_config.json and video_preprocessor_config.json."
                )
        # Not configurable: videos of all samples share one tensor, so none may have fewer frames.
        if getattr(self.videos, "fps", None) is not None and "video" in MODALITIES[config.modality]:
            raise ConfigError(
                "fps of the video processor (encoder.processor) gives each video its own number of frames, but the "
                "videos of a pack need the same; set num_frames in the processor's file in its place."
            )
        self.video_frames: int = getattr(self.videos, "num_frames", None) or DEFAULT_VIDEO_FRAMES

    def _tile_grid(self) -> tuple[int, int]:
        side = math.isqrt(self._setting("num_image_tokens"))
        return side, side

    def plans(self, media: Sequence[Media]) -> tuple[MediaPlan, ...]:
        """Returns the plan of each image and video; if a sample has several images, each is padded to a square."""
        several = sum(item.kind == "image" for item in media) > 1
        return tuple(
            self.measured(item, self._squared) if several and item.kind == "image" else self.plan(item)
            for item in media
        )

    def _squared(self, media: Media, height: int, width: int) -> MediaPlan:
        """Plans one image of several: padded to a square, with a token that ends it."""
        self.check_area(max(height, width), max(height, width))
        tokens = self._setting("num_image_tokens") + 1 - self._dropped
        return MediaPlan(kind="image", grid=(1, *self.tile_grid), runs=(tokens,))

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        if media.kind == "image":
            return super().geometry(media, height, width)
        total, fps = require(media.frames, media, "frame count"), require(media.rate, media, "fps")
        wanted: dict[str, Any] = {"rate": None, "fewest": 1, "most": self.video_frames}
        indices = chosen_frames(
            media, self.config, lambda: uniform_frames(self.videos, total, fps, **wanted), most=self.video_frames
        )
        rows, columns = self.tile_grid
        pooled = -(-rows // 2) * -(-columns // 2)
        return MediaPlan(
            kind="video",
            grid=(self.video_frames, rows, columns),
            runs=(self.video_frames * pooled + 1,),
            frame_indices=shown_frames(media, self.config, indices)[0],
            tiles=self.video_frames,
        )

    def replacement(self, plan: MediaPlan) -> str:
        return self.image_token if plan.kind == "image" else self.video_token

    def byte_forms(self) -> dict[str, PixelForm]:
        forms = super().byte_forms()
        if not forms or self.videos is None:
            return forms
        frames = form_of(self.videos, "images")
        return {} if frames is None else {**forms, "pixel_values_videos": frames}

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns `LlavaNext`'s inputs and ``pixel_values_videos`` ``[videos, video_frames, 3, H, W]``.

        With images there is also ``batch_num_images`` ``[1]``, which distinguishes a single image from one of several.
        """
        result = super().pixels(plans, media, raw=raw)
        clips = [self.spread(tensor) for plan, tensor in zip(plans, media, strict=True) if plan.kind == "video"]
        if clips:
            made = ask(self.videos, raw, videos=clips, do_sample_frames=False, input_data_format="channels_first")
            result["pixel_values_videos"] = made["pixel_values_videos"]
        return result

    def spread(self, clip: torch.Tensor) -> torch.Tensor:
        """Returns ``video_frames`` frames of a clip ``[frames, 3, H, W]``: a short clip's are repeated evenly, as all
        samples' videos share a tensor."""
        if len(clip) == self.video_frames:
            return clip
        return clip[torch.linspace(0, len(clip) - 1, self.video_frames).round().long()]
