"""Attention on a CPU: a stand-in for Transformer Engine's, one segment at a time.

Exact (fp32, no approximation) and slow. `stand_ins` puts it into Bridge's models; it needs only Megatron-Core.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn import functional

from energon_packing.errors import UserError
from energon_packing.thd.context_parallel import context_parallel_indices

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
"""The mask types of language layers; a vision tower has others."""
_ignore_boundaries = False


class SegmentAttention(MegatronModule):
    """Attention by `torch.nn.functional.scaled_dot_product_attention`, one call per segment.

    Stands in for Transformer Engine's ``DotProductAttention`` with ``qkv_format="thd"``: segment ``i`` starts at
    ``cu_seqlens_q_padded[i]`` (``cu_seqlens_q[i]`` where there are no padded boundaries) and has the real length
    ``cu_seqlens_q[i + 1] - cu_seqlens_q[i]``. Tokens between the real end of a segment and its physical end neither
    attend nor are attended to; their output is zero. Causal for language layers, full for the vision tower; with the
    window of ``config.window_size`` in the layers that have it, and with sinks where ``softmax_type`` asks for them.
    Ranks share a row over ``packed_seq_params.cp_group`` where ``local_cp_size`` is set, else over the layer's group.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1 and pg_collection is None:
            raise UserError("The CPU stand-in for attention needs the process groups for context parallelism.")
        # Bridge replaces the group under this name for an evaluation with another context-parallel size.
        self.cp_group = None if pg_collection is None else pg_collection.cp
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        window, frequency = (getattr(config, name, None) for name in ("window_size", "window_attn_skip_freq"))
        self.window = window if is_layer_window_attention(window, frequency, layer_number) else None
        kind, heads = getattr(config, "softmax_type", "vanilla"), getattr(config, "num_attention_heads", 0)
        sinks = torch.zeros(heads // getattr(config, "tensor_model_parallel_size", 1))
        self.softmax_offset = (
            None if kind == "vanilla" else torch.nn.Parameter(sinks, requires_grad=kind == "learnable")
        )
        if config.apply_query_key_layer_scaling:
            head_width = config.kv_channels
            self.softmax_scale = (softmax_scale or head_width**-0.5) / max(1, layer_number)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Returns attention inside segments, ``[t, heads * width]`` or ``[s, b, heads * width]``.

        Args:
            query: ``[t, heads, width]`` with ``packed_seq_params``, else ``[s, b, heads, width]``.
            key, value: as ``query``, with ``groups`` heads.
            attn_mask_type: overrides the layer's own.
        """
        if attention_bias is not None:
            raise NotImplementedError("the CPU stand-in for attention does not support a bias")
        causal = (attn_mask_type or self.attn_mask_type) in CAUSAL
        group = self.cp_group if self.config.context_parallel_size > 1 else None
        if packed_seq_params is not None and getattr(packed_seq_params, "local_cp_size", None) is not None:
            # As Megatron-Core's layer for Transformer Engine follows the row.
            group = packed_seq_params.cp_group
        spread = group is not None and group.size() > 1
        if packed_seq_params is None:
            if spread:
                raise NotImplementedError(
                    "the CPU stand-in for attention supports context parallelism only for packed rows"
                )
            rows = [self._attend(query[:, b], key[:, b], value[:, b], causal) for b in range(query.size(1))]
            return torch.stack(rows, dim=1).flatten(2)
        if _ignore_boundaries and causal:
            return self._attend(query, key, value, causal).flatten(1)
        if spread:
            return self._attend_over_ranks(query, key, value, packed_seq_params, group, causal).flatten(1)
        pieces: list[torch.Tensor] = []
        end = 0
        for start, stop in (*physical_segments(packed_seq_params), (query.size(0),) * 2):
            pieces.append(query.new_zeros(start - end, *query.shape[1:-1], value.size(-1)))
            if stop > start:
                pieces.append(self._attend(query[start:stop], key[start:stop], value[start:stop], causal))
            end = stop
        return torch.cat(pieces).flatten(1)

    def _attend_over_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed: PackedSeqParams,
        group: Any,
        causal: bool,
    ) -> torch.Tensor:
        repeat = query.size(1) // key.size(1)
        key, value = (tensor.repeat_interleave(repeat, dim=1) for tensor in (key, value))
        boundaries = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        return attend_over_ranks(
            query,
            key,
            value,
            physical_segments(packed),
            boundaries,
            group,
            causal=causal,
            scale=self.softmax_scale,
            dropout=self.dropout if self.training else 0.0,
            window=self.window,
            sinks=self.softmax_offset,
        )

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
        """Plain attention over one segment: ``[t, heads, width]`` in and out."""
        repeat = query.size(1) // key.size(1)
        if repeat > 1:
            key, value = (tensor.repeat_interleave(repeat, dim=1) for tensor in (key, value))
        places = torch.arange(query.size(0))
        if self.window is None and self.softmax_offset is None:
            out = functional.scaled_dot_product_attention(
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                is_causal=causal,
                dropout_p=self.dropout if self.training else 0.0,
                scale=self.softmax_scale,
            )
            return out.transpose(0, 1)
        return attend(
            *(query, key, value),
            seen(places, places, causal=causal, window=self.window),
            sinks=self.softmax_offset,
            dropout=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
        )


def seen(
    queries: torch.Tensor, keys: torch.Tensor, *, causal: bool, window: tuple[int, int] | None = None
) -> torch.Tensor | None:
    """Returns which keys a query sees by their places in a segment, bool ``[queries, keys]``; None if all.

    Args:
        window: places before and after its own, each -1 for all, as ``window_size`` of Transformer Engine.
    """
    before, after = window or (-1, -1)
    limits = ((1, before), (-1, 0 if causal else after))
    distance = queries[:, None] - keys[None]
    parts = [sign * distance <= limit for sign, limit in limits if limit >= 0]
    return functools.reduce(torch.logical_and, parts) if parts else None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    *,
    sinks: torch.Tensor | None,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """Returns softmax attention, ``[queries, heads, width]``; a sink ``[heads]`` is one more logit, of no value."""
    if sinks is not None:  # a key and a value of zeros, with the sink as its logit
        key, value = (functional.pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (key, value))
        if allowed is None:
            allowed = torch.ones(query.size(0), key.size(0) - 1, dtype=torch.bool)
        bias = query.new_zeros(allowed.shape).masked_fill(~allowed, float("-inf")).expand(sinks.numel(), -1, -1)
        allowed = torch.cat((bias, sinks.to(query)[:, None, None].expand(-1, query.size(0), 1)), dim=2)
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        attn_mask=allowed,
        dropout_p=dropout,
        scale=scale,
    )
    return out.transpose(0, 1)


def physical_segments(packed: PackedSeqParams) -> list[tuple[int, int]]:
    """``(start, real end)`` of each segment in the physical row; segments of length zero are left out."""
    real = packed.cu_seqlens_q
    physical = real if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    lengths = (real[1:] - real[:-1]).tolist()
    return [(start, start + length) for start, length in zip(physical[:-1].tolist(), lengths, strict=True) if length]


@contextlib.contextmanager
def ignore_boundaries() -> Iterator[None]:
    """The control of every parity test: inside the block, causal attention runs over the whole row."""
    global _ignore_boundaries
    before, _ignore_boundaries = _ignore_boundaries, True
    try:
        yield
    finally:
        _ignore_boundaries = before


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


def whole(own: torch.Tensor, boundaries: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the tokens of the whole row in their order, ``[T, ...]``, of which each rank holds ``[T / size, ...]``.

    Args:
        boundaries: int32, the physical boundaries that the row was sliced by.
        group: the context-parallel process group; all of its ranks call.
    """
    by_rank = [context_parallel_indices(boundaries, group.size(), rank) for rank in range(group.size())]
    place = torch.empty(sum(indices.numel() for indices in by_rank), dtype=torch.long)
    place[torch.cat(by_rank)] = torch.arange(place.numel())  # index of each token of the row among the gathered ones
    return _GatherTokens.apply(own, group)[place]


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
    window: tuple[int, int] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns attention inside segments for the tokens that this rank holds, ``[t, heads, width]``; zero where a token
    belongs to no segment.

    Transformer Engine passes keys and values round a ring; here they are gathered, and each rank's queries attend to
    what they would see in the whole row. A test checks that `context_parallel_indices` equals Transformer Engine's.

    Args:
        query, key, value: ``[t, heads, width]``, this rank's tokens in its own order, ``t = T / group size``.
        segments: ``(start, real end)`` of each segment in the whole row.
        boundaries: int32, physical boundaries of the whole row, which it was sliced by.
        group: the context-parallel process group; all of its ranks call.
    """
    keys, values = (whole(tensor, boundaries, group) for tensor in (key, value))
    own = context_parallel_indices(boundaries, group.size(), group.rank())
    out = query.new_zeros(*query.shape[:-1], value.size(-1))
    for start, stop in segments:
        mine = torch.nonzero((own >= start) & (own < stop)).flatten()
        if not mine.numel():
            continue
        attended = attend(
            *(query[mine], keys[start:stop], values[start:stop]),
            seen(own[mine], torch.arange(start, stop), causal=causal, window=window),
            sinks=sinks,
            dropout=dropout,
            scale=scale,
        )
        out = out.index_copy(0, mine, attended.to(out.dtype))
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
