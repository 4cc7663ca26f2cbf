"""Qwen2-VL, Qwen2.5-VL and what has their processor: native resolution, 28-pixel tokens, a run per image or video; and
Qwen3-VL and Qwen3.5: 32-pixel tokens, and a video as one run per time step, each after its time as text."""

import contextlib
import functools
import inspect
from collections.abc import Sequence
from fractions import Fraction
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from energon_packing.config import MODALITIES, EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families import geometry
from energon_packing.families.base import IMAGE_SIZES, VIDEO_SIZES, Inputs, MediaPlan, VisionFamily, ask, require
from energon_packing.families.geometry import sampled_frames
from energon_packing.families.pixel_forms import form_of, resized
from energon_packing.media.decoding_process import empty_result
from energon_packing.thd.pixels import PixelForm

DEFAULT_VIDEO_FPS = 2.0


def _patches(
    processor: Any, clips: Sequence[torch.Tensor], grids: Sequence[tuple[int, int, int]], step: int
) -> torch.Tensor:
    """Makes the patches ``[patches, values]`` of images or videos, uint8 ``[frames, 3, H, W]``, with these ``grids``
    and ``step`` frames to a patch; an image is one frame. ``Qwen2VLImageProcessor`` and the video processors like it
    (transformers 5) copy pixels about seven times on the way to the patches, most of them as 32-bit floats. Here an
    image or frame is resized by the processor's own function, and its bytes are sorted into patches, to their final
    place. `VisionFamily.pixel_forms` compares both."""
    patch, merge = processor.patch_size, processor.merge_size
    counts = [steps * rows * columns for steps, rows, columns in grids]
    pixels = empty_result((sum(counts), 3, step, patch * patch), torch.uint8)
    for clip, (steps, rows, columns), place in zip(clips, grids, pixels.split(counts), strict=True):
        for at in range(steps * step):
            frame = clip[min(at, len(clip) - 1)]  # a short last time step repeats its last frame
            whole = resized(processor, frame, rows * patch, columns * patch)
            # The patches of one merged token are adjacent.
            blocks = whole.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
            ordered = blocks.permute(1, 4, 2, 5, 0, 3, 6)
            first = at // step * rows * columns
            place[first : first + rows * columns, :, at % step].view(ordered.shape).copy_(ordered)
    return pixels.view(len(pixels), -1)


