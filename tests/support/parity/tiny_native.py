"""Tiny random models of families that see images at native resolution: Pixtral, GLM-4.1V, Qwen3.5, Qwen2-VL, Ernie 4.5.

They are the real transformers classes with two layers, and with the patches and token ids of a given processor, as in
`tiny_tiles`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from energon_packing.encoders.encoder import ConversationEncoder
from support.parity.tiny_tiles import HIDDEN, text_fields

SCALED_FROM = 32
"""Position from which Ministral 3 scales its queries here (16,384 in the released models), in tokens."""

_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": HIDDEN}


def tiny_config(encoder: ConversationEncoder, *, vocab_size: int, seq_length: int) -> Any:
    """Returns a transformers configuration for the encoder's family, one of `FAMILIES`.

    Args:
        encoder: its family provides the patch size and the token ids.
        vocab_size: rows of the embedding; larger than every token id.
        seq_length: longest row in tokens.
    """
    return _CONFIGS[encoder.family.name](encoder.family, text_fields(vocab_size, seq_length))


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 10_000.0}}


def _pixtral(family: Any, text: dict[str, Any]) -> Any:
    import transformers

    vision = transformers.PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
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
    import transformers

    ids = {name: family.check_token(token) for name, token in (
        *(("image_start_token_id", "<|begin_of_image|>"), ("image_end_token_id", "<|end_of_image|>")),
        *(("video_start_token_id", "<|begin_of_video|>"), ("video_end_token_id", "<|end_of_video|>")),
        *(("image_token_id", family.image_token), ("video_token_id", family.video_token)),
    )}  # fmt: skip
    rotary = _mrope(2, 1, 1)
    rotary["rope_parameters"]["partial_rotary_factor"] = 0.5
    return transformers.Glm4vConfig(
        vision_config=transformers.Glm4vVisionConfig(
            **_VISION, patch_size=family.images.patch_size, image_size=24 * family.images.patch_size
        ),
        text_config=transformers.Glm4vTextConfig(**text | rotary),
        tie_word_embeddings=False,
        **ids,
    )


def _qwen3_5(family: Any, text: dict[str, Any]) -> Any:
    import transformers

    rotary = _mrope(2, 1, 1)
    rotary["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_interleaved": True}
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }
    return transformers.Qwen3_5Config(
        vision_config=transformers.Qwen3_5VisionConfig(
            **_VISION, patch_size=family.images.patch_size, num_position_embeddings=64
        ),
        text_config=transformers.Qwen3_5TextConfig(**text | rotary | linear, head_dim=HIDDEN // 4),
        image_token_id=family.placeholder_ids["image"],
        video_token_id=family.placeholder_ids["video"],
        vision_start_token_id=family.check_token("<|vision_start|>"),
        vision_end_token_id=family.check_token("<|vision_end|>"),
        tie_word_embeddings=False,
    )


def _qwen2_vl(family: Any, text: dict[str, Any]) -> Any:
    import transformers

    return transformers.Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": HIDDEN,
            "num_heads": 2,
            "mlp_ratio": 2,
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
    import transformers

    processor = family.processor
    names = [f"{kind}{edge}_token" for kind in ("image", "video") for edge in ("", "_start", "_end")]
    del text["attention_dropout"]  # it has none
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": [64, 32]}
    return transformers.Ernie4_5_VLMoeConfig(
        vision_config={
            **{name: value for name, value in _VISION.items() if name != "out_hidden_size"},
            "patch_size": family.images.patch_size,
            "temporal_merge_size": family.videos.temporal_patch_size,
        },
        text_config=text | experts | _mrope(3, 3, 2) | {"tie_word_embeddings": False},
        tie_word_embeddings=False,
        **{f"{name}_id": family.check_token(getattr(processor, name)) for name in names},
    )


_CONFIGS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "pixtral": _pixtral,
    "glm4v": _glm4v,
    "qwen3_5_vl": _qwen3_5,
    "qwen2_vl": _qwen2_vl,
    "ernie4_5_vl": _ernie4_5,
}
FAMILIES = tuple(_CONFIGS)
"""Names of the families that have a tiny model here."""
