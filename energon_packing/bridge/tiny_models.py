"""Tiny, randomly initialised Megatron-Bridge models: the real classes, two layers, a few hundred thousand weights.

Each function writes a tiny Hugging Face configuration and hands it to Bridge's own `AutoBridge`, which makes the model
provider just as it does for a real checkpoint. Vocabulary and special token ids are arguments, because they come from
the processor that made the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from energon_packing.bridge import cpu_stand_ins

_HIDDEN = 64
_HEADS = 4
_GROUPS = 2
_HEAD_WIDTH = _HIDDEN // _HEADS
_LAYERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Ids of the tokens that a vision-language model looks for in its input.

    Attributes:
        vision_start: ``<|vision_start|>``, before each image, video or video frame.
        vision_end: ``<|vision_end|>``.
        image: ``<|image_pad|>``, once for each visual token of an image.
        video: ``<|video_pad|>``, once for each visual token of a video.
    """

    vision_start: int
    vision_end: int
    image: int
    video: int

    def to_config(self) -> dict[str, int]:
        """The fields of a Hugging Face Qwen-VL configuration."""
        return {
            "vision_start_token_id": self.vision_start,
            "vision_end_token_id": self.vision_end,
            "image_token_id": self.image,
            "video_token_id": self.video,
        }


def _text_config(vocab_size: int, seq_length: int) -> dict[str, Any]:
    return {
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _GROUPS,
        "vocab_size": vocab_size,
        "max_position_embeddings": seq_length,
        "attention_dropout": 0.0,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _mrope(sections: list[int], theta: float = 10000.0) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": theta}
    return {"rope_parameters": rope}


def _provider(config: Any, *, seq_length: int, **overrides: Any) -> Any:
    """Bridge's provider for a Hugging Face configuration, set to fp32 and to what a CPU can run."""
    cpu_stand_ins.install()
    from megatron.bridge import AutoBridge

    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    fields: dict[str, Any] = {
        "seq_length": seq_length,
        "fp16": False,
        "bf16": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "autocast_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # The fused kernels are CUDA (or inductor) code; the plain ones compute the same.
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "cross_entropy_loss_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        # Loss and gradient are sums over tokens divided by the number of trained tokens of the whole step.
        "calculate_per_token_loss": True,
        "make_vocab_size_divisible_by": 1,
        **overrides,
    }
    for name, value in fields.items():
        if not hasattr(provider, name):
            raise AttributeError(f"{type(provider).__name__} has no field {name!r}")
        setattr(provider, name, value)
    return provider


def qwen25_vl(*, vocab_size: int, tokens: SpecialTokens, seq_length: int = 4096, patch_size: int = 14) -> Any:
    """A `Qwen25VLModelProvider`: patches of ``3 * 2 * patch_size**2`` values, merged 2 x 2."""
    from transformers import Qwen2_5_VLConfig

    config = Qwen2_5_VLConfig(
        text_config=_text_config(vocab_size, seq_length) | _mrope([2, 3, 3]),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": _HIDDEN,
            "patch_size": patch_size,
            "spatial_patch_size": patch_size,
            "window_size": 4 * patch_size,
            "fullatt_block_indexes": [1],
        },
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        tie_word_embeddings=False,
        **tokens.to_config(),
    )
    return _provider(config, seq_length=seq_length, mrope_section=[2, 3, 3])


def qwen3_vl(*, vocab_size: int, tokens: SpecialTokens, seq_length: int = 4096, patch_size: int = 16) -> Any:
    """A `Qwen3VLModelProvider`: patches of ``3 * 2 * patch_size**2`` values, merged 2 x 2, deep-stack in layer 0."""
    from transformers import Qwen3VLConfig

    config = Qwen3VLConfig(
        text_config=_text_config(vocab_size, seq_length) | {"head_dim": _HEAD_WIDTH} | _mrope([4, 2, 2]),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": _HIDDEN,
            "patch_size": patch_size,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        architectures=["Qwen3VLForConditionalGeneration"],
        tie_word_embeddings=False,
        **tokens.to_config(),
    )
    return _provider(config, seq_length=seq_length, language_max_sequence_length=seq_length)


def gpt(*, vocab_size: int, seq_length: int = 4096) -> Any:
    """A text-only Qwen2 provider, for ``gpt_step``."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        **_text_config(vocab_size, seq_length),
        architectures=["Qwen2ForCausalLM"],
        tie_word_embeddings=False,
    )
    return _provider(config, seq_length=seq_length)


FAMILIES: dict[str, Callable[..., Any]] = {"qwen2_5_vl": qwen25_vl, "qwen3_vl": qwen3_vl}
