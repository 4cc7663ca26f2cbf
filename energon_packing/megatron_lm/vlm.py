"""Vision-language models on packed rows: what ``pretrain_vlm.py`` imports in place of its own data functions.

    from energon_packing.megatron_lm.vlm import forward_step, parse_and_validate_args
    from energon_packing.megatron_lm.vlm import train_valid_test_datasets_provider

Two kinds of model are recognised: Megatron-Core's ``LLaVAModel``, and models whose forward takes the Hugging Face
names (``pixel_values``, ``image_grid_thw``, ...), such as Megatron-Bridge's Qwen-VL classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from energon_packing.encoders.model_forward import innermost
from energon_packing.megatron_lm.arguments import add_energon_packing_args, parse_and_validate_args
from energon_packing.megatron_lm.batch import StageBatch, get_batch
from energon_packing.megatron_lm.dataloader import train_valid_test_datasets_provider
from energon_packing.megatron_lm.gpt import inputs_of, read, refuse_schedule_plan
from energon_packing.megatron_lm.llava import check_pipeline_width, image_placeholder, llava_inputs
from energon_packing.megatron_lm.loss import bound_loss, loss_func

__all__ = [
    "add_energon_packing_args",
    "forward_step",
    "get_batch",
    "loss_func",
    "parse_and_validate_args",
    "train_valid_test_datasets_provider",
]


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[torch.Tensor, Any]:
    """One micro-batch forward, as Megatron-LM's schedules call it.

    Args:
        data_iterator: of this rank.
        model: a ``LLaVAModel`` or a model with Hugging Face's argument names, wrapped or not.
        return_schedule_plan: refused; a plan takes no boundaries.

    Returns:
        Token losses on the last stage, hidden states elsewhere; and the loss function.

    Raises:
        ConfigError: a schedule plan is requested, or the processor does not fit the model.
    """
    from megatron.core.models.multimodal.llava_model import LLaVAModel

    refuse_schedule_plan(return_schedule_plan)
    batch = read(data_iterator, whole_row=True)
    call = _call_llava if isinstance(innermost(model), LLaVAModel) else _call_by_name
    output = call(model, batch)
    # A model that slices the row for context parallelism returns the mask of its own tokens.
    output, loss_mask = output if isinstance(output, tuple) else (output, batch.loss_mask)
    return output, bound_loss(loss_mask)


def _call_llava(model: Any, batch: StageBatch) -> Any:
    inner = innermost(model)
    more = inputs_of(model, replace(batch, visual_inputs=None))  # checks of media are the next lines'
    check_pipeline_width(inner, batch)
    inputs = llava_inputs(
        batch,
        placeholder=image_placeholder(),
        image_token_index=inner.image_token_index,
        tokens_per_tile=inner.img_seq_len,
    )
    # Images are passed by position, because the mixed-precision wrapper casts those. The mask is passed by name and so
    # is not cast: weights of targets would lose digits in 16 bits.
    return model(
        inputs.images,
        inputs.tokens,
        inputs.position_ids,
        None,
        labels=inputs.labels,
        loss_mask=inputs.loss_mask,
        num_image_tiles=inputs.tiles,
        packed_seq_params=batch.packed_seq_params,
        **more,
    )


def _call_by_name(model: Any, batch: StageBatch) -> Any:
    return model(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        attention_mask=None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
        **inputs_of(model, batch),
    )
