"""Tiny, randomly initialised Megatron-Bridge models: the real classes, two layers, a few hundred thousand weights.

`provider` writes a tiny Hugging Face configuration and passes it to Bridge's own `AutoBridge`, which makes the model
provider as for a real checkpoint. Vocabulary size and special token ids are arguments, because they depend on the
processor that made the data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from energon_packing.errors import ConfigError

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "text")
"""Families that have a tiny model; ``text`` is a Qwen2 language model, for ``gpt_step``."""

_HIDDEN = 64
_HEADS = 4
_GROUPS = 2
_HEAD_WIDTH = _HIDDEN // _HEADS
_LAYERS = 2
_QWEN25_SECTIONS = [2, 3, 3]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Ids of the tokens that a vision-language model looks for: ``<|vision_start|>`` before each image, video or video
    frame, ``<|vision_end|>``, and ``<|image_pad|>`` or ``<|video_pad|>`` once per visual token."""

    vision_start: int
    vision_end: int
    image: int
    video: int

    def to_config(self) -> dict[str, int]:
        """Returns the fields of a Hugging Face Qwen-VL configuration."""
        return {f"{name}_token_id": number for name, number in dataclasses.asdict(self).items()}


SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
}
"""Sizes of a language model of 0.15 billion weights and heads of 128, for measurements on a GPU; in bfloat16."""
_SMALL_VISION = {"depth": 8, "hidden_size": 512, "intermediate_size": 2048, "num_heads": 8, "out_hidden_size": 1024}


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
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _mrope(sections: list[int]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0}}


def _experts(count: int) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": _HIDDEN,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.1,
    }


def hugging_face_config(
    family: str,
    *,
    vocab_size: int,
    tokens: SpecialTokens | None = None,
    seq_length: int = 4096,
    experts: int = 0,
    layers: int = _LAYERS,
    small: bool = False,
) -> Any:
    """Returns the tiny model as a Hugging Face configuration.

    Patches hold ``3 * 2 * 14**2`` values for ``qwen2_5_vl`` and ``3 * 2 * 16**2`` for ``qwen3_vl``; 2 x 2 patches make
    one token, as in the released models.

    Args:
        family: one of `FAMILIES`.
        vocab_size: rows of the embedding; larger than every token id.
        tokens: needed by the vision families.
        seq_length: longest row in tokens.
        experts: per layer, two of which each token uses; not for ``qwen2_5_vl``; ``text`` becomes a Qwen3 mixture.
        small: `SMALL` instead of tiny; for ``qwen3_vl``.

    Raises:
        ConfigError: the special tokens of a vision family are missing.
    """
    import transformers

    text = _text_config(vocab_size, seq_length) | {"num_hidden_layers": layers} | (_experts(experts) if experts else {})
    if small:
        text |= SMALL
    if family == "text" and experts:
        return transformers.Qwen3MoeConfig(
            **text, head_dim=_HEAD_WIDTH, architectures=["Qwen3MoeForCausalLM"], tie_word_embeddings=False
        )
    if family == "text":
        return transformers.Qwen2Config(**text, architectures=["Qwen2ForCausalLM"], tie_word_embeddings=False)
    if tokens is None:
        raise ConfigError(f"The tiny model of {family} needs the processor's special token ids.")
    ids = tokens.to_config()
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": _HIDDEN,
        "dtype": "float32",
    }
    if family == "qwen2_5_vl":
        return transformers.Qwen2_5_VLConfig(
            text_config=text | _mrope(_QWEN25_SECTIONS),
            vision_config=vision | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
            architectures=["Qwen2_5_VLForConditionalGeneration"],
            tie_word_embeddings=False,
            **ids,
        )
    vision |= _SMALL_VISION if small else {}
    kind, name = (transformers.Qwen3VLMoeConfig, "Moe") if experts else (transformers.Qwen3VLConfig, "")
    return kind(
        text_config=text | {"head_dim": 128 if small else _HEAD_WIDTH} | _mrope([24, 20, 20] if small else [4, 2, 2]),
        vision_config=vision | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        architectures=[f"Qwen3VL{name}ForConditionalGeneration"],
        tie_word_embeddings=False,
        **ids,
    )


def provider(
    family: str,
    *,
    vocab_size: int,
    tokens: SpecialTokens | None = None,
    seq_length: int = 4096,
    experts: int = 0,
    layers: int = _LAYERS,
    small: bool = False,
) -> Any:
    """Bridge's model provider for `hugging_face_config`, set to fp32 and to what a CPU can run; a small one in bf16."""
    # Imported here, because `hugging_face_config` also serves machines without Megatron-Core.
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    from megatron.bridge import AutoBridge

    config = hugging_face_config(
        family, vocab_size=vocab_size, tokens=tokens, seq_length=seq_length, experts=experts, layers=layers, small=small
    )
    with stand_ins.without_warnings():
        made = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    fields: dict[str, Any] = {"seq_length": seq_length, "make_vocab_size_divisible_by": 1}
    if family == "qwen2_5_vl":  # Bridge 0.6.2 leaves the sections of the released sizes in place
        fields["mrope_section"] = _QWEN25_SECTIONS
    if family == "qwen3_vl":
        fields["language_max_sequence_length"] = seq_length
    fused = ("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "persist_layer_norm")
    on_gpu: dict[str, Any] = dict.fromkeys((*fused, "cross_entropy_loss_fusion", "bf16"), True)
    on_gpu |= {**dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), torch.bfloat16)}
    return with_fields(made, ON_CPU | (EXPERTS_ON_CPU if experts else {}) | fields | (on_gpu if small else {}))


ON_CPU: dict[str, Any] = {
    **dict.fromkeys(("fp16", "bf16"), False),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), torch.float32),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    # The fused kernels are CUDA (or inductor) code; the plain ones compute the same.
    **dict.fromkeys(("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"), False),
    **dict.fromkeys(("cross_entropy_loss_fusion", "gradient_accumulation_fusion", "apply_rope_fusion"), False),
    "persist_layer_norm": False,
    # Loss and gradient are sums over tokens divided by the number of trained tokens of the whole step.
    "calculate_per_token_loss": True,
}
"""Settings of a provider in fp32, of what a CPU can run."""

EXPERTS_ON_CPU: dict[str, Any] = {
    **dict.fromkeys(("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"), False),
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": False,
}
"""Grouped and fused kernels of experts are CUDA code too."""


def with_fields(provider: Any, fields: Mapping[str, Any]) -> Any:
    """Returns the provider, with fields that it must have set."""
    for name, value in fields.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    return provider


def special_tokens(ids: Mapping[str, int]) -> SpecialTokens | None:
    """Those of a Qwen-VL processor, from its vocabulary; None for one without images."""
    names = {"vision_start": "vision_start", "vision_end": "vision_end", "image": "image_pad", "video": "video_pad"}
    found = {name: ids[f"<|{word}|>"] for name, word in names.items() if f"<|{word}|>" in ids}
    return SpecialTokens(**found) if len(found) == len(names) else None


@functools.cache
def vocabulary_of(processor: str) -> dict[str, int]:
    """Token -> number."""
    from transformers import AutoTokenizer

    vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(processor).get_vocab()
    return vocabulary


def shipped_provider(family: str, *, processor: str | None = None, **sizes: Any) -> Any:
    """`provider` with the vocabulary of the processor that the demo ships for the family, or of another one."""
    from energon_packing.demo import processor_path

    ids = vocabulary_of(processor or str(processor_path(family)))
    return provider(family, vocab_size=-(-len(ids) // 8) * 8, tokens=special_tokens(ids), **sizes)
