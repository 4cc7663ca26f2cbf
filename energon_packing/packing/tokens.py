"""Packs lists of tokens into padded rows of torch tensors, for users without Megatron.

The two functions have the names, arguments and results that fast-axolotl documents. They add what keeps samples apart
in attention: positions that restart, and `cu_seqlens`. A sample longer than a row raises an error unless `oversize`
drops, truncates or splits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from energon_packing.errors import UserError, refuse
from energon_packing.packing.whole_list import Oversize, pack_lengths

if TYPE_CHECKING:
    import torch

Tokens = Sequence[int]


class Segment(NamedTuple):
    """One piece of a sequence in a row: ``row[start:end]`` is ``sequences[sequence][offset:offset + end - start]``."""

    start: int
    end: int
    sequence: int
    offset: int


class PackedRows(tuple[Any, ...]):
    """The rows of `concatenate_and_pack`: unpacks as ``input_ids, labels, attention_mask``; more by attribute.

    Attributes:
        input_ids, labels, attention_mask: ``[R, max_length]`` int64, padded at the end; the mask is 0 on padding.
        position_ids: ``[R, max_length]`` int64; restart at 0 in each segment and in the padding. Models of
            ``transformers`` keep segments apart by them, with ``use_cache=False`` and without `attention_mask` only.
        cu_seqlens: for each row, int32 ``[segments + 1]``, from 0 to `max_length`; padding is a last segment of its
            own.
        segments: for each row, its `Segment` entries, without padding.
        boundaries: for each row, the ``(start, end)`` of each segment.
        dropped: indices of the sequences that are in no row (empty, or too long under ``oversize="drop"``).
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: list[torch.Tensor]
    segments: list[list[Segment]]
    boundaries: Boundaries
    dropped: list[int]


class Boundaries(list[list[tuple[int, int]]]):
    """For each row, the ``(start, end)`` of each sequence in it; attributes as in `PackedRows`."""

    position_ids: torch.Tensor
    cu_seqlens: list[torch.Tensor]
    segments: list[list[Segment]]
    dropped: list[int]


@overload
def pack_sequences(
    sequences: Sequence[Tokens],
    max_length: int,
    pad_token_id: int,
    return_boundaries: Literal[False] = False,
    policy: str = "next_fit",
    oversize: Oversize = "raise",
) -> torch.Tensor: ...


@overload
def pack_sequences(
    sequences: Sequence[Tokens],
    max_length: int,
    pad_token_id: int,
    return_boundaries: Literal[True],
    policy: str = "next_fit",
    oversize: Oversize = "raise",
) -> tuple[torch.Tensor, Boundaries]: ...


def pack_sequences(
    sequences: Sequence[Tokens],
    max_length: int,
    pad_token_id: int,
    return_boundaries: bool = False,
    policy: str = "next_fit",
    oversize: Oversize = "raise",
) -> torch.Tensor | tuple[torch.Tensor, Boundaries]:
    """Packs token sequences into rows of `max_length`, as fast-axolotl documents the function of that name. Returns
    ``[R, max_length]`` int64, or this and `Boundaries`. Raises UserError: a sequence that is too long under
    ``"raise"``; names its index, its length and the row's. Or a ``pad_token_id`` of None, as of a tokenizer without a
    padding token; ConfigError: an unknown policy or oversize mode.

    Args:
        sequences: lists, arrays or 1-D tensors of token ids. Empty ones take no room and are listed as dropped.
        pad_token_id: fills the rest of a row.
        return_boundaries: whether to return where each sequence is, too.
        policy: ``"next_fit"`` keeps the order; ``"best_fit"`` and ``"window"`` need up to a quarter fewer rows.
        oversize: how to treat a sequence longer than a row: ``"raise"``, ``"drop"``, ``"truncate"`` (keeps its first
            `max_length` tokens) or ``"split"`` (without loss, into separate segments).
    """
    rows, dropped = _rows([len(sequence) for sequence in sequences], max_length, policy, oversize)
    packed = _fill(rows, sequences, max_length, pad_token_id)
    return (packed, _boundaries(rows, dropped, max_length)) if return_boundaries else packed


