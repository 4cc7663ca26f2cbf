r"""Qwen3.5-VL on packed rows: Bridge's own recipes with the data set changed.

Judge one in a fresh checkout; without ``--no-data`` also what it reads, once ``data/packed`` is there::

    energon-packing validate bridge_configs.qwen35_vl:qwen35_vl_9b_sft --world-size 8 --step vlm_step --no-data \
        --set checkpoint.pretrained_checkpoint=null

Train the dense models with ``vlm_step``, and 35B-A3B with ``energon_packing.bridge.step.forward_step``, which keeps
padding out of the routers' load balance. ``validate`` has no estimate of memory for layers with gated delta nets.
``GPUS`` is where weights, gradients and optimizer take half of an 80 GB card at most; the other half is for a row, of
which ``within_memory`` keeps the inputs of layers and no more patches than it names.

Values of ``bridge_configs/hf``: Bridge's ``Qwen35VLModelProvider`` (27B, and what all have) and its unit test, the
defaults of ``Qwen3_5TextConfig`` (9B), ``Qwen3_5MoeTextConfig`` (35B-A3B) and ``Qwen3_5VisionConfig`` of transformers
5.12.1; patches are merged to the width of the language model.
"""

from __future__ import annotations

from typing import Any

from megatron.bridge.recipes import qwen_vl

from bridge_configs import CHECKPOINTS, recipe, within_memory
from energon_packing.bridge.dataset import use_packed_data

DATA = "data/packed"

GPUS = {
    "qwen35_vl_9b_sft": 8,
    "qwen35_vl_9b_peft": 8,
    "qwen35_vl_27b_sft": 16,
    "qwen35_vl_27b_peft": 8,
    "qwen35_vl_35b_a3b_sft": 32,
    "qwen35_vl_35b_a3b_peft": 8,
}


@recipe(weights="Qwen3.5-9B")
def qwen35_vl_9b_sft(data: str = DATA) -> Any:
    """8 GPUs: TP 4, DP 2."""
    cfg = use_packed_data(qwen_vl.qwen35_vl_9b_sft_config(), data, seq_length=8192, global_batch_size=16)
    return within_memory(cfg)


@recipe()
def qwen35_vl_9b_peft(data: str = DATA) -> Any:
    """8 GPUs: TP 1, DP 8; LoRA."""
    cfg = use_packed_data(qwen_vl.qwen35_vl_9b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen3.5-9B"
    return within_memory(cfg)


@recipe(weights="Qwen3.5-27B")
def qwen35_vl_27b_sft(data: str = DATA) -> Any:
    """16 GPUs: TP 4, PP 4, DP 1."""
    cfg = use_packed_data(qwen_vl.qwen35_vl_27b_sft_config(), data, seq_length=8192, global_batch_size=16)
    return within_memory(cfg)


@recipe()
def qwen35_vl_27b_peft(data: str = DATA) -> Any:
    """8 GPUs: TP 2, DP 4; LoRA."""
    cfg = use_packed_data(qwen_vl.qwen35_vl_27b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen3.5-27B"
    return within_memory(cfg)


@recipe(weights="Qwen3.5-35B-A3B")
def qwen35_vl_35b_a3b_sft(data: str = DATA) -> Any:
    """32 GPUs: EP 32, DP 32."""
    cfg = use_packed_data(qwen_vl.qwen35_vl_35b_a3b_sft_config(), data, seq_length=8192, global_batch_size=32)
    cfg.model.tensor_model_parallel_size, cfg.model.sequence_parallel = 1, False
    cfg.model.pipeline_model_parallel_size, cfg.model.expert_model_parallel_size = 1, 32
    # Of the two stages in Bridge 0.7.
    cfg.model.num_layers_in_first_pipeline_stage = cfg.model.num_layers_in_last_pipeline_stage = None
    return within_memory(cfg)


@recipe()
def qwen35_vl_35b_a3b_peft(data: str = DATA) -> Any:
    """8 GPUs: EP 8, DP 8; LoRA."""
    cfg = use_packed_data(qwen_vl.qwen35_vl_35b_a3b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.model.tensor_model_parallel_size, cfg.model.sequence_parallel = 1, False
    cfg.model.expert_model_parallel_size = 8
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen3.5-35B-A3B"
    return within_memory(cfg)
