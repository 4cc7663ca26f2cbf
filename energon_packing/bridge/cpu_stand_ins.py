"""Everything that is replaced so that Megatron-Bridge's own code runs on a CPU, in one place.

Megatron-Bridge needs CUDA devices and Transformer Engine. A machine without them can still run its unmodified
configuration, data, model, step and training code, if the lines that name a CUDA device and the Transformer Engine
modules lead somewhere else. `REPLACED` is the complete list, with a reason for each entry; `install` carries it out,
`uninstall` takes it back. Nothing else of Bridge or Megatron-Core is touched, and no file of theirs is changed.

The stand-ins are exact (fp32, no approximation) and slow. They are for tests, the demo and `energon-packing parity`;
on a machine with a GPU and Transformer Engine `install` replaces nothing and says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from energon_packing.bridge.cpu_context_parallel import PartitionedIndices, attend_over_ranks
from energon_packing.errors import UserError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, no log records: Megatron says twenty times that Transformer Engine and Apex are absent."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


try:
    with quiet():
        # First of all Megatron imports: it notes here whether Transformer Engine is present.
        from megatron.core.extensions import transformer_engine as mcore_te
        from megatron.core.models.backends import LocalSpecProvider
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.module import MegatronModule
except ImportError as error:
    raise UserError(
        f"Megatron-Core cannot be imported ({error}); install the extra with `pip install 'energon-packing[bridge]'`."
    ) from error

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_ignore_boundaries = False


# --- Attention -------------------------------------------------------------------------------------------------------


class SegmentAttention(MegatronModule):
    """Attention by `torch.nn.functional.scaled_dot_product_attention`, one call a segment.

    Stands in for Transformer Engine's ``DotProductAttention`` with ``qkv_format="thd"``: segment ``i`` lies at
    ``cu_seqlens_q_padded[i]`` (``cu_seqlens_q[i]`` where there are no padded boundaries) and has the real length
    ``cu_seqlens_q[i + 1] - cu_seqlens_q[i]``. Tokens between the real end of a segment and its physical end neither
    attend nor are attended to; their output is zero. Causal for language layers, full for the vision tower.
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
        # Under this name Bridge exchanges the group for an evaluation with another context-parallel size.
        self.cp_group = None if pg_collection is None else pg_collection.cp
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
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
        """Attends inside segments.

        Args:
            query: ``[t, heads, width]`` with ``packed_seq_params``, else ``[s, b, heads, width]``.
            key: as ``query``, with ``groups`` heads.
            value: as ``key``.
            attention_mask: must be None; the boundaries are the mask.
            attn_mask_type: overrides the layer's own.
            attention_bias: must be None.
            packed_seq_params: the boundaries, ``int32 [segments + 1]``.

        Returns:
            ``[t, heads * width]`` or ``[s, b, heads * width]``.
        """
        if attention_bias is not None:
            raise NotImplementedError("the CPU stand-in for attention takes no bias")
        causal = (attn_mask_type or self.attn_mask_type) in _CAUSAL
        spread = self.config.context_parallel_size > 1 and self.cp_group is not None and self.cp_group.size() > 1
        if packed_seq_params is None:
            if spread:
                raise NotImplementedError("the CPU stand-in for attention has context parallelism for packed rows only")
            rows = [self._attend(query[:, b], key[:, b], value[:, b], causal) for b in range(query.size(1))]
            return torch.stack(rows, dim=1).flatten(2)
        if _ignore_boundaries and causal:
            return self._attend(query, key, value, causal).flatten(1)
        if spread:
            return self._attend_over_ranks(query, key, value, packed_seq_params, causal).flatten(1)
        pieces: list[torch.Tensor] = []
        end = 0
        for start, stop in physical_segments(packed_seq_params):
            if start > end:
                pieces.append(query.new_zeros(start - end, *query.shape[1:-1], value.size(-1)))
            pieces.append(self._attend(query[start:stop], key[start:stop], value[start:stop], causal))
            end = stop
        if query.size(0) > end:
            pieces.append(query.new_zeros(query.size(0) - end, *query.shape[1:-1], value.size(-1)))
        return torch.cat(pieces).flatten(1)

    def _attend_over_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams, causal: bool
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
            self.cp_group,
            causal=causal,
            scale=self.softmax_scale,
            dropout=self.dropout if self.training else 0.0,
        )

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
        """Plain attention over one segment: ``[t, heads, width]`` in and out."""
        repeat = query.size(1) // key.size(1)
        if repeat > 1:
            key, value = (tensor.repeat_interleave(repeat, dim=1) for tensor in (key, value))
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            is_causal=causal,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
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
    """The control of every parity test: while it is open, causal attention runs over the whole row."""
    global _ignore_boundaries
    before, _ignore_boundaries = _ignore_boundaries, True
    try:
        yield
    finally:
        _ignore_boundaries = before


