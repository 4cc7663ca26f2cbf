"""What Transformer Engine's context parallelism (``cp_comm_type="p2p"``) computes for a packed row, on a CPU.

Two things decide it, both plain Python in its source and both restated here: whether it treats the row as padded, and
how it cuts lengths for one step of the ring. A query meets every key in exactly one step, and the parts of the softmax
are joined without loss, so the result is one softmax over the keys that some step shows to the query.

Sources (``transformer_engine/pytorch/attention/dot_product_attention/``): ``dot_product_attention.py``, "check if there
is padding between sequences" in 2.9 and 2.16 and "Default pad_between_seqs auto-detect" in 2.18 and on the main branch;
``context_parallel.py``, ``cp_p2p_fwd_prepare_qkv`` and ``get_cu_seqlens_on_cp_rank`` of 2.16.
"""

from typing import Literal

import numpy as np
import torch

Release = Literal["2.9", "2.16", "2.18", "main"]
RELEASES: tuple[Release, ...] = ("2.9", "2.16", "2.18", "main")


def infers_padding(real: torch.Tensor, physical: torch.Tensor | None, release: Release) -> bool:
    """Returns the ``pad_between_seqs`` of a caller that leaves it unset; keys have the boundaries of queries.

    Args:
        real: ``cu_seqlens``, int32 ``[segments + 1]``.
        physical: ``cu_seqlens_padded``, of the same shape, or None.
        release: of Transformer Engine.
    """
    if release in ("2.9", "2.16"):
        return physical is not None and not torch.equal(physical[:-1], real[:-1])
    return False if physical is real else physical is not None


def attention_over_ranks(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    real: np.ndarray,
    physical: np.ndarray,
    *,
    ranks: int,
    padded: bool,
) -> np.ndarray:
    """Computes causal attention of one head over a row that ``ranks`` ranks share.

    Args:
        query, key, value: float ``[T, width]``.
        real, physical: boundaries, int ``[segments + 1]``; every physical length is a multiple of ``2 * ranks``.
        ranks: context-parallel size, above 1.
        padded: ``pad_between_seqs``.

    Returns:
        float ``[T, width]``; 0 for tokens that no step computes.
    """
    out = np.zeros_like(value)
    whole, first, second = lengths_of_steps(real, physical, ranks=ranks, padded=padded)
    for segment, (start, stop) in enumerate(zip(physical[:-1].tolist(), physical[1:].tolist(), strict=True)):
        chunk = (stop - start) // (2 * ranks)
        shown = _shown(chunk, ranks, whole[:, segment], first[:, segment], second[:, segment])
        here = slice(start, stop)
        out[here] = masked_attention(query[here], key[here], value[here], shown)
    return out


def lengths_of_steps(
    real: np.ndarray, physical: np.ndarray, *, ranks: int, padded: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns how many tokens of each segment a step treats as real on each rank, three int ``[ranks, segments]``.

    The first counts both pieces that the rank holds, for a step with both; the second the first piece alone (keys of an
    earlier rank); the third the second piece alone (queries that meet a later rank). Without padding they come from the
    boundaries divided by the ranks.
    """
    if not padded:
        whole, half = np.diff(real // ranks), np.diff(real // (2 * ranks))
        return np.tile(whole, (ranks, 1)), np.tile(half, (ranks, 1)), np.tile(half, (ranks, 1))
    lengths, chunk = np.diff(real)[None], np.diff(physical)[None] // (2 * ranks)
    rank = np.arange(ranks)[:, None]
    first = np.clip(lengths - rank * chunk, 0, chunk)
    second = np.clip(lengths - (2 * ranks - 1 - rank) * chunk, 0, chunk)
    return first + second, first, second


def masked_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Returns softmax attention ``[n, width]`` over the keys that ``shown`` bool ``[n, n]`` marks; 0 without any."""
    scores = np.where(shown, query @ key.T, -np.inf)
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    total = weights.sum(axis=1, keepdims=True)
    return np.asarray(weights @ value / np.where(total > 0, total, 1))


def _shown(chunk: int, ranks: int, whole: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns which keys each query of a segment meets, bool ``[P, P]``.

    Args:
        chunk: tokens of each of the ``2 * ranks`` pieces of the segment; rank ``r`` holds piece ``r`` and its mirror.
        whole, first, second: for each rank, how many of its tokens a step treats as real: of both pieces in a row, of
            the first one, and of the second one.
    """
    piece, within = np.divmod(np.arange(2 * ranks * chunk), chunk)
    rank = np.where(piece < ranks, piece, 2 * ranks - 1 - piece)
    later = piece >= ranks
    local = within + later * chunk
    asks, has = rank[:, None], rank[None]
    in_whole = local < whole[rank]
    own = in_whole[:, None] & in_whole[None] & (local[None] <= local[:, None])
    lower = in_whole[:, None] & (~later & (local < first[rank]))[None]
    upper = (later & (within < second[rank]))[:, None] & in_whole[None]
    return np.where(asks == has, own, np.where(has < asks, lower, upper))
