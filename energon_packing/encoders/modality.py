"""Encoders by modality: `ConversationEncoder` restricted to the media that a model or a data set may have.

Use a restriction if an image or video would be a mistake: for a language model whose data contain an image by accident,
or a vision tower that was never trained on video. Samples that an encoder does not accept are dropped as
``other_modality``, in the ledger.
"""

from __future__ import annotations

from typing import Any

from energon_packing.config import EncoderConfig, Modality
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import ConfigError


class _OfModality(ConversationEncoder):
    modality: Modality = "mixed"

    def __init__(self, config: EncoderConfig, *, processor: Any = None) -> None:
        if config.modality not in ("mixed", self.modality):
            raise ConfigError(
                f"encoder.modality is {config.modality!r}, but {type(self).__name__} takes {self.modality!r}; "
                "leave it out, or use the encoder of that modality."
            )
        super().__init__(config, processor=processor, modality=self.modality)


class TextEncoder(_OfModality):
    """Conversations without media."""

    modality = "text"


class TextImageEncoder(_OfModality):
    """Conversations with any number of images, including none."""

    modality = "text_image"


class TextVideoEncoder(_OfModality):
    """Conversations with any number of videos, including none."""

    modality = "text_video"


class MixedEncoder(_OfModality):
    """Conversations with images and videos in any order and number, including none."""
