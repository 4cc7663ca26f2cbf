r"""Qwen2.5-VL on packed rows: Bridge's own recipes with the data set changed.

Judge one in a fresh checkout; without ``--no-data`` also what it reads, once ``data/packed`` is there::

    energon-packing validate bridge_configs.qwen25_vl:qwen25_vl_7b_sft --world-size 8 --step vlm_step --no-data \
        --set checkpoint.pretrained_checkpoint=null

No context parallelism: Bridge's Qwen2.5-VL has no code for it. Train with ``vlm_step``. ``GPUS`` is what each recipe
needs, with 80 GB each by the estimate of ``validate``; more replicas need no other change than a global batch that they
divide. Its vision encoder is Hugging Face's: every rank has all of it, and nothing recomputes it. So a trained one
keeps 2.1 MB for each patch of a row, and ``within_memory`` limits them. Adapters leave it frozen.
"""

from __future__ import annotations

from typing import Any

from megatron.bridge.recipes import qwen_vl

from bridge_configs import CHECKPOINTS, recipe, within_memory
from energon_packing.bridge.dataset import use_packed_data

DATA = "data/packed"

GPUS = {
    "qwen25_vl_3b_sft": 8,
    "qwen25_vl_3b_peft": 8,
    "qwen25_vl_7b_sft": 8,
    "qwen25_vl_7b_peft": 8,
    "qwen25_vl_32b_sft": 32,
    "qwen25_vl_32b_peft": 16,
    "qwen25_vl_72b_sft": 64,
    "qwen25_vl_72b_peft": 32,
}


@recipe(weights="Qwen2.5-VL-3B-Instruct")
def qwen25_vl_3b_sft(data: str = DATA) -> Any:
    """8 GPUs: TP 1, DP 8."""
    cfg = use_packed_data(qwen_vl.qwen25_vl_3b_sft_config(), data, seq_length=8192, global_batch_size=16)
    return within_memory(cfg, patches=16384)


@recipe()
def qwen25_vl_3b_peft(data: str = DATA) -> Any:
    """8 GPUs: TP 1, DP 8; LoRA."""
    cfg = use_packed_data(qwen_vl.qwen25_vl_3b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen2.5-VL-3B-Instruct"
    return cfg


@recipe(weights="Qwen2.5-VL-7B-Instruct")
def qwen25_vl_7b_sft(data: str = DATA) -> Any:
    """8 GPUs: TP 2 with sequence parallelism, DP 4."""
    cfg = use_packed_data(qwen_vl.qwen25_vl_7b_sft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.model.sequence_parallel = True
    return within_memory(cfg, patches=8192)


@recipe()
def qwen25_vl_7b_peft(data: str = DATA) -> Any:
    """8 GPUs: TP 1, DP 8; LoRA."""
    cfg = use_packed_data(qwen_vl.qwen25_vl_7b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen2.5-VL-7B-Instruct"
    return cfg


@recipe(weights="Qwen2.5-VL-32B-Instruct")
def qwen25_vl_32b_sft(data: str = DATA) -> Any:
    """32 GPUs: TP 8 with sequence parallelism, PP 2, DP 2."""
    cfg = use_packed_data(qwen_vl.qwen25_vl_32b_sft_config(), data, seq_length=16384, global_batch_size=16)
    cfg.model.sequence_parallel = True
    return within_memory(cfg, patches=8192)


@recipe()
def qwen25_vl_32b_peft(data: str = DATA) -> Any:
    """16 GPUs: TP 4 with sequence parallelism, DP 4; LoRA."""
    cfg = use_packed_data(qwen_vl.qwen25_vl_32b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.model.tensor_model_parallel_size, cfg.model.sequence_parallel = 4, True
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen2.5-VL-32B-Instruct"
    return cfg


@recipe(weights="Qwen2.5-VL-72B-Instruct")
def qwen25_vl_72b_sft(data: str = DATA) -> Any:
    """64 GPUs: TP 8 with sequence parallelism, PP 2, DP 4."""
    cfg = use_packed_data(qwen_vl.qwen25_vl_72b_sft_config(), data, seq_length=16384, global_batch_size=16)
    cfg.model.sequence_parallel, cfg.model.pipeline_model_parallel_size = True, 2
    return within_memory(cfg, patches=6144)


@recipe()
def qwen25_vl_72b_peft(data: str = DATA) -> Any:
    """32 GPUs: TP 8 with sequence parallelism, DP 4; LoRA."""
    cfg = use_packed_data(qwen_vl.qwen25_vl_72b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.model.tensor_model_parallel_size, cfg.model.sequence_parallel = 8, True
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen2.5-VL-72B-Instruct"
    return cfg
