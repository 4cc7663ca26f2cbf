r"""Qwen3, text only, on packed rows: Bridge's own recipes with the data set changed. Train with ``gpt_step``.

Judge one in a fresh checkout; without ``--no-data`` also what it reads, once ``data/packed`` is there::

    energon-packing validate bridge_configs.qwen3:qwen3_8b_sft --world-size 8 --step gpt_step --no-data \
        --set checkpoint.pretrained_checkpoint=null
"""

from __future__ import annotations

from typing import Any

from megatron.bridge.recipes import qwen

from bridge_configs import CHECKPOINTS, recipe
from energon_packing.bridge.dataset import use_packed_data

DATA = "data/packed"

GPUS = {"qwen3_8b_sft": 8, "qwen3_8b_sft_long": 32, "qwen3_8b_peft": 8}


@recipe(weights="Qwen3-8B")
def qwen3_8b_sft(data: str = DATA) -> Any:
    """8 GPUs: TP 4 with sequence parallelism, DP 2."""
    cfg = use_packed_data(qwen.qwen3_8b_sft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.model.sequence_parallel = True
    return cfg


@recipe(weights="Qwen3-8B")
def qwen3_8b_sft_long(data: str = DATA) -> Any:
    """32 GPUs: TP 4 with sequence parallelism, CP 2, PP 2, DP 2; rows of 32,768 tokens."""
    cfg = use_packed_data(qwen.qwen3_8b_sft_config(), data, seq_length=32768, global_batch_size=16)
    cfg.model.sequence_parallel, cfg.model.context_parallel_size = True, 2
    cfg.model.pipeline_model_parallel_size = 2
    return cfg


@recipe()
def qwen3_8b_peft(data: str = DATA) -> Any:
    """8 GPUs: TP 1, DP 8; LoRA."""
    cfg = use_packed_data(qwen.qwen3_8b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Qwen3-8B"
    return cfg
