"""GPT on packed rows: what Megatron-LM's ``pretrain_gpt.py`` imports in place of its own data functions.

from energon_packing.megatron_lm.gpt import forward_step, parse_and_validate_args
from energon_packing.megatron_lm.gpt import train_valid_test_datasets_provider
"""

from functools import partial
from typing import Any

import torch

from energon_packing.encoders.encoder import innermost, refuse_untaken, takes
from energon_packing.errors import ConfigError, PackingError
from energon_packing.megatron_lm.arguments import NO_SCHEDULE_PLAN, run_config_of
from energon_packing.megatron_lm.dataloader import (
    StageBatch,
    get_batch,
    parse_and_validate_args,
    scheduled_batch,
    train_valid_test_datasets_provider,
)
from energon_packing.thd.rotary import repair_rotary
from energon_packing.thd.routers import experts_read_masks

__all__ = ["forward_step", "parse_and_validate_args", "train_valid_test_datasets_provider"]


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[torch.Tensor, Any]:
    """One micro-batch forward, as Megatron-LM's schedules call it. Returns token losses on the last stage, hidden
    states elsewhere; and the loss function. Raises ConfigError: a schedule plan is requested, which takes no
    boundaries, or the data have images, or fields per token, for another model."""
    batch = read(data_iterator, return_schedule_plan)
    return called_by_name(model, batch), partial(loss_func, batch.loss_mask)


def called_by_name(model: Any, batch: StageBatch) -> Any:
    """What a model returns whose forward takes Hugging Face's names, as Megatron-Core's GPT does."""
    return model(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        attention_mask=None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
        **inputs_of(model, batch),
    )


def read(data_iterator: Any, schedule_plan: bool, **how: Any) -> StageBatch:
    """`get_batch`, with its arguments ``how``, under Megatron-LM's timer; counts the real tokens for its FLOPs report.
    Raises `ConfigError`: a schedule plan is requested."""
    from megatron.training import get_args, get_timers, training

    if schedule_plan:
        raise ConfigError(NO_SCHEDULE_PLAN)
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    scheduled = getattr(get_args(), "sequence_packing_scheduler", None)
    if scheduled and how:
        raise ConfigError("This forward step needs whole rows, and Megatron-Core's scheduler cuts them; remove it.")
    batch = scheduled_batch(data_iterator) if scheduled else get_batch(data_iterator, **how)
    count = getattr(training, "update_seqlen_stats_from_cu_seqlens", None)  # from Megatron-Core 0.19 on
    if count is not None and not scheduled:  # else the scheduler has told the lengths of the step
        count(batch.cu_seqlens)
    timers("batch-generator").stop()
    return batch


def inputs_of(model: Any, batch: StageBatch) -> dict[str, torch.Tensor]:
    """What the model reads besides tokens, by the names of its forward: media, the family's fields per token, padding.
    The mask reaches experts even if the forward does not take it, see `energon_packing.thd.routers`. Raises
    ConfigError: the model's forward does not take what the processor makes for it; or a router would count wrongly."""
    from megatron.training import get_args

    given = {**(batch.visual_inputs or {}), **batch.model_inputs}
    refuse_untaken(model, given, lambda: run_config_of(get_args()).encoder)
    experts_read_masks(innermost(model))
    repair_rotary(innermost(model))
    return given | ({"padding_mask": batch.padding_mask} if takes(model, "padding_mask") else {})


def loss_func(
    loss_mask: torch.Tensor | None, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """A loss function for Megatron-LM's schedules, to be bound with `functools.partial` to a mask: the weights of the
    targets that this rank holds, 0 for those that are not trained; None on stages before the last, which never call it.
    Returns the weighted sum; the sum of the weights, rounded to a whole number (the encoder scales fractional weights
    by a factor that makes this exact enough); and both as ``"lm loss"`` for the report, which Megatron-LM sums over
    micro-batches and ranks and divides. Raises PackingError: there is no mask, so this is not the last stage."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    if loss_mask is None:
        raise PackingError("a pipeline stage without labels cannot compute a loss")
    weights = loss_mask.reshape(-1).float()
    loss = torch.sum(output_tensor.reshape(-1).float() * weights)
    total = weights.sum().detach().round().to(torch.int)
    args, checks = get_args(), []
    if args.check_for_nan_in_loss_and_grad:
        checks = [(loss, torch.isnan, "the loss of a packed row is NaN"), (loss, torch.isinf, "it is infinite")]
    if getattr(args, "check_for_spiky_loss", False):  # of the mean, because rows differ in targets
        large = partial(get_rerun_state_machine().is_unexpectedly_large, threshold=10, context="loss")
        checks += [(loss / total.clamp(min=1), large, "the loss of a packed row is unexpectedly large")]
    for result, rejects, message in checks:
        fatal = rejects in (torch.isnan, torch.isinf)
        get_rerun_state_machine().validate_result(result, rejects, message=message, tolerance=0.0, fatal=fatal)
    return loss, total, {"lm loss": torch.stack([loss.detach(), total.to(loss.dtype)])}
