"""InternVL 2.5, 3 and 3.5: images cut into tiles with a thumbnail, and videos as one tile per frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media, MediaKind
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.base import IMAGE_SIZES, MediaPlan, VisionFamily, require
from energon_packing.families.frames import VIDEO_FRAMES, chosen_frames, uniform_frames
from energon_packing.families.internvl_tiles import InternVLTiles
from energon_packing.families.pixel_forms import RAW, form_of
from energon_packing.families.tile_bound import MOST_TILES, check_tiles
from energon_packing.media.shared_room import empty_result
from energon_packing.thd.pixels import PixelForm

DEFAULT_VIDEO_FRAMES = 8
"""Frames of a video if neither the configuration nor the processor sets a number."""


class InternVL(VisionFamily):
    """Geometry of ``GotOcr2ImageProcessor`` and ``InternVLVideoProcessor`` (transformers 5).

    An image is resized to the grid of ``min_patches`` to ``max_patches`` square tiles whose side ratio is nearest to
    its own. A grid of several tiles is followed by a thumbnail of the whole image. Every tile costs
    ``image_seq_length`` tokens. ``encoder.min_pixels`` and ``max_pixels`` bound the area of the grid, so they become
    the minimum and maximum number of tiles.
    """

    name = "internvl"
    processor_classes: ClassVar[tuple[str, ...]] = ("InternVLProcessor",)
    reads = (*IMAGE_SIZES, *VIDEO_FRAMES)
    mrope = False

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        self.image_token: str = processor.image_token
        self._start: str = processor.start_image_token
        self._end: str = processor.end_image_token
        image_id = self.check_token(self.image_token)
        self.placeholders: dict[MediaKind, str] = {"image": self._image_placeholder()}
        self.placeholder_ids = {"image": image_id}
        self.images = processor.image_processor
        self.videos = processor.video_processor
        self.tile_tokens: int = processor.image_seq_length
        if self.videos is not None:
            self.placeholders["video"] = processor.video_token
            self.placeholder_ids["video"] = image_id
            if self.videos.size != self.images.size:
                raise ConfigError(
                    f"The processor resizes images to {dict(self.images.size)} and frames to {dict(self.videos.size)}; "
                    "the vision encoder takes one size: set both in preprocessor_config.json and "
                    "video_preprocessor_config.json."
                )
        self.reserved = (self.image_token, self._start, self._end, *self.placeholders.values())
        self._limit_tiles(config)
        self.video_fps = config.video_fps or getattr(self.videos, "fps", None)
        self.video_frames = config.video_max_frames or getattr(self.videos, "num_frames", None) or DEFAULT_VIDEO_FRAMES
        self._fewest = config.video_min_frames or 1
        if self._fewest > self.video_frames:
            raise ConfigError(
                f"encoder.video_min_frames is {self._fewest}, but at most {self.video_frames} frames are sampled; set "
                "encoder.video_max_frames too."
            )

    def _image_placeholder(self) -> str:
        return self.image_token

    def _limit_tiles(self, config: EncoderConfig) -> None:
        area = self.images.size["height"] * self.images.size["width"]
        if config.min_pixels is not None:
            self.images.min_patches = max(1, math.ceil(config.min_pixels / area))
        if config.max_pixels is not None:
            self.images.max_patches = config.max_pixels // area
        self.most_pixels = MOST_TILES * area
        check_tiles(
            self.images.max_patches,
            "max_patches of the image processor"
            if config.max_pixels is None
            else f"encoder.max_pixels={config.max_pixels} with tiles of {area} pixels",
        )
        if not 1 <= self.images.min_patches <= self.images.max_patches:
            raise ConfigError(
                f"No grid has between {self.images.min_patches} and {self.images.max_patches} tiles of {area} pixels; "
                "encoder.min_pixels and encoder.max_pixels limit the area of the whole grid."
            )

    def plan(self, media: Media) -> MediaPlan:
        """Returns the tiles of an image as its processor counts them, or the sampled frames of a video, one tile each.

        Raises:
            SampleRejected: ``unsupported_media``, ``unmeasured_media``, or as for `uniform_frames`.
        """
        self.check_kind(media)
        width, height = require(media.width, media, "width"), require(media.height, media, "height")
        if media.kind == "image":
            tiles = int(self.images.get_number_of_image_patches(height, width, {"crop_to_patches": True}))
            return self._tiled("image", tiles, (tiles * self.tile_tokens,))
        total, fps = require(media.frames, media, "frame count"), require(media.rate, media, "fps")
        wanted: dict[str, Any] = {"rate": self.video_fps, "fewest": self._fewest, "most": self.video_frames}
        indices = chosen_frames(media, self.config, lambda: uniform_frames(self.videos, total, fps, **wanted))
        return self._tiled("video", len(indices), (self.tile_tokens,) * len(indices), indices)

    def _tiled(self, kind: MediaKind, tiles: int, runs: tuple[int, ...], indices: tuple[int, ...] = ()) -> MediaPlan:
        # Patches are merged two by two (the model's downsample_ratio is 0.5), and a tile is square.
        side = 2 * math.isqrt(self.tile_tokens)
        return MediaPlan(kind=kind, grid=(tiles, side, side), runs=runs, frame_indices=indices, tiles=tiles)

    def replacement(self, plan: MediaPlan) -> str:
        """Returns the placeholder between its start and end tokens; for a video once per frame, after its number."""
        tile = f"{self._start}{self.image_token}{self._end}"
        if plan.kind == "image":
            return tile
        return "\n".join(f"Frame{number}: {tile}" for number in range(1, plan.tiles + 1))

    def byte_forms(self) -> dict[str, PixelForm]:
        """Returns the form of tiles and frames, if it is one."""
        form = form_of(self.images, "images")
        if form is None or (self.videos is not None and form_of(self.videos, "images") != form):
            return {}
        return {"pixel_values": form}

    def pixels(
        self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False
    ) -> dict[str, torch.Tensor]:
        """Returns ``pixel_values`` ``[tiles, 3, H, W]`` of images and videos, in the order of the text."""
        if raw and plans and self._tiles.direct:
            return {"pixel_values": self._fill(plans, media)}
        images = [tensor for plan, tensor in zip(plans, media, strict=True) if plan.kind == "image"]
        cut: list[torch.Tensor] = []
        if images:
            made = self.images(
                images=images,
                crop_to_patches=True,
                input_data_format="channels_first",
                return_tensors="pt",
                **(RAW if raw else {}),
            )
            cut = list(torch.split(made["pixel_values"], [int(count) for count in made["num_patches"]]))
        waiting = iter(cut)
        parts = [
            next(waiting) if plan.kind == "image" else self._frames(tensor, raw)
            for plan, tensor in zip(plans, media, strict=True)
        ]
        self._check_tiles(plans, [len(part) for part in parts])
        if cut and len(cut) == len(parts):
            return {"pixel_values": made["pixel_values"]}  # images only: no copy, which would take as long as the rest
        return {"pixel_values": torch.cat(parts) if len(parts) > 1 else parts[0]} if parts else {}

    @cached_property
    def _tiles(self) -> InternVLTiles:
        return InternVLTiles(self.images, self.videos)

    def _fill(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor]) -> torch.Tensor:
        """Makes the tiles of a sample as bytes in one tensor."""
        counts = [
            self._tiles.count(tensor) if plan.kind == "image" else len(tensor)
            for plan, tensor in zip(plans, media, strict=True)
        ]
        self._check_tiles(plans, counts)
        made = empty_result((sum(counts), 3, *self._tiles.shape), torch.uint8)
        for plan, tensor, place in zip(plans, media, made.split(counts), strict=True):
            if plan.kind == "image":
                self._tiles.fill_image(tensor, place)
            else:
                self._tiles.fill_clip(tensor, place)
        return made

    def _check_tiles(self, plans: Sequence[MediaPlan], counts: Sequence[int]) -> None:
        for plan, count in zip(plans, counts, strict=True):
            if count != plan.tiles:
                raise SampleRejected(
                    "media_changed", f"the {plan.kind} became {count} tiles, but {plan.tiles} were measured"
                )

    def _frames(self, clip: torch.Tensor, raw: bool) -> torch.Tensor:
        # One clip per call: the processor accepts several clips only if all have equally many frames.
        made = self.videos(videos=[clip], do_sample_frames=False, return_tensors="pt", **(RAW if raw else {}))
        return made["pixel_values_videos"].flatten(0, 1)