# --- Transformer Engine modules --------------------------------------------------------------------------------------


class TorchNorm:
    """Builds torch's LayerNorm or RMSNorm by ``config.normalization``, as ``TENorm`` builds Transformer Engine's."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> Any:
        if config.layernorm_zero_centered_gamma:
            raise NotImplementedError("the CPU stand-in for TENorm has no zero-centred gamma")
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
    """Which modules a "Transformer Engine" layer specification gets: the same slots, filled from this file."""

    def column_parallel_layer_norm_linear(self) -> type:
        """Instead of ``TELayerNormColumnParallelLinear``."""
        return NormColumnParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """As Transformer Engine: layers then have no norm of their own before a linear."""
        return True

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """Instead of ``TENorm``, whichever norm it is for."""
        return TorchNorm

    def core_attention(self) -> type:
        """Instead of ``TEDotProductAttention``."""
        return SegmentAttention


class _Absent(type):
    """The type of placeholder classes: each of their attributes is a placeholder class again (``te.ops.Linear``)."""

    def __getattr__(cls, attribute: str) -> type:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return _Absent(attribute, (torch.nn.Module,), {})


def _placeholder(name: str) -> types.ModuleType:
    """A module whose attributes are empty classes: enough for ``import transformer_engine.pytorch as te``."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    module.__version__ = "0.0.0"  # type: ignore[attr-defined]  # what Megatron-Core reports where TE is absent

    def absent(attribute: str) -> type:
        """An empty class for any public name."""
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Absent(attribute, (torch.nn.Module,), {})

    module.__getattr__ = absent  # type: ignore[method-assign]
    return module


class _PlaceholdersFor(importlib.abc.MetaPathFinder):
    """Lets one module import Transformer Engine placeholders; every other module goes on seeing that TE is absent."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The usual place of the one module, with a loader that lends it the placeholders; None for others."""
        if fullname != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            """Runs the module while the placeholders can be imported, and takes them away again."""
            names = ("transformer_engine", "transformer_engine.pytorch")
            placeholders = [_placeholder(name) for name in names]
            placeholders[0].pytorch = placeholders[1]  # type: ignore[attr-defined]
            sys.modules.update(zip(names, placeholders, strict=True))
            try:
                execute(module)
            finally:
                for name in names:
                    del sys.modules[name]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _import_bridge() -> None:
    """Imports Bridge's training modules; one of them, which all others reach, imports TE without a guard."""
    finder = _PlaceholdersFor("megatron.bridge.peft.lora_layers")
    if not mcore_te.HAVE_TE:
        sys.meta_path.insert(0, finder)
    try:
        with quiet():
            for name in ("models.qwen_vl", "training.setup", "training.train", "training.eval", "training.vlm_step"):
                importlib.import_module(f"megatron.bridge.{name}")
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


# --- CUDA ------------------------------------------------------------------------------------------------------------


