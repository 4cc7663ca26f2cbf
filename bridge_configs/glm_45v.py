r"""GLM-4.5V on packed rows: Bridge's own recipes with the data set changed.

Judge one where the hub can be reached, or its ``config.json`` lies in ``configs/GLM-4.5V`` (``--model-configs``
``configs``): this checkout has none, as no source here states its vision encoder. Without ``--no-data`` also what it
reads is looked at, once ``data/packed`` is there::

    energon-packing validate bridge_configs.glm_45v:glm_45v_sft --world-size 128 --no-data \
        --step energon_packing.bridge.step --model-configs configs --set checkpoint.pretrained_checkpoint=null

Train with ``energon_packing.bridge.step.forward_step``, which keeps padding out of the routers' load balance. A pack is
no sequence, so the load is balanced by ``aux_loss`` and not by Bridge's ``seq_aux_loss``. No context parallelism:
Bridge's GLM-4.5V has no code for it. ``validate`` has no estimate of memory for layers of experts beside shared ones.
``GPUS`` are those of Bridge's recipes, where weights, gradients and optimizer take half of an 80 GB card at
most, and ``within_memory`` keeps of a row the inputs of layers and no more patches than it names.
"""

from __future__ import annotations

from typing import Any

from megatron.bridge.recipes import glm_vl

from bridge_configs import CHECKPOINTS, recipe, within_memory
from energon_packing.bridge.dataset import use_packed_data

DATA = "data/packed"

GPUS = {"glm_45v_sft": 128, "glm_45v_peft": 32}


@recipe(weights="GLM-4.5V")
def glm_45v_sft(data: str = DATA) -> Any:
    """128 GPUs: PP 8, EP 16, DP 16."""
    cfg = use_packed_data(glm_vl.glm_45v_sft_config(), data, seq_length=8192, global_batch_size=64)
    cfg.model.moe_router_load_balancing_type = "aux_loss"
    return within_memory(cfg)


@recipe()
def glm_45v_peft(data: str = DATA) -> Any:
    """32 GPUs: PP 8, EP 4, DP 4; LoRA."""
    cfg = use_packed_data(glm_vl.glm_45v_peft_config(), data, seq_length=8192, global_batch_size=32)
    cfg.checkpoint.pretrained_checkpoint = f"{CHECKPOINTS}/GLM-4.5V"
    cfg.model.moe_router_load_balancing_type = "aux_loss"
    return within_memory(cfg)
