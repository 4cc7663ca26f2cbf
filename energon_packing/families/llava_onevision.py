"""LLaVA-NeXT, tiles at the best of several resolutions; LLaVA-OneVision, also several images and pooled frames."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from energon_packing.config import MODALITIES, EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import ConfigError
from energon_packing.families.base import Inputs, MediaPlan, ask
from energon_packing.families.geometry import check_pinpoints, spread_frames, two_sizes
from energon_packing.families.llava import Llava
from energon_packing.families.pixel_forms import RAW, form_of
from energon_packing.thd.pixels import PixelForm

DEFAULT_VIDEO_FRAMES = 32  # frames of a video if the video processor has no ``num_frames``; the published number


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
        how = {"do_pad": False, "input_data_format": "channels_first", **(RAW if raw else {})}
        made = self.images(images=[[tensor for _, tensor in images]], **how)
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
                raise two_sizes(self.tile, dict(size))
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
        ways = [self._squared if several and item.kind == "image" else self.geometry for item in media]
        return tuple(map(self.measured, media, ways))

    def _squared(self, media: Media, height: int, width: int) -> MediaPlan:
        """Plans one image of several: padded to a square, with a token that ends it."""
        self.check_area(max(height, width), max(height, width))
        tokens = self._setting("num_image_tokens") + 1 - self._dropped
        return MediaPlan(kind="image", grid=(1, *self.tile_grid), runs=(tokens,))

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        if media.kind == "image":
            return super().geometry(media, height, width)
        wanted: dict[str, Any] = {"rate": None, "fewest": 1, "most": self.video_frames}
        rows, columns = self.tile_grid
        pooled = -(-rows // 2) * -(-columns // 2)
        return MediaPlan(
            kind="video",
            grid=(self.video_frames, rows, columns),
            runs=(self.video_frames * pooled + 1,),
            frame_indices=spread_frames(media, self.config, self.videos, of_list=self.video_frames, **wanted),
            tiles=self.video_frames,
        )

    def byte_forms(self) -> dict[str, PixelForm]:
        forms = super().byte_forms()
        if not forms or self.videos is None:
            return forms
        frames = form_of(self.videos, "images")
        return {} if frames is None else {**forms, "pixel_values_videos": frames}

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