@functools.cache
def truncates_seconds() -> bool:
    """Whether the installed model truncates the seconds between two time steps before it multiplies them with the
    tokens per second, as in transformers 5.14; that of 5.18 multiplies first and truncates the positions."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel as Model

    vision = SimpleNamespace(spatial_merge_size=1, tokens_per_second=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = MethodType(Model.get_vision_position_ids, model)
    clip = torch.full((1, 2), 2)  # two time steps of one token of a video, half a second apart
    positions, _ = Model.get_rope_index(model, clip, clip, None, torch.tensor([[2, 1, 1]]), torch.tensor([0.5]))
    return int(positions[0, 0, 1]) == 0


class Qwen25VL(VisionFamily):
    """Geometry of ``Qwen2VLImageProcessor`` and ``Qwen2VLVideoProcessor`` (transformers 5). An image of ``h x w``
    pixels is resized to multiples of ``patch_size * merge_size`` inside the pixel limits and costs ``grid_h * grid_w /
    merge_size**2`` tokens; a video costs that for every ``temporal_patch_size`` sampled frames."""

    name = "qwen2_5_vl"
    processor_classes: ClassVar[tuple[str, ...]] = ("Qwen2_5_VLProcessor",)
    reads: ClassVar[tuple[str, ...]] = (*IMAGE_SIZES, *VIDEO_SIZES, *geometry.VIDEO_FRAMES, "jpeg_scaled_decoding")
    takes_seconds: ClassVar[bool] = True  # whether the model takes ``second_per_grid_ts``

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        if self.takes_seconds and config.position_ids == "mrope" and not truncates_seconds():
            self.installed = {"position_ids": ", steps of clips as in transformers 5.18"}
        self.image_token: str = processor.image_token
        self.video_token: str = processor.video_token
        self.stand_for_media({"image": self.image_token, "video": self.video_token})
        self.reserved += ("<|vision_start|>", "<|vision_end|>")
        # From transformers 5.16 on; releases before it ignore a file that sets it.
        if hasattr(type(self.videos), "cap_pixels_per_frame") and self.videos.cap_pixels_per_frame:
            fix = "is not supported; set it to false and limit clips with encoder.video_max_pixels."
            raise ConfigError(f"cap_pixels_per_frame of the video processor (encoder.processor) {fix}")
        self.merge: int = self.images.merge_size
        geometry.set_pixel_limits(self.images, config.min_pixels, config.max_pixels)
        geometry.set_pixel_limits(self.videos, config.video_min_pixels, config.video_max_pixels)
        if config.video_fps is not None and getattr(type(self.videos), "fps", None) is None:
            self.videos.num_frames = None  # which these classes would prefer to a rate
        self.video_frames = self._fixed_frames() if "video" in MODALITIES[config.modality] else None
        limits = {"min_frames": config.video_min_frames, "max_frames": config.video_max_frames}
        for name, number in limits.items() if self.video_frames is None else ():
            if number is not None:
                setattr(self.videos, name, number)
        self.video_fps = config.video_fps or getattr(self.videos, "fps", None) or DEFAULT_VIDEO_FPS

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        """Returns the patches after the processor's own resizing, merged two by two into tokens. Raises SampleRejected:
        ``too_few_frames`` if the processor finds no time step in a clip."""
        if media.kind == "video":
            return self._plan_video(media, height, width)
        grid = (1, *self._image_grid(height, width))
        return MediaPlan(kind="image", grid=grid, runs=(grid[1] * grid[2] // self.merge**2,))

    def _image_grid(self, height: int, width: int) -> tuple[int, int]:
        return self._grid(self.images, getattr(self.images, "temporal_patch_size", None) or 1, height, width)

    def _video_grid(self, frames: int, height: int, width: int) -> tuple[int, int]:
        return self._grid(self.videos, frames, height, width)

    def _grid(self, processor: Any, frames: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        size, patch, factor = processor.size, processor.patch_size, processor.patch_size * processor.merge_size
        rows, columns = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
        return rows // patch, columns // patch

    def _fixed_frames(self) -> int | None:
        """Returns how many frames ``num_frames`` of the processor takes of a long clip; None if a rate decides. Raises
        ConfigError: the settings of its clips cannot be followed."""
        videos, sides = self.videos, ("merge_size", "patch_size")
        for name, image, video in ((name, getattr(self.images, name), getattr(videos, name)) for name in sides):
            if image != video:
                raise ConfigError(
                    f"{name} of the processor (encoder.processor) is {image} for images and {video} for videos, but "
                    "the model has one; set the model's for both."
                )
        if self.config.video_fps is not None:
            return None
        if getattr(type(videos), "do_sample_frames", False) and not videos.do_sample_frames:
            raise ConfigError(
                "do_sample_frames of the video processor (encoder.processor) is false, which takes every frame of a "
                "clip; set encoder.video_fps, or do_sample_frames to true in the processor's file."
            )
        if getattr(type(videos), "fps", None) is not None and videos.fps is None:
            why = "fps of the video processor (encoder.processor) is null; set encoder.video_fps, or fps alone there."
            raise ConfigError(why)
        number = videos.num_frames
        if number is None or "num_frames" not in inspect.signature(videos.sample_frames).parameters:
            return None  # GLM-4.1V's has a number and never reads it
        try:
            return len(sampled_frames(videos, 4 * number, Fraction(number), num_frames=number, fps=videos.fps))
        except (ValueError, ZeroDivisionError, RuntimeError) as error:
            raise ConfigError(
                f"The video processor (encoder.processor) has num_frames={number} and fps={videos.fps} and fails on "
                f"every clip ({error}); remove one from its file, or set encoder.video_fps, which is used alone."
            ) from error

    def sample_frames(self, total: int, fps: Fraction) -> tuple[int, ...]:
        """Returns the indices of the frames that the processor samples evenly from a clip; a ValueError if none is
        left. Of a clip with fewer than its ``num_frames``, those are all whole time steps."""
        how: dict[str, Any] = {"fps": self.video_fps}
        if self.video_frames is not None:
            number = max(self.video_frames, self.config.video_min_frames or 1)
            number = min(number, self.config.video_max_frames or number, total)
            if number != self.video_frames:
                number -= number % self.videos.temporal_patch_size
            how = {"num_frames": number, "min_frames": 0, "max_frames": number}
        result = tuple(sampled_frames(self.videos, total, fps, **how))
        if not result:
            raise ValueError(f"no frame can be sampled from {total} frames at {fps:g} fps")
        return result

    def _plan_video(self, media: Media, height: int, width: int) -> MediaPlan:
        total, exact = require(media.frames, media, "frame count"), require(media.rate, media, "fps")
        fps, step = float(exact), self.videos.temporal_patch_size  # processors compute with the float
        indices = None
        try:
            indices = geometry.chosen_frames(media, self.config, lambda: self.sample_frames(total, exact))
            sides = self._video_grid(len(indices), height, width)
        except (ZeroDivisionError, ValueError) as error:
            # Qwen2-VL and Qwen2.5-VL divide by 0 time steps; GLM-4.1V, and Qwen3-VL of transformers 5.15, resize none.
            if isinstance(error, ValueError):
                if indices is None or len(indices) >= step:
                    raise
                self._video_grid(step, height, width)  # raises where it is the size that is refused
            if total < step:
                cause = f"the clip has {total} {'frame' if total == 1 else 'frames'}"
            else:
                cause = (
                    f"fewer of the clip's {total} frames at {exact:g} fps are sampled (video_fps={self.video_fps:g}, "
                    f"video_min_frames={getattr(self.videos, 'min_frames', None)}, "
                    f"video_max_frames={self.config.video_max_frames or getattr(self.videos, 'max_frames', None)})"
                )
            detail = f"video {media.name!r}: {cause}; the processor of {self.name} needs at least {step} ({error})"
            raise SampleRejected("too_few_frames", detail) from error
        grid = (-(-len(indices) // step), *sides)
        shown, seconds = geometry.shown_frames(media, self.config, indices)
        return MediaPlan(
            kind="video",
            grid=grid,
            runs=self._video_runs(grid),
            frame_indices=shown,
            # As in the processor, from the number of frames, not from their times (VideoMetadata.sampled_fps).
            seconds_per_grid=step / (len(indices) / total * fps),
            timestamps=self._timestamps(seconds or self._seconds(media, indices, fps)),
        )

    def _seconds(self, media: Media, indices: tuple[int, ...], fps: float) -> tuple[float, ...]:
        return tuple(media.frame_times[index] if media.frame_times else index / fps for index in indices)

    def _video_runs(self, grid: tuple[int, int, int]) -> tuple[int, ...]:
        return (grid[0] * grid[1] * grid[2] // self.merge**2,)

    def _timestamps(self, seconds: tuple[float, ...]) -> tuple[float, ...]:
        return ()

    def replacement(self, plan: MediaPlan) -> str:
        """Returns the placeholder of the kind alone; the chat template writes the tokens around it."""
        return self.image_token if plan.kind == "image" else self.video_token

    def image_size(self, plan: MediaPlan) -> tuple[int, int]:
        return plan.grid[1] * self.images.patch_size, plan.grid[2] * self.images.patch_size

    def resize_image(self, image: torch.Tensor, plan: MediaPlan) -> torch.Tensor:
        """Resizes uint8 ``[3, H, W]`` with the processor's own function; sizes of whole patches stay as they are."""
        return resized(self.images, image, *self.image_size(plan))

    def byte_forms(self) -> dict[str, PixelForm]:
        # The processor repeats an image along the temporal axis; its bytes are carried once.
        repeat = getattr(self.images, "temporal_patch_size", None) or 1
        images = form_of(self.images, "patches", repeat=repeat)
        videos = form_of(self.videos, "patches", "pixel_values_videos")
        return images | videos if images and videos else {}

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns ``pixel_values`` and ``pixel_values_videos`` (``[patches, patch size]`` of all media in order),
        ``image_grid_thw`` and ``video_grid_thw`` ``[media, 3]``; for Qwen2.5-VL ``second_per_grid_ts`` ``[videos]``."""
        images = [tensor for plan, tensor in zip(plans, media, strict=True) if plan.kind == "image"]
        videos = [tensor for plan, tensor in zip(plans, media, strict=True) if plan.kind == "video"]
        clips = [plan for plan in plans if plan.kind == "video"]
        result = self._patches_of_images(images, raw) if images else {}
        if clips:
            result |= self._patches_of_videos(clips, videos, raw)
        if clips and self.takes_seconds:
            result["second_per_grid_ts"] = torch.tensor([plan.seconds_per_grid or 0.0 for plan in clips]).float()
        return result

    def _patches_of_images(self, images: Sequence[torch.Tensor], raw: bool) -> Inputs:
        if raw:
            grids = [(1, *self._image_grid(*image.shape[-2:])) for image in images]
            pixels = _patches(self.images, [image[None] for image in images], grids, 1)
            return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
        made = ask(self.images, False, images=list(images))
        return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"].to(torch.int64)}

    def _patches_of_videos(self, plans: Sequence[MediaPlan], videos: Sequence[torch.Tensor], raw: bool) -> Inputs:
        if raw:
            step = self.videos.temporal_patch_size
            grids = [(-(-len(clip) // step), *self._video_grid(len(clip), *clip.shape[-2:])) for clip in videos]
            pixels = _patches(self.videos, videos, grids, step)
            return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor(grids)}
        made = ask(self.videos, False, videos=list(videos), do_sample_frames=False)
        grids = made["video_grid_thw"].to(torch.int64)
        return {"pixel_values_videos": made["pixel_values_videos"], "video_grid_thw": grids}

    def positions(self, input_ids: np.ndarray, plans: Sequence[MediaPlan]) -> np.ndarray:
        """Returns positions ``[3, L]`` of one sample, the same as ``Qwen2_5_VLModel.get_rope_index``: time, height and
        width. A text token has the same position on all three axes. A visual token in a run that starts at position
        ``p`` has ``p + (time, row, column)``, and the text after the run goes on at ``p + max(rows, columns)``. Raises
        ValueError: a run and its grid differ in their number of tokens, or there are more of one than of the other."""
        grids = [grid for plan in plans for grid in self._rope_grids(plan)]
        visual = np.isin(input_ids, list(self.placeholder_ids.values()))
        edges = np.flatnonzero(np.diff(np.concatenate(([0], visual.view(np.int8), [0]))))
        result = np.empty((3, len(input_ids)), dtype=np.int64)
        position, cursor = 0, 0
        for (start, end), (t, h, w, interval) in zip(edges.reshape(-1, 2), grids, strict=True):
            result[:, cursor:start] = np.arange(position, position + start - cursor)
            position += int(start - cursor)
            rows, columns = h // self.merge, w // self.merge
            if end - start != t * rows * columns:
                why = f"a run has {end - start} visual tokens, but its grid {(t, h, w)} needs {t * rows * columns}"
                raise ValueError(why)
            steps = np.indices((t, rows, columns)).reshape(3, -1)
            steps[0] = steps[0].astype(type(interval)) * interval
            result[:, start:end] = steps + position
            position += max(rows, columns)
            cursor = int(end)
        result[:, cursor:] = np.arange(position, position + len(input_ids) - cursor)
        return result

    def _rope_grids(self, plan: MediaPlan) -> list[tuple[int, int, int, float | np.float32]]:
        """Returns ``(t, h, w, positions between two time steps)`` in patches for each run of an image or video; the
        positions of steps are truncated."""
        if plan.kind == "image":
            return [(*plan.grid, 1)]
        seconds = np.float32(plan.seconds_per_grid or 0)  # those of the batch
        rate = self.config.tokens_per_second
        return [(*plan.grid, rate * int(seconds) if truncates_seconds() else np.float32(rate) * seconds)]


class Qwen2VL(Qwen25VL):
    """Qwen2-VL: the same geometry, but time steps of a video are one position apart."""

    name = "qwen2_vl"
    processor_classes = ("Qwen2VLProcessor",)
    takes_seconds = False

    def _rope_grids(self, plan: MediaPlan) -> list[tuple[int, int, int, float | np.float32]]:
        return [(*plan.grid, 1)]


class LlavaOneVision15(Qwen25VL):
    """Geometry of ``Qwen2_5_VLProcessor``, which the checkpoints are published with. transformers 5.12 has no model
    class for them, and their processor's class says Qwen2.5-VL: choose the family by name. Their text model is a plain
    Qwen3, so positions count tokens."""

    name = "llava_onevision_1_5"
    processor_classes = by_name_only = ("Qwen2_5_VLProcessor",)
    mrope = False
    positions = VisionFamily.positions  # the same on all axes, as the text model counts them


class TimeSteps(Qwen25VL):
    """The base of families that write a video step by step, with the time of each step in the text (``_timestamps`` and
    ``replacement``). The model counts the positions of a step like those of an image."""

    takes_seconds = False

    def _video_runs(self, grid: tuple[int, int, int]) -> tuple[int, ...]:
        return (grid[1] * grid[2] // self.merge**2,) * grid[0]

    def _rope_grids(self, plan: MediaPlan) -> list[tuple[int, int, int, float | np.float32]]:
        return [(1, plan.grid[1], plan.grid[2], 1)] * plan.grid[0]


class Qwen3VL(TimeSteps):
    """Geometry of ``Qwen2VLImageProcessor`` (patch 16) and ``Qwen3VLVideoProcessor`` (transformers 5). The pixel limits
    of a video apply to the whole clip, so more frames mean smaller ones."""

    name = "qwen3_vl"
    processor_classes = ("Qwen3VLProcessor",)

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        self._start: str = processor.vision_start_token
        self._end: str = processor.vision_end_token
        self.reserved = (self.image_token, self.video_token, self._start, self._end)
        whole = f"{self._start}{self.video_token}{self._end}"
        if self._takes_the_frame(whole):
            self.placeholders = {"image": self.image_token, "video": whole}
            self.installed = {"family": f" of {whole}"}
        if "video" in MODALITIES[config.modality]:
            with contextlib.suppress(ValueError):  # of transformers before 5.15, where clips have other sizes
                self._video_grid(self.videos.temporal_patch_size, 1, 1)
                self.installed = {**self.installed, "vision_limits": ", clips resized as in transformers 5.15"}

    def _takes_the_frame(self, whole: str) -> bool:
        """Whether the processor replaces ``<|vision_start|><|video_pad|><|vision_end|>`` or only ``<|video_pad|>``.
        Releases of transformers differ here, by two tokens per video. Checked once, with the smallest clip."""
        side = self.videos.patch_size * self.videos.merge_size
        clip = torch.zeros((self.videos.temporal_patch_size, 3, side, side), dtype=torch.uint8)
        metadata = {"total_num_frames": len(clip), "fps": 1.0, "frames_indices": list(range(len(clip)))}
        clips = {"videos": [clip], "video_metadata": [metadata], "do_sample_frames": False}
        made = self.processor(text=[whole], return_tensors="pt", **clips)
        return int((made["input_ids"] == self.check_token(self._start)).sum()) == int(made["video_grid_thw"][0, 0])

    def _video_grid(self, frames: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        patch, limits = self.videos.patch_size, [self.videos.size[edge] for edge in ("shortest_edge", "longest_edge")]
        factors = self.videos.temporal_patch_size, patch * self.videos.merge_size
        rows, columns = smart_resize(frames, height, width, *factors, *limits)
        return rows // patch, columns // patch

    def _timestamps(self, seconds: tuple[float, ...]) -> tuple[float, ...]:
        """Midpoint of each time step's first and last frame, in seconds; a short last step repeats its last frame."""
        step = self.videos.temporal_patch_size
        filled = [*seconds, *(seconds[-1:] * (-len(seconds) % step))]
        return tuple((filled[at] + filled[at + step - 1]) / 2 for at in range(0, len(filled), step))

    def replacement(self, plan: MediaPlan) -> str:
        """Returns the image's placeholder; for a video, each time step between its tokens, after its timestamp."""
        if plan.kind == "image":
            return self.image_token
        return "".join(f"<{at:.1f} seconds>{self._start}{self.video_token}{self._end}" for at in plan.timestamps)


class Qwen35VL(Qwen3VL):
    """Geometry of ``Qwen3VLProcessor``, which transformers 5 loads for the model types qwen3_5 and qwen3_5_moe. The
    processor's class says Qwen3-VL, so ``auto`` chooses that family, which makes the same rows. Choose this one by name
    to see it in fingerprints and messages. Positions are those of ``Qwen3_5Model.get_rope_index``; a test checks that
    they equal Qwen3-VL's."""

    name = "qwen3_5_vl"
    processor_classes = by_name_only = ("Qwen3VLProcessor",)
