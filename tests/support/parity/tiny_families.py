"""Tiny random models of every family: the real transformers classes with two layers, sized for a given processor.

The side of a tile or patch, its tokens and the token ids are read from the encoder's family, so every processor of
these families, the published ones included, has a model that fits it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import transformers

from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.families.gemma3 import SIGLIP_PATCH

HIDDEN = 64
WINDOW = 48
"""Tokens that a sliding layer of the tiny Gemma 3 sees: fewer than a sample has, more than an image."""

SCALED_FROM = 32
"""Position from which Ministral 3 scales its queries here (16,384 in the released models), in tokens."""

_VISION = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2}
_NATIVE = {"depth": 2, "hidden_size": 32, "intermediate_size": 80, "num_heads": 2, "out_hidden_size": HIDDEN}


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


def _internvl(family: Any, text: dict[str, Any]) -> Any:
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
    return transformers.CLIPVisionConfig(
        **_VISION, image_size=family.tile[0], patch_size=family.tile[0] // family.tile_grid[0]
    )


def _llava(family: Any, text: dict[str, Any]) -> Any:
    return transformers.LlavaConfig(
        vision_config=_clip(family),
        text_config=transformers.LlamaConfig(**text),
        image_token_index=family.placeholder_ids["image"],
        vision_feature_select_strategy=family.processor.vision_feature_select_strategy,
    )


def _llava_next(family: Any, text: dict[str, Any]) -> Any:
    return transformers.LlavaNextConfig(
        vision_config=_clip(family),
        text_config=transformers.MistralConfig(**text, sliding_window=None),
        image_token_index=family.placeholder_ids["image"],
        image_grid_pinpoints=[list(size) for size in family.images.image_grid_pinpoints],
        vision_feature_select_strategy=family.processor.vision_feature_select_strategy,
    )


def _llava_onevision(family: Any, text: dict[str, Any]) -> Any:
    ids, side = family.placeholder_ids, family.tile[0]
    return transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(
            **_VISION, image_size=side, patch_size=side // family.tile_grid[0], vision_use_head=False
        ),
        text_config=transformers.Qwen2Config(**text),
        image_token_index=ids["image"],
        video_token_index=ids.get("video", ids["image"]),
        image_grid_pinpoints=[list(size) for size in family.images.image_grid_pinpoints],
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


def _gemma3(family: Any, text: dict[str, Any]) -> Any:
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


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 10_000.0, **more}
    }


def _pixtral(family: Any, text: dict[str, Any]) -> Any:
    vision = transformers.PixtralVisionConfig(
        **_VISION,
        patch_size=family.processor.patch_size,
        image_size=int(family.images.size.longest_edge),
    )
    image = family.placeholder_ids["image"]
    text["head_dim"] = HIDDEN // 4
    if family.merge == 1:  # Pixtral 12B, which is a LLaVA in transformers
        return transformers.LlavaConfig(
            vision_config=vision,
            text_config=transformers.MistralConfig(**text, sliding_window=None),
            image_token_index=image,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
    # Its queries grow with their position, so positions that continue through the row would show.
    scaled = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": SCALED_FROM,
    }
    return transformers.Mistral3Config(
        vision_config=vision,
        text_config=transformers.Ministral3Config(**text, rope_parameters=scaled),
        image_token_index=image,
        spatial_merge_size=family.merge,
        tie_word_embeddings=False,
    )


def _glm4v(family: Any, text: dict[str, Any]) -> Any:
    ids = {name: family.check_token(token) for name, token in (
        *(("image_start_token_id", "<|begin_of_image|>"), ("image_end_token_id", "<|end_of_image|>")),
        *(("video_start_token_id", "<|begin_of_video|>"), ("video_end_token_id", "<|end_of_video|>")),
        *(("image_token_id", family.image_token), ("video_token_id", family.video_token)),
    )}  # fmt: skip
    return transformers.Glm4vConfig(
        vision_config=transformers.Glm4vVisionConfig(
            **_NATIVE, patch_size=family.images.patch_size, image_size=24 * family.images.patch_size
        ),
        text_config=transformers.Glm4vTextConfig(**text | _mrope(2, 1, 1, partial_rotary_factor=0.5)),
        tie_word_embeddings=False,
        **ids,
    )


def _qwen3_5(family: Any, text: dict[str, Any]) -> Any:
    rotary = _mrope(2, 1, 1, partial_rotary_factor=0.5, mrope_interleaved=True)
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }
    return transformers.Qwen3_5Config(
        vision_config=transformers.Qwen3_5VisionConfig(
            **_NATIVE, patch_size=family.images.patch_size, num_position_embeddings=64
        ),
        text_config=transformers.Qwen3_5TextConfig(**text | rotary | linear, head_dim=HIDDEN // 4),
        image_token_id=family.placeholder_ids["image"],
        video_token_id=family.placeholder_ids["video"],
        vision_start_token_id=family.check_token("<|vision_start|>"),
        vision_end_token_id=family.check_token("<|vision_end|>"),
        tie_word_embeddings=False,
    )


def _qwen2_vl(family: Any, text: dict[str, Any]) -> Any:
    return transformers.Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": HIDDEN,
            "num_heads": 2,
            "mlp_ratio": 3,
            "patch_size": family.images.patch_size,
        },
        text_config=text | _mrope(2, 3, 3),
        image_token_id=family.placeholder_ids["image"],
        video_token_id=family.placeholder_ids["video"],
        vision_start_token_id=family.check_token("<|vision_start|>"),
        vision_end_token_id=family.check_token("<|vision_end|>"),
        tie_word_embeddings=False,
    )


def _ernie4_5(family: Any, text: dict[str, Any]) -> Any:
    processor = family.processor
    names = [f"{kind}{edge}_token" for kind in ("image", "video") for edge in ("", "_start", "_end")]
    del text["attention_dropout"]  # it has none
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": [64, 32]}
    return transformers.Ernie4_5_VLMoeConfig(
        vision_config={
            **{name: value for name, value in _NATIVE.items() if name != "out_hidden_size"},
            "patch_size": family.images.patch_size,
            "temporal_merge_size": family.videos.temporal_patch_size,
        },
        text_config=text | experts | _mrope(3, 3, 2) | {"tie_word_embeddings": False},
        tie_word_embeddings=False,
        **{f"{name}_id": family.check_token(getattr(processor, name)) for name in names},
    )


_CONFIGS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "internvl": _internvl,
    "qianfan_vl": _internvl,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "gemma3": _gemma3,
    "pixtral": _pixtral,
    "glm4v": _glm4v,
    "qwen3_5_vl": _qwen3_5,
    "qwen2_vl": _qwen2_vl,
    "ernie4_5_vl": _ernie4_5,
}
FAMILIES = tuple(_CONFIGS)
"""Names of the families that have a tiny model here."""


def tiny_config(encoder: ConversationEncoder, *, vocab_size: int, seq_length: int) -> Any:
    """Returns a transformers configuration for the encoder's family, one of `FAMILIES`.

    Args:
        encoder: its family provides sizes and token ids.
        vocab_size: rows of the embedding; larger than every token id.
        seq_length: longest row in tokens.
    """
    return _CONFIGS[encoder.family.name](encoder.family, text_fields(vocab_size, seq_length))
