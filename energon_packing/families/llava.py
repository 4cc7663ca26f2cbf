"""LLaVA-1.5, where every image becomes one square; LLaVA-NeXT, which adds the image at the best of several resolutions,
cut into tiles; LLaVA-OneVision, with one square per image for several, and pooled frames for a video."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from energon_packing.config import MODALITIES, EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import ConfigError
from energon_packing.families.base import Inputs, MediaPlan, VisionFamily, ask
from energon_packing.families.geometry import check_pinpoints, spread_frames
from energon_packing.families.pixel_forms import RAW, form_of
from energon_packing.thd.pixels import PixelForm

DEFAULT_VIDEO_FRAMES = 32  # Frames of a video if the video processor has no ``num_frames``; the published number


class Llava(VisionFamily):
    """Geometry of ``LlavaProcessor`` with a CLIP or SigLIP image processor (transformers 5)."""

    name = "llava"
    processor_classes: ClassVar[tuple[str, ...]] = ("LlavaProcessor",)
    mrope = False

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        self.image_token: str = processor.image_token
        self.stand_for_media({"image": self.image_token})
        # The one size to which the image processor resizes two small images of different shapes.
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
        self.tile: tuple[int, int] = first
        """Height and width of what the vision encoder sees, in pixels."""
        self.tile_grid = self._tile_grid()
        """The same in patches."""

    def _tile_grid(self) -> tuple[int, int]:
        patch = self._setting("patch_size")
        return self.tile[0] // patch, self.tile[1] // patch

    def _setting(self, name: str) -> int:
        value = getattr(self.processor, name, None)
        if value is None:
            needed = "which is needed to count the tokens of an image"
            fix = "set it in processor_config.json to the vision encoder's."
            raise ConfigError(f"The {type(self.processor).__name__} has no {name}, {needed}; {fix}")
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
        if height * width > (most := self.config.max_source_pixels):
            raise ValueError(f"resizing makes it {width}x{height} pixels, over encoder.max_source_pixels={most}")

    def replacement(self, plan: MediaPlan) -> str:
        return self.image_token

    def byte_forms(self) -> dict[str, PixelForm]:
        return form_of(self.images)

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns ``pixel_values`` ``[images, 3, H, W]``."""
        made = ask(self.images, raw, images=list(media), input_data_format="channels_first")
        return {"pixel_values": made["pixel_values"]}


class LlavaNext(Llava):
    """Geometry of ``LlavaNextProcessor`` (transformers 5). An image is fitted into the best of ``image_grid_pinpoints``
    and padded. The tokens of the padding are left out, and one token ends each row. The processor itself counts the
    tokens, because its rounding decides."""

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
        """Returns ``pixel_values`` ``[tiles, 3, H, W]`` and ``image_sizes`` ``[images, 2]`` (height, width). By default
        the processor pads all images of a call to equally many tiles, ``[images, tiles, 3, H, W]``, which samples of
        one pack could not share. The models also take the tiles without that padding."""
        images = [(plan, tensor) for plan, tensor in zip(plans, media, strict=True) if plan.kind == "image"]
        if not images:
            return {}
        form: dict[str, Any] = {"do_pad": False, "input_data_format": "channels_first", **(RAW if raw else {})}
        made = self.images(images=[[tensor for _, tensor in images]], **form)
        tiles = list(made["pixel_values"])
        self.check_tiles([plan for plan, _ in images], map(len, tiles))
        result = {
            "pixel_values": torch.cat(tiles) if len(tiles) > 1 else tiles[0],
            "image_sizes": torch.tensor([list(size) for size in made["image_sizes"]], dtype=torch.int64),
        }
        if "batch_num_images" in made:
            result["batch_num_images"] = torch.tensor(made["batch_num_images"], dtype=torch.int64)
        return result


class LlavaOneVision(LlavaNext):
    """Geometry of ``LlavaOnevisionProcessor`` (transformers 5). The cost of an image depends on its sample: a single
    image is cut into tiles (`LlavaNext`), but each of several is padded to a square and seen once. Frames of a video
    are pooled two by two, and one token ends the video."""

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
        most = self.video_frames
        frames = spread_frames(media, self.config, self.videos, listed=most, rate=None, fewest=1, most=most)
        rows, columns = self.tile_grid
        pooled = -(-rows // 2) * -(-columns // 2)
        return MediaPlan(
            kind="video",
            grid=(self.video_frames, rows, columns),
            runs=(self.video_frames * pooled + 1,),
            frame_indices=frames,
            tiles=self.video_frames,
        )

    def replacement(self, plan: MediaPlan) -> str:
        return self.image_token if plan.kind == "image" else self.video_token

    def byte_forms(self) -> dict[str, PixelForm]:
        forms = super().byte_forms()
        if not forms or self.videos is None:
            return forms
        frames = form_of(self.videos, name="pixel_values_videos")
        return forms | frames if frames else {}

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns `LlavaNext`'s inputs and ``pixel_values_videos`` ``[videos, video_frames, 3, H, W]``. With images
        there is also ``batch_num_images`` ``[1]``, which distinguishes a single image from one of several."""
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
