"""The part of a packed row that a rank's forward step needs: one rank of the replica reads the row, each slices it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from energon_packing.errors import PackingError
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.boundaries import packed_seq_params
from energon_packing.thd.context_parallel import context_parallel_indices, slice_for_context_parallel
from energon_packing.thd.fields import TOKEN_FIELDS
from energon_packing.thd.pixels import PIXELS
from energon_packing.thd.routers import put_mask


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBatch:
    """A micro-batch of one row on one rank, on the model's device. The row has T tokens, this rank t = T / CP of them.

    Attributes:
        tokens: ``[1, t]`` int64; None on stages that have no embedding.
        position_ids: ``[1, t]`` or ``[3, 1, t]`` int64; None if ``tokens`` is.
        labels: ``[1, t]`` int64, shifted; None on stages that have no output layer.
        loss_mask: ``[1, t]`` float32; None if ``labels`` is.
        padding_mask: bool, True where the token is padding: ``[1, t]`` on the first stage and of whole rows; other
            later stages get the part for the tokens that their layers hold, ``[1, t / TP]`` with sequence parallelism.
        packed_seq_params: Megatron-Core's ``PackedSeqParams`` of the whole row; on every stage. With a whole row it
            carries the mask of the tokens that this rank's layers hold (`energon_packing.thd.routers`).
        cu_seqlens: int32, real boundaries of the whole row.
        visual_inputs: name -> tensor for all media of the row; pixels are None on stages after the first.
        model_inputs: name -> int64 ``[1, t]``, what the family's model reads per token; on every stage.
        loss_inputs: name -> ``[1, t]``, the run's ``encoder.extra_fields``; on every stage.
    """

    tokens: torch.Tensor | None
    position_ids: torch.Tensor | None
    labels: torch.Tensor | None
    loss_mask: torch.Tensor | None
    padding_mask: torch.Tensor
    packed_seq_params: Any
    cu_seqlens: torch.Tensor
    visual_inputs: Mapping[str, torch.Tensor] | None
    model_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    loss_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


def get_batch(data_iterator: Any, *, whole_row: bool = False) -> StageBatch:
    """Returns the next micro-batch of this rank. Every rank of a replica calls it equally often.

    Args:
        data_iterator: what Megatron-LM made of a `PackDataloader`.
        whole_row: returns all token fields on every stage, not sliced for context parallelism: for vision models, which
            slice the embeddings after pixels are inserted.

    Raises:
        PackingError: the iterator yields something other than packs.
    """
    from megatron.core import parallel_state

    row = next(data_iterator)
    if not isinstance(row, PackedBatch):
        raise PackingError(
            f"the data iterator returned a {type(row).__name__}, not a packed row; pass the provider of "
            "energon_packing.megatron_lm to pretrain()"
        )
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    cp = parallel_state.get_context_parallel_world_size()
    if not first:
        row = without_pixels(row)
    # Sliced on the host, so the accelerator neither waits for the boundaries nor receives tokens of other ranks.
    part = row
    if cp > 1 and not whole_row:
        part = slice_for_context_parallel(row, cp, parallel_state.get_context_parallel_rank())
    of_layers = row.padding_mask
    if cp > 1:
        of_rank = context_parallel_indices(row.boundaries, cp, parallel_state.get_context_parallel_rank())
        of_layers = of_layers.index_select(1, of_rank)
    of_layers = _of_sequence_parallel_rank(of_layers).to(device(), non_blocking=True)
    part = part.to(device(), non_blocking=True)
    reads = {"first": first or whole_row, "last": last or whole_row, "every": True}
    fields: dict[str, Any] = dict.fromkeys((each.name for each in TOKEN_FIELDS), None)
    fields |= {each.name: getattr(part, each.name) for each in TOKEN_FIELDS if reads[each.stage]}
    params = packed_seq_params(part, total_tokens=False)
    if whole_row:
        put_mask(params, of_layers)
    elif not first:
        fields["padding_mask"] = of_layers
    inputs = part.model_inputs
    return StageBatch(
        **fields,
        packed_seq_params=params,
        cu_seqlens=part.cu_seqlens,
        visual_inputs=part.media_of_model() or None,
        model_inputs=inputs,
        loss_inputs={name: tensor for name, tensor in part.extra.items() if name not in inputs},
    )


def device() -> torch.device:
    """The device of this process's model."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def without_pixels(row: PackedBatch) -> PackedBatch:
    """The row without what only the vision encoder reads, by far its largest part."""
    if not row.visual_inputs:
        return row
    kept = {name: tensor for name, tensor in row.visual_inputs.items() if name not in PIXELS}
    return replace(row, visual_inputs=kept or None, pixel_forms={})


def _of_sequence_parallel_rank(mask: torch.Tensor) -> torch.Tensor:
    """This rank's part of the mask. Later stages use it as it is; the first stage's embedding scatters its own."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or not get_args().sequence_parallel:
        return mask
    return mask.chunk(size, dim=1)[parallel_state.get_tensor_model_parallel_rank()].contiguous()
