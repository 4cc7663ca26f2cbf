"""Megatron-Core's layers with a state, Mamba and gated delta nets, on a CPU.

Their kernels are CUDA code of other packages (``mamba_ssm``, ``fla``). Here torch computes the same, one span of the
row at a time. A kernel that is told of no boundaries has one span.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from support.bridge_cpu.modules import TorchNorm

HIDDEN = 32


@contextlib.contextmanager
def layer(kind: str) -> Iterator[Any]:
    """A layer with random weights, ``mamba`` or ``gated_delta_net``, inside `process_groups`; its kernels are replaced
    in the block. It takes ``[T, 1, HIDDEN]``, and boundaries as ``packed_seq_params``."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=functional.silu,
        **{"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    )
    parts: dict[str, Any] = {"pg_collection": ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])}
    ends: dict[str, Any] = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    torch.manual_seed(0)
    with contextlib.ExitStack() as replaced:
        for module, kernels in KERNELS.items():
            replaced.enter_context(mock.patch.multiple(module, **kernels))
        if kind == "mamba":  # its norm is a kernel of mamba_ssm too
            yield mamba_mixer.MambaMixer(
                config, mamba_mixer.MambaMixerSubmodules(**ends), HIDDEN, rmsnorm=False, **parts
            )
        else:
            yield gdn.GatedDeltaNet(config, common.GatedDeltaNetSubmodules(out_norm=TorchNorm, **ends), 1, **parts)


def _spans(of: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], lengths: list[int]) -> torch.Tensor:
    """``of`` each span of tensors that hold the row in their second axis, one after the other."""
    parts = zip(*(tensor.split(lengths, dim=1) for tensor in tensors), strict=True)
    return torch.cat([of(*part) for part in parts], dim=1)


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Causal depthwise convolution and SiLU of ``[1, L, channels]`` by ``[channels, width]``."""
    padded = functional.pad(x.transpose(1, 2), (weight.size(1) - 1, 0))
    return functional.silu(functional.conv1d(padded, weight[:, None], bias, groups=weight.size(0))).transpose(1, 2)


def _causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, cu_seqlens: torch.Tensor | None, **_same: Any
) -> tuple[torch.Tensor, None]:
    """As ``fla.modules.convolution``."""
    lengths = [x.size(1)] if cu_seqlens is None else cu_seqlens.diff().tolist()
    return _spans(lambda span: _convolution(span, weight, bias), (x,), lengths), None


def _delta_rule(
    *tensors: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, cu_seqlens: torch.Tensor | None, **_same: Any
) -> tuple[torch.Tensor, None]:
    """As ``fla.ops.gated_delta_rule``, by Megatron-Core's own formula, which takes no boundaries."""
    lengths = [g.size(1)] if cu_seqlens is None else cu_seqlens.diff().tolist()
    return _spans(lambda *span: common.torch_chunk_gated_delta_rule(*span)[0], (*tensors, g, beta), lengths), None


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _scan(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    *,
    D: torch.Tensor,
    headdim: int,
    ngroups: int,
    seq_idx: torch.Tensor | None,
    **_same: Any,
) -> torch.Tensor:
    """As ``mamba_split_conv1d_scan_combined`` of ``mamba_ssm``, without a norm: ``[1, T, heads * headdim]``."""
    heads, width = A.numel(), A.numel() * headdim
    states = (weight.size(0) - width) // 2
    lengths = [zxbcdt.size(1)] if seq_idx is None else torch.unique_consecutive(seq_idx, return_counts=True)[1].tolist()

    def of(span: torch.Tensor) -> torch.Tensor:
        z, x, dt = span.split([width, width + 2 * states, heads], dim=-1)
        x, *groups = _convolution(x, weight, bias)[0].split([width, states, states], dim=-1)
        x, dt = x.unflatten(-1, (heads, headdim)), functional.softplus(dt[0] + dt_bias)
        B, C = (part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 1) for part in groups)
        state, out = x.new_zeros(heads, headdim, B.size(-1)), []
        for at in range(len(x)):
            state = state * (dt[at] * A).exp()[:, None, None] + (dt[at, :, None] * x[at])[..., None] * B[at, :, None]
            out.append((state * C[at, :, None]).sum(-1) + D[:, None] * x[at])
        return torch.stack(out).flatten(1)[None] * functional.silu(z)

    return _spans(of, (zxbcdt,), lengths)


KERNELS: dict[Any, dict[str, Any]] = {
    common: {"HAVE_FLA": True, "l2norm": _l2norm},
    gdn: {"causal_conv1d": _causal_conv1d, "chunk_gated_delta_rule": _delta_rule},
    mamba_mixer: {
        "HAVE_MAMBA_SSM": True,
        "mamba_split_conv1d_scan_combined": _scan,
        "_check_mamba_sequence_packing_support": lambda **_: (True, None),
    },
}
