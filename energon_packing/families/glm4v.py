"""GLM-4.1V and GLM-4.5V: a video as one run of image tokens per time step, each followed by its second as text."""

from fractions import Fraction
from typing import Any

import numpy as np

from energon_packing.config import EncoderConfig
from energon_packing.families.base import IMAGE, VIDEO, MediaPlan
from energon_packing.families.geometry import sampled_frames
from energon_packing.families.qwen_vl import TimeSteps
from energon_packing.thd.fields import TokenField


class Glm4v(TimeSteps):
    """Geometry of ``Glm4vImageProcessor`` and ``Glm4vVideoProcessor`` (transformers 5). The pixel limits apply to
    height times width times frames; an image counts as two frames because it is repeated. A time step of a video is
    written as an image, so only the tokens around the whole video distinguish the two. ``mm_token_type_ids`` follow
    from those tokens, and the model derives positions from ``mm_token_type_ids``."""

    name = "glm4v"
    processor_classes = ("Glm4vProcessor",)
    reads = tuple(name for name in TimeSteps.reads if name != "video_min_frames")
    token_fields = (TokenField(name="mm_token_type_ids"),)
    shared_placeholder = True

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        self._start, self._end = "<|begin_of_image|>", "<|end_of_image|>"
        clip = "<|begin_of_video|>", "<|end_of_video|>"
        self.reserved = (self.image_token, self.video_token, self._start, self._end, *clip)
        image_id, _, _, _, *self._clip_ids = map(self.check_token, self.reserved)
        self.placeholder_ids = {"image": image_id, "video": image_id}

    def _grid(self, processor: Any, frames: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.glm4v.image_processing_glm4v import smart_resize

        size, patch = processor.size, processor.patch_size
        rows, columns = smart_resize(
            num_frames=frames,
            height=height,
            width=width,
            temporal_factor=processor.temporal_patch_size,
            factor=patch * processor.merge_size,
            min_pixels=size.shortest_edge,
            max_pixels=size.longest_edge,
        )
        return rows // patch, columns // patch

    def sample_frames(self, total: int, fps: Fraction) -> tuple[int, ...]:
        """Returns the frames that the video processor samples from a clip; an odd number repeats the last one. The
        processor has no maximum number of frames. If there are more than ``encoder.video_max_frames``, that many,
        rounded down to whole time steps, are chosen evenly from them."""
        # The duration that transformers' video readers report, of the exact rate; without it the processor rounds up to
        # whole seconds.
        indices = tuple(sampled_frames(self.videos, total, fps, duration=float(total / fps), fps=self.video_fps))
        most, step = self.config.video_max_frames, int(self.videos.temporal_patch_size)
        if most is None or len(indices) <= most:
            return indices
        most = max(step, most - most % step)
        return tuple(indices[round(at * (len(indices) - 1) / (most - 1))] for at in range(most))

    def _timestamps(self, seconds: tuple[float, ...]) -> tuple[float, ...]:
        """Seconds of the first frame of each time step; the processor takes every other frame, whatever its step."""
        return seconds[::2]

    def replacement(self, plan: MediaPlan) -> str:
        """Returns the image's placeholder; for a video, each time step as an image, followed by its second."""
        if plan.kind == "image":
            return self.image_token
        return "".join(f"{self._start}{self.image_token}{self._end}{int(seconds)}" for seconds in plan.timestamps)

    def visual_kinds(self, input_ids: np.ndarray) -> np.ndarray:
        """Returns what ``Glm4vProcessor.create_mm_token_type_ids`` does: 1 for image tokens, 2 for videos, else 0."""
        start, end = self._clip_ids
        inside = np.cumsum(input_ids == start) > np.cumsum(input_ids == end)
        return np.where(input_ids == self.placeholder_ids["image"], np.where(inside, VIDEO, IMAGE), 0)

    def token_values(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns ``mm_token_type_ids`` ``[L]``, which the model derives positions from, even without media."""
        return {"mm_token_type_ids": self.visual_kinds(input_ids).astype(np.int64)}
