"""Tiny random models of the families that see images as square tiles: InternVL and LLaVA-OneVision.

The real transformers classes, two layers, sized so that they take the tiles of a given processor: the side of a tile,
the tokens that it costs and the token ids are read from the encoder's family, so any processor of these families has a
model that fits it, the published ones included.
"""

from __future__ import annotations

import math
from typing import Any

from energon_packing.encoders.encoder import ConversationEncoder

FAMILIES = ("internvl", "llava_onevision")
"""Names of the families that have a tiny model here."""

_HIDDEN = 64
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny_config(encoder: ConversationEncoder, *, vocab_size: int, seq_length: int) -> Any:
    """A transformers configuration for the encoder's family, one of `FAMILIES`.

    Args:
        encoder: its family names the side of a tile, the tokens of one and the placeholder ids.
        vocab_size: rows of the embedding; larger than every token id.
        seq_length: longest row in tokens.
    """
    import transformers

    text = transformers.Qwen2Config(
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=seq_length,
        attention_dropout=0.0,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    family: Any = encoder.family
    ids = family.placeholder_ids
    if family.name == "internvl":
        side = int(family.images.size["height"])
        patch = side // (2 * math.isqrt(family.tile_tokens))  # the model merges patches two by two
        vision = transformers.InternVLVisionConfig(**_VISION, image_size=(side, side), patch_size=(patch, patch))
        return transformers.InternVLConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=ids["image"],
            image_seq_length=family.tile_tokens,
            tie_word_embeddings=False,
        )
    height, _ = family.tile
    rows, _ = family.tile_grid
    vision = transformers.SiglipVisionConfig(
        **_VISION, image_size=height, patch_size=height // rows, vision_use_head=False
    )
    return transformers.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=ids["image"],
        video_token_index=ids.get("video", ids["image"]),
        image_grid_pinpoints=[list(size) for size in family.images.image_grid_pinpoints],
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
