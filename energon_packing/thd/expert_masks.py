"""The padding mask of a packed row, on its way to the layers with experts of any model.

The forward of a vision model takes no padding mask, so its experts would balance their load over padding. Here the mask
travels on the row's ``PackedSeqParams``, which Megatron-Core hands to every layer of every pipeline stage, and again to
a layer that is recomputed. So it is the mask of the right micro-batch even where several are in flight.
"""

from __future__ import annotations

from typing import Any

import torch

from energon_packing.thd.routers import count_real_tokens

_ON_PARAMS = "energon_packing_padding_mask"
_HOOKED = "_energon_packing_hooked"


def put_mask(params: Any, mask: torch.Tensor) -> None:
    """Sends a mask along with a row.

    Args:
        params: the ``PackedSeqParams`` that the model is called with.
        mask: ``[1, t]`` bool, True where the token is padding, of the t tokens that this rank's layers hold.
    """
    setattr(params, _ON_PARAMS, mask)


def experts_read_masks(model: torch.nn.Module) -> bool:
    """Makes layers with experts read the mask that `put_mask` sent; returns whether there is such a layer.

    Hooks each model once; the hooks do nothing for a row without a mask. Routers then count real tokens right
    (`count_real_tokens`).

    Args:
        model: a model chunk without its wrappers.

    Raises:
        ConfigError: see `count_real_tokens`.
    """
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
    mask = getattr(keywords.get("packed_seq_params"), _ON_PARAMS, None)
    if mask is None:
        return None
    # Replaces an existing mask too: Qwen3-VL of Bridge 0.7 derives one from the boundaries, which count the masked rest
    # of a row as a sample.
    return arguments, {**keywords, "padding_mask": mask}
