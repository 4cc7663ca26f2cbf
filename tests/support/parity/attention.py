"""Attention of a packed row in a Hugging Face model on a CPU: masks, context-parallel ranks, linear attention.

Masks: each token sees what it would see in its sample alone; besides the causal rule, sliding layers see a window, and
the tokens of one image of Gemma 3 see each other in both directions.

Linear attention: on a GPU the layers of Qwen3.5 call ``causal_conv1d_fn`` (boundaries as ``seq_idx``) and the chunked
rule of flash-linear-attention (boundaries as ``cu_seqlens``). transformers' CPU code takes both arguments and ignores
them, so both are computed per segment here, by the boundaries that the layer passes to its kernels. A forward pass that
does not receive boundaries still leaks, which is the control.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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


def written_mask(
    config: Any, segment: torch.Tensor, images: torch.Tensor | None, *, isolate: bool
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Returns the mask or masks that the language model takes as ``attention_mask``.

    Args:
        config: of the language model; ``layer_types`` and ``sliding_window`` are read.
        segment: int64 ``[T]``, number of the sample that each token belongs to.
        images: bool ``[T]``, tokens that see each other within a run in both directions; None if the model is causal.
        isolate: tokens see their own segment only; without it the whole row, as if there were no boundaries.

    Returns:
        bool ``[1, 1, T, T]``, True where a query (second last axis) sees a key; if the model has sliding layers, one
        such mask per layer type.
    """
    order = torch.arange(segment.numel(), device=segment.device)
    causal = order[:, None] >= order[None, :]
    kinds = getattr(config, "layer_types", None) or ()
    masks = {"full_attention": causal}
    if "sliding_attention" in kinds:
        masks["sliding_attention"] = causal & (order[:, None] - order[None, :] < config.sliding_window)
    for name, mask in masks.items():
        if images is not None:
            mask = mask | _same_image(images)
        if isolate:
            mask = mask & (segment[:, None] == segment[None, :])
        masks[name] = mask[None, None]
    return masks if len(masks) > 1 else masks["full_attention"]


def _same_image(images: torch.Tensor) -> torch.Tensor:
    """Whether two tokens stand in one uninterrupted run of image tokens, ``[T, T]``."""
    starts = images & ~torch.cat([images.new_zeros(1), images[:-1]])
    run = torch.where(images, starts.cumsum(0), 0)
    return (run[:, None] == run[None, :]) & images[:, None]


def linear_layers(model: Any) -> list[Any]:
    """Returns the layers with a gated delta rule; empty for models with softmax attention only."""
    return [layer for layer in model.modules() if hasattr(layer, "chunk_gated_delta_rule") and hasattr(layer, "conv1d")]


def kernel_arguments(physical: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the forward arguments for such layers: ``cu_seq_lens_q`` int32 ``[S + 1]``, ``seq_idx`` int32 ``[1, T]``.

    Args:
        physical: boundaries ``[S + 1]`` of the segments in the row, padding included.
    """
    segment = torch.repeat_interleave(torch.arange(physical.numel() - 1, device=physical.device), physical.diff())
    return {"cu_seq_lens_q": physical.int(), "seq_idx": segment.int()[None]}


@contextlib.contextmanager
def span_kernels(model: Any) -> Iterator[None]:
    """Makes the layers' CPU code respect boundaries inside the block; layers with their own kernels keep them."""
    layers = linear_layers(model)
    before = [(layer.chunk_gated_delta_rule, layer.causal_conv1d_fn) for layer in layers]
    for layer in layers:
        if layer.chunk_gated_delta_rule.__module__.startswith("transformers."):
            layer.chunk_gated_delta_rule = _rule_by_span(layer.chunk_gated_delta_rule)
        if layer.causal_conv1d_fn is None:
            layer.causal_conv1d_fn = _conv_by_span
    try:
        yield
    finally:
        for layer, (rule, conv) in zip(layers, before, strict=True):
            layer.chunk_gated_delta_rule, layer.causal_conv1d_fn = rule, conv


def _rule_by_span(rule: Callable[..., Any]) -> Callable[..., Any]:
    def by_span(*tensors: Any, g: Any, beta: Any, cu_seqlens: torch.Tensor | None = None, **settings: Any) -> Any:
        """``tensors`` (query, key, value), ``g`` and ``beta`` hold the row in their second axis."""
        if cu_seqlens is None:
            return rule(*tensors, g=g, beta=beta, **settings)
        lengths = cu_seqlens.diff().tolist()
        parts = zip(*(tensor.split(lengths, dim=1) for tensor in (*tensors, g, beta)), strict=True)
        made = [rule(*part[:-2], g=part[-2], beta=part[-1], **settings)[0] for part in parts]
        return torch.cat(made, dim=1), None

    return by_span


def _conv_by_span(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str, seq_idx: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal depthwise convolution of ``x`` ``[1, channels, T]`` by ``weight`` ``[channels, width]``."""
    if activation not in ("silu", "swish"):
        raise NotImplementedError(f"the convolution's activation is {activation!r}; only silu is supported here")
    lengths = [x.shape[-1]] if seq_idx is None else torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    width = weight.shape[-1]
    made = [
        functional.conv1d(functional.pad(part, (width - 1, 0)), weight[:, None], bias, groups=weight.shape[0])
        for part in x.split(lengths, dim=-1)
    ]
    return functional.silu(torch.cat(made, dim=-1))
