"""Qianfan-VL and Qianfan-OCR: InternVL's tiles, without videos and with a placeholder of their own."""

from __future__ import annotations

from energon_packing.families.internvl import InternVL


class QianfanVL(InternVL):
    """Geometry of ``QianfanOCRProcessor`` (transformers 5): InternVL's.

    transformers has no processor for the Qianfan-VL checkpoints themselves, whose code is InternVL's; they are served
    through an ``InternVLProcessor`` or a ``QianfanOCRProcessor`` on their tokenizer.
    """

    name = "qianfan_vl"
    processor_classes = ("QianfanOCRProcessor", "InternVLProcessor")

    def _image_placeholder(self) -> str:
        # The chat template writes this token, the model sees the one that takes its place.
        return str(getattr(self.processor, "image_placeholder_token", self.image_token))