def _to_cpu(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _cpu_device(*_args: Any, **_kwargs: Any) -> torch.device:
    return torch.device("cpu")


def _no_random_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


class _NoStream:
    """The CUDA stream of a machine without one: work is done in order, so there is nothing to wait for."""

    wait_stream = synchronize = _nothing

    def record_event(self) -> _NoStream:
        """An event of a stream with nothing to wait for is as good as the stream."""
        return self


_THE_STREAM = _NoStream()


def _no_stream(*_args: Any, **_kwargs: Any) -> _NoStream:
    return _THE_STREAM


@contextlib.contextmanager
def _plain_block(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with ``device="cuda"`` read as the CPU; every other call goes through untouched."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        """The factory's tensor; see `_on_cpu`."""
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _clip_gradients(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    """Scales ``parameter.grad`` in place to ``max_norm`` where ``total_norm`` is above it (Megatron-Core's formula)."""
    if use_decoupled_grad:
        raise NotImplementedError("the CPU stand-in clips only parameter.grad")
    scale = max_norm / (float(total_norm) + 1.0e-6)
    if scale < 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)


# --- The list --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """One replaced name.

    Attributes:
        target: ``module:attribute`` (the attribute may have dots).
        stand_in: maps the original object to what takes its place.
        reason: why Bridge cannot run on a CPU with the original, and what the stand-in does.
    """

    target: str
    stand_in: Callable[[Any], Any]
    reason: str


def _row(target: str, stand_in: Any, reason: str) -> Replacement:
    return Replacement(target=target, stand_in=lambda _original: stand_in, reason=reason)


_VIT = "megatron.core.models.vision.vit_layer_specs"
_QWEN3 = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model"
_SETUP = "megatron.bridge.training.setup"

REPLACED: tuple[Replacement, ...] = (
    # CUDA
    _row("torch:Tensor.cuda", _to_cpu, "vlm_step and gpt_step move every tensor to CUDA; it stays on the CPU"),
    _row("torch.nn:Module.cuda", _to_cpu, "get_model moves the model to CUDA; it stays on the CPU"),
    _row("torch.cuda:current_device", _cpu_device, "buffers are put on the current CUDA device; it names the CPU"),
    _row("torch.cuda:Stream", _no_stream, "the data-parallel wrapper is built on a side stream"),
    _row("torch.cuda:current_stream", _no_stream, "side streams wait for it"),
    _row("torch.cuda:stream", _plain_block, "enters a side stream; the block just runs"),
    _row("torch.cuda:synchronize", _nothing, "timers wait for CUDA; CPU work is done when the call returns"),
    _row("torch.cuda:get_rng_state", _no_random_state, "checkpoints hold CUDA's random state; nothing draws from it"),
    _row("torch.cuda.nvtx:range_push", _nothing, "the Qwen3-VL model marks profiler ranges"),
    _row("torch.cuda.nvtx:range_pop", _nothing, "the Qwen3-VL model marks profiler ranges"),
    *(
        Replacement(
            target=f"torch:{name}",
            stand_in=_on_cpu,
            reason='Bridge and Megatron-Core write device="cuda" (loop flags, losses, norms); read as "cpu"',
        )
        for name in ("tensor", "zeros")
    ),
    _row(
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        _plain_block,
        "weights are drawn under a CUDA random-number state; drawn from torch's CPU generator instead",
    ),
    _row(
        "megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32",
        _clip_gradients,
        "asserts CUDA gradients and calls a fused kernel; the same scaling in torch",
    ),
    # Transformer Engine
    _row(
        "megatron.core.models.gpt.gpt_layer_specs:TESpecProvider",
        CpuSpecProvider,
        "default_layer_spec asks Transformer Engine for its modules; same slots, Megatron-Core and torch modules",
    ),
    _row(
        "megatron.core.transformer.transformer_block:LayerNormImpl",
        TorchNorm,
        "the final norm; Megatron-Core's torch fallback refuses sequence parallelism",
    ),
    _row(f"{_VIT}:TEDotProductAttention", SegmentAttention, "vision tower of Qwen3-VL: full attention by frame"),
    _row(f"{_VIT}:TELayerNormColumnParallelLinear", NormColumnParallelLinear, "vision tower of Qwen3-VL"),
    _row(f"{_VIT}:TERowParallelLinear", RowParallelLinear, "vision tower of Qwen3-VL"),
    _row(f"{_QWEN3}:TENorm", TorchNorm, "patch merger of Qwen3-VL"),
    _row(f"{_QWEN3}:TEColumnParallelLinear", ColumnParallelLinear, "patch merger of Qwen3-VL"),
    _row(f"{_QWEN3}:TERowParallelLinear", RowParallelLinear, "patch merger of Qwen3-VL"),
    _row(
        "megatron.core.utils:tex",
        PartitionedIndices,
        "slices packed rows for context parallelism with a Transformer Engine kernel; our own indices, which are equal",
    ),
    # Start-up
    Replacement(
        target=f"{_SETUP}:initialize_megatron",
        stand_in=lambda original: functools.partial(original, allow_no_cuda=True),
        reason="refuses to start without CUDA unless told that this is meant",
    ),
    _row(f"{_SETUP}:set_jit_fusion_options", _nothing, "warms up fused CUDA kernels that are not used"),
    _row(
        "megatron.bridge.training.initialize:compile_helpers",
        _nothing,
        "builds the index helpers of Megatron's GPT data sets with a C++ compiler; these runs use none of them",
    ),
)

_originals: list[tuple[Any, str, Any]] = []


def needed() -> bool:
    """False where Bridge runs as it is: a CUDA device and Transformer Engine are present."""
    return not (mcore_te.HAVE_TE and torch.cuda.is_available())


def install() -> str:
    """Carries out `REPLACED`; a second call does nothing.

    Returns:
        One sentence that says what was done.
    """
    if not needed():
        return "A CUDA device and Transformer Engine are present: nothing is replaced."
    if _originals:
        return f"{len(_originals)} names are replaced already."
    _import_bridge()
    for entry in REPLACED:
        module, _, path = entry.target.partition(":")
        *parents, name = path.split(".")
        owner = functools.reduce(getattr, parents, importlib.import_module(module))
        original = getattr(owner, name)
        setattr(owner, name, entry.stand_in(original))
        _originals.append((owner, name, original))
    return f"No CUDA device with Transformer Engine: {len(_originals)} names are replaced for a run on the CPU."


def uninstall() -> None:
    """Puts every original back."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)
