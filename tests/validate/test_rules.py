"""The rules that Bridge's ``validate()`` does not have, those of its own online packing, and what is true of all."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from energon_packing.cli.validate import packing_of, resolved_summary
from energon_packing.config import ParallelConfig, RunConfig, TrainingConfig
from energon_packing.validate.kernel_table import Machine
from energon_packing.validate.memory import Memory
from energon_packing.validate.rules import packing
from energon_packing.validate.rules.rule import all_rules, judge, rule_that_bridge_named, violations
from energon_packing.validate.run_facts import DataFacts, TokenFacts
from energon_packing.validate.run_source import view_of_config
from energon_packing.validate.run_view import RunView, installed_version

ROOT = Path(__file__).resolve().parents[2]

PACKED = RunView(enable_offline_packing=True, has_offline_packing_specs=True, packed_sequence_size=4096)


NATIVE = RunView(
    dataset_kind="energon",
    packing_buffer_size=64,
    task_encoder="QwenVLEnergonTaskEncoderConfig",
    bridge_version="0.7.0",
    model="Qwen3VL",
    step="vlm_step",
    overlap_grad_reduce=False,
)
EXPERTS = PACKED.changed(num_moe_experts=8, expert_parallel=2, world_size=2, global_batch_size=2)
OVER_HYBRIDEP = EXPERTS.changed(expert_dispatcher="hybridep", pad_to_max_length=True)


def packed(**changes: Any) -> RunView:
    layout = ("tensor_parallel", "context_parallel", "pipeline_parallel")
    world = math.prod(changes.get(name, 1) for name in layout)
    return PACKED.changed(**({"world_size": world} | changes))


def outcome(rule: str, view: RunView) -> str:
    return next(judgement.outcome for judgement in judge(view) if judgement.rule.id == rule)


def errors(view: RunView) -> list[str]:
    return [judgement.rule.id for judgement in violations(view)]


def facts(**changes: Any) -> DataFacts:
    known = {"samples": 1000, "measured": 100, "dropped": 0, "too_long": 0, "longest": 900, "mean": 500.0}
    return DataFacts(**(known | {"fill": 0.9, "packs": 10} | changes))


IN_BATCH = {"enable_offline_packing": False, "has_offline_packing_specs": False, "packed_sequence_size": None}
IN_BATCH |= {
    "enable_in_batch_packing": True,
    "micro_batch_size": 2,
    "global_batch_size": 2,
    "eval_global_batch_size": 2,
}

MOE = {"num_moe_experts": 8, "step": "vlm_step"}
WHOLE = {"tensor_parallel": 2, "sequence_parallel": True, "world_size": 2}

GRAPHS: dict[str, Any] = {
    "num_moe_experts": 8,
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_modules": ("attn",),
    "pad_cu_seqlens": True,
    "pad_to_max_length": True,
}

# rule, a run that breaks it, a run like it that does not, severity
MEMORY = Memory(weights=1, gradients=2, optimizer=3, language=4, vision=5, loss=6)
BLOCK = {
    "model": "Qwen3VL",
    "recompute_granularity": "full",
    "recompute_method": "block",
    "deepstack_layers": (8, 16, 24),
}

A100, H100 = Machine(sm=80), Machine(sm=90)
GATHERED = IN_BATCH | {"expert_dispatcher": "allgather", "expert_parallel": 2, "num_moe_experts": 8, "world_size": 2}
GATHERED |= {"global_batch_size": 4, "eval_global_batch_size": 4}

OWN = [
    (
        "core/global-batch-size",
        {"world_size": 4, "global_batch_size": 6, "eval_global_batch_size": 8},
        {"global_batch_size": 8},
        "error",
    ),
    (
        "core/expert-world-size",
        {"expert_parallel": 4, "world_size": 2, "global_batch_size": 8},
        {"world_size": 8},
        "error",
    ),
    (  # Bridge's own default, as in its recipe of Qwen3-VL 235B
        "core/expert-world-size",
        {"tensor_parallel": 2, "expert_parallel": 4, "expert_tensor_parallel": 2, "world_size": 4}
        | {"global_batch_size": 4, "eval_global_batch_size": 4},
        {"expert_tensor_parallel": None},
        "error",
    ),
    ("core/no-average-with-token-loss", {"average_in_collective": True}, {"average_in_collective": False}, "error"),
    ("core/no-average-with-token-loss", {"average_in_collective": True}, {"megatron_fsdp": True}, "error"),
    ("ours/family-takes-packs", {"model": "Gemma4VL"}, {"model": "gemma4_text"}, "error"),
    ("ours/token-weight", {"calculate_per_token_loss": False}, {"calculate_per_token_loss": True}, "warning"),
    ("ours/initial-weights", {"has_weights": False}, {"has_weights": True}, "warning"),
    ("ours/decay-over-the-run", {"train_iters": 2000, "lr_decay_iters": 50}, {"lr_decay_iters": None}, "warning"),
    (
        "ours/decay-over-the-run",
        {"train_iters": 2000, "lr_decay_iters": 300_000},
        {"lr_decay_style": "constant"},
        "warning",
    ),
    ("ours/decay-over-the-run", {"train_iters": 300, "lr_warmup_iters": 200}, {"train_iters": 400}, "warning"),
    (  # 16 packs of 0.9 x 4096 / 500 samples
        "ours/samples-per-step",
        {"recipe_batch_size": 32, "global_batch_size": 16, "data": facts()},
        {"global_batch_size": 8},
        "warning",
    ),
    (
        "ours/samples-per-step",
        {"recipe_batch_size": 32, "global_batch_size": 1, "data": facts(mean=3000.0)},
        {"recipe_batch_size": None},
        "warning",
    ),
    ("ours/no-multi-token-prediction", {"mtp_num_layers": 1}, {"mtp_num_layers": 0}, "error"),
    ("ours/family-takes-packs", {"model": "Qwen3-Next-80B"}, {"model": "Qwen3-VL-8B"}, "error"),
    ("ours/family-takes-packs", {"model": "glm_4_5"}, {"model": "gpt"}, "error"),
    ("ours/step-reads-packs", {"step": "qwen3_vl_step"}, {"step": "vlm_step"}, "error"),
    ("ours/step-reads-packs", {"step": "megatron.bridge.training.audio_lm_step"}, {"step": "gpt_step"}, "error"),
    (
        "ours/step-reads-packs",
        IN_BATCH | {"step": "audio_lm_step"},
        {"defer_in_batch_packing_to_step": True},
        "error",
    ),
    (
        "core/context-parallel-packs",
        {"context_parallel": 2, "megatron_core_version": "0.17.1"},
        {"megatron_core_version": "0.18.0"},
        "error",
    ),
    (
        "ours/family-context-parallel",
        {"context_parallel": 2, "model": "Qwen2.5-VL-7B"},
        {"model": "qwen3_vl"},
        "error",
    ),
    (
        "ours/experts-see-padding",
        {"num_moe_experts": 8, "pad_to_max_length": True, "step": "vlm_step"},
        {"pad_to_max_length": False},
        "warning",
    ),
    (  # a schedule plan, also with our step, whose hooks it bypasses
        "ours/experts-see-padding",
        {
            "num_moe_experts": 8,
            "pad_to_max_length": True,
            "step": "energon_packing.bridge.step",
            "overlap_moe_expert_parallel_comm": True,
            "bridge_version": "0.7.0",
        },
        {"overlap_moe_expert_parallel_comm": False},
        "warning",
    ),
    (
        "ours/balance-per-sequence",
        {"num_moe_experts": 8, "load_balancing": "seq_aux_loss", "balance_coefficients": (0.001,)},
        {"load_balancing": "aux_loss"},
        "error",
    ),
    (
        "ours/balance-per-sequence",
        {"num_moe_experts": 8, "load_balancing": ("aux_loss", "seq_aux_loss"), "balance_coefficients": (0.0, 0.01)},
        {"balance_coefficients": (0.01, 0.0)},
        "error",
    ),
    (
        "ours/balance-over-ranks",
        {
            "dataset_kind": "packed_energon",
            "num_moe_experts": 8,
            "context_parallel": 2,
            "world_size": 2,
            "step": "gpt_step",
            "bridge_version": "0.7.0",
        },
        {"step": "energon_packing.bridge.step"},
        "warning",
    ),
    (
        "ours/padding-mask-under-graphs",
        GRAPHS | {"step": "energon_packing.bridge.step", "bridge_version": "0.6.2"},
        {"cuda_graph_impl": "none"},
        "error",
    ),
    (
        "ours/padding-mask-under-graphs",
        GRAPHS | {"step": "energon_packing.bridge.step.forward_step", "model": "Qwen3MoE", "bridge_version": "0.6.2"},
        {"bridge_version": "0.7.0"},
        "error",
    ),
    (
        "ours/padding-mask-under-graphs",
        GRAPHS | {"step": "gpt_step", "cuda_graph_modules": ("attn", "moe_router"), "bridge_version": "0.7.0"},
        {"cuda_graph_modules": ("attn",)},
        "error",
    ),
    (
        "ours/experts-see-padding",
        GRAPHS | {"step": "gpt_step", "bridge_version": "0.6.2"},
        {"bridge_version": "0.7.0"},
        "warning",
    ),
    (
        "ours/packs-without-media",
        {"model": "qwen2_5_vl", "overlap_grad_reduce": True},
        {"overlap_grad_reduce": False},
        "error",
    ),
    (
        "ours/packs-without-media",
        {"model": "qwen2_5_vl", "overlap_grad_reduce": True},
        {"vision_frozen": True},
        "error",
    ),
    ("ours/packs-without-media", {"model": "Qwen3VL", "overlap_grad_reduce": True}, {"dummy_image": True}, "error"),
    ("ours/packs-without-media", {"model": "KimiK25VL", "overlap_grad_reduce": True}, {"dummy_image": True}, "error"),
    (
        "ours/packs-without-media",
        {"model": "Qwen3VL", "overlap_grad_reduce": False, "megatron_fsdp": True},
        {"megatron_fsdp": False},
        "error",
    ),
    (
        "ours/packs-without-media",
        {"model": "Qwen3VL", "overlap_grad_reduce": False, "fsdp2": True},
        {"fsdp2": False},
        "error",
    ),
    (
        "ours/one-packed-row-over-context-parallelism",
        {"dataset_kind": "gpt_sft", "context_parallel": 2, "eval_micro_batch_size": 2, "eval_global_batch_size": 2},
        {"do_validation": False},
        "error",
    ),
    (
        "ours/one-packed-row-over-context-parallelism",
        {"dataset_kind": "gpt_sft", "context_parallel": 2, "eval_micro_batch_size": 2, "eval_global_batch_size": 2},
        {"eval_micro_batch_size": 1},
        "error",
    ),
    (
        "ours/metadata-beside-packed-file",
        {
            "dataset_kind": "gpt_sft",
            "pad_cu_seqlens": True,
            "pad_to_max_length": True,
            "packed_metadata_missing": "packs.json",
        },
        {"packed_metadata_missing": None},
        "error",
    ),
    (
        "ours/middle-stages-see-boundaries",
        {
            "dataset_kind": "provider",
            "pipeline_parallel": 4,
            "enable_offline_packing": False,
            "has_offline_packing_specs": False,
        },
        {"step": "energon_packing.bridge.step"},
        "warning",
    ),
    (
        "ours/no-schedule-plan",
        {"overlap_moe_expert_parallel_comm": True},
        {"overlap_moe_expert_parallel_comm": False},
        "error",
    ),
    (
        "ours/no-schedule-plan",
        {"overlap_moe_expert_parallel_comm": True, "model": "GPT", "bridge_version": "0.6.2"},
        {"bridge_version": "0.7.0+067f987"},
        "error",
    ),
    (
        "ours/no-schedule-plan",
        {"overlap_moe_expert_parallel_comm": True, "bridge_version": "0.7.0", "step": "vlm_step"},
        {"step": "gpt_step"},
        "error",
    ),
    (
        "ours/no-schedule-plan",
        {"overlap_moe_expert_parallel_comm": True, "bridge_version": "0.7.0", "model": "Qwen25VL"},
        {"model": "Qwen3MoE"},
        "error",
    ),
    (
        "ours/no-multi-token-prediction",
        {"mtp_num_layers": 1, "bridge_version": "0.6.2", "model": "Qwen25VL"},
        {"model": "Qwen35VL"},
        "error",
    ),
    (
        "ours/no-multi-token-prediction",
        {"mtp_num_layers": 1, "bridge_version": "0.7.0", "model": "Qwen35VL", "context_parallel": 2, "padding": "real"},
        {"mtp_num_layers": 0},
        "error",
    ),
    (
        "ours/no-multi-token-prediction",
        {"mtp_num_layers": 1, "bridge_version": "0.7.0", "model": "Qwen3MoE"},
        {"model": "Qwen35VL"},
        "error",
    ),
    *(
        ("ours/dynamic-context-parallel", {"dynamic_context_parallel": True} | broken, fixed, "error")
        for broken, fixed in (
            ({"source": "bridge"}, {"source": "argument"}),
            ({"calculate_per_token_loss": False}, {"calculate_per_token_loss": True}),
            (
                {"cuda_graph_impl": "transformer_engine", "pad_to_max_length": True, "pad_cu_seqlens": True},
                {"cuda_graph_impl": "none"},
            ),
            ({"megatron_fsdp": True}, {"megatron_fsdp": False}),
            ({"model": "Qwen3VL"}, {"model": "Qwen3MoE"}),
            ({"model": "Qwen3VL"}, {"dynamic_context_parallel": False}),
        )
    ),
    ("ours/packed-once", {"sequence_packing_scheduler": "dp_balanced"}, {"source": "argument"}, "error"),
    ("ours/packed-once", {"enable_global_batch_packing": True}, {"enable_global_batch_packing": False}, "error"),
    ("ours/packed-once", {"sequence_packing_scheduler": "dp_balanced"}, {"enable_offline_packing": False}, "error"),
    (
        "ours/alignment-used",
        {
            "dataset_kind": "gpt_sft",
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "pad_seq_to_multiple": 1,
        },
        {"pad_to_max_length": True},
        "error",
    ),
    (
        "ours/alignment-used",
        {
            "dataset_kind": "gpt_sft",
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "context_parallel": 2,
            "pad_seq_to_multiple": 2,
            "pad_to_max_length": True,
        },
        {"context_parallel": 1},
        "error",
    ),
    (
        "ours/deepstack-gradient",
        {"model": "Qwen3VLMoE", "recompute_granularity": "full"},
        {"recompute_granularity": "selective"},
        "error",
    ),
    (
        "ours/deepstack-gradient",
        {"model": "Qwen3VL", "recompute_granularity": "full"},
        {"vision_frozen": True},
        "error",
    ),
    (
        "ours/deepstack-gradient",  # Core recomputes the first layers of each stack: here as far as the deepstack
        BLOCK | {"recompute_num_layers": 9},
        {"recompute_num_layers": 8},
        "error",
    ),
    (
        "ours/deepstack-gradient",
        BLOCK | {"recompute_num_layers": 1, "recompute_method": "uniform"},
        {"recompute_method": "block"},
        "error",
    ),
    ("ours/gpu-memory", {"memory": MEMORY, "gpu_memory": 20}, {"gpu_memory": 21}, "warning"),
    (
        "ours/deepstack-over-tensor-ranks",
        {"model": "Qwen3VL", "tensor_parallel": 2, "sequence_parallel": True},
        {"sequence_parallel": False},
        "error",
    ),
    (
        "ours/deepstack-over-tensor-ranks",
        {"model": "Qwen3VLMoE", "tensor_parallel": 2, "sequence_parallel": True},
        {"vision_frozen": True},
        "error",
    ),
    (
        "ours/deepstack-over-tensor-ranks",
        {"model": "Qwen3-VL-30B-A3B", "tensor_parallel": 2, "sequence_parallel": True},
        {"processor_tokens": TokenFacts(size=10)},  # a tokenizer of text: no image reaches the model
        "error",
    ),
    (
        "ours/query-scale-by-position",
        {"model": "Ministral3VL", "dataset_seq_length": 32768, "model_seq_length": 32768},
        {"context_parallel": 2},
        "warning",
    ),
    ("bridge/fixed-width", {"pipeline_parallel": 2}, {"pad_to_max_length": True}, "note"),
    (
        "ours/alignment-used",
        {"dataset_kind": "gpt_sft", "context_parallel": 2, "pad_seq_to_multiple": 2},
        {"pad_seq_to_multiple": 8},
        "error",
    ),
    ("ours/fp8-multiple", {"fp8_recipe": "delayed"}, {"pad_to_max_length": True}, "error"),
    (
        "ours/fp8-multiple",
        {"fp8_recipe": "mxfp8", "pad_to_max_length": True, "tensor_parallel": 4, "sequence_parallel": True}
        | dict.fromkeys(("dataset_seq_length", "model_seq_length", "packed_sequence_size"), 4096 + 64),
        dict.fromkeys(("dataset_seq_length", "model_seq_length", "packed_sequence_size"), 4096 + 128),
        "error",
    ),
    (
        "ours/fp8-multiple",
        IN_BATCH | {"fp8_recipe": "delayed", "pad_to_max_length": True},
        {"enable_in_batch_packing": False, "enable_offline_packing": True, "has_offline_packing_specs": True}
        | {"micro_batch_size": 1},
        "error",
    ),
    (
        "ours/fp8-multiple",
        IN_BATCH | {"fp8_recipe": "delayed", "pad_to_max_length": True, "dataset_kind": "energon"},
        {"defer_in_batch_packing_to_step": True},
        "error",
    ),
    # Kernels by GPU, as Transformer Engine chooses them: test_kernel_table.
    (
        "ours/attention-kernel",
        {"machine": A100, "context_parallel": 2, "padding": "between"},
        {"padding": "real"},
        "error",
    ),
    (
        "ours/attention-kernel",
        {"machine": A100, "context_parallel": 2, "padding": "between"},
        {"machine": H100},
        "error",
    ),
    ("ours/attention-kernel", {"machine": A100, "softmax_type": "learnable"}, {"machine": H100}, "warning"),
    (
        "ours/attention-kernel",
        {"machine": Machine(sm=100, cudnn=(9, 19)), "head_dim": 256, "context_parallel": 2, "padding": "between"},
        {"machine": Machine(sm=100)},
        "error",
    ),
    (  # Multi-head latent attention: keys of 192 channels
        "ours/attention-kernel",
        {"machine": Machine(sm=120), "head_dim": 192, "value_dim": 128, "context_parallel": 2, "padding": "between"},
        {"machine": Machine(sm=100)},
        "error",
    ),
    (
        "ours/attention-kernel",
        {"machine": H100, "context_parallel": 2, "padding": "between", "kernel_variables": (("NVTE_FUSED_ATTN", "0"),)},
        {"kernel_variables": (("NVTE_FUSED_ATTN", "1"),)},
        "error",
    ),
    ("ours/context-parallel-kind", {"window_size": (128, 0), "context_parallel": 2}, {"cp_comm_type": "a2a"}, "error"),
    (
        "ours/context-parallel-kind",
        {"softmax_type": "learnable", "context_parallel": 2, "cp_comm_type": "all_gather"},
        {"cp_comm_type": "a2a"},
        "error",
    ),
    (  # Layers differ: only a window need not be in all of them
        "ours/context-parallel-kind",
        {"softmax_type": "learnable", "context_parallel": 2, "cp_comm_type": ("p2p", "a2a")},
        {"cp_comm_type": "a2a"},
        "error",
    ),
    (
        "ours/context-parallel-kind",
        {"machine": Machine(sm=90, te=(2, 9)), "context_parallel": 2, "cp_comm_type": ("p2p", "a2a")},
        {"cp_comm_type": "p2p"},
        "error",
    ),
    (
        "ours/context-parallel-kind",
        {"machine": Machine(sm=90, te=(2, 18)), "context_parallel": 4, "cp_comm_type": "a2a+p2p"}
        | {"hierarchical_context_parallel_sizes": (2, 2)},
        {"machine": Machine(sm=90, te=(2, 19))},
        "error",
    ),
    (
        "ours/fp8-attention",
        {"fp8_recipe": "delayed", "fp8_dot_product_attention": True, "pad_to_max_length": True},
        {"machine": H100},
        "error",
    ),
    (
        "ours/deterministic-delta-net",
        {"experimental_attention_variant": "gated_delta_net", "deterministic_mode": True},
        {"deterministic_mode": False},
        "error",
    ),
    (
        "ours/overlap-needs-one-width",
        {"tp_comm_overlap": True, "tensor_parallel": 2, "sequence_parallel": True},
        {"pad_to_max_length": True},
        "error",
    ),
    ("ours/kernel-choice", {"attention_backend_set": "flash"}, {"attention_backend_set": "auto"}, "warning"),
    ("ours/kernel-choice", {"kernel_variables": (("NVTE_FLASH_ATTN", "0"),)}, {"kernel_variables": ()}, "warning"),
    ("ours/equal-dispatch", {**GATHERED, "pad_to_max_length": False}, {"expert_dispatcher": "alltoall"}, "error"),
    (
        "ours/fused-router",
        {"num_moe_experts": 8, "moe_router_fusion": True, "bridge_version": "0.7.0", "step": "gpt_step"},
        {"step": "energon_packing.bridge.step"},
        "warning",
    ),
    (
        "ours/attention-kernel",
        {"head_dim": 288, "context_parallel": 2, "padding": "between"},
        {"head_dim": 256},
        "error",
    ),
    ("ours/attention-kernel", {"head_dim": 512, "attention_backend": "flash"}, {"attention_backend": None}, "error"),
    (
        "ours/attention-kernel",
        {"head_dim": 100, "context_parallel": 2, "padding": "between"},
        {"head_dim": 96},
        "error",
    ),
    ("ours/attention-kernel", {"attention_backend": "local"}, {"attention_backend": "flash"}, "error"),
    (
        "ours/attention-kernel",
        {"attention_backend": "unfused", "context_parallel": 2, "padding": "between"},
        {"attention_backend": "fused"},
        "error",
    ),
    (
        "ours/attention-kernel",
        {"attention_backend": "flash", "context_parallel": 2, "padding": "between"},
        {"context_parallel": 1},
        "error",
    ),
    (
        "ours/vocabulary",
        {"model_tokens": TokenFacts(size=32000), "processor_tokens": TokenFacts(size=32001)},
        {"processor_tokens": TokenFacts(size=32000)},
        "error",
    ),
    (
        "ours/placeholder-ids",
        {
            "model_tokens": TokenFacts(placeholders={"image": 7, "video": 8}),
            "processor_tokens": TokenFacts(placeholders={"image": 7, "video": 9}),
        },
        {"processor_tokens": TokenFacts(placeholders={"image": 7})},
        "error",
    ),
    (
        "ours/placeholder-ids",
        {
            "model_tokens": TokenFacts(placeholders={"image": 7, "vision_start": 5}),
            "processor_tokens": TokenFacts(placeholders={"image": 7, "vision_start": 6}),
        },
        {"processor_tokens": TokenFacts(placeholders={"image": 7, "vision_start": 5})},
        "error",
    ),
    (
        "ours/processor-fits-the-model",
        {"model": "Qwen3VL", "processor_tokens": TokenFacts(processor="Qwen2_5_VLProcessor")},
        {"processor_tokens": TokenFacts(processor="SomebodysProcessor")},  # nobody knows whose
        "error",
    ),
    (
        "ours/processor-fits-the-model",
        {
            "model_tokens": TokenFacts(geometry={"patch_size": 16, "image_size": 448}),
            "processor_tokens": TokenFacts(geometry={"patch_size": 14}),
        },
        {"processor_tokens": TokenFacts(geometry={"patch_size": 16, "merge_size": 2})},
        "error",
    ),
    (
        "ours/bridges-own-packing",
        {"dataset_kind": "energon", "packing_buffer_size": 64, "bridge_version": "0.6.2"},
        {"bridge_version": "0.7.0"},
        "error",
    ),
    (
        "ours/weights-need-token-loss",
        {"loss_weighting": "sample", "calculate_per_token_loss": False},
        {"loss_weighting": "token"},
        "error",
    ),
    ("ours/loader-memory", {"window": 10_000_000, "workers": 4}, {"window": 256}, "warning"),
    (
        "ours/longest-sample",
        {"data": facts(too_long=3, longest=9000)},
        {"data": facts(too_long=0, longest=4000)},
        "warning",
    ),
    ("ours/steps-an-epoch", {"data": facts(packs=0)}, {"data": facts(packs=10)}, "warning"),
    ("ours/steps-an-epoch", IN_BATCH | {"data": facts(packs=100, samples=1)}, {"data": facts(packs=0)}, "warning"),
    ("ours/failures-are-limited", {"failure_tolerance": 0}, {"failure_tolerance": 1}, "error"),
    ("core/hybrid-context-parallel", {"hybrid_context_parallel": True}, {"hybrid_context_parallel": False}, "error"),
    ("ours/family-listed", {"model": "Exaone45"}, {"model": "Qwen3VL"}, "warning"),
    ("ours/family-listed", {"model": "Mamba", "is_gpt": False}, {"is_gpt": True}, "warning"),
    (
        "ours/settings-by-their-names",
        {"source": "bridge", "unknown_settings": (("dataset.packed_sequence_specs", "dataset.offline_packing_specs"),)},
        {"unknown_settings": (("model.of_my_step", ""), ("train.train_iter", "train.train_iters"))},
        "error",
    ),
    (
        "ours/settings-are-read",
        {"source": "bridge", "unknown_settings": (("model.of_my_step", ""),)},
        {"unknown_settings": ()},
        "warning",
    ),
    (
        "ours/captured-rows-alike",
        GRAPHS | {"context_parallel": 2, "padding": "between", "num_moe_experts": None},
        {"context_parallel": 1, "world_size": 1},
        "warning",
    ),
    (
        "ours/captured-rows-alike",
        GRAPHS | {"context_parallel": 2, "padding": "between", "num_moe_experts": None},
        {"padding": "real"},
        "warning",
    ),
    (
        "ours/step-packs-in-batch",
        IN_BATCH | {"defer_in_batch_packing_to_step": True, "step": "vlm_step"},
        {"step": "qwen3_vl_step"},
        "error",
    ),
    ("ours/in-batch-row-length", IN_BATCH, {"defer_in_batch_packing_to_step": True}, "note"),
    ("ours/visible-padding", IN_BATCH | {"context_parallel": 2}, {"context_parallel": 1}, "warning"),
    (
        "ours/visible-padding",
        IN_BATCH | {"context_parallel": 1, "eval_context_parallel": 2, "world_size": 2, "global_batch_size": 4},
        {"context_parallel": 1, "eval_context_parallel": None},
        "warning",
    ),
    (
        "ours/visible-padding",
        IN_BATCH | {"context_parallel": 2, "cp_comm_type": ("p2p", "a2a")},
        {"cp_comm_type": "a2a"},
        "warning",
    ),
    (
        "ours/visible-padding",
        IN_BATCH | {"context_parallel": 2, "defer_in_batch_packing_to_step": True, "step": "qwen3_vl_step"},
        {"enable_in_batch_packing": False, "enable_offline_packing": True},
        "warning",
    ),
    (
        "ours/visible-padding",
        {"dataset_kind": "gpt_sft", "pad_seq_to_multiple": 4, "context_parallel": 2},
        {"dataset_kind": "packed_energon", "pad_seq_to_multiple": None},
        "warning",
    ),
    (
        "ours/visible-padding",
        {"dataset_kind": "energon", "packing_buffer_size": 64, "bridge_version": "0.7.0", "context_parallel": 2},
        {"packing_buffer_size": None},
        "warning",
    ),
]


@pytest.mark.parametrize(("rule", "broken", "fixed", "severity"), OWN)
def test_a_rule_of_ours_speaks_when_broken_and_is_content_when_fixed(
    rule: str, broken: dict[str, Any], fixed: dict[str, Any], severity: str
) -> None:
    view = packed(**broken)
    assert outcome(rule, view) == severity
    assert outcome(rule, view.changed(**fixed)) in ("ok", "not applicable")
    expected = [rule] if severity == "error" else []
    assert [found.rule.id for found in violations(view)] == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, "warning"),
        ("2.2", "warning"),
        ("2.9.0", "warning"),
        ("2.17.1", "warning"),
        ("2.18", "ok"),
        ("2.20.2+cu13", "ok"),
    ],
)
def test_bridges_own_packers_are_warned_about_until_transformer_engine_asks_no_more(monkeypatch, version, expected):
    monkeypatch.setattr(packing, "installed_version", lambda name: version)
    assert outcome("ours/visible-padding", packed(**IN_BATCH, context_parallel=2)) == expected


@pytest.mark.parametrize(("rule", "broken", "fixed", "severity"), OWN)
def test_a_run_of_bridge_is_not_told_keys_of_our_yaml(
    rule: str, broken: dict[str, Any], fixed: dict[str, Any], severity: str
) -> None:
    found = next(each for each in judge(packed(**{**broken, "source": "bridge"})) if each.rule.id == rule)
    assert found.finding is not None
    assert not re.search(r"(?<![\w.])(training|parallel|packing)\.", found.finding.why + found.finding.fix)


@pytest.mark.parametrize(
    ("changed", "severity", "named"),
    [
        ({}, "ok", ""),
        ({"padding": "real", **WHOLE}, "ok", ""),
        ({"padding": "between", **WHOLE}, "ok", ""),
        ({"model": "Step37", "padding": "real", **WHOLE}, "ok", ""),
        ({"model": "Step37", "padding": "between", **WHOLE}, "error", "to 0, or packing.padding to real"),
        ({"model": "Qwen3VL"}, "error", "Qwen3-VL of Megatron-Bridge has no such layers"),
        ({"model": "GLM45V"}, "error", "its first step raises"),
        ({"context_parallel": 2, "padding": "real"}, "error", "each rank's own part of a row"),
        ({"eval_context_parallel": 2, "padding": "real"}, "error", "each rank's own part of a row"),
        ({"model": "Qwen3MoE"}, "error", "prompts and padding are predicted too"),
        ({"step": "gpt_step"}, "error", "prompts and padding are predicted too"),
    ],
)
@pytest.mark.parametrize("version", ["0.6.2", "0.7.0"])
def test_several_predicted_tokens_are_judged_by_what_the_installed_step_and_layout_do(
    version, changed, severity, named
) -> None:
    view = packed(**{"mtp_num_layers": 1, "model": "Qwen35VL", "bridge_version": version, **changed})
    found = next(each for each in judge(view) if each.rule.id == "ours/no-multi-token-prediction")
    assert found.outcome == severity
    assert named in (f"{found.finding.why}; {found.finding.fix}." if found.finding else "")


@pytest.mark.parametrize("version", ["0.6.2", "0.7.0"])
def test_nemotron_omni_is_told_which_step_gives_its_experts_the_padding_mask(version) -> None:
    view = packed(**MOE, model="NemotronOmni", context_parallel=2, world_size=2, bridge_version=version)
    found = next(each for each in judge(view) if each.rule.id == "ours/experts-see-padding")
    assert (found.outcome, found.finding and found.finding.fix) == (
        "warning",
        "train with the forward step energon_packing.bridge.step.forward_step",
    )


def test_what_to_change_is_called_as_the_runs_own_source_calls_it() -> None:
    odd = packed(world_size=4, global_batch_size=6, eval_global_batch_size=8, context_parallel=2)
    for source, key in (("ours", "training.global"), ("bridge", "train.global"), ("argument", "--global-batch-size")):
        found = next(each for each in judge(odd.changed(source=source, world_size=16)) if each.outcome == "error")
        assert found.finding is not None
        assert f"set {key}" in found.finding.fix


def test_a_plain_packed_run_breaks_nothing() -> None:
    assert {judgement.outcome for judgement in judge(packed())} <= {"ok", "not applicable"}


PIPELINE = IN_BATCH | {"pipeline_parallel": 2}
DEFERRED = {"defer_in_batch_packing_to_step": True}
OMNI = PIPELINE | {"dataset_kind": "hf_sft", "model": "NemotronOmni"}
FP8 = {"fp8_recipe": "delayed", "pipeline_parallel": 2}


BOTH = {"enable_in_batch_packing": True}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
OURS = OVERLAP | {"dataset_kind": "packed_energon", "enable_offline_packing": True}
QWEN3 = {"model": "Qwen3VLMoE", "step": "vlm_step", "bridge_version": "0.7.0", "context_parallel": 2, "world_size": 4}
JOINED = {"enable_offline_packing": False, "has_offline_packing_specs": False, "enable_in_batch_packing": True}
JOINED |= {"micro_batch_size": 2, "cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ("attn",)}


def of_length(length: int, tensor: int = 1, context: int = 1, shared: bool = False) -> dict[str, Any]:
    layout = {"tensor_parallel": tensor, "context_parallel": context, "world_size": 2 * tensor * context}
    return layout | {"dataset_seq_length": length, "sequence_parallel": shared, "expert_tensor_parallel": 1}


@pytest.mark.parametrize(
    ("rule", "view", "expected"),
    [
        # Families whose model raises on packed rows are refused however they are packed.
        ("ours/family-takes-packs", packed(**{"model": "Qwen3-Omni-30B-A3B"}), "error"),
        ("ours/family-takes-packs", packed(**(IN_BATCH | {"model": "Qwen3-Omni-30B-A3B"})), "error"),
        ("ours/family-takes-packs", packed(**(IN_BATCH | {"model": "Qwen35VL", "step": "vlm_step"})), "ok"),
        ("ours/family-takes-packs", packed(**OMNI), "not applicable"),  # nobody looked at it
        # A step that packs itself may do so where packing is left to it.
        ("ours/step-reads-packs", packed(**(IN_BATCH | {"step": "qwen3_vl_step"})), "error"),
        ("ours/step-reads-packs", packed(**(IN_BATCH | DEFERRED | {"step": "qwen3_vl_step"})), "not applicable"),
        # Rows packed in the batch have no tail that experts could see; those that Bridge widens for experts have one.
        ("ours/experts-see-padding", packed(**(IN_BATCH | MOE | {"pad_to_max_length": True})), "ok"),
        (
            "ours/experts-see-padding",
            packed(**(IN_BATCH | MOE | {"pad_to_max_length": True, "context_parallel": 2})),
            "warning",
        ),
        ("ours/experts-see-padding", packed(**(MOE | {"expert_parallel": 2, "world_size": 2})), "warning"),
        ("ours/experts-see-padding", packed(**MOE), "ok"),
        # Only rows that have a width are said to get one: the in-batch packer does not read `pad_to_max_length`.
        ("bridge/fixed-width", packed(**PIPELINE), "not applicable"),
        ("bridge/variable-lengths", packed(**PIPELINE), "note"),
        ("bridge/fixed-width", packed(**(PIPELINE | DEFERRED)), "note"),
        ("bridge/fixed-width", packed(**OMNI), "note"),
        ("ours/in-batch-row-length", packed(**OMNI), "not applicable"),
        # Rows whose width Bridge fixes are judged by it.
        ("ours/fp8-multiple", packed(**FP8), "ok"),
        (
            "ours/fp8-multiple",
            packed(**(FP8 | dict.fromkeys(("dataset_seq_length", "model_seq_length"), 4100))),
            "error",
        ),
        ("bridge/native-one-packing-mode", NATIVE.changed(**BOTH), "error"),
        ("bridge/native-no-average-in-collective", NATIVE.changed(**{"average_in_collective": True}), "error"),
        # What Bridge turns off itself is a note there, and an error for other packers.
        ("bridge/native-no-overlap", NATIVE.changed(**OVERLAP), "note"),
        ("ours/no-schedule-plan", NATIVE.changed(**OVERLAP), "not applicable"),
        ("ours/no-schedule-plan", NATIVE.changed(**OURS), "error"),
        ("bridge/native-no-overlap", NATIVE.changed(**OURS), "not applicable"),
        # Qwen3-VL of 0.7 finds the padding itself where its boundaries show it: not at multiple 1, nor if it is real.
        ("ours/experts-see-padding", EXPERTS.changed(**QWEN3, padding="between"), "ok"),
        ("ours/experts-see-padding", EXPERTS.changed(**QWEN3), "warning"),
        ("ours/experts-see-padding", EXPERTS.changed(**(QWEN3 | {"bridge_version": "0.6.2"})), "warning"),
        ("ours/experts-see-padding", EXPERTS.changed(**(QWEN3 | {"model": "GLM45V"})), "warning"),
        ("ours/experts-see-padding", EXPERTS.changed(**(QWEN3 | {"context_parallel": 1, "world_size": 2})), "warning"),
        # HybridEP gets equally many tokens of each rank, in whole chunks of 128.
        ("ours/equal-dispatch", OVER_HYBRIDEP, "ok"),
        ("ours/equal-dispatch", OVER_HYBRIDEP.changed(**JOINED), "error"),
        ("ours/equal-dispatch", OVER_HYBRIDEP.changed(**(JOINED | {"cuda_graph_impl": "none"})), "ok"),
        ("ours/equal-dispatch", OVER_HYBRIDEP.changed(**(JOINED | {"pads_uneven_dispatch": True})), "ok"),
        ("ours/equal-dispatch", OVER_HYBRIDEP.changed(**(JOINED | {"expert_dispatcher": None})), "not applicable"),
        ("ours/hybridep-chunks", OVER_HYBRIDEP.changed(**of_length(4096)), "ok"),
        ("ours/hybridep-chunks", OVER_HYBRIDEP.changed(**of_length(4096 + 64)), "warning"),
        ("ours/hybridep-chunks", OVER_HYBRIDEP.changed(**of_length(4096, context=32)), "ok"),
        ("ours/hybridep-chunks", OVER_HYBRIDEP.changed(**of_length(4096, context=64)), "warning"),
        ("ours/hybridep-chunks", OVER_HYBRIDEP.changed(**of_length(1024, tensor=8, shared=True)), "ok"),
        ("ours/hybridep-chunks", OVER_HYBRIDEP.changed(**of_length(1024, tensor=16, shared=True)), "warning"),
        ("ours/hybridep-chunks", OVER_HYBRIDEP.changed(**of_length(1024, tensor=16)), "ok"),
    ],
)
def test_what_a_rule_says_of_a_run(rule: str, view: RunView, expected: str) -> None:
    assert outcome(rule, view) == expected


def test_nobody_is_sent_to_our_step_where_its_hooks_are_bypassed() -> None:
    view = packed(**GRAPHS, step="vlm_step")
    (found,) = [judgement for judgement in judge(view) if judgement.rule.id == "ours/experts-see-padding"]
    assert found.finding is not None
    assert "set cuda_graph_impl to 'none'" in found.finding.fix
    fixed = view.changed(cuda_graph_impl="none", step="energon_packing.bridge.step")
    assert violations(fixed) == []
    assert outcome("ours/padding-mask-under-graphs", fixed) == "not applicable"


def test_no_message_of_bridge_is_claimed_by_two_rules() -> None:
    fragments = [(fragment, rule) for rule in all_rules() for fragment in rule.bridge_says]
    assert all(rule_that_bridge_named(f"before {fragment} after") is rule for fragment, rule in fragments)


def test_our_data_set_is_declared_to_bridge_as_packed_rows_unless_bridge_packs_in_the_batch() -> None:
    online = view_of_config(RunConfig())
    assert online.enable_offline_packing
    assert online.has_offline_packing_specs
    assert online.packed_sequence_size == online.dataset_seq_length
    in_batch = view_of_config(RunConfig(training=TrainingConfig(enable_in_batch_packing=True, micro_batch_size=2)))
    assert not in_batch.enable_offline_packing
    assert not violations(in_batch.changed(global_batch_size=2))


@pytest.mark.parametrize(
    ("model", "takes_packs", "listed"),
    [
        ("foo", "not applicable", "warning"),
        ("InternVL3-8B", "not applicable", "warning"),
        ("Qwen3-8B", "ok", "ok"),
        ("gpt", "ok", "ok"),
        ("Qwen3-VL-8B", "ok", "ok"),
        ("GLM-4.5V", "ok", "ok"),
        ("GLM-4.5-Air", "error", "ok"),
        ("Qwen/Qwen3-8B", "ok", "ok"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "error", "ok"),
        ("google/gemma-3-27b-it", "error", "ok"),
        ("google/gemma-3-1b-it", "ok", "ok"),
        ("Qwen/Qwen3.5-9B", "ok", "ok"),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "not applicable", "warning"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "not applicable", "warning"),
    ],
)
def test_only_a_known_model_is_said_to_keep_samples_apart(model: str, takes_packs: str, listed: str) -> None:
    view = view_of_config(RunConfig(training=TrainingConfig(model=model)))
    assert outcome("ours/family-takes-packs", view) == takes_packs
    assert outcome("ours/family-listed", view) == listed


def test_without_a_world_size_one_replica_of_training_and_evaluation_is_judged() -> None:
    parallel = ParallelConfig(tensor_parallel=2, context_parallel=2, eval_context_parallel=4, pipeline_parallel=3)
    assert view_of_config(RunConfig(parallel=parallel)).world_size == 2 * 3 * 4


def test_the_static_rules_need_neither_torch_nor_bridge() -> None:
    program = (
        "import sys\n"
        "from energon_packing.validate.run_source import view_of_config\n"
        "from energon_packing.validate.rules.rule import judge\n"
        "import energon_packing.cli.validate\n"
        "from energon_packing.config import RunConfig\n"
        "judge(view_of_config(RunConfig()))\n"
        "print([m for m in ('torch', 'megatron', 'numpy', 'transformers') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_versions_of_megatron_core_are_ordered_as_packages_are() -> None:
    packaging = pytest.importorskip("packaging.version")
    for version in ("0.9.0", "0.17.0", "0.18.0rc1", "0.18.0.dev1", "0.18", "0.18.0", "0.18.1rc0", "0.19.2", "1.0.0"):
        old = packaging.Version(version) < packaging.Version("0.18.0")
        view = packed(context_parallel=2, megatron_core_version=version)
        assert (outcome("core/context-parallel-packs", view) == "error") == old, version


def test_rows_of_bridges_own_packing_are_packed_rows_from_0_7_on() -> None:
    assert errors(NATIVE) == []
    assert packing_of(NATIVE) == ("online", "Megatron-Bridge 0.7.0")
    assert NATIVE.packed
    assert NATIVE.reaches_the_step_packed
    assert NATIVE.rows_are_packs
    before = NATIVE.changed(bridge_version="0.6.2")
    assert not before.packed
    assert errors(before) == ["ours/bridges-own-packing"]
    assert not NATIVE.changed(dataset_kind="packed_energon").packs_natively
    assert not NATIVE.changed(packing_buffer_size=None).packed


def test_batches_of_bridges_own_packing_count_packs() -> None:
    view = NATIVE.changed(data=facts(samples=100))
    assert view.rows_per_epoch == 10
    assert view.changed(bridge_version="0.6.2").rows_per_epoch == 100
    assert resolved_summary(view, assumed=False)["packs_per_epoch"] == 10


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("bridge/native-buffer-size", {"packing_buffer_size": 0}),
        ("bridge/native-not-left-to-the-step", {"defer_in_batch_packing_to_step": True}),
        ("bridge/native-one-pack-a-micro-batch", {"micro_batch_size": 2, "global_batch_size": 2}),
        ("bridge/native-task-encoder", {"task_encoder": "HFEnergonTaskEncoderConfig"}),
        ("bridge/native-task-encoder", {"task_encoder": "NemotronOmniEnergonTaskEncoderConfig"}),
        ("bridge/native-per-token-loss", {"calculate_per_token_loss": False}),
        ("bridge/native-no-multi-token-prediction", {"mtp_num_layers": 1}),
        ("bridge/native-no-graphs", {"cuda_graph_impl": "full_iteration"}),
        ("bridge/native-no-graphs", {"vision_cuda_graph_impl": "transformer_engine"}),
        ("bridge/native-no-dist-train", {"dist_train": True}),
        ("bridge/native-no-pipeline", {"pipeline_parallel": 2, "world_size": 2}),
        ("ours/step-reads-packs", {"step": "qwen3_vl_step"}),
        ("ours/family-takes-packs", {"model": "Gemma3VL"}),
        ("ours/attention-kernel", {"head_dim": 288, "attention_backend": "fused"}),
        ("bridge/epochs-need-finite-data", {"num_epochs": 1}),
    ],
)
def test_what_bridges_own_packing_cannot_do_is_refused_by_one_rule(rule: str, broken: dict[str, Any]) -> None:
    view = NATIVE.changed(**broken)
    assert errors(view) == [rule]


def test_rules_of_0_7_say_nothing_of_0_6_and_the_other_way_round() -> None:
    versioned = [rule for rule in all_rules() if rule.since > (0, 6) or rule.before]
    assert len(versioned) >= 11
    for rule in versioned:
        old, new = (NATIVE.changed(bridge_version=version) for version in ("0.6.2", "0.7.0rc1"))
        assert rule.concerns(old) == (rule.before is not None)
        assert not (rule.before is not None and rule.concerns(new))


def test_epochs_are_counted_for_whole_batches_of_data_whose_size_is_known() -> None:
    finite = RunView(dataset_kind="gpt_sft", num_epochs=2, dataloader_type="batch")
    assert errors(finite) == []
    assert errors(finite.changed(dataloader_type="cyclic")) == ["bridge/epochs-need-whole-batches"]
    for kind in ("packed_energon", "energon", "hf_sft", "gpt_pretraining", "provider"):
        view = finite.changed(dataset_kind=kind)  # type: ignore[arg-type]
        assert errors(view) == ["bridge/epochs-need-finite-data"]
        assert errors(view.changed(num_epochs=None)) == []


@pytest.mark.parametrize("step", ["gpt_step", "vlm_step"])
@pytest.mark.parametrize("scopes", [(), ("attn",), ("moe_router",), ("attn", "moe_preprocess")])
def test_graphs_with_a_router_are_refused_where_0_7_gives_it_a_padding_mask(step: str, scopes: tuple[str, ...]) -> None:
    model = "gpt" if step == "gpt_step" else "Qwen3VLMoE"
    captured = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": scopes, "pad_cu_seqlens": True}
    view = EXPERTS.changed(
        **captured,
        dataset_kind="gpt_sft" if step == "gpt_step" else "energon",
        overlap_grad_reduce=False,
        context_parallel=2,
        world_size=4,
        bridge_version="0.7.0",
        model=model,
        step=step,
        pad_to_max_length=True,
    )
    attention_only = scopes == ("attn",)
    assert outcome("ours/padding-mask-under-graphs", view) == ("ok" if attention_only else "error")
    before = view.changed(bridge_version="0.6.2")  # where both steps drop the mask: a warning
    assert outcome("ours/padding-mask-under-graphs", before) == "not applicable"
    assert outcome("ours/experts-see-padding", before) == "warning"


def test_experts_with_a_capacity_are_warned_of_padding_that_takes_their_room() -> None:
    limited = EXPERTS.changed(expert_parallel=1, expert_capacity_factor=1.25, context_parallel=2, world_size=2)
    assert outcome("ours/capacity-and-padding", limited) == "warning"
    for change in ({"expert_capacity_factor": None}, {"expert_capacity_factor": -1.0}):
        assert outcome("ours/capacity-and-padding", limited.changed(**change)) == "not applicable"
    unpadded = limited.changed(context_parallel=1)
    widened = unpadded.changed(expert_parallel=2)
    assert outcome("ours/capacity-and-padding", widened) == "warning"
    assert outcome("ours/capacity-and-padding", unpadded) == "ok"


def test_a_checkout_on_the_path_is_the_version_that_runs(tmp_path, monkeypatch) -> None:
    package = tmp_path / "megatron" / "bridge"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "package_info.py").write_text('MAJOR = 0\nMINOR = 7\nPATCH = 1\nPRE_RELEASE = "rc2"\n')
    installed_version.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert installed_version("megatron-bridge") == "0.7.1rc2"
    finally:
        installed_version.cache_clear()
