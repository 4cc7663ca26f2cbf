"""The rows that a pack is assembled from: the data of each sample, and the checks that it must pass.

`energon_packing.thd.assemble` documents the contract. This module enforces it, one sample at a time, with the sample's
key in every message.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from energon_packing.errors import PackingError
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.fields import IGNORE_INDEX, ROW_TENSORS, TOKEN_FIELDS, TokenField
from energon_packing.thd.pixels import PIXEL_FORMS, PixelForm

_MOST_BYTES = 1 << 30  # Bytes per write; Linux writes at most 2 GiB less a page


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins parts along their first axis in new memory, even one part, because a view would keep its storage alive. At
    least one is given, and they are equal in dtype and in all axes but the first. In a data loader's worker this memory
    is shared from the start, as in PyTorch's own collation. The parts are written to its file: the kernel clears every
    page that is first touched through a mapping. Raises PackingError: shared memory is full."""
    first = parts[0]
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    if torch.utils.data.get_worker_info() is None or first.device.type != "cpu" or not math.prod(shape):
        return torch.cat(list(parts))
    result = first.new(first._typed_storage()._new_shared(math.prod(shape), device=first.device)).resize_(shape)
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return torch.cat(list(parts), out=result)
    descriptor, _ = result.untyped_storage()._share_fd_cpu_()  # of the storage itself: not to be closed
    try:
        write_bytes(descriptor, parts)
    except OSError as error:
        size = result.numel() * result.element_size()
        fix = "make /dev/shm larger, or lower data.num_workers."
        raise PackingError(f"{size} bytes of pixels do not fit into shared memory ({error.strerror}); {fix}") from error
    return result


def write_bytes(descriptor: int, parts: Iterable[torch.Tensor]) -> None:
    """Writes the bytes of tensors to a file in memory, one after the other; a write clears no page beforehand."""
    at = 0
    for part in parts:
        left = memoryview(part.contiguous().view(-1).view(torch.uint8).numpy())
        while left:
            written = os.pwrite(descriptor, left[:_MOST_BYTES], at)
            at, left = at + written, left[written:]


ROW_FIELDS = (*ROW_TENSORS, "attention_mask", "visual_inputs", PIXEL_FORMS, "key", "expected_length", "position_start")


def _array(value: Any) -> np.ndarray:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # NumPy has no bfloat16


def row_arrays(key: str, row: Mapping[str, Any], extra_fields: Mapping[str, Any]) -> dict[str, Any]:
    """The token-aligned fields of one row, checked against the contract of `assemble`."""
    for name in (*ROW_TENSORS, *extra_fields):
        if row.get(name) is None:
            raise PackingError(f"sample {key} has no {name}")
    for name, value in row.items():
        if name not in ROW_FIELDS and name not in extra_fields and isinstance(value, torch.Tensor | np.ndarray):
            raise PackingError(f"sample {key} has a tensor {name!r} that extra_fields does not declare")
    arrays: dict[str, Any] = {name: _array(row[name]) for name in ROW_TENSORS}
    if len(shape := arrays["input_ids"].shape) != 1 or shape[0] == 0:
        raise PackingError(f"sample {key}: input_ids has shape {list(shape)}, expected [length] with length above 0")
    for field in TOKEN_FIELDS:
        if field.of_row and field.dtype == torch.int64 and arrays[field.of_row].dtype.kind not in "iu":
            raise PackingError(f"sample {key}: {field.of_row} must be whole numbers, not {arrays[field.of_row].dtype}")
    arrays.update({name: torch.as_tensor(row[name]) for name in extra_fields})
    for name, value in arrays.items():
        own = tuple(value.shape)
        if own != shape and not (name == "position_ids" and own == (3, *shape)):
            raise PackingError(f"sample {key}: {name} has shape {list(own)}, but input_ids has {shape[0]} tokens")
    mask = row.get("attention_mask")
    if mask is not None and ((mask := _array(mask)).shape != shape or not mask.all()):
        fix = "remove the padding before assembly (processor padding=False; packing does not use padding_side)"
        raise PackingError(f"sample {key}: its attention_mask marks padding; {fix}")
    if (expected := row.get("expected_length")) is not None and int(expected) != shape[0]:
        raise PackingError(f"sample {key}: {shape[0]} tokens were rendered, but {int(expected)} were predicted")
    return arrays


def verify_targets(
    keys: Sequence[str], starts: np.ndarray, lengths: np.ndarray, labels: np.ndarray, loss_mask: np.ndarray
) -> None:
    """Checks that no label of a joined row reaches into the next sample and that every weight has a target. Raises
    PackingError: a sample's last token has a target; a weight is negative, infinite or NaN; a token with a weight has
    no label. The message names the sample and the token.

    Args:
        starts: ``[B + 1]``, where each sample begins in the row.
        lengths: ``[B]``, real tokens of each sample.
        labels: ``[T]`` int64, already shifted.
        loss_mask: ``[T]`` weights.
    """
    ends = starts[:-1] + lengths - 1
    if (bad := np.flatnonzero((labels[ends] != IGNORE_INDEX) | (loss_mask[ends] != 0))).size:
        index = int(bad[0])
        last = f"label {labels[ends[index]]} and weight {loss_mask[ends[index]]:g}"
        why = f"nothing follows it inside the sample, so it needs label {IGNORE_INDEX} and weight 0"
        raise PackingError(f"sample {keys[index]}: its last token has {last}; {why}")
    impossible = ~((loss_mask >= 0) & (loss_mask < np.inf))
    wrong = impossible | ((loss_mask > 0) & (labels < 0))
    if wrong.any():
        at = int((impossible if impossible.any() else wrong).argmax())
        index = int(np.searchsorted(starts, at, side="right")) - 1
        key, token = keys[index], at - starts[index]
        if impossible[at]:
            raise PackingError(f"sample {key}: loss_mask holds {loss_mask[at]!r}; weights are finite and not negative")
        raise PackingError(f"sample {key}: token {token} has weight {loss_mask[at]:g} but label {labels[at]}")