def concatenate_and_pack(
    input_ids: Sequence[Tokens],
    labels: Sequence[Tokens],
    attention_masks: Sequence[Tokens],
    max_length: int,
    pad_token_id: int,
    label_pad_id: int = -100,
    *,
    policy: str = "next_fit",
    oversize: Oversize = "raise",
    mask_first_label: bool = False,
) -> PackedRows:
    """Packs tokens, labels and attention masks together, as fast-axolotl documents the function of that name. Raises
    UserError: unequal numbers or lengths; a sequence that is too long under ``"raise"``.

    Args:
        input_ids, labels, attention_masks: one list per sequence each; the three lists of a sequence have equal length.
        pad_token_id, label_pad_id: fill the rest of a row of tokens, and of labels.
        max_length, policy, oversize: as in `pack_sequences`.
        mask_first_label: set the label of each segment's first token to `label_pad_id`. Use it if the model shifts the
            labels itself (as Hugging Face models do); otherwise the last token of a segment would be trained to predict
            the first token of the next.
    """
    if label_pad_id is None:
        raise UserError("label_pad_id is None; pass the label that your loss ignores, or leave it out: it is -100")
    if not len(input_ids) == len(labels) == len(attention_masks):
        given = f"{len(input_ids)} input_ids, {len(labels)} labels and {len(attention_masks)} attention_masks"
        raise UserError(f"got {given}; each sequence needs one of each")
    for index, (tokens, targets, mask) in enumerate(zip(input_ids, labels, attention_masks, strict=True)):
        if not len(tokens) == len(targets) == len(mask):
            given = f"{len(tokens)} input_ids, {len(targets)} labels and {len(mask)} attention_mask"
            raise UserError(f"sequence {index} has {given}; they must be equally long")
    rows, dropped = _rows([len(tokens) for tokens in input_ids], max_length, policy, oversize)
    filled = ((input_ids, pad_token_id), (labels, label_pad_id), (attention_masks, 0))
    packed = PackedRows(_fill(rows, values, max_length, pad) for values, pad in filled)
    packed.input_ids, packed.labels, packed.attention_mask = packed
    if mask_first_label:
        for number, row in enumerate(rows):
            packed.labels[number, [segment.start for segment in row]] = label_pad_id
    packed.boundaries = _boundaries(rows, dropped, max_length)
    vars(packed).update(vars(packed.boundaries))
    return packed


def _rows(
    lengths: list[int], max_length: int, policy: str, oversize: Oversize
) -> tuple[list[list[Segment]], list[int]]:
    """Returns where each piece goes, row by row, and the indices of the sequences that are dropped."""
    known = ("raise", "drop", "truncate", "split")
    refuse(
        (max_length < 1, f"max_length must be at least 1 token, not {max_length}"),
        (oversize not in known, f"unknown oversize mode {oversize!r}, known: {', '.join(known)}"),
    )
    pieces: list[tuple[int, int, int]] = []  # sequence, offset, tokens
    dropped: list[int] = []
    for index, length in enumerate(lengths):
        if length == 0 or (length > max_length and oversize == "drop"):
            dropped.append(index)
        elif length <= max_length or oversize == "truncate":
            pieces.append((index, 0, min(length, max_length)))
        elif oversize == "split":
            pieces.extend((index, start, min(max_length, length - start)) for start in range(0, length, max_length))
        else:
            fix = "pass oversize='drop', 'truncate' or 'split', or a longer max_length"
            raise UserError(f"sequence {index} has {length} tokens, a row holds {max_length}; {fix}")
    rows = []
    for group in pack_lengths([tokens for _, _, tokens in pieces], max_length, policy):
        row: list[Segment] = []
        for sequence, offset, tokens in (pieces[piece] for piece in group.tolist()):
            at = row[-1].end if row else 0
            row.append(Segment(at, at + tokens, sequence, offset))
        rows.append(row)
    return rows, dropped


def _fill(rows: list[list[Segment]], values: Sequence[Tokens], max_length: int, pad: int | None) -> torch.Tensor:
    import torch

    if pad is None:
        raise UserError("pad_token_id is None, no token of the tokenizer; pass another id, such as its eos_token_id")
    filled = np.full((len(rows), max_length), pad, dtype=np.int64)
    for number, row in enumerate(rows):
        for segment in row:
            stop = segment.offset + segment.end - segment.start
            filled[number, segment.start : segment.end] = np.asarray(values[segment.sequence])[segment.offset : stop]
    return torch.from_numpy(filled)


def _boundaries(rows: list[list[Segment]], dropped: list[int], max_length: int) -> Boundaries:
    import torch

    boundaries = Boundaries([(segment.start, segment.end) for segment in row] for row in rows)
    places = [np.unique([0, *(segment.end for segment in row), max_length]) for row in rows]
    positions = [np.arange(max_length) - np.repeat(ends[:-1], np.diff(ends)) for ends in places]
    boundaries.position_ids = torch.from_numpy(np.array(positions, dtype=np.int64).reshape(-1, max_length))
    boundaries.cu_seqlens = [torch.from_numpy(ends.astype(np.int32)) for ends in places]
    boundaries.segments, boundaries.dropped = rows, dropped
    return boundaries
