"""Qianfan-VL and Qianfan-OCR: InternVL's tiles, without videos and with their own placeholder."""

from __future__ import annotations

from energon_packing.families.internvl import InternVL


class QianfanVL(InternVL):
    """Geometry of ``QianfanOCRProcessor`` (transformers 5): InternVL's.

    transformers has no processor for the Qianfan-VL checkpoints themselves, whose code is InternVL's. Use an
    ``InternVLProcessor`` or a ``QianfanOCRProcessor`` with their tokenizer.
    """

    name = "qianfan_vl"
    processor_classes = ("QianfanOCRProcessor", "InternVLProcessor")

    def _image_placeholder(self) -> str:
        # The chat template writes this token; the model sees the one that replaces it.
        return str(getattr(self.processor, "image_placeholder_token", self.image_token))
