"""Padding masks for layers with experts, and routers that count a row's real tokens.

The forward of a vision model takes no padding mask, so its experts would balance their load over padding. Here the mask
travels on the row's ``PackedSeqParams``, which Megatron-Core hands to every layer of every pipeline stage, and again to
a layer that is recomputed. So it is the mask of the right micro-batch even where several are in flight.

Megatron-Core's own count is wrong under a mask. It has two defects up to 0.20, and one that stays with the count that
its repair proposes (Megatron-LM#7481):

* ``TopKRouter._apply_expert_bias`` combines a mask ``[tokens]`` with a routing map ``[tokens, experts]`` and stops
  (Megatron-LM#6111; repaired in 0.20).
* ``get_tokens_per_expert_and_token_count`` reduces the local count in place, so it is the count of the whole group.
  With ``calculate_per_token_loss`` the balance losses are multiplied by it *and* by the size of the group: at TP 2 and
  CP 4 they are eight times too strong (Megatron-LM#7452).
* A rank's own count times the size of the group is the row's count only if padding is spread evenly over the ranks. It
  is not: a row's tail lies on the last rank.

So a router is given each expert's real tokens without a mask, and the row's count divided by the ranks that share it.
Both are right whether or not the installed version has the defects. `docs/thd.md` has the report.
"""

from copy import copy
from functools import partial
from types import MethodType
from typing import Any

import torch

from energon_packing.errors import ConfigError

_REPAIRED = "_energon_packing_running_mask"
"""Attribute of a repaired router: the mask of the call of `routing` that is under way, or None."""


def count_real_tokens(model: torch.nn.Module) -> bool:
    """Makes the routers of a model count real tokens for as long as the model lives, where they get a padding mask;
    returns whether the model has such layers. Without a mask a router computes what it computed before. Call it again
    as often as you like. Raises ConfigError: a router balances each sequence (``seq_aux_loss``): it would take a packed
    row for one sequence."""
    from megatron.core.transformer.moe.router import TopKRouter

    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        if router.get_aux_loss_coeff("seq_aux_loss") > 0:
            why = "'seq_aux_loss' balances each sequence, but a packed row holds many and would count as one"
            fix = "set it to 'aux_loss', which is what it would compute, or moe_aux_loss_coeff to 0"
            raise ConfigError(f"moe_router_load_balancing_type {why}; {fix} (rule ours/balance-per-sequence).")
        if not hasattr(router, _REPAIRED):
            _repair(router)
    return bool(routers)


def _repair(router: Any) -> None:
    setattr(router, _REPAIRED, None)
    for name, repaired in (
        ("routing", _routing),
        ("_apply_aux_loss", _apply_aux_loss),
        ("_apply_global_aux_loss", partial(_balance, "_apply_global_aux_loss")),
        ("_apply_expert_bias", _apply_expert_bias),
        ("attach_and_log_load_balancing_loss", _attach_by_the_rows_count),
    ):
        setattr(router, name, MethodType(repaired, router))  # of the router, so that a deep copy has its own


def _routing(router: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None, **more: Any) -> Any:
    setattr(router, _REPAIRED, padding_mask)  # of the call that is under way
    try:
        return type(router).routing(router, logits, padding_mask=padding_mask, **more)
    finally:
        setattr(router, _REPAIRED, None)


def _apply_aux_loss(router: Any, probs: Any, scores_for_aux_loss: torch.Tensor, *rest: Any, **more: Any) -> Any:
    """Keeps NaN from the scores, which all balance losses share: Megatron-Core divides by the row's real tokens, and a
    row of padding alone (the end of an epoch) has none."""
    mask = getattr(router, _REPAIRED)
    if mask is not None and scores_for_aux_loss.requires_grad:
        scores_for_aux_loss.register_hook(lambda gradient: gradient.masked_fill(mask.reshape(-1, 1), 0))
    return _balance("_apply_aux_loss", router, probs, scores_for_aux_loss, *rest, **more)


def _balance(name: str, router: Any, *given: Any, **keywords: Any) -> Any:
    """Computes a balance loss without its fused kernel under a mask, where Megatron-Core divides the count of tokens:
    Transformer Engine takes an integer, waits for it once per layer before 2.18, then refuses a fraction."""
    config = router.config
    if getattr(router, _REPAIRED) is not None and getattr(config, "moe_router_fusion", False):
        router.config = copy(config)
        router.config.moe_router_fusion = False
    try:
        return getattr(type(router), name)(router, *given, **keywords)
    finally:
        router.config = config


def _apply_expert_bias(router: Any, routing_map: torch.Tensor, padding_mask: Any = None, **more: Any) -> Any:
    if padding_mask is not None and router.enable_expert_bias:
        routing_map = routing_map & ~padding_mask.reshape(-1, 1)
    return type(router)._apply_expert_bias(router, routing_map, **more)


def _attach_by_the_rows_count(  # with Megatron's names of the parameters, as it may be called by them
    router: Any, activation: torch.Tensor, aux_loss_coeff: float, aux_loss: torch.Tensor, *rest: Any, **more: Any
) -> Any:
    mask = getattr(router, _REPAIRED)
    if mask is not None:
        count, group = (~mask).sum(), router.tp_cp_group
        if group.size() > 1:
            torch.distributed.all_reduce(count, group=group)
        if router.calculate_per_token_loss:
            more["valid_token_count"] = count / group.size()
        aux_loss = torch.nan_to_num(aux_loss)  # see `_apply_aux_loss`
    return type(router).attach_and_log_load_balancing_loss(router, activation, aux_loss_coeff, aux_loss, *rest, **more)


_ON_PARAMS = "energon_packing_padding_mask"
_HOOKED = "_energon_packing_hooked"


def put_mask(params: Any, mask: torch.Tensor) -> None:
    """Sends a mask with a row: ``[1, t]`` bool, True on padding, of the t tokens that this rank's layers hold."""
    setattr(params, _ON_PARAMS, mask)


def experts_read_masks(model: torch.nn.Module) -> bool:
    """Makes layers with experts read the mask that `put_mask` sent; returns whether there is such a layer. Hooks each
    model once; the hooks do nothing for a row without a mask. Routers then count real tokens right
    (`count_real_tokens`). Raises ConfigError: see `count_real_tokens`."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    found: bool | None = getattr(model, _HOOKED, None)
    if found is None:
        layers = [module for module in model.modules() if isinstance(getattr(module, "mlp", None), BaseMoELayer)]
        for layer in layers:
            layer.register_forward_pre_hook(_take_mask_from_params, with_kwargs=True)
        count_real_tokens(model)
        found = bool(layers)
        setattr(model, _HOOKED, found)
    return found


def _take_mask_from_params(_layer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if (mask := getattr(keywords.get("packed_seq_params"), _ON_PARAMS, None)) is None:
        return None
    # Replaces an existing mask too: Qwen3-VL of Bridge 0.7 derives one from the boundaries, which count the masked rest
    # of a row as a sample.
    return arguments, {**keywords, "padding_mask": mask}
