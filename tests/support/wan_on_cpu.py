"""Bridge's Wan model and its forward step on a machine without a GPU: what is replaced for the length of a test.

What `support.bridge_cpu.stand_ins` replaces already is needed as well. Bridge's own code is not changed.
"""

import contextlib
import importlib
from typing import Any, cast
from unittest import mock

import torch

WAN = "megatron.bridge.diffusion.models.wan"


def boundary_pairs(real: torch.Tensor, physical: torch.Tensor | None) -> list[tuple[int, int]]:
    """``(start, real end)`` of every segment, empty ones too."""
    starts = (real if physical is None else physical)[:-1].tolist()
    return [(start, start + length) for start, length in zip(starts, real.diff().tolist(), strict=True)]


def attention_class() -> type:
    """Attention in which queries and keys have boundaries of their own, as Wan's cross attention has."""
    from energon_packing.thd.context_parallel import context_parallel_indices
    from support.bridge_cpu.attention import SegmentAttention, whole

    class TwoSidedAttention(SegmentAttention):
        def forward(
            self, query: Any, key: Any, value: Any, *_masks: Any, packed_seq_params: Any = None, **_: Any
        ) -> Any:
            """As `SegmentAttention.forward`, segment i of the queries over segment i of the keys; never causal."""
            row = packed_seq_params
            queries = boundary_pairs(row.cu_seqlens_q, row.cu_seqlens_q_padded)
            keys = boundary_pairs(row.cu_seqlens_kv, row.cu_seqlens_kv_padded)
            own, group = torch.arange(query.size(0)), cast("Any", self.cp_group)
            if self.config.context_parallel_size > 1:  # each rank holds its pieces of every clip, and of every text
                own = context_parallel_indices(row.cu_seqlens_q_padded, group.size(), group.rank())
                key, value = (whole(tensor, row.cu_seqlens_kv_padded, group) for tensor in (key, value))
            out = query.new_zeros(query.size(0), query.size(1), value.size(-1))
            for (start, stop), (first, last) in zip(queries, keys, strict=True):
                mine = torch.nonzero((own >= start) & (own < stop)).flatten()
                attended = self._attend(query[mine], key[first:last], value[first:last], False)
                out = out.index_copy(0, mine, attended)
            return out.flatten(1)

    return TwoSidedAttention


class Replaced(contextlib.ExitStack):
    """``monkeypatch`` outside pytest: what `setattr` replaces is put back at the end of the block."""

    def setattr(self, target: Any, *name_and_value: Any) -> None:
        """Replaces ``target.name``, or ``target`` where it is a path."""
        *name, value = name_and_value
        self.enter_context(mock.patch.object(target, name[0], value) if name else mock.patch(target, value))


def install(monkeypatch: Any) -> None:
    """Replaces, until the test ends: Wan's layers, and CUDA as a target of moves and draws."""
    importlib.import_module(f"{WAN}.wan_layer_spec")
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from support.bridge_cpu.modules import TorchNorm

    spec = f"{WAN}.wan_layer_spec"
    monkeypatch.setattr(f"{spec}.TEDotProductAttention", attention_class())
    monkeypatch.setattr(f"{spec}.TENorm", TorchNorm)
    monkeypatch.setattr(f"{spec}.TEColumnParallelLinear", ColumnParallelLinear)
    monkeypatch.setattr(f"{spec}.TERowParallelLinear", RowParallelLinear)
    for owner, name in ((torch.Tensor, "to"), (torch, "rand"), (torch, "normal")):
        monkeypatch.setattr(owner, name, without_cuda(getattr(owner, name)))


def compute_in_float32(monkeypatch: Any) -> None:
    """Makes Wan's model take what the step gives it in fp32; the step rounds it to bfloat16, as does the model's
    embedding of the time, whatever the model is in."""
    from diffusers.models.embeddings import TimestepEmbedding
    from megatron.bridge.diffusion.models.common.dit_embeddings import ParallelTimestepEmbedding
    from megatron.bridge.diffusion.models.wan.wan_model import WanModel

    forward = WanModel.forward

    def in_float32(self: Any, **named: Any) -> Any:
        floats = {name: each for name, each in named.items() if torch.is_tensor(each) and each.is_floating_point()}
        return forward(self, **{**named, **{name: each.float() for name, each in floats.items()}})

    monkeypatch.setattr(WanModel, "forward", in_float32)
    monkeypatch.setattr(ParallelTimestepEmbedding, "forward", TimestepEmbedding.forward)
    torch.compiler.set_stance("force_eager")


def without_cuda(function: Any) -> Any:
    """``function`` with every CUDA device among its arguments read as the CPU."""

    def on_cpu(value: Any) -> Any:
        named = isinstance(value, torch.device | str) and str(value).startswith("cuda")
        return torch.device("cpu") if named else value

    def call(*arguments: Any, **named: Any) -> Any:
        return function(*map(on_cpu, arguments), **{name: on_cpu(value) for name, value in named.items()})

    return call


def tiny_sizes() -> dict[str, Any]:
    """Sizes of a model of two layers for latents of 4 channels and embeddings of width 32."""
    return {
        "num_layers": 2,
        "hidden_size": 48,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "crossattn_emb_size": 48,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
        "freq_dim": 16,
        "seq_length": 96,
        "vocab_size": 512,
    }


def tiny_provider(**changes: Any) -> Any:
    """A `WanModelProvider` of `tiny_sizes` without fused kernels."""
    from megatron.bridge.diffusion.models.wan.wan_provider import WanModelProvider

    fusions = ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "masked_softmax_fusion")
    return WanModelProvider(**{**tiny_sizes(), **dict.fromkeys(fusions, False), **changes})
