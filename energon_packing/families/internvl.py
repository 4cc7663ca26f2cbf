"""InternVL 2.5, 3 and 3.5: images cut into tiles with a thumbnail, and videos as one tile per frame."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media, MediaKind
from energon_packing.errors import ConfigError
from energon_packing.families.base import IMAGE_SIZES, Inputs, MediaPlan, VisionFamily, ask
from energon_packing.families.geometry import MOST_TILES, VIDEO_FRAMES, check_tiles, spread_frames
from energon_packing.families.pixel_forms import form_of, resized
from energon_packing.media.decoding_process import empty_result
from energon_packing.thd.pixels import PixelForm

DEFAULT_VIDEO_FRAMES = 8  # Frames of a video if neither the configuration nor the processor sets a number


class InternVL(VisionFamily):
    """Geometry of ``GotOcr2ImageProcessor`` and ``InternVLVideoProcessor`` (transformers 5). An image is resized to the
    grid of ``min_patches`` to ``max_patches`` square tiles whose side ratio is nearest to its own. A grid of several
    tiles is followed by a thumbnail of the whole image. Every tile costs ``image_seq_length`` tokens.
    ``encoder.min_pixels`` and ``max_pixels`` bound the area of the grid, and so the number of tiles."""

    name = "internvl"
    processor_classes: ClassVar[tuple[str, ...]] = ("InternVLProcessor",)
    reads = (*IMAGE_SIZES, *VIDEO_FRAMES)
    mrope = False

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        self.image_token: str = processor.image_token
        self._start: str = processor.start_image_token
        self._end: str = processor.end_image_token
        # The chat template of Qianfan-VL writes another token; the model sees the one that replaces it.
        image = str(getattr(processor, "image_placeholder_token", self.image_token))
        self.placeholders: dict[MediaKind, str] = {"image": image}
        self.tile_tokens: int = processor.image_seq_length
        if self.videos is not None:
            self.placeholders["video"] = processor.video_token
            if self.videos.size != self.images.size:
                raise ConfigError(
                    f"The processor resizes images to {dict(self.images.size)} and frames to {dict(self.videos.size)}; "
                    "the vision encoder takes one size: set both in preprocessor_config.json and "
                    "video_preprocessor_config.json."
                )
        self.placeholder_ids = dict.fromkeys(self.placeholders, self.check_token(self.image_token))
        self.reserved = (self.image_token, self._start, self._end, *self.placeholders.values())
        area = self.images.size["height"] * self.images.size["width"]
        self.most_pixels = MOST_TILES * area
        where = "max_patches of the image processor"
        if config.min_pixels is not None:
            self.images.min_patches = max(1, math.ceil(config.min_pixels / area))
        if config.max_pixels is not None:
            self.images.max_patches = config.max_pixels // area
            where = f"encoder.max_pixels={config.max_pixels} with tiles of {area} pixels"
        check_tiles(self.images.max_patches, where)
        if not 1 <= self.images.min_patches <= self.images.max_patches:
            raise ConfigError(
                f"No grid has between {self.images.min_patches} and {self.images.max_patches} tiles of {area} pixels; "
                "encoder.min_pixels and encoder.max_pixels limit the area of the whole grid."
            )
        # As in the processor: its number comes before its rate.
        number = None if config.video_fps else getattr(self.videos, "num_frames", None)
        self.video_fps = config.video_fps or (None if number else getattr(self.videos, "fps", None))
        self.video_frames = config.video_max_frames or number or (None if self.video_fps else DEFAULT_VIDEO_FRAMES)
        self._fewest = config.video_min_frames or 1
        if self._fewest > (self.video_frames or self._fewest):
            most = f"at most {self.video_frames} frames are sampled; set encoder.video_max_frames too."
            raise ConfigError(f"encoder.video_min_frames is {self._fewest}, but {most}")

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        """The tiles of an image as its processor counts them, or the sampled frames of a video, one tile each."""
        shown: tuple[int, ...] = ()
        if media.kind == "image":
            tiles = int(self.images.get_number_of_image_patches(height, width, {"crop_to_patches": True}))
            runs: tuple[int, ...] = (tiles * self.tile_tokens,)
        else:
            wanted: dict[str, Any] = {"rate": self.video_fps, "fewest": self._fewest, "most": self.video_frames}
            shown = spread_frames(media, self.config, self.videos, **wanted)
            tiles, runs = len(shown), (self.tile_tokens,) * len(shown)
        # Patches are merged two by two (the model's downsample_ratio is 0.5), and a tile is square.
        side = 2 * math.isqrt(self.tile_tokens)
        return MediaPlan(kind=media.kind, grid=(tiles, side, side), runs=runs, frame_indices=shown, tiles=tiles)

    def replacement(self, plan: MediaPlan) -> str:
        """Returns the placeholder between its start and end tokens; for a video once per frame, after its number."""
        tile = f"{self._start}{self.image_token}{self._end}"
        if plan.kind == "image":
            return tile
        return "\n".join(f"Frame{number}: {tile}" for number in range(1, plan.tiles + 1))

    def byte_forms(self) -> dict[str, PixelForm]:
        forms = form_of(self.images)
        return {} if self.videos is not None and form_of(self.videos) != forms else forms

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns ``pixel_values`` ``[tiles, 3, H, W]`` of images and videos, in the order of the text."""
        if raw and plans:
            return {"pixel_values": self._bytes(plans, media)}
        parts: list[torch.Tensor] = []
        for plan, image in zip(plans, media, strict=True):
            if plan.kind == "image":
                made = ask(self.images, raw, images=[image], crop_to_patches=True, input_data_format="channels_first")
                parts.append(made["pixel_values"])
            else:  # one clip per call: the processor accepts several only if all have equally many frames
                made = ask(self.videos, raw, videos=[image], do_sample_frames=False)
                parts.append(made["pixel_values_videos"].flatten(0, 1))
        self.check_tiles(plans, map(len, parts))
        return {"pixel_values": torch.cat(parts) if len(parts) > 1 else parts[0]} if parts else {}

    def _bytes(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor]) -> torch.Tensor:
        """Makes the tiles of a sample as bytes in one tensor; `pixel_forms` compares them with the processor's.
        ``GotOcr2ImageProcessor`` and ``InternVLVideoProcessor`` (transformers 5) stack images before they resize them
        and tiles after it, plane by plane. Here the processor's own function resizes rows of pixels, and each tile is
        copied to its place."""
        from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

        height, width = int(self.images.size["height"]), int(self.images.size["width"])
        how = (height, width), self.images.min_patches, self.images.max_patches
        grids = [  # columns and rows
            get_optimal_tiled_canvas(tuple(image.shape[-2:]), *how) if plan.kind == "image" else (len(image), 1)
            for plan, image in zip(plans, media, strict=True)
        ]
        counts = [
            columns * rows + (plan.kind == "image" and columns * rows > 1)
            for plan, (columns, rows) in zip(plans, grids, strict=True)
        ]
        self.check_tiles(plans, counts)
        made = empty_result((sum(counts), 3, height, width), torch.uint8)
        for plan, (columns, rows), image, place in zip(plans, grids, media, made.split(counts), strict=True):
            if plan.kind == "video":
                for frame, each in zip(image, place, strict=True):
                    each.copy_(resized(self.videos, frame, height, width))
                continue
            whole = resized(self.images, image, rows * height, columns * width)
            tiles = whole.reshape(3, rows, height, columns, width).permute(1, 3, 0, 2, 4)
            place[: rows * columns].view(tiles.shape).copy_(tiles)
            if rows * columns > 1:  # a thumbnail follows
                place[-1] = resized(self.images, image, height, width)
        return made


class QianfanVL(InternVL):
    """Geometry of ``QianfanOCRProcessor`` (transformers 5): InternVL's. transformers has no processor for the
    Qianfan-VL checkpoints themselves, whose code is InternVL's. Use an ``InternVLProcessor`` or a
    ``QianfanOCRProcessor`` with their tokenizer."""

    name = "qianfan_vl"
    processor_classes = ("QianfanOCRProcessor", "InternVLProcessor")
    by_name_only = ("InternVLProcessor",)
