"""Boundary arrays in Megatron-Core's forms: with a fixed length for CUDA graphs, and as `PackedSeqParams`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from energon_packing.errors import PackingError
from energon_packing.thd.batch import PackedBatch


def pad_cu_seqlens(batch: PackedBatch, *, max_segments: int, max_seqlen: int | None = None) -> PackedBatch:
    """The batch with boundary arrays of ``max_segments + 1`` entries, the last boundary repeated, for CUDA graphs.

    Repeated boundaries are segments of length 0, which text attention kernels skip. Models that rebuild positions from
    boundaries do not accept them, so a batch with visual inputs or mRoPE positions is rejected.

    Args:
        max_segments: the most segments in any row of the run, including a masked tail.
        max_seqlen: the value of ``max_seqlen`` for all rows of the run, because a captured graph keeps the first one.

    Raises:
        PackingError: the batch has more segments than announced, or a longer one, or is not text only.
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
        cu_seqlens_padded=None if padded is None else repeat_last(padded),  # one tensor again if they are equal
        max_seqlen=batch.max_seqlen if max_seqlen is None else max_seqlen,
        boundary_padding=spare,
    )


def packed_seq_params(batch: PackedBatch, *, total_tokens: bool = True) -> Any:
    """``megatron.core.packed_seq_params.PackedSeqParams`` for this row, for the installed version.

    If that version has ``pad_between_seqs``, it is set from what the host knows about the row, so that no release of
    Transformer Engine has to infer it. ``cp_partition_mode`` is ``"zigzag"`` if the version has it.

    Args:
        total_tokens: passes the row's length, from which Megatron-Core derives ``seq_idx``. State-space and
            linear-attention layers need it; for a pure transformer it is a small extra computation on the device.
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
