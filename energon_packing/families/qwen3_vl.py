"""Qwen3-VL and Qwen3.5: 32-pixel tokens, and a video as one run per time step, each after its time as text."""

import contextlib
from typing import Any

import torch

from energon_packing.config import EncoderConfig
from energon_packing.config.encoder import MODALITIES
from energon_packing.families.base import MediaPlan
from energon_packing.families.qwen_vl import TimeSteps


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
        made = self.processor(
            text=[whole], videos=[clip], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
        )
        start = self.check_token(self._start)
        return int((made["input_ids"] == start).sum()) == int(made["video_grid_thw"][0, 0])

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
        return "".join(
            f"<{seconds:.1f} seconds>{self._start}{self.video_token}{self._end}" for seconds in plan.timestamps
        )


class Qwen35VL(Qwen3VL):
    """Geometry of ``Qwen3VLProcessor``, which transformers 5 loads for the model types qwen3_5 and qwen3_5_moe. The
    processor's class says Qwen3-VL, so ``auto`` chooses that family, which makes the same rows. Choose this one by name
    to see it in fingerprints and messages. Positions are those of ``Qwen3_5Model.get_rope_index``; a test checks that
    they equal Qwen3-VL's."""

    name = "qwen3_5_vl"
    processor_classes = by_name_only = ("Qwen3VLProcessor",)
