"""The loss of packed rows: the weighted sum of token losses, and its divisor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from energon_packing.errors import PackingError

LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def bound_loss(loss_mask: torch.Tensor | None) -> Callable[[torch.Tensor], LossResult]:
    """`loss_func` bound to one micro-batch; stages before the last have no mask and never call it."""
    return partial(loss_func, loss_mask)


def loss_func(loss_mask: torch.Tensor | None, output_tensor: torch.Tensor) -> LossResult:
    """A loss function for Megatron-LM's schedules, to be bound to a mask with `functools.partial`.

    Args:
        loss_mask: weights of the targets that this rank holds; 0 for targets that are not trained.
        output_tensor: their token losses, in the same order.

    Returns:
        The weighted sum; the sum of the weights, rounded to a whole number (the encoder scales fractional weights by a
        factor that makes this exact enough); and both as ``"lm loss"`` for the report, which Megatron-LM sums over
        micro-batches and ranks and divides.

    Raises:
        PackingError: there is no mask, so this is not the last stage.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    if loss_mask is None:
        raise PackingError("a pipeline stage without labels cannot compute a loss")
    weights = loss_mask.reshape(-1).float()
    loss = torch.sum(output_tensor.reshape(-1).float() * weights)
    total = weights.sum().detach().round().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        machine = get_rerun_state_machine()
        for refuse, message in ((torch.isnan, "the loss of a packed row is NaN"), (torch.isinf, "it is infinite")):
            machine.validate_result(result=loss, rejection_func=refuse, message=message, tolerance=0.0, fatal=True)
    return loss, total, {"lm loss": torch.stack([loss.detach(), total.to(loss.dtype)])}
