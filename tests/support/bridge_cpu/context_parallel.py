"""Context parallelism of the CPU stand-in for attention: every rank sees the keys and values of all ranks.

Transformer Engine passes keys and values round a ring; here they are gathered, and each rank's queries attend to what
they would see in the whole row. `energon_packing.thd.context_parallel.context_parallel_indices` determines which token
lies on which rank; a test checks that it equals Transformer Engine's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from energon_packing.thd.context_parallel import context_parallel_indices


class _GatherTokens(torch.autograd.Function):
    """Gathers the tokens of all ranks, one rank after the other; gradients return to the rank that owns the token."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        """``own``: ``[tokens of this rank, ...]``, the same on every rank; returns ``[tokens of all ranks, ...]``."""
        ctx.group, ctx.tokens = group, own.size(0)
        parts = [torch.empty_like(own) for _ in range(group.size())]
        torch.distributed.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Every rank used all tokens, so the gradient of a token is the sum over the ranks."""
        gradient = gradients[0].contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.tokens)[ctx.group.rank()], None


def attend_over_ranks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: list[tuple[int, int]],
    boundaries: torch.Tensor,
    group: Any,
    *,
    causal: bool,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention inside segments for the tokens that this rank holds.

    Args:
        query: ``[t, heads, width]``, this rank's tokens in its own order, ``t = T / group size``.
        key: as ``query``.
        value: as ``query``.
        segments: ``(start, real end)`` of each segment in the whole row.
        boundaries: int32, physical boundaries of the whole row, which it was sliced by.
        group: the context-parallel process group; all of its ranks call.
        causal: no token sees a later one of its segment.
        scale: of the logits; None means ``width ** -0.5``.
        dropout: probability.

    Returns:
        ``[t, heads, width]``; zero where a token belongs to no segment.
    """
    by_rank = [context_parallel_indices(boundaries, group.size(), rank) for rank in range(group.size())]
    place = torch.empty(sum(indices.numel() for indices in by_rank), dtype=torch.long)
    place[torch.cat(by_rank)] = torch.arange(place.numel())  # index of each token of the row among the gathered ones
    keys, values = (_GatherTokens.apply(tensor, group)[place] for tensor in (key, value))
    own = by_rank[group.rank()]
    out = query.new_zeros(*query.shape[:-1], value.size(-1))
    for start, stop in segments:
        mine = torch.nonzero((own >= start) & (own < stop)).flatten()
        if not mine.numel():
            continue
        seen = torch.arange(start, stop)
        allowed = (own[mine][:, None] >= seen[None]) if causal else None
        attended = functional.scaled_dot_product_attention(
            query[mine].transpose(0, 1),
            keys[start:stop].transpose(0, 1),
            values[start:stop].transpose(0, 1),
            attn_mask=allowed,
            dropout_p=dropout,
            scale=scale,
        )
        out = out.index_copy(0, mine, attended.transpose(0, 1).to(out.dtype))
    return out


class PartitionedIndices:
    """Stands in for the extension module ``transformer_engine_torch`` when Megatron-Core slices packed rows."""

    @staticmethod
    def thd_get_partitioned_indices(
        cu_seqlens: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
    ) -> torch.Tensor:
        """Positions of the whole row that rank ``cp_rank`` holds, int64; ``total_tokens`` is the row's length."""
        indices = context_parallel_indices(cu_seqlens, cp_size, cp_rank)
        if indices.numel() * cp_size != total_tokens:
            raise ValueError(f"the boundaries end at {int(cu_seqlens[-1])}, but the row has {total_tokens} tokens")
        return indices
