"""Boundary arrays in the forms that Megatron-Core wants: of fixed length for CUDA graphs, and as `PackedSeqParams`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from energon_packing.errors import PackingError
from energon_packing.thd.batch import PackedBatch


def pad_cu_seqlens(batch: PackedBatch, *, max_segments: int, max_seqlen: int | None = None) -> PackedBatch:
    """The batch with boundary arrays of ``max_segments + 1`` entries, the last boundary repeated, for CUDA graphs.

    Repeated boundaries are segments of length 0, which text attention kernels skip. Models that rebuild positions from
    boundaries reject them, so a batch with visual inputs or mRoPE positions is refused.

    Args:
        max_segments: the most segments any row of the run has, a masked tail counted.
        max_seqlen: the value of ``max_seqlen`` for all rows of the run, since a captured graph keeps the first one.

    Raises:
        PackingError: where the batch has more segments, or a longer one, than announced, or is not text alone.
    """
    if batch.visual_inputs or batch.position_ids.dim() == 3:
        raise PackingError("boundary arrays of fixed length are for text models; this batch has images or mRoPE")
    spare = max_segments - batch.num_segments
    if spare < 0:
        raise PackingError(f"the row has {batch.num_segments} segments, more than max_segments={max_segments}")
    if max_seqlen is not None and max_seqlen < batch.max_seqlen:
        raise PackingError(f"a segment of the row has {batch.max_seqlen} tokens, more than max_seqlen={max_seqlen}")

    def repeat_last(boundaries: torch.Tensor) -> torch.Tensor:
        kept = boundaries[: batch.num_segments + 1]
        return torch.cat([kept, kept[-1:].expand(spare)])

    padded = batch.cu_seqlens_padded
    return replace(
        batch,
        cu_seqlens=repeat_last(batch.cu_seqlens),
        cu_seqlens_padded=None if padded is None else repeat_last(padded),  # one tensor again where they are equal
        max_seqlen=batch.max_seqlen if max_seqlen is None else max_seqlen,
        boundary_padding=spare,
    )


def packed_seq_params(batch: PackedBatch, *, total_tokens: bool = True) -> Any:
    """``megatron.core.packed_seq_params.PackedSeqParams`` for this row, of whatever version is installed.

    ``pad_between_seqs`` is set where that version has it, from what the host knows of the row, so that no release of
    Transformer Engine has to infer it. ``cp_partition_mode`` is ``"zigzag"`` where the version knows it.

    Args:
        total_tokens: passes the row's length, from which Megatron-Core derives ``seq_idx``: required by state-space
            and linear-attention layers, and a small extra computation on the device for a pure transformer.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = batch.cu_seqlens_padded
    values: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": batch.cu_seqlens,
        "cu_seqlens_kv": batch.cu_seqlens,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": batch.max_seqlen,
        "max_seqlen_kv": batch.max_seqlen,
        "pad_between_seqs": batch.pad_between_seqs,
        "cp_partition_mode": "zigzag",
    }
    if total_tokens:
        values["total_tokens"] = batch.total_tokens
    known = {spec.name for spec in fields(PackedSeqParams)}
    return PackedSeqParams(**{name: value for name, value in values.items() if name in known})
