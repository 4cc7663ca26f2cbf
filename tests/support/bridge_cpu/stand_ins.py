"""All replacements that let Megatron-Bridge's own code run on a CPU.

Megatron-Bridge needs CUDA devices and Transformer Engine. A machine without them can still run its unmodified
configuration, data, model, step and training code, if the lines that name a CUDA device and the Transformer Engine
modules lead somewhere else. `REPLACED` is the complete list, with a reason for each entry. `install` applies the
entries that the installed release has (`replaced`), and `uninstall` reverts them. Nothing else in Bridge or
Megatron-Core is touched, and none of their files is changed.

The stand-ins are exact (fp32, no approximation) and slow. They are for tests, the demo and `python scripts/parity.py`;
on a machine with a GPU and Transformer Engine `install` replaces nothing and says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from energon_packing.errors import UserError
from energon_packing.validate.verdict import import_bridge


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silences warnings and log records: Megatron reports twenty times that Transformer Engine and Apex are absent."""
    disabled = logging.root.manager.disable
    if disabled < logging.WARNING:  # each change walks over all loggers, more than a thousand with Bridge
        logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if logging.root.manager.disable != disabled:
            logging.disable(disabled)


try:
    with without_warnings():
        # The first Megatron import: it records here whether Transformer Engine is present.
        from megatron.core.extensions import transformer_engine as mcore_te
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        from support.bridge_cpu.attention import PartitionedIndices, SegmentAttention
        from support.bridge_cpu.modules import CpuSpecProvider, NormColumnParallelLinear, TorchNorm
except ImportError as error:
    raise UserError(f"Megatron-Core cannot be imported ({error}); run `bash scripts/setup.sh`.") from error


# --- CUDA ------------------------------------------------------------------------------------------------------------


def _to_cpu(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _cpu_device(*_args: Any, **_kwargs: Any) -> torch.device:
    return torch.device("cpu")


def _no_random_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _takes_random_state(*_args: Any, **_kwargs: Any) -> None:  # dynamo has another rule for it than for `_nothing`
    pass


def _one_random_state(*_args: Any, **_kwargs: Any) -> dict[str, torch.Tensor]:
    return {"none": _no_random_state()}


class _NoStream:
    """A CUDA stream on a machine without CUDA: work is done in order, so there is nothing to wait for."""

    wait_stream = synchronize = _nothing

    def record_event(self) -> _NoStream:
        return self


_THE_STREAM = _NoStream()


def _no_stream(*_args: Any, **_kwargs: Any) -> _NoStream:
    return _THE_STREAM


@contextlib.contextmanager
def _plain_block(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with ``device="cuda"`` replaced by the CPU; every other call passes unchanged."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        """The factory's tensor; see `_on_cpu`."""
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _clip_gradients(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    """Scales ``parameter.grad`` in place to ``max_norm`` if ``total_norm`` is above it (Megatron-Core's formula)."""
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
        stand_in: maps the original object to its replacement.
        reason: why Bridge cannot run on a CPU with the original, and what the stand-in does.
        since: the first release of Bridge that has the name, ``(0, 7)``; None where all supported ones have it.
    """

    target: str
    stand_in: Callable[[Any], Any]
    reason: str
    since: tuple[int, int] | None = None


def _row(target: str, stand_in: Any, reason: str, since: tuple[int, int] | None = None) -> Replacement:
    return Replacement(target=target, stand_in=lambda _original: stand_in, reason=reason, since=since)


_VIT = "megatron.core.models.vision.vit_layer_specs"
_QWEN3 = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
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
    _row(
        "torch.cuda:set_rng_state", _takes_random_state, "a checkpoint's random state of CUDA, which nothing draws from"
    ),
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
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.get_states",
        _one_random_state,
        "Bridge ends a run whose checkpoint has no states of CUDA's generators; one that nothing draws from",
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
    _row(f"{_QWEN3}.model:TENorm", TorchNorm, "patch merger of Qwen3-VL"),
    _row(f"{_QWEN3}.model:TEColumnParallelLinear", ColumnParallelLinear, "patch merger of Qwen3-VL"),
    _row(f"{_QWEN3}.model:TERowParallelLinear", RowParallelLinear, "patch merger of Qwen3-VL"),
    _row(
        f"{_QWEN3}.attention:TEDotProductAttention",
        SegmentAttention,
        "the layers ask whether their attention is Transformer Engine's; here it is the stand-in for it",
        since=(0, 7),
    ),
    _row(
        "megatron.core.utils:tex",
        PartitionedIndices,
        "slices packed rows for context parallelism with a Transformer Engine kernel; our own indices, which are equal",
    ),
    Replacement(
        target="megatron.core.transformer.multi_token_prediction:is_inference_column_parallel_linear",
        stand_in=lambda _original: lambda _module: False,
        reason="asks whether a layer is of a class that is made from Transformer Engine's",
        since=(0, 7),
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
    """False if Bridge runs as it is, because a CUDA device and Transformer Engine are present."""
    return not (mcore_te.HAVE_TE and torch.cuda.is_available())


def replaced() -> tuple[Replacement, ...]:
    """The entries of `REPLACED` that the installed release of Bridge has; `install` applies these."""
    release = importlib.import_module("megatron.bridge.package_info").VERSION[:2]
    return tuple(entry for entry in REPLACED if entry.since is None or release >= entry.since)


def install() -> str:
    """Applies `REPLACED`; a second call does nothing. Returns one sentence that states what was done."""
    if not needed():
        return "A CUDA device and Transformer Engine are present: nothing is replaced."
    if _originals:
        return f"{len(_originals)} names are replaced already."
    with without_warnings():
        import_bridge(placeholders=not mcore_te.HAVE_TE)
    for entry in replaced():
        module, _, path = entry.target.partition(":")
        *parents, name = path.split(".")
        owner = functools.reduce(getattr, parents, importlib.import_module(module))
        original = getattr(owner, name)
        setattr(owner, name, entry.stand_in(original))
        _originals.append((owner, name, original))
    return f"No CUDA device with Transformer Engine: {len(_originals)} names are replaced for a run on the CPU."


def uninstall() -> None:
    """Restores every original."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)
