r"""Qwen3-VL on packed rows: Bridge's own recipes with the data set changed, five of them with context parallelism.

Judge one in a fresh checkout; without ``--no-data`` also what it reads, once the data sets of ``BLEND`` are there::

    energon-packing validate bridge_configs.qwen3_vl:qwen3_vl_8b_sft --world-size 8 --step vlm_step --no-data \
        --set checkpoint.pretrained_checkpoint=null

Train the 8B with ``vlm_step`` and the mixtures of experts with ``energon_packing.bridge.step.forward_step``, which
keeps padding out of the routers' load balance; ``qwen3_vl_step``, which Bridge's recipes go with, refuses packed rows.
None has sequence parallelism, with which Qwen3-VL loses gradients of images (rule ours/deepstack-over-tensor-ranks).
``GPUS`` is what each recipe needs, with 80 GB each by the estimate of ``validate``. Every context-parallel rank encodes
all images of its row, some 1 MB for each patch (0.7 at TP 2), so ``within_memory`` limits them.
"""

from __future__ import annotations

from typing import Any

from megatron.bridge.recipes import qwen_vl

from bridge_configs import CHECKPOINTS, recipe, within_memory
from energon_packing.bridge.dataset import use_packed_data

DATA = "data/packed"
BLEND = "bridge_configs/data/blend.yaml"

GPUS = {
    "qwen3_vl_8b_sft": 8,
    "qwen3_vl_8b_sft_long": 32,
    "qwen3_vl_8b_peft": 8,
    "qwen3_vl_30b_a3b_sft": 16,
    "qwen3_vl_30b_a3b_sft_long": 64,
    "qwen3_vl_30b_a3b_peft": 8,
    "qwen3_vl_235b_a22b_sft": 256,
    "qwen3_vl_235b_a22b_peft": 64,
}


@recipe(weights="Qwen3-VL-8B-Instruct")
def qwen3_vl_8b_sft(data: str = BLEND) -> Any:
    """8 GPUs: TP 2, DP 4; on a blend of two data sets."""
    cfg = use_packed_data(qwen_vl.qwen3_vl_8b_sft_config(), data, seq_length=8192, global_batch_size=16)
    return within_memory(cfg, patches=16384, all_layers=False)


@recipe(weights="Qwen3-VL-8B-Instruct")
def qwen3_vl_8b_sft_long(data: str = DATA) -> Any:
    """32 GPUs: TP 2, CP 8, DP 2; rows of 65,536 tokens."""
    cfg = use_packed_data(qwen_vl.qwen3_vl_8b_sft_config(), data, seq_length=65536, global_batch_size=8)
    cfg.model.context_parallel_size = 8
    return within_memory(cfg, patches=32768, all_layers=False)


@recipe()
def qwen3_vl_8b_peft(data: str = DATA) -> Any:
    """8 GPUs: TP 1, DP 8; LoRA."""
    cfg = use_packed_data(qwen_vl.qwen3_vl_8b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen3-VL-8B-Instruct"
    return within_memory(cfg, patches=16384, all_layers=False)


@recipe(weights="Qwen3-VL-30B-A3B-Instruct")
def qwen3_vl_30b_a3b_sft(data: str = DATA) -> Any:
    """16 GPUs: CP 2, EP 16, DP 8."""
    cfg = use_packed_data(qwen_vl.qwen3_vl_30b_a3b_sft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.model.context_parallel_size, cfg.model.expert_model_parallel_size = 2, 16
    return within_memory(cfg, patches=8192, all_layers=False)


@recipe(weights="Qwen3-VL-30B-A3B-Instruct")
def qwen3_vl_30b_a3b_sft_long(data: str = BLEND) -> Any:
    """64 GPUs: CP 4, EP 16, DP 16; rows of 32,768 tokens; on a blend of two data sets."""
    cfg = use_packed_data(qwen_vl.qwen3_vl_30b_a3b_sft_config(), data, seq_length=32768, global_batch_size=16)
    cfg.model.context_parallel_size, cfg.model.expert_model_parallel_size = 4, 16
    return within_memory(cfg, patches=16384, all_layers=False)


@recipe()
def qwen3_vl_30b_a3b_peft(data: str = DATA) -> Any:
    """8 GPUs: EP 4, DP 8; LoRA."""
    cfg = use_packed_data(qwen_vl.qwen3_vl_30b_a3b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen3-VL-30B-A3B-Instruct"
    return within_memory(cfg, patches=16384, all_layers=False)


@recipe(weights="Qwen3-VL-235B-A22B-Instruct")
def qwen3_vl_235b_a22b_sft(data: str = DATA) -> Any:
    """256 GPUs: PP 2, CP 4, EP 64, DP 32; TP 1, because this provider turns sequence parallelism on with TP."""
    cfg = use_packed_data(qwen_vl.qwen3_vl_235b_a22b_sft_config(), data, seq_length=16384, global_batch_size=32)
    cfg.model.tensor_model_parallel_size, cfg.model.expert_tensor_parallel_size = 1, 1
    cfg.model.pipeline_model_parallel_size, cfg.model.context_parallel_size = 2, 4
    cfg.model.expert_model_parallel_size = 64
    return within_memory(cfg, patches=8192, all_layers=False)


@recipe()
def qwen3_vl_235b_a22b_peft(data: str = DATA) -> Any:
    """64 GPUs: CP 4, EP 32, DP 16; LoRA."""
    cfg = use_packed_data(qwen_vl.qwen3_vl_235b_a22b_peft_config(), data, seq_length=8192, global_batch_size=64)
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen3-VL-235B-A22B-Instruct"
    cfg.model.context_parallel_size, cfg.model.expert_model_parallel_size = 4, 32
    return within_memory(cfg, patches=8192, all_layers=False)
