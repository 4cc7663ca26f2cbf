"""Attention of a Hugging Face model as context-parallel ranks compute it, all of them in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from energon_packing.thd import PackedBatch, context_parallel_indices

_RANKED = "energon_packing_ranks"
_ranks: list[torch.Tensor] = []


def _attention_by_rank(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention like context parallelism with an all-gather, all ranks in turn: ``[1, heads, T, width]``."""
    repeat = query.shape[1] // key.shape[1]
    gathered = torch.cat(_ranks)
    keys = key.repeat_interleave(repeat, dim=1)[:, :, gathered]
    values = value.repeat_interleave(repeat, dim=1)[:, :, gathered]
    out = query.new_empty(query.shape[:-1] + value.shape[-1:])
    for own in _ranks:
        part = functional.scaled_dot_product_attention(
            query[:, :, own],
            keys,
            values,
            attn_mask=attention_mask[:, :, own][..., gathered],
            dropout_p=dropout,
            scale=scaling,
        )
        out = out.index_copy(2, own, part)
    return out.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def ranked_attention(model: Any, batch: PackedBatch, cp_size: int) -> Iterator[None]:
    """Makes a model's language layers attend rank by rank inside the block; nothing changes at ``cp_size`` 1."""
    if cp_size == 1:
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(_RANKED, _attention_by_rank)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = _RANKED
    device = next(model.parameters()).device
    _ranks[:] = [context_parallel_indices(batch.boundaries, cp_size, rank).to(device) for rank in range(cp_size)]
    try:
        yield
    finally:
        config._attn_implementation = before
        _ranks.clear()
