"""Rotary embeddings of packed rows in one piece."""

import functools
from typing import Any

import torch


def rotate_rows_whole() -> None:
    """Makes Megatron-Core's unfused rotary embedding apply a table with one entry per token of the row as it is.

    ``_apply_rotary_pos_emb_thd`` (0.19.2, and main at 2a75ac12) cuts such a table at every boundary and joins the same
    pieces again. It reads each boundary from the device for that: in every layer the host waits twice per sample. The
    result is the same bit for bit; other tables, and those of context parallelism, go to Megatron-Core. Call it again
    as often as you like.
    """
    from megatron.core.models.common.embeddings import rope_utils

    by_segment = rope_utils._apply_rotary_pos_emb_thd
    if hasattr(by_segment, "__wrapped__"):
        return

    @functools.wraps(by_segment)
    def rotate(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *more: Any, **named: Any) -> Any:
        group = named.get("cp_group")
        if more or group is None or group.size() > 1 or freqs.size(0) != t.size(0):
            return by_segment(t, cu_seqlens, freqs, *more, **named)
        form = {name: value for name, value in named.items() if name != "cp_group"}
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, **form).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate
