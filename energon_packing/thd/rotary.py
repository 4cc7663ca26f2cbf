"""Rotary embeddings: exact frequencies of vision encoders, and packed rows in one piece."""

import functools
import inspect
from typing import Any

import torch

_REPAIRED = "_energon_packing_restored_frequencies"
"""Attribute of a model: the number of its frequencies that were restored."""


def repair_rotary(model: torch.nn.Module) -> None:
    """Calls `restore_frequencies` and `rotate_rows_whole` once per model; call it again as often as you like."""
    if not hasattr(model, _REPAIRED):
        setattr(model, _REPAIRED, restore_frequencies(model))
        rotate_rows_whole()


def restore_frequencies(model: torch.nn.Module) -> int:
    """Makes rounded inverse frequencies (``inv_freq``, ``[width / 2]``) float32 again; returns their number.
    Megatron-Core's ``Float16Module`` rounds each buffer to 8 bits of mantissa. Angles of Qwen2.5-VL's patches are then
    wrong by up to 0.26 for an image of 840 x 1288. Bridge 0.6.2 prevents that for Qwen3-VL and Ministral 3 only."""
    restored = 0
    module: Any
    for module in model.modules():
        rounded = dict(module.named_buffers(recurse=False)).get("inv_freq")
        if rounded is None or rounded.dtype not in (torch.bfloat16, torch.float16):
            continue
        if {"dim", "theta"} <= vars(module).keys():
            exact = 1.0 / (module.theta ** (torch.arange(0, module.dim, 2, dtype=torch.float) / module.dim))
        elif getattr(module, "rope_type", "") == "default":
            exact, _ = module.compute_default_rope_parameters(module.config)
        else:
            continue
        module.inv_freq, restored = exact.to(rounded.device), restored + 1
    return restored


def rotate_rows_whole() -> None:
    """Makes Megatron-Core's unfused rotary embedding apply a table with one entry per token of the row as it is.
    ``_apply_rotary_pos_emb_thd`` (0.19.2, and main at 2a75ac12) cuts such a table at every boundary and joins the same
    pieces again. It reads each boundary from the device for that: in every layer the host waits twice per sample. The
    result is the same bit for bit; other tables, and those of context parallelism, go to Megatron-Core. A row that its
    boundaries do not cover is no longer refused here. It changes Megatron-Core for the whole process, once."""
    from megatron.core.models.common.embeddings import rope_utils

    by_segment = rope_utils._apply_rotary_pos_emb_thd
    if hasattr(by_segment, "__wrapped__") or "max_seqlen" in inspect.signature(by_segment).parameters:
        return  # the branch dev waits for nothing

    @functools.wraps(by_segment)
    def rotate(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *more: Any, **named: Any) -> Any:
        if more or (group := named.get("cp_group")) is None or group.size() > 1 or freqs.size(0) != t.size(0):
            return by_segment(t, cu_seqlens, freqs, *more, **named)
        form = {name: value for name, value in named.items() if name != "cp_group"}
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, **form).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate
