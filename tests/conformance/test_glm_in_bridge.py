"""A packed row of images and videos through Bridge's own GLM-4.5V: each sample as if alone.

The model is Bridge's, made of a tiny configuration by its own ``AutoBridge`` and run on the CPU stand-ins. It reads
``mm_token_type_ids`` from the visual inputs, which a packed row brings.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import bridge_here  # noqa: F401
import pytest
import torch
import transformers
from support.bridge_cpu import row_parity, training_run
from support.offline_processors import glm4v
from support.parity.tiny_native import tiny_config

from energon_packing import thd
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.joinable_rows import SHARED_PLACEHOLDER, joinable

sys.path.append(str(Path(__file__).parents[1] / "families"))
from whole_sample import both_ways, image, video

pytestmark = pytest.mark.usefixtures("stand_ins")

LIMITS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
SEQ_LENGTH = 2048
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
ON_CPU = {
    **dict.fromkeys(("fp16", "bf16", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"), False),
    **dict.fromkeys(("cross_entropy_loss_fusion", "gradient_accumulation_fusion", "apply_rope_fusion"), False),
    **dict.fromkeys(("persist_layer_norm", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"), False),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), torch.float32),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    "calculate_per_token_loss": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": False,
    "moe_router_dtype": "fp32",
    "mtp_num_layers": None,
    "mrope_section": [2, 1, 1],
    # Larger than published, so that two layers mix enough for a leak between samples to show.
    "init_method_std": 0.1,
}


def provider(encoder: ConversationEncoder):
    """Bridge's provider of a GLM-4.5V of two layers, with four experts in the second."""
    from megatron.bridge import AutoBridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    vocab = max(encoder.tokenizer.get_vocab().values()) + 1
    dense = tiny_config(encoder, vocab_size=vocab, seq_length=SEQ_LENGTH)
    text = {name: value for name, value in dense.text_config.to_dict().items() if name != "model_type"}
    vision = {name: value for name, value in dense.vision_config.to_dict().items() if name != "model_type"}
    tokens = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    config = transformers.Glm4vMoeConfig(
        text_config=text | EXPERTS,
        vision_config=vision,
        architectures=["Glm4vMoeForConditionalGeneration"],
        tie_word_embeddings=False,
        **{f"{name}_token_id": getattr(dense, f"{name}_token_id") for name in tokens},
    )
    made = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    for name, value in (ON_CPU | {"seq_length": SEQ_LENGTH}).items():
        assert hasattr(made, name), name
        setattr(made, name, value)
    made.image_token_id, made.video_token_id = config.image_token_id, config.video_token_id
    made.transformer_layer_spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
    return made


def row_of(encoder: ConversationEncoder, number: int, media: tuple, answer: str) -> dict:
    """A sample as the processor itself makes it, with every token trained."""
    parts = (*(MediaPart(index=at) for at in range(len(media))), f"What is in number {number}?")
    turns = (Turn(role="user", parts=parts), Turn(role="assistant", parts=(answer,)))
    ids, visual, _, measured = both_ways(encoder, Conversation(key=f"k{number}", turns=turns, media=media))
    tokens = torch.from_numpy(ids)
    row = {
        "key": f"k{number}",
        "expected_length": len(ids),
        "input_ids": tokens,
        "labels": torch.cat([tokens[1:], torch.tensor([-100])]),
        "loss_mask": torch.cat([torch.ones(len(ids) - 1), torch.zeros(1)]),
        "position_ids": torch.as_tensor(encoder.family.positions(ids, measured.plans)),
        "mm_token_type_ids": torch.from_numpy(encoder.family.token_values(ids)["mm_token_type_ids"]),
        "visual_inputs": visual,
    }
    return row | {SHARED_PLACEHOLDER: True} if measured.plans else row


def test_a_pack_of_images_and_videos_gives_each_samples_own_logits_loss_and_gradients():
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

    encoder = ConversationEncoder(EncoderConfig(), processor=glm4v(LIMITS, LIMITS))
    rows = [
        row_of(encoder, 0, (image(90, 60, name="a"), image(31, 33, name="b")), "A cat."),
        row_of(encoder, 1, (), "Nothing at all."),
        row_of(encoder, 2, (video(8, 2.0, 64, 64, name="c"),), "A clip of rain."),
        row_of(encoder, 3, (image(60, 200, name="d"),), "A tower."),
    ]
    extra = {"mm_token_type_ids": 0}
    batch = thd.assemble(joinable(rows), extra_fields=extra)
    assert set(batch.visual_inputs) == {"pixel_values", "image_grid_thw"}, "a pack hands videos over as images"
    alone = []
    for row in rows:  # as the processor made it: the video is a video
        (single,) = row_parity.row_batches(thd.unpack(thd.assemble([row], extra_fields=extra)))
        single["visual_inputs"] = single["visual_inputs"] or GenericVisualInputs()
        single["visual_inputs"].mm_token_type_ids = row["mm_token_type_ids"][None]
        alone.append(single)
    with training_run.process_groups():
        report = row_parity.compare(training_run.build_model(provider(encoder)), batch.to_bridge(), alone)
    print(f"\n{report}")
    assert len(report.segments) == 4
    assert max(segment.logits for segment in report.segments) < 1e-4
    assert max(segment.positions for segment in report.segments) == 0
    assert report.packed_loss == pytest.approx(report.single_loss, abs=1e-5)
    assert report.gradient < 1e-4
    assert report.control > 1e-2, "samples that see each other must show"
