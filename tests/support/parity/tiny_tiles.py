"""Tiny random models of the families that see images as square tiles: InternVL, the LLaVA ones, Gemma 3.

They are the real transformers classes with two layers, sized for the tiles of a given processor. The side of a tile,
its tokens and the token ids are read from the encoder's family, so every processor of these families, the published
ones included, has a model that fits it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.families.gemma3 import SIGLIP_PATCH

HIDDEN = 64
WINDOW = 48
"""Tokens that a sliding layer of the tiny Gemma 3 sees: fewer than a sample has, more than an image."""

_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def text_fields(vocab_size: int, seq_length: int) -> dict[str, Any]:
    """Returns the fields that the language models of all tiny models share in their transformers configurations."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": seq_length,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def tiny_config(encoder: ConversationEncoder, *, vocab_size: int, seq_length: int) -> Any:
    """Returns a transformers configuration for the encoder's family, one of `FAMILIES`.

    Args:
        encoder: its family provides the side of a tile, its tokens and the placeholder ids.
        vocab_size: rows of the embedding; larger than every token id.
        seq_length: longest row in tokens.
    """
    return _CONFIGS[encoder.family.name](encoder.family, text_fields(vocab_size, seq_length))


def _internvl(family: Any, text: dict[str, Any]) -> Any:
    import transformers

    side = int(family.images.size["height"])
    patch = side // (2 * math.isqrt(family.tile_tokens))  # the model merges patches two by two
    shared: dict[str, Any] = {
        "image_token_id": family.placeholder_ids["image"],
        "image_seq_length": family.tile_tokens,
        "tie_word_embeddings": False,
    }
    sizes: dict[str, Any] = {**_VISION, "image_size": (side, side), "patch_size": (patch, patch)}
    if type(family.processor).__name__ == "QianfanOCRProcessor":
        from transformers.models.qianfan_ocr.configuration_qianfan_ocr import QianfanOCRConfig, QianfanOCRVisionConfig

        vision = QianfanOCRVisionConfig(**sizes, drop_path_rate=0.0)
        return QianfanOCRConfig(vision_config=vision, text_config=transformers.Qwen3Config(**text), **shared)
    vision = transformers.InternVLVisionConfig(**sizes)
    return transformers.InternVLConfig(vision_config=vision, text_config=transformers.Qwen2Config(**text), **shared)


def _clip(family: Any) -> Any:
    import transformers

    return transformers.CLIPVisionConfig(
        **_VISION, image_size=family.tile[0], patch_size=family.tile[0] // family.tile_grid[0]
    )


def _llava(family: Any, text: dict[str, Any]) -> Any:
    import transformers

    return transformers.LlavaConfig(
        vision_config=_clip(family),
        text_config=transformers.LlamaConfig(**text),
        image_token_index=family.placeholder_ids["image"],
        vision_feature_select_strategy=family.processor.vision_feature_select_strategy,
    )


def _llava_next(family: Any, text: dict[str, Any]) -> Any:
    import transformers

    return transformers.LlavaNextConfig(
        vision_config=_clip(family),
        text_config=transformers.MistralConfig(**text, sliding_window=None),
        image_token_index=family.placeholder_ids["image"],
        image_grid_pinpoints=[list(size) for size in family.images.image_grid_pinpoints],
        vision_feature_select_strategy=family.processor.vision_feature_select_strategy,
    )


def _llava_onevision(family: Any, text: dict[str, Any]) -> Any:
    import transformers

    ids = family.placeholder_ids
    height, _ = family.tile
    rows, _ = family.tile_grid
    return transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(
            **_VISION, image_size=height, patch_size=height // rows, vision_use_head=False
        ),
        text_config=transformers.Qwen2Config(**text),
        image_token_index=ids["image"],
        video_token_index=ids.get("video", ids["image"]),
        image_grid_pinpoints=[list(size) for size in family.images.image_grid_pinpoints],
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


def _gemma3(family: Any, text: dict[str, Any]) -> Any:
    import transformers

    return transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(
            **_VISION, image_size=int(family.images.size.height), patch_size=SIGLIP_PATCH, vision_use_head=False
        ),
        text_config=transformers.Gemma3TextConfig(
            **text,
            head_dim=HIDDEN // 4,
            query_pre_attn_scalar=HIDDEN // 4,
            sliding_window=max(WINDOW, 2 * family.square_tokens),
            layer_types=["sliding_attention", "full_attention"],
        ),
        mm_tokens_per_image=family.square_tokens,
        image_token_index=family.placeholder_ids["image"],
    )


_CONFIGS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "internvl": _internvl,
    "qianfan_vl": _internvl,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "gemma3": _gemma3,
}
FAMILIES = tuple(_CONFIGS)
"""Names of the families that have a tiny model here."""
