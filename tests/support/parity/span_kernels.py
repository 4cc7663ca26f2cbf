"""Linear attention of a packed row on a CPU: transformers' own reference, restarted at every boundary.

On a GPU the layers of Qwen3.5 call ``causal_conv1d_fn`` (boundaries as ``seq_idx``) and the chunked rule of
flash-linear-attention (boundaries as ``cu_seqlens``). transformers' CPU code takes both arguments and ignores them, so
the state of a packed row would run through all samples. Here both are computed per segment, by the boundaries that the
layer passes to its kernels. A forward pass that does not receive boundaries still leaks, which is the control.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional


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
