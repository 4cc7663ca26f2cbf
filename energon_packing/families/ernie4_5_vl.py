"""Ernie 4.5 VL: native resolution, the time drawn on each frame of a video, and a token for two frames."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ImageFont

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import ConfigError
from energon_packing.families.base import IMAGE, VIDEO, Inputs, MediaPlan, ask
from energon_packing.families.qwen_vl import Qwen25VL
from energon_packing.thd.fields import TokenField

SMALLEST_FRAME = 10
"""Pixels of the shorter side of a frame that the time can be drawn on: its letters are a tenth of that side."""
HINT = "put the font file beside the processor's files, or set draw_on_frames to false in them"


def missing_font(folder: str) -> str:
    """Returns which font is missing beside a processor's files; empty if none is, or if it is no directory.
    transformers 5.12 loads the font with the processor, and of a missing one it says only that None cannot be read."""
    for name in ("processor_config.json", "video_preprocessor_config.json"):
        try:
            found = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
            clips = found.get("video_processor", found)
            font, draws = clips.get("font"), clips.get("draw_on_frames")
        except (OSError, ValueError, AttributeError):
            continue
        if font and draws and not (Path(folder) / font).is_file():
            return f"{name} names the font {font!r}, which is not in the directory; {HINT}."
    return ""


class Ernie45VL(Qwen25VL):
    """Geometry of ``Ernie4_5_VLMoeImageProcessor`` and ``Ernie4_5_VLMoeVideoProcessor`` (transformers 5). Resizing is
    that of Qwen2-VL. Patches have no temporal axis: a frame is a step of the grid, and the model joins two frames to a
    token, so that a video of an odd number of frames repeats its last one. The video processor draws on each frame the
    time at which it is shown, with a font from beside the processor. The processor samples every frame up to its
    ``max_frames`` unless it, or ``encoder.video_fps``, sets a rate."""

    name = "ernie4_5_vl"
    takes_seconds = False
    processor_classes = ("Ernie4_5_VLMoeProcessor", "Ernie4_5_VL_MoeProcessor")
    token_fields = (TokenField(name="mm_token_type_ids"), TokenField(name="moe_mm_token_type_ids"))

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        edges = {
            IMAGE: (processor.image_start_token, processor.image_end_token),
            VIDEO: (processor.video_start_token, processor.video_end_token),
        }
        self._edge_ids = {kind: [self.check_token(token) for token in pair] for kind, pair in edges.items()}
        self.reserved = (self.image_token, self.video_token, *edges[IMAGE], *edges[VIDEO])
        self.video_fps = config.video_fps or getattr(self.videos, "fps", None)
        try:
            if self.videos.draw_on_frames:
                ImageFont.truetype(self.videos.font)
        except (OSError, ImportError, TypeError, AttributeError) as error:  # the last two of None
            raise ConfigError(
                f"The video processor draws the time on each frame, but its font {self.videos.font!r} cannot be opened "
                f"(encoder.processor); {HINT}."
            ) from error

    def _plan_video(self, media: Media, height: int, width: int) -> MediaPlan:
        if self.videos.draw_on_frames and min(height, width) < SMALLEST_FRAME:
            raise ValueError("font size must be greater than 0, not 0")  # in the words of the font's library
        plan, step = super()._plan_video(media, height, width), self.videos.temporal_patch_size
        seconds = (plan.seconds_per_grid or 0.0) / step
        return replace(plan, grid=(plan.grid[0] * step, *plan.grid[1:]), seconds_per_grid=seconds)

    def _seconds(self, media: Media, indices: tuple[int, ...], fps: float) -> tuple[float, ...]:
        if media.frame_names:
            return super()._seconds(media, indices, fps)
        # The processor divides the tensor of the frames that it has sampled, in float32.
        return tuple((torch.tensor(indices, dtype=torch.int32) / fps).tolist())

    def _timestamps(self, seconds: tuple[float, ...]) -> tuple[float, ...]:
        return seconds

    def _patches_of_videos(self, plans: Sequence[MediaPlan], videos: Sequence[torch.Tensor], raw: bool) -> Inputs:
        from transformers.video_utils import VideoMetadata

        # At one frame per second the index of a frame is its time, which a list of frames may give freely.
        times = (list(plan.timestamps) for plan in plans)
        metadata = [VideoMetadata(total_num_frames=len(shown), fps=1.0, frames_indices=shown) for shown in times]
        # The processor draws in place; the frames are the caller's.
        drawn = [video.clone() for video in videos] if self.videos.draw_on_frames else list(videos)
        made = ask(self.videos, raw, videos=drawn, video_metadata=metadata, do_sample_frames=False)
        grids = made["video_grid_thw"].to(torch.int64)
        return {"pixel_values_videos": made["pixel_values_videos"], "video_grid_thw": grids}

    def _rope_grids(self, plan: MediaPlan) -> list[tuple[int, int, int, float | np.float32]]:
        steps = plan.grid[0] // self.videos.temporal_patch_size if plan.kind == "video" else 1
        return [(steps, plan.grid[1], plan.grid[2], 1)]

    def token_values(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns what the model counts positions by, and what it chooses experts by; both ``[L]``. In
        ``moe_mm_token_type_ids`` the tokens before and after an image or video have its type, too."""
        kinds = self.visual_kinds(input_ids)
        experts = kinds.copy()
        for kind, ids in self._edge_ids.items():
            experts[np.isin(input_ids, ids)] = kind
        return {"mm_token_type_ids": kinds, "moe_mm_token_type_ids": experts}
