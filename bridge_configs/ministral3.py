r"""Ministral 3 on packed rows: Bridge's own recipes with the data set changed. Train with ``vlm_step``.

Judge one in a fresh checkout; without ``--no-data`` also what it reads, once ``data/packed`` is there::

    energon-packing validate bridge_configs.ministral3:ministral3_8b_sft --world-size 8 --step vlm_step --no-data \
        --set checkpoint.pretrained_checkpoint=null

Its vision encoder is Hugging Face's Pixtral: every rank has all of it, nothing recomputes it, and it masks all patches
of a row against each other. ``within_memory`` limits them. ``validate`` has no estimate of memory for it. ``GPUS`` is
where weights, gradients and optimizer take half of an 80 GB card at most.

Values of ``bridge_configs/hf``: the defaults of ``Ministral3Config`` (the 8B model's) and of the vision encoder of
``Mistral3Config`` in transformers 5.12.1, and Bridge's ``Ministral3ModelProvider``.
"""

from __future__ import annotations

from typing import Any

from megatron.bridge.recipes import ministral3
from megatron.core.transformer.enums import AttnBackend

from bridge_configs import CHECKPOINTS, recipe, within_memory
from energon_packing.bridge.dataset import use_packed_data

DATA = "data/packed"

GPUS = {"ministral3_8b_sft": 8, "ministral3_8b_peft": 8}


@recipe(weights="Ministral-3-8B-Instruct-2512")
def ministral3_8b_sft(data: str = DATA) -> Any:
    """8 GPUs: TP 2, DP 4."""
    cfg = use_packed_data(ministral3.ministral3_8b_sft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.model.attention_backend = AttnBackend.auto  # Bridge's "flash" is a text, which Megatron-Core ignores
    return within_memory(cfg)


@recipe()
def ministral3_8b_peft(data: str = DATA) -> Any:
    """8 GPUs: TP 1, DP 8; LoRA."""
    cfg = use_packed_data(ministral3.ministral3_8b_peft_config(), data, seq_length=8192, global_batch_size=16)
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/Ministral-3-8B-Instruct-2512"
    cfg.model.attention_backend = AttnBackend.auto  # Bridge's "flash" is a text, which Megatron-Core ignores
    return within_memory(cfg)
