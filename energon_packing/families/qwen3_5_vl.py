"""Qwen3.5, whose checkpoints with vision are published with Qwen3-VL's processor."""

from __future__ import annotations

from energon_packing.families.qwen3_vl import Qwen3VL


class Qwen35VL(Qwen3VL):
    """Geometry of ``Qwen3VLProcessor``, which transformers 5 loads for the model types qwen3_5 and qwen3_5_moe.

    The processor's class says Qwen3-VL, so ``auto`` chooses that family, which makes the same rows. Choose this one by
    name to see it in fingerprints and messages. Positions are those of ``Qwen3_5Model.get_rope_index``; a test checks
    that they equal Qwen3-VL's.
    """

    name = "qwen3_5_vl"
    processor_classes = ("Qwen3VLProcessor",)