def join_extra(
    keys: Sequence[str], arrays: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], starts: np.ndarray, width: int
) -> dict[str, torch.Tensor]:
    """The extra token-aligned fields of all samples as rows ``[1, width]``, in which samples begin at ``starts`` ``[B +
    1]``. Each sample has every field as ``[length]``; ``fields`` are name -> `TokenField`, or the padding value where
    the first sample decides about the dtype. Raises PackingError: a sample has a field in another dtype; types of
    tokens would silently become fractions."""
    joined: dict[str, torch.Tensor] = {}
    for name, pad in fields.items():
        field = pad if isinstance(pad, TokenField) else TokenField(name=name, dtype=arrays[0][name].dtype, pad=pad)
        out = field.filled(width)
        for key, row, start in zip(keys, arrays, starts[:-1].tolist(), strict=True):
            if row[name].dtype != field.dtype:
                raise PackingError(f"sample {key}: {name} is {row[name].dtype}, not {field.dtype}")
            out[start : start + row[name].shape[0]] = row[name]
        joined[name] = out[None]
    return joined


def join_visual(
    keys: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, torch.Tensor] | None, dict[str, tuple[int, ...]]]:
    """The samples' visual inputs, joined along their first axis in the order of the samples, by name, or None if no
    sample has any; and name -> how many entries of the first axis each sample has. Raises PackingError: an input has no
    axes, or its axes or dtype differ from the same input of an earlier sample."""
    parts: dict[str, list[torch.Tensor]] = {}
    counts: dict[str, list[int]] = {}
    for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
        for name, value in (row.get("visual_inputs") or {}).items():
            if value is None:
                continue
            if (tensor := torch.as_tensor(value)).dim() == 0:
                raise PackingError(f"sample {key}: visual input {name} has no axis to join samples along")
            first = parts.setdefault(name, [])
            if first and (first[0].shape[1:] != tensor.shape[1:] or first[0].dtype != tensor.dtype):
                own, others = (f"{each.dtype} {list(each.shape)}" for each in (tensor, first[0]))
                raise PackingError(f"sample {key}: visual input {name} is {own}, which cannot be joined to {others}")
            first.append(tensor)
            counts.setdefault(name, [0] * len(rows))[index] = tensor.shape[0]
    if not parts:
        return None, {}
    together = {name: joined(tensors) for name, tensors in parts.items()}
    return together, {name: tuple(count) for name, count in counts.items()}


def joined_forms(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, PixelForm]:
    """Forms of the visual inputs that are bytes, by name. Raises PackingError: samples differ in the form of one."""
    forms: dict[str, PixelForm] = {}
    for key, row in zip(keys, rows, strict=True):
        for name, form in (row.get(PIXEL_FORMS) or {}).items():
            if forms.setdefault(name, form) != form:
                raise PackingError(
                    f"sample {key}: the bytes of visual input {name} are normalised as {form}, those of a sample "
                    f"before it as {forms[name]}; give all encoders of a pack one image processor, or set "
                    "encoder.pixels to float32"
                )
    return forms


def unpack(batch: PackedBatch) -> list[dict[str, Any]]:
    """The rows that the batch was assembled from, without padding: the inverse of `energon_packing.thd.assemble`. Each
    sample has ``key``, ``input_ids``, ``labels``, ``loss_mask``, ``position_ids`` (``[L]`` or ``[3, L]``), every extra
    field and, if it had any, ``visual_inputs``; all tensors are views. Raises PackingError: the batch is a
    context-parallel slice, which holds only pieces of its samples."""
    if batch.cp_size != 1:
        raise PackingError("a context-parallel slice holds pieces of samples; reassemble the slices, then unpack")
    starts = batch.boundaries.tolist()
    taken = dict.fromkeys(batch.visual_counts, 0)
    rows: list[dict[str, Any]] = []
    for index, (key, length) in enumerate(zip(batch.sample_keys, batch.sample_lengths, strict=True)):
        span = slice(starts[index], starts[index] + length)
        row: dict[str, Any] = {"key": key}
        for field in TOKEN_FIELDS:
            if field.of_row:  # ``[1, T]``, or positions ``[3, 1, T]``
                row[field.of_row] = getattr(batch, field.name).squeeze(-2)[..., span]
        if batch.position_starts:
            row["position_start"] = batch.position_starts[index]
        row |= {name: tensor[0, span] for name, tensor in batch.extra.items()}
        visual: dict[str, torch.Tensor] = {}
        for name, tensor in (batch.visual_inputs or {}).items():
            if count := batch.visual_counts[name][index]:
                visual[name] = tensor[taken[name] : taken[name] + count]
            taken[name] += count
        if visual:
            row["visual_inputs"] = visual
        if forms := {name: form for name, form in batch.pixel_forms.items() if name in visual}:
            row[PIXEL_FORMS] = forms
        rows.append(row)
    return rows
