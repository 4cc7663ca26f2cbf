"""A forward step for packed rows: Bridge's own, plus what the installed Bridge does not pass to the model.

`forward_step` calls Bridge's unmodified ``gpt_step`` or ``vlm_step`` and adds these:

* **Padding reaches the routers.** Both steps of 0.6 drop ``padding_mask``, so experts balance their load over padding
  tokens too. In 0.7 ``gpt_step`` passes it; with ``vlm_step`` Qwen3-VL derives one from the boundaries, which count the
  masked rest of a row as a sample. Here the mask travels on the row's ``PackedSeqParams``, which Megatron-Core hands to
  every layer of every pipeline stage, and again to one that is recomputed, so several micro-batches may be in flight.
* **Routers count real tokens** under that mask, also where ranks share a row: `energon_packing.thd.routers`.
* **Boundaries reach middle stages.** ``gpt_step`` reads no batch on middle pipeline stages of a data set that does not
  declare packed rows; those stages would attend across samples.
* **Attention is told whether samples are padded.** Bridge leaves ``PackedSeqParams.pad_between_seqs`` unset, and
  Transformer Engine then infers it: up to 2.17.1 wrongly if only the last sample is padded, from 2.18 on as True even
  if nothing is padded. Here the host's knowledge sets it; without padding, both boundaries are also one tensor.
* **Vision encoders of Hugging Face keep their frequencies**, and without context parallelism **layers read no
  boundaries** where each token has frequencies of its own: `energon_packing.thd.rotary`.

    from energon_packing.bridge.step import forward_step
    pretrain(cfg, forward_step)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_cp_partition_indices
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.bridge.utils.common_utils import get_rank_safe
from megatron.core.utils import get_model_config

from energon_packing.config import ParallelConfig
from energon_packing.encoders.encoder import innermost, refuse_untaken
from energon_packing.errors import ConfigError
from energon_packing.thd.rotary import repair_rotary
from energon_packing.thd.routers import experts_read_masks, put_mask
from energon_packing.validate.run_view import RunView, installed_version

_CHOOSES = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
"""The module that keeps which kernel Transformer Engine chose for the attention before."""


def forward_step(
    state: GlobalState, data_iterator: Any, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """One micro-batch forward, as Bridge calls it: ``data_iterator`` yields batches as `PackedBatch.to_bridge` makes
    them (those of other data sets pass through), and ``model`` is the model chunk of this rank, wrapped or not. Returns
    the model's output and its loss function. Raises ConfigError: a schedule plan is asked for with packed rows, whose
    boundaries only the plans of ``gpt_step`` of 0.7 take; the model's forward does not take what the family's processor
    makes per token; or a router would take a packed row for one sequence."""
    inner = innermost(model)
    repair_rotary(inner)
    # Here and not above: gpt_step imports the distillation package, which vision runs need not have.
    if hasattr(inner, "language_model") or "pixel_values" in inspect.signature(inner.forward).parameters:
        from megatron.bridge.training.vlm_step import forward_step as step
    else:
        from megatron.bridge.training.gpt_step import forward_step as step
    if data_iterator is None:
        return step(state, data_iterator, model, return_schedule_plan)
    batch = next(data_iterator)
    packed = batch.get("cu_seqlens_q") is not None
    dataset, media = state.cfg.dataset, batch.get("visual_inputs")
    if media is not None and hasattr(dataset, "run_config"):  # of ours; Bridge leaves fields out in silence
        fields = [name for name in media.as_model_kwargs() if name in batch]
        refuse_untaken(inner, fields, lambda: dataset.run_config(ParallelConfig()).encoder)
    if packed and return_schedule_plan and not _forwards_batches_whole(step):
        why = "but Bridge's schedule plan ignores the boundaries of packed rows"
        fix = "set cfg.comm_overlap.overlap_moe_expert_parallel_comm to false."
        raise ConfigError(f"overlap_moe_expert_parallel_comm is on, {why}; {fix}")
    with contextlib.ExitStack() as added:
        if packed:
            added.callback(log_kernel)
            names = ("enable_offline_packing", "enable_in_batch_packing")
            if not any(getattr(dataset, name, False) for name in names):  # `gpt_step` sees packed rows during the call
                added.enter_context(mock.patch.object(dataset, names[0], True, create=True))
            mask = batch.get("padding_mask") if experts_read_masks(inner) else None
            if mask is not None:
                _refuse_graphs(model, step)
            added.enter_context(_travelling(pads_between_sequences(batch), mask, inner, model))
        return step(state, iter((batch,)), model, return_schedule_plan)


def log_kernel() -> None:
    """Logs the kernel of the last attention of the first rank, each once; nothing without Transformer Engine."""
    chosen = getattr(sys.modules.get(_CHOOSES), "_attention_backends", {})
    for name in ("flash", "fused", "unfused"):
        if chosen.get(f"use_{name}_attention") and get_rank_safe() == 0:
            _log_once(f"Packed rows: {name} attention, backend {chosen.get(f'{name}_attention_backend')}")


_log_once = functools.cache(logging.getLogger(__name__).info)


def pads_between_sequences(batch: Mapping[str, Any]) -> bool:
    """Whether any segment of a packed row is shorter than its place, by its boundaries (int32). Boundaries on a device
    are not waited for: two tensors count as padding there, which is correct, and slower than needed without any."""
    real, physical = batch["cu_seqlens_q"], batch.get("cu_seqlens_q_padded")
    if physical is None or physical is real:
        return False
    return real.device.type != "cpu" or physical.device.type != "cpu" or not torch.equal(real, physical)


def local_padding_mask(mask: torch.Tensor, params: Any, groups: Any, *, sequence_parallel: bool) -> torch.Tensor:
    """Returns the part of a row's padding mask (bool ``[1, T]``, True where the token is padding) whose tokens a rank's
    layers hold: ``[1, T / CP]``, or with sequence parallelism ``[1, T / (CP * TP)]``. ``groups`` is the model's
    ``ProcessGroupCollection``."""
    cp, tp = groups.cp, groups.tp
    if cp.size() > 1:
        part = {"cp_size": cp.size(), "cp_rank": cp.rank(), "cp_group": cp}
        indices = get_packed_seq_cp_partition_indices(params, total_tokens=mask.size(1), device=mask.device, **part)
        mask = mask.index_select(1, indices)
    if sequence_parallel and tp.size() > 1:
        mask = mask.chunk(tp.size(), dim=1)[tp.rank()]
    return mask.contiguous()


def _forwards_batches_whole(step: Any) -> bool:
    """Whether a Bridge step passes boundaries and mask to models and schedule plans: gpt_step of 0.7."""
    view = RunView(bridge_version=installed_version("megatron-bridge"), step=step.__module__.rpartition(".")[2])
    return view.bridge_release >= (0, 7) and view.goes_through_gpt_step


def _refuse_graphs(model: Any, step: Any) -> None:
    """Refuses Transformer Engine's CUDA graphs, which bypass the hooks of layers; for every batch, whatever its mask
    holds, because ranks must not differ. ``gpt_step`` of 0.7 passes the mask itself, and has its own check."""
    graphs = getattr(get_model_config(model), "cuda_graph_impl", "none")
    if graphs == "transformer_engine" and not _forwards_batches_whole(step):
        why = "CUDA graphs bypass the hooks through which the padding mask reaches the experts"
        fix = "set cfg.model.cuda_graph_impl to 'none' (rule ours/padding-mask-under-graphs)."
        raise ConfigError(f"cuda_graph_impl is 'transformer_engine': {why}; {fix}")


def _travelling(padded: bool, mask: torch.Tensor | None, inner: Any, model: Any) -> Any:
    """A hook, until it is left, that adds what the host knows to the ``PackedSeqParams`` of the model."""

    def attach(_module: Any, _arguments: Any, keywords: dict[str, Any]) -> None:
        if (params := keywords.get("packed_seq_params")) is None:
            return
        if hasattr(params, "pad_between_seqs"):  # the installed Megatron-Core may be older than the field
            params.pad_between_seqs = padded
        if params.cu_seqlens_q_padded is not None and not padded:
            params.cu_seqlens_q_padded = params.cu_seqlens_q
            params.cu_seqlens_kv_padded = params.cu_seqlens_kv
        if mask is not None:
            on_device = mask.to(device=params.cu_seqlens_q.device, non_blocking=True)
            parallel = get_model_config(model).sequence_parallel
            groups = get_pg_collection(model)
            put_mask(params, local_padding_mask(on_device, params, groups, sequence_parallel=parallel))

    return inner.register_forward_pre_hook(attach, with_kwargs=True)
