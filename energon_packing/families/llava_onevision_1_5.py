"""LLaVA-OneVision-1.5: Qwen2.5-VL's processor and native resolution, but a text model with one position axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from energon_packing.families.base import MediaPlan, VisionFamily
from energon_packing.families.qwen_vl import Qwen25VL


class LlavaOneVision15(Qwen25VL):
    """Geometry of ``Qwen2_5_VLProcessor``, which the checkpoints are published with.

    transformers 5.12 has no model class for them, and their processor's class says Qwen2.5-VL: choose the family by
    name. Their text model is a plain Qwen3, so positions count tokens.
    """

    name = "llava_onevision_1_5"
    processor_classes = ("Qwen2_5_VLProcessor",)
    mrope = False

    def positions(self, input_ids: np.ndarray, plans: Sequence[MediaPlan]) -> np.ndarray:
        """Returns positions ``[3, L]``, the same on all axes, as the text model counts them."""
        return VisionFamily.positions(self, input_ids, plans)
