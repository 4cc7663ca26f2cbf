"""Assembly of THD rows: samples of one length each become one row with boundaries, masks and positions.

THD is the layout of packed attention in Megatron-Core and Transformer Engine: tokens of all samples lie in one row,
and cumulative lengths say where each begins. The rules about boundaries here:

* ``cu_seqlens`` sums real lengths, ``cu_seqlens_padded`` physical ones. An alignment multiple above 1 always emits
  both, also where they are equal; a multiple of 1 never does, because padded boundaries select a slower kernel.
* A row of fixed width leaves a tail. With a multiple above 1 the last segment's physical end takes it. With a multiple
  of 1 there is no place to hide it, so it becomes one last, fully masked segment: a segment, never a sample.
* ``max_seqlen`` is the longest *physical* segment, since kernels size their tiles by it.

This module needs NumPy and PyTorch, nothing else; Megatron is imported by the two functions that speak to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from energon_packing.errors import ConfigError, PackingError
from energon_packing.packed_batch import BRIDGE_KEYS, IGNORE_INDEX, PackedBatch

__all__ = [
    "IGNORE_INDEX",
    "PackedBatch",
    "alignment_multiple",
    "assemble",
    "packed_seq_params",
    "pad_cu_seqlens",
]

ROW_TENSORS = ("input_ids", "labels", "loss_mask", "position_ids")
ROW_FIELDS = (*ROW_TENSORS, "attention_mask", "visual_inputs", "key", "expected_length")


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
    return int(value)


def alignment_multiple(
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    sequence_parallel: bool = False,
    eval_context_parallel: int | None = None,
) -> int:
    """The number of tokens that each segment's physical length must be a multiple of.

    Zigzag context parallelism cuts a segment into ``2 * CP`` equal pieces; sequence parallelism splits what a rank
    holds over the tensor-parallel ranks. The least common multiple over the training and the evaluation context
    parallelism is taken, as ``ConfigContainer.validate`` of Megatron-Bridge 0.6.2 does.

    Raises:
        ConfigError: where a size is not a whole number of at least 1, or ``sequence_parallel`` is not a boolean.
    """
    tensor_parallel = _positive("tensor_parallel", tensor_parallel)
    sizes = {_positive("context_parallel", context_parallel)}
    if eval_context_parallel is not None:
        sizes.add(_positive("eval_context_parallel", eval_context_parallel))
    if not isinstance(sequence_parallel, bool):
        raise ConfigError(f"sequence_parallel must be true or false, not {sequence_parallel!r}")
    zigzag = [2 * size if size > 1 else 1 for size in sizes]
    split = [size * tensor_parallel if sequence_parallel and tensor_parallel > 1 else 1 for size in sizes]
    return math.lcm(*zigzag, *split)


def assemble(
    rows: Sequence[Mapping[str, Any]],
    *,
    multiple: int = 1,
    width: int | None = None,
    pad_token_id: int = 0,
    total_multiple: int = 1,
    extra_fields: Mapping[str, int | float | bool] | None = None,
) -> PackedBatch:
    """Lays samples side by side in one row and computes its boundaries.

    Each row is a mapping of tensors (or arrays) of one common length L, and of what belongs to them:

    * ``input_ids`` ``[L]``, ``labels`` ``[L]`` (already shifted), ``loss_mask`` ``[L]``, ``position_ids`` ``[L]`` or
      ``[3, L]`` (all rows alike): required;
    * the names of ``extra_fields``, ``[L]``: required where declared;
    * ``visual_inputs``: name -> tensor whose first axis counts this sample's media or patches; joined in row order;
    * ``attention_mask`` ``[L]``: refused unless all true, because a processor that pads (left or right) would put
      padding inside a segment where no boundary shows it;
    * ``key``: the sample's name, for messages and ``sample_keys`` (its index where missing);
    * ``expected_length``: the predicted length; another length is an error, never a silent change of the plan.

    Args:
        multiple: every segment is padded to a multiple of this many tokens (see `alignment_multiple`).
        width: the row's length in tokens; None makes the row as long as its segments.
        pad_token_id: token of padding.
        total_multiple: the row's length becomes a multiple of this, for kernels that want one (16 for FP8, 32 for
            MXFP8, times the ranks that share a row); the tail is handled as with ``width``.
        extra_fields: name -> padding value of further token-aligned fields.

    Padding has label -100, weight 0, ``padding_mask`` True, and positions that go on counting from the sample's last
    one (as Bridge's in-batch packer does; for mRoPE all three axes count on from the largest, as text would). Positions
    of a masked tail segment count from 0.

    Raises:
        ConfigError: a multiple, width or extra field that cannot work.
        PackingError: a row that breaks the contract above, by key; also a last token with a target (it would be the
            first token of the next sample), and a weight on a position without a target.
    """
    multiple = _positive("multiple", multiple)
    total_multiple = _positive("total_multiple", total_multiple)
    if width is not None:
        width = _positive("width", width)
        if width % multiple or width % total_multiple:
            raise ConfigError(
                f"width {width} is not a multiple of {math.lcm(multiple, total_multiple)}, which alignment to "
                f"{multiple} and a total multiple of {total_multiple} need; choose the next width that is"
            )
    extra_fields = dict(extra_fields or {})
    if clash := sorted(set(extra_fields) & {*ROW_FIELDS, *BRIDGE_KEYS}):
        raise ConfigError(f"extra_fields may not redefine {', '.join(clash)}")
    if not rows:
        raise PackingError("a pack without samples cannot be assembled")

    keys = tuple(str(index if row.get("key") is None else row["key"]) for index, row in enumerate(rows))
    arrays = [_row_arrays(key, row, extra_fields) for key, row in zip(keys, rows, strict=True)]
    lengths = np.array([row["input_ids"].shape[0] for row in arrays], dtype=np.int64)
    physical = -(-lengths // multiple) * multiple
    occupied = int(physical.sum())
    if width is None:
        step = math.lcm(multiple, total_multiple)
        width = -(-occupied // step) * step
    elif occupied > width:
        raise PackingError(
            f"{len(rows)} samples ({keys[0]} to {keys[-1]}) occupy {occupied} tokens after alignment to {multiple}, "
            f"more than the row's {width}"
        )
    tail = width - occupied
    if multiple > 1:
        physical[-1] += tail
        tail = 0

    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(physical, out=starts[1:])
    axes = arrays[0]["position_ids"].shape[:-1]
    tokens = np.full(width, pad_token_id, dtype=np.int64)
    labels = np.full(width, IGNORE_INDEX, dtype=np.int64)
    loss_mask = np.zeros(width, dtype=np.float32)
    padding = np.ones(width, dtype=np.bool_)
    positions = np.empty((*axes, width), dtype=np.int64)
    for key, row, start, length, stop in zip(keys, arrays, starts[:-1], lengths, starts[1:], strict=True):
        end = start + length
        tokens[start:end] = row["input_ids"]
        labels[start:end] = row["labels"]
        loss_mask[start:end] = row["loss_mask"]
        padding[start:end] = False
        own = row["position_ids"]
        if own.shape[:-1] != axes:
            raise PackingError(
                f"sample {key}: position_ids of shape {list(own.shape)} beside {[*axes, int(lengths[0])]} of sample "
                f"{keys[0]}; all samples of a pack need 1-D positions, or all [3, length]"
            )
        positions[..., start:end] = own
        if end < stop:
            first = int(own[..., -1].max()) + 1
            positions[..., end:stop] = np.arange(first, first + stop - end)
    if tail:
        positions[..., width - tail :] = np.arange(tail)
    _verify_targets(keys, starts, lengths, labels, loss_mask)

    real = np.zeros(len(rows) + 1 + bool(tail), dtype=np.int32)
    real[1 : len(rows) + 1] = np.cumsum(lengths)
    if tail:
        real[-1] = width
    visual_inputs, visual_counts = _join_visual_inputs(keys, rows)
    return PackedBatch(
        tokens=torch.from_numpy(tokens)[None],
        labels=torch.from_numpy(labels)[None],
        loss_mask=torch.from_numpy(loss_mask)[None],
        position_ids=torch.from_numpy(positions)[..., None, :] if axes else torch.from_numpy(positions)[None],
        padding_mask=torch.from_numpy(padding)[None],
        cu_seqlens=torch.from_numpy(real),
        cu_seqlens_padded=torch.from_numpy(starts.astype(np.int32)) if multiple > 1 else None,
        max_seqlen=max(int(physical.max()), tail),
        total_tokens=width,
        visual_inputs=visual_inputs,
        visual_counts=visual_counts,
        sample_keys=keys,
        sample_lengths=tuple(lengths.tolist()),
        extra=_join_extra(arrays, extra_fields, starts, width),
    )


def _array(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _row_arrays(key: str, row: Mapping[str, Any], extra_fields: Mapping[str, Any]) -> dict[str, Any]:
    """The token-aligned fields of one row, checked against the contract of `assemble`."""
    for name in (*ROW_TENSORS, *extra_fields):
        if row.get(name) is None:
            raise PackingError(f"sample {key} has no {name}")
    for name, value in row.items():
        if name not in ROW_FIELDS and name not in extra_fields and isinstance(value, torch.Tensor | np.ndarray):
            raise PackingError(f"sample {key} has a tensor {name!r} that extra_fields does not declare")
    arrays: dict[str, Any] = {name: _array(row[name]) for name in ROW_TENSORS}
    shape = arrays["input_ids"].shape
    if len(shape) != 1 or shape[0] == 0:
        raise PackingError(f"sample {key}: input_ids has shape {list(shape)}, expected [length] with length above 0")
    if not np.issubdtype(arrays["input_ids"].dtype, np.integer) or not np.issubdtype(
        arrays["labels"].dtype, np.integer
    ):
        raise PackingError(f"sample {key}: input_ids and labels must be whole numbers")
    arrays.update({name: torch.as_tensor(row[name]) for name in extra_fields})
    for name, value in arrays.items():
        own = tuple(value.shape)
        if own != shape and not (name == "position_ids" and own == (3, *shape)):
            raise PackingError(f"sample {key}: {name} has shape {list(own)} beside input_ids of {shape[0]} tokens")
    attention_mask = row.get("attention_mask")
    if attention_mask is not None:
        mask = _array(attention_mask)
        if mask.shape != shape or not mask.all():
            raise PackingError(
                f"sample {key}: its attention_mask marks padding; remove the padding (processor padding=False, "
                "padding_side has no part in packing) before assembly"
            )
    expected = row.get("expected_length")
    if expected is not None and int(expected) != shape[0]:
        raise PackingError(f"sample {key}: {shape[0]} tokens were rendered where {int(expected)} had been predicted")
    return arrays


def _verify_targets(
    keys: Sequence[str], starts: np.ndarray, lengths: np.ndarray, labels: np.ndarray, loss_mask: np.ndarray
) -> None:
    ends = starts[:-1] + lengths - 1
    bad = np.flatnonzero((labels[ends] != IGNORE_INDEX) | (loss_mask[ends] != 0))
    if bad.size:
        index = int(bad[0])
        raise PackingError(
            f"sample {keys[index]}: its last token has label {labels[ends[index]]} and weight "
            f"{loss_mask[ends[index]]:g}; nothing follows it inside the sample, so it needs label {IGNORE_INDEX} and weight 0"
        )
    if not (loss_mask.min() >= 0 and loss_mask.max() < np.inf):
        at = int(np.flatnonzero(~((loss_mask >= 0) & (loss_mask < np.inf)))[0])
        key = keys[int(np.searchsorted(starts, at, side="right")) - 1]
        raise PackingError(f"sample {key}: loss_mask holds {loss_mask[at]!r}; weights are finite and not negative")
    unlabelled = (loss_mask > 0) & (labels < 0)
    if unlabelled.any():
        at = int(unlabelled.argmax())
        index = int(np.searchsorted(starts, at, side="right")) - 1
        raise PackingError(
            f"sample {keys[index]}: token {at - starts[index]} has weight {loss_mask[at]:g} but label {labels[at]}"
        )


def _join_extra(
    arrays: Sequence[Mapping[str, Any]], extra_fields: Mapping[str, Any], starts: np.ndarray, width: int
) -> dict[str, torch.Tensor]:
    joined: dict[str, torch.Tensor] = {}
    for name, value in extra_fields.items():
        out = torch.full((width,), value, dtype=arrays[0][name].dtype)
        for row, start in zip(arrays, starts[:-1].tolist(), strict=True):
            out[start : start + row[name].shape[0]] = row[name]
        joined[name] = out[None]
    return joined


def _join_visual_inputs(
    keys: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, torch.Tensor] | None, dict[str, tuple[int, ...]]]:
    parts: dict[str, list[torch.Tensor]] = {}
    counts: dict[str, list[int]] = {}
    for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
        for name, value in (row.get("visual_inputs") or {}).items():
            if value is None:
                continue
            tensor = torch.as_tensor(value)
            if tensor.dim() == 0:
                raise PackingError(f"sample {key}: visual input {name} has no axis to join samples along")
            first = parts.setdefault(name, [])
            if first and (first[0].shape[1:] != tensor.shape[1:] or first[0].dtype != tensor.dtype):
                raise PackingError(
                    f"sample {key}: visual input {name} is {tensor.dtype} {list(tensor.shape)}, which cannot follow "
                    f"{first[0].dtype} {list(first[0].shape)}"
                )
            first.append(tensor)
            counts.setdefault(name, [0] * len(rows))[index] = tensor.shape[0]
    if not parts:
        return None, {}
    # cat copies also a single part: a view would drag the whole storage of its processor output through pickling.
    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    return joined, {name: tuple(count) for name, count in counts.items()}


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
        cu_seqlens_padded=None if padded is None else repeat_last(padded),
        max_seqlen=batch.max_seqlen if max_seqlen is None else max_seqlen,
        boundary_padding=spare,
    )


def packed_seq_params(batch: PackedBatch, *, total_tokens: bool = True) -> Any:
    """``megatron.core.packed_seq_params.PackedSeqParams`` for this row, of whatever version is installed.

    ``pad_between_seqs`` is set where that version has it: True as soon as any padding exists, also where it lies
    only behind the last sample (Transformer Engine treats both alike). ``cp_partition_mode`` is ``"zigzag"`` where
    the version knows it.

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
        "pad_between_seqs": padded is not None and batch.real_tokens != batch.total_tokens,
        "cp_partition_mode": "zigzag",
    }
    if total_tokens:
        values["total_tokens"] = batch.total_tokens
    known = {spec.name for spec in fields(PackedSeqParams)}
    return PackedSeqParams(**{name: value for name, value in values.items() if name in known})
