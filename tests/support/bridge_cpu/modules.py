"""Norms and linear layers on a CPU: stand-ins for Transformer Engine's in the layers of Megatron-Core."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch.nn import functional

from support.bridge_cpu.attention import SegmentAttention


class TorchNorm:
    """Builds torch's LayerNorm or RMSNorm by ``config.normalization``, as ``TENorm`` builds Transformer Engine's."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> Any:
        if config.layernorm_zero_centered_gamma:
            raise NotImplementedError("the CPU stand-in for TENorm does not support a zero-centred gamma")
        kind = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class NormColumnParallelLinear(ColumnParallelLinear):
    """A norm followed by Megatron-Core's `ColumnParallelLinear`, with the parameter names of TE's fused layer."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = dict(TorchNorm(config, input_size, eps=config.layernorm_epsilon).named_parameters())
        self.layer_norm_weight: torch.nn.Parameter = norm["weight"]
        self.layer_norm_bias: torch.nn.Parameter | None
        self.register_parameter("layer_norm_bias", norm.get("bias"))
        self._eps = config.layernorm_epsilon

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The norm over the last axis of ``input_``, then what `ColumnParallelLinear` returns: output and bias."""
        width = (input_.size(-1),)
        if self.config.normalization == "RMSNorm":
            normed = functional.rms_norm(input_, width, self.layer_norm_weight, self._eps)
        else:
            normed = functional.layer_norm(input_, width, self.layer_norm_weight, self.layer_norm_bias, self._eps)
        return super().forward(normed, *args, **kwargs)


class CpuSpecProvider(LocalSpecProvider):
    """The modules of a "Transformer Engine" layer specification: the same slots, filled with modules for a CPU."""

    def column_parallel_layer_norm_linear(self) -> type:
        """Instead of ``TELayerNormColumnParallelLinear``."""
        return NormColumnParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """True, as for Transformer Engine: layers then have no separate norm before a linear layer."""
        return True

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """Instead of ``TENorm``, for every norm."""
        return TorchNorm

    def core_attention(self) -> type:
        """Instead of ``TEDotProductAttention``."""
        return SegmentAttention
