"""Which tokens of a packed row each context-parallel rank holds, and the slices made from it.

In causal attention, late tokens take more work than early ones. Transformer Engine therefore cuts every segment into
``2 * cp_size`` equal pieces and assigns rank ``r`` the pieces ``r`` and ``2 * cp_size - 1 - r``: the zigzag. The
indices here equal those of its compiled ``thd_get_partitioned_indices`` but need neither a GPU nor Transformer Engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from energon_packing.errors import ConfigError, PackingError
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.fields import TOKEN_FIELDS


def context_parallel_indices_numpy(cu_seqlens_padded: np.ndarray, cp_size: int, cp_rank: int) -> np.ndarray:
    """As `context_parallel_indices`, of NumPy's arrays: boundaries ``[segments + 1]``, positions int64."""
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ConfigError(f"context-parallel rank {cp_rank} of {cp_size} does not exist")
    boundaries = np.asarray(cu_seqlens_padded).astype(np.int64)
    if boundaries.ndim != 1 or boundaries.size < 2 or boundaries[0] != 0:
        raise PackingError(f"boundaries must be one row of at least two that starts at 0, not {boundaries.tolist()}")
    starts = boundaries[:-1]
    if (lengths := boundaries[1:] - starts).min() <= 0:
        segment = int(lengths.argmin())
        raise PackingError(f"segment {segment} has length {lengths[segment]}; an empty segment cannot be partitioned")
    if cp_size == 1:
        return np.arange(boundaries[-1], dtype=np.int64)
    pieces = 2 * cp_size
    size, rest = np.divmod(lengths, pieces)
    if rest.any():
        segment = int(rest.argmax())
        raise PackingError(
            f"segment {segment} has {lengths[segment]} tokens, not a multiple of {pieces} = 2 * {cp_size}; assemble "
            f"with the multiple of alignment_multiple(context_parallel={cp_size}, ...)"
        )
    begin = np.stack([starts + cp_rank * size, starts + (pieces - 1 - cp_rank) * size], axis=1)
    sizes = np.repeat(size, 2)  # a piece is a run of consecutive positions: shift one long arange piece by piece
    local = np.repeat(begin.reshape(-1) - (np.cumsum(sizes) - sizes), sizes)
    local += np.arange(local.size, dtype=np.int64)
    return local


def context_parallel_indices(cu_seqlens_padded: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Positions of the full row that a rank holds, in its order, int64 ``[T / cp_size]``, by its physical boundaries
    ``[segments + 1]`` without repeated ones (`PackedBatch.boundaries`). ``row.index_select(-1,
    context_parallel_indices(...))`` is the rank's part of a token-aligned row. Boundaries on an accelerator are first
    copied to the host (one synchronisation); the result is on their device. Raises ConfigError: a rank outside ``0 ..
    cp_size - 1``; PackingError: an empty segment, or one whose length is no multiple of ``2 * cp_size``."""
    local = context_parallel_indices_numpy(cu_seqlens_padded.cpu().numpy(), cp_size, cp_rank)
    return torch.from_numpy(local).to(cu_seqlens_padded.device)


def slice_for_context_parallel(batch: PackedBatch, cp_size: int, cp_rank: int) -> PackedBatch:
    """The part of a batch that one context-parallel rank sees. Every token-aligned field is sliced along its last axis,
    including mRoPE positions ``[3, 1, T]`` and extra fields. Boundaries, ``max_seqlen`` and ``total_tokens`` stay those
    of the whole row, as attention needs them. Visual inputs stay whole, even those of images whose tokens are all on
    other ranks. Raises ConfigError, PackingError: as `context_parallel_indices`; also for a slice."""
    if batch.cp_size != 1:
        raise PackingError(f"this batch is a slice of context-parallel rank {batch.cp_rank} already")
    indices = context_parallel_indices(batch.boundaries, cp_size, cp_rank).to(batch.tokens.device)
    parts = {name: tensor.index_select(-1, indices) for name, tensor in batch.token_tensors.items()}
    return _with_token_tensors(batch, parts, cp_size=cp_size, cp_rank=cp_rank)


def reassemble(slices: Sequence[PackedBatch]) -> PackedBatch:
    """Rebuilds the whole batch from the slices of all context-parallel ranks, in any order; for debugging and tests.
    Raises PackingError: there is not exactly one slice per rank, or their boundaries differ."""
    if not slices:
        raise PackingError("no slices to reassemble")
    first = slices[0]
    if sorted(part.cp_rank for part in slices) != list(range(first.cp_size)) or any(
        part.cp_size != first.cp_size or not torch.equal(part.boundaries, first.boundaries) for part in slices
    ):
        ranks = [(part.cp_rank, part.cp_size) for part in slices]
        raise PackingError(f"one slice of one batch is needed for each of {first.cp_size} ranks, not {ranks}")
    tensors, total = first.token_tensors, first.total_tokens
    whole = {name: tensor.new_empty((*tensor.shape[:-1], total)) for name, tensor in tensors.items()}
    for part in slices:
        indices = context_parallel_indices(part.boundaries, part.cp_size, part.cp_rank).to(part.tokens.device)
        for name, tensor in part.token_tensors.items():
            whole[name].index_copy_(-1, indices, tensor)
    return _with_token_tensors(first, whole, cp_size=1, cp_rank=0)


def _with_token_tensors(batch: PackedBatch, tensors: Mapping[str, torch.Tensor], **changes: Any) -> PackedBatch:
    changes |= {field.name: tensors[field.name] for field in TOKEN_FIELDS}
    return replace(batch, extra={name: tensors[name] for name in batch.extra}, **changes)
