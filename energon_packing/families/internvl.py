"""InternVL 2.5, 3 and 3.5: images cut into tiles with a thumbnail, and videos as one tile per frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media, MediaKind
from energon_packing.errors import ConfigError
from energon_packing.families.base import IMAGE_SIZES, MediaPlan, VisionFamily, ask, require
from energon_packing.families.geometry import MOST_TILES, VIDEO_FRAMES, check_tiles, chosen_frames, uniform_frames
from energon_packing.families.pixel_forms import RAW, form_of, resized
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

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        """Returns the tiles of an image as its processor counts them, or the sampled frames of a video, one tile each.

        Raises:
            SampleRejected: ``unmeasured_media``.
        """
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
        parts: list[torch.Tensor] = []
        for plan, tensor in zip(plans, media, strict=True):
            if plan.kind == "image":
                made = ask(self.images, raw, images=[tensor], crop_to_patches=True, input_data_format="channels_first")
                parts.append(made["pixel_values"])
            else:  # one clip per call: the processor accepts several only if all have equally many frames
                made = ask(self.videos, raw, videos=[tensor], do_sample_frames=False)
                parts.append(made["pixel_values_videos"].flatten(0, 1))
        self.check_tiles(plans, map(len, parts))
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
        self.check_tiles(plans, counts)
        made = empty_result((sum(counts), 3, *self._tiles.shape), torch.uint8)
        for plan, tensor, place in zip(plans, media, made.split(counts), strict=True):
            if plan.kind == "image":
                self._tiles.fill_image(tensor, place)
            else:
                self._tiles.fill_clip(tensor, place)
        return made


class QianfanVL(InternVL):
    """Geometry of ``QianfanOCRProcessor`` (transformers 5): InternVL's.

    transformers has no processor for the Qianfan-VL checkpoints themselves, whose code is InternVL's. Use an
    ``InternVLProcessor`` or a ``QianfanOCRProcessor`` with their tokenizer.
    """

    name = "qianfan_vl"
    processor_classes = ("QianfanOCRProcessor", "InternVLProcessor")
    by_name_only = ("InternVLProcessor",)

    def _image_placeholder(self) -> str:
        # The chat template writes this token; the model sees the one that replaces it.
        return str(getattr(self.processor, "image_placeholder_token", self.image_token))


PROBES = ((57, 93), (60, 60))
"""Height and width of images: one of several tiles and a thumbnail, one of a single tile."""
PROBE_FRAMES = 3


class InternVLTiles:
    """Makes tiles of images and frames for an image processor and a video processor, each written once to its place.

    ``GotOcr2ImageProcessor`` and ``InternVLVideoProcessor`` (transformers 5) stack images before they resize them and
    tiles after it, plane by plane. Here the processor's own function resizes rows of pixels, and each tile is copied to
    its place in the tensor of the sample. The result must equal the processor's bit for bit. This is checked once, on
    probes; if the processor gives anything else (another release, a disabled step), the processor itself is used.

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
        whole = resized(self._images, image, rows * height, columns * width)
        tiles = whole.reshape(3, rows, height, columns, width).permute(1, 3, 0, 2, 4)
        place[: rows * columns].view(tiles.shape).copy_(tiles)
        if rows * columns > 1:
            place[-1] = resized(self._images, image, height, width)

    def fill_clip(self, clip: torch.Tensor, place: torch.Tensor) -> None:
        """Writes each frame of a clip.

        Args:
            clip: uint8 ``[frames, 3, H, W]``.
            place: uint8 ``[frames, 3, height, width]``, overwritten.
        """
        for frame, each in zip(clip, place, strict=True):
            each.copy_(resized(self._videos, frame, *self.shape))

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
