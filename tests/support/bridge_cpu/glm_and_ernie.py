"""GLM-4.5V and Ernie 4.5 VL of Bridge with two layers on a CPU, and samples as their own processors make them.

The models are Bridge's, made of a tiny configuration by its own ``AutoBridge``. Both read the types of tokens from the
visual inputs; Ernie normalises the bytes of the pixels itself.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from energon_packing.conversation import Conversation, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.joinable_rows import SHARED_PLACEHOLDER
from support.bridge_cpu.tiny_models import EXPERTS_ON_CPU, ON_CPU, with_fields
from support.parity.tiny_families import tiny_config

sys.path.insert(0, str(Path(__file__).parents[2] / "families"))  # for `whole_sample`, here and in tests

LIMITS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
SEQ_LENGTH = 2048
TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids")
EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": False,
}
SETTINGS = {
    "moe_router_dtype": "fp32",
    "mtp_num_layers": None,
    # Larger than published, so that two layers mix enough for a leak between samples to show.
    "init_method_std": 0.1,
    "seq_length": SEQ_LENGTH,
}


def _provider(config: Any, mrope_section: list[int]) -> Any:
    from megatron.bridge import AutoBridge

    made = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    return with_fields(made, ON_CPU | EXPERTS_ON_CPU | SETTINGS | {"mrope_section": mrope_section})


def glm_provider(encoder: Any) -> Any:
    """Bridge's provider of a GLM-4.5V of two layers, with four experts in the second."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    vocab = max(encoder.tokenizer.get_vocab().values()) + 1
    dense = tiny_config(encoder, vocab_size=vocab, seq_length=SEQ_LENGTH)
    text, vision = (
        {name: value for name, value in part.to_dict().items() if name != "model_type"}
        for part in (dense.text_config, dense.vision_config)
    )
    tokens = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    config = transformers.Glm4vMoeConfig(
        text_config=text | EXPERTS,
        vision_config=vision,
        architectures=["Glm4vMoeForConditionalGeneration"],
        tie_word_embeddings=False,
        **{f"{name}_token_id": getattr(dense, f"{name}_token_id") for name in tokens},
    )
    made = _provider(config, [2, 1, 1])
    made.image_token_id, made.video_token_id = config.image_token_id, config.video_token_id
    made.transformer_layer_spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
    return made


def ernie_provider(encoder: ConversationEncoder) -> Any:
    """Bridge's provider of an Ernie 4.5 VL of two layers, with four experts of each kind in the second."""
    vocab = max(encoder.tokenizer.get_vocab().values()) + 1
    config = tiny_config(encoder, vocab_size=vocab, seq_length=SEQ_LENGTH)
    config.architectures = ["Ernie4_5_VLMoeForConditionalGeneration"]
    return _provider(config, [3, 3, 2])


def known_layers(monkeypatch: Any) -> None:
    """Makes Ernie's decoder take the stand-ins of Transformer Engine's layers.

    It has its own list of these layers, and without them no normalisation before a layer.
    """
    from megatron.bridge.models.ernie_vl.modeling_ernie45_vl import ernie_decoder_layer_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from support.bridge_cpu.attention import SegmentAttention
    from support.bridge_cpu.modules import CpuSpecProvider, NormColumnParallelLinear

    norm = CpuSpecProvider().layer_norm(rms_norm=True)
    layers = (ColumnParallelLinear, RowParallelLinear, SegmentAttention, NormColumnParallelLinear, norm)
    monkeypatch.setattr(ernie_decoder_layer_spec, "_get_linear_modules", lambda: layers)


def row_of(encoder: ConversationEncoder, number: int, media: tuple[Any, ...], answer: str) -> dict[str, Any]:
    """A sample with every token trained: GLM's as the processor itself makes it, Ernie's with random pixels."""
    from whole_sample import both_ways, random_pixels  # type: ignore[import-not-found]

    parts: tuple[str | MediaPart, ...] = tuple(MediaPart(index=at) for at in range(len(media)))
    parts += (f"What is in number {number}?",)
    turns = (Turn(role="user", parts=parts), Turn(role="assistant", parts=(answer,)))
    conversation = Conversation(key=f"k{number}", turns=turns, media=media)
    row: dict[str, Any] = {}
    if encoder.family.name == "glm4v":
        ids, visual, _, measured = both_ways(encoder, conversation)
        row = {SHARED_PLACEHOLDER: True} if measured.plans else {}
    else:
        measured = encoder.measure(conversation)
        ids, _ = measured.expand()
        visual = encoder.family.pixels(measured.plans, random_pixels(measured.plans, media), raw=True)
        row = {"pixel_forms": {name: form for name, form in encoder.family.pixel_forms.items() if name in visual}}
    tokens = torch.from_numpy(ids)
    return {
        "key": f"k{number}",
        "expected_length": len(ids),
        "input_ids": tokens,
        "labels": torch.cat([tokens[1:], torch.tensor([-100])]),
        "loss_mask": torch.cat([torch.ones(len(ids) - 1), torch.zeros(1)]),
        "position_ids": torch.as_tensor(encoder.family.positions(ids, measured.plans)),
        **{name: torch.from_numpy(values) for name, values in encoder.family.token_values(ids).items()},
        "visual_inputs": visual,
    } | row
