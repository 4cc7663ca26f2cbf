"""A video as one run of placeholders per time step, each step as the chat template writes an image."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from energon_packing.families.base import MediaPlan
from energon_packing.families.qwen_vl import Qwen25VL


class TimeSteps(Qwen25VL):
    """The base of families that write a video step by step, with the time of each step in the text.

    A subclass defines the text between the steps (``_timestamps`` and ``replacement``) and how a clip is resized. The
    model counts the positions of a step like those of an image, so it needs no ``second_per_grid_ts``.
    """

    def _video_runs(self, grid: tuple[int, int, int]) -> tuple[int, ...]:
        return (grid[1] * grid[2] // self.merge**2,) * grid[0]

    def _video_extras(self, plans: Sequence[MediaPlan]) -> dict[str, torch.Tensor]:
        return {}

    def _rope_grids(self, plan: MediaPlan) -> list[tuple[int, int, int, int]]:
        return [(1, plan.grid[1], plan.grid[2], 1)] * plan.grid[0]
