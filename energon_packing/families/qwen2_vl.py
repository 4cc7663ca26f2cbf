"""Qwen2-VL: Qwen2.5-VL's geometry, without the seconds of a video's time steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from energon_packing.families.base import MediaPlan
from energon_packing.families.qwen_vl import Qwen25VL


class Qwen2VL(Qwen25VL):
    """Qwen2-VL: the same geometry, but time steps of a video are one position apart."""

    name = "qwen2_vl"
    processor_classes = ("Qwen2VLProcessor",)

    def _rope_grids(self, plan: MediaPlan) -> list[tuple[int, int, int, int]]:
        return [(*plan.grid, 1)]

    def _video_extras(self, plans: Sequence[MediaPlan]) -> dict[str, torch.Tensor]:
        return {}
