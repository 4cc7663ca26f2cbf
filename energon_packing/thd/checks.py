"""The invariants of a packed row, checked on the tensors that go to the model.

`check_thd` takes a fraction of a millisecond for a row of 32,768 tokens, so a loader can leave it on. It reports and
never repairs: a violation means that some code between assembly and the model is wrong.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.fields import IGNORE_INDEX, TOKEN_FIELDS

INVARIANTS = {
    "type": "the batch is a PackedBatch whose fields are what its docstring says",
    "shape": "token fields are [1, T] of one T, positions [1, T] or [3, 1, T]",
    "dtype": "tokens, labels and positions are int64, loss_mask is float32, padding_mask is bool",
    "boundary_dtype": "boundaries are int32 in one dimension, real and padded of equal number",
    "starts_at_zero": "both boundary arrays start at 0",
    "strictly_increasing": "every segment has a real length above 0",
    "boundary_padding": "repeated boundaries at the end, and only those, repeat the last one",
    "real_within_physical": "no segment is longer than its place",
    "covers_row": "the last physical boundary and total_tokens are the length of the row",
    "padded_presence": "padded boundaries exist where samples are not aligned, and only for a multiple above 1",
    "aligned": "every physical length is a multiple of the alignment",
    "padding_is_visible": "any padding shows before the start of the last segment, where kernels look for it",
    "max_seqlen": "max_seqlen is the longest physical segment (or more if boundaries have a fixed length)",
    "samples": "keys and lengths of the samples agree with the boundaries; only a masked tail is a segment without one",
    "visual_counts": "each visual input has as many entries as its samples brought",
    "padding_mask": "padding_mask is True outside the samples and nowhere else",
    "padding_targets": "padding has label -100 and weight 0",
    "segment_end": "the last token of a sample has label -100 and weight 0, so that it never learns the next sample",
    "loss_weight": "weights are finite and not negative, and none lies on a position without a label",
    "positions": "positions count from 0, or a piece's position_start, in each segment; on three axes they start there "
    "and are never negative",
    "context_parallel": "a slice holds the total length divided by the ranks, and its rank exists",
}
"""Name -> meaning of every invariant that `check_thd` reports."""


def check_thd(batch: PackedBatch, *, multiple: int = 1) -> list[str]:
    """The invariants of a batch that do not hold; empty if all hold. A batch on an accelerator is copied to the host,
    which costs more than the check. Returns sentences ``"<name>: <values>"`` with the names of `INVARIANTS`. If shapes,
    dtypes or boundaries are wrong, invariants that depend on them are not checked. In a context-parallel slice, only
    metadata and shapes are checked."""
    if found := list(_types(batch)) or list(_shapes(batch)):
        return found
    real = batch.cu_seqlens.cpu().numpy().astype(np.int64)
    physical = real if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded.cpu().numpy().astype(np.int64)
    count = batch.num_segments
    found = list(_boundaries(batch, real, physical, count))
    found += _places(batch, real[: count + 1], physical[: count + 1], multiple)
    if found:
        return found
    found += _samples(batch, np.diff(real[: count + 1]), multiple)
    if batch.cp_size == 1 and not found:
        found += _content(batch, physical[: count + 1])
    return found


def check_media(
    batch: PackedBatch, *, merge_size: int, image_token_id: int | None = None, video_token_id: int | None = None
) -> list[str]:
    """The samples whose placeholders and media do not match, for families with grids (Qwen2-VL and its descendants):
    one sentence per mismatch, beginning with ``"media: "``; empty if all match. The ids are those of the placeholders;
    None if the family has none. A sample must have as many placeholder tokens as its own grids have merged patches, and
    as many patches as its grids state. With any other number, the model would silently read another sample's image,
    because it only compares sums over the row."""
    found: list[str] = []
    starts = batch.boundaries.tolist()
    tokens = batch.tokens[0].cpu().numpy()
    visual = batch.visual_inputs or {}
    kinds = ("image", image_token_id, "pixel_values"), ("video", video_token_id, "pixel_values_videos")
    for kind, token_id, pixels_name in kinds:
        if token_id is None:
            continue
        name = f"{kind}_grid_thw"
        none = (0,) * batch.num_samples
        grids = visual[name].cpu().numpy().prod(axis=1) if name in visual else np.zeros(0, dtype=np.int64)
        grid_ends = np.cumsum((0, *batch.visual_counts.get(name, none)))
        patch_counts = batch.visual_counts.get(pixels_name, none)
        for index, (key, length) in enumerate(zip(batch.sample_keys, batch.sample_lengths, strict=True)):
            placeholders = int((tokens[starts[index] : starts[index] + length] == token_id).sum())
            patches = int(grids[grid_ends[index] : grid_ends[index + 1]].sum())
            if placeholders * merge_size**2 != patches or patch_counts[index] != patches:
                found.append(
                    f"media: sample {key} has {placeholders} {kind} placeholders and {patch_counts[index]} rows of "
                    f"{pixels_name}, but its grids have {patches} patches, {merge_size**2} per token"
                )
    return found


_TENSORS = (*(field.name for field in TOKEN_FIELDS), "cu_seqlens")
_SEQUENCES = {"sample_keys": str, "sample_lengths": int, "position_starts": int}
_NUMBERS = ("max_seqlen", "total_tokens", "fillers", "cp_size", "cp_rank")


def _types(batch: Any) -> Iterator[str]:
    if not isinstance(batch, PackedBatch):
        yield f"type: a {type(batch).__name__}, expected a PackedBatch"
        return
    tensors = {name: getattr(batch, name) for name in _TENSORS}
    if batch.cu_seqlens_padded is not None:
        tensors["cu_seqlens_padded"] = batch.cu_seqlens_padded
    for name in ("visual_inputs", "extra"):
        if isinstance(held := getattr(batch, name), Mapping):
            tensors |= {f"{name}[{inner!r}]": value for inner, value in held.items()}
        elif held is not None or name == "extra":
            yield f"type: {name} is a {type(held).__name__}, expected a mapping of tensors"
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            yield _unexpected(name, value, "a tensor")
        elif name.startswith("visual_inputs") and value.dim() == 0:
            yield f"type: {name} has no axis, expected one over media or patches"
    for name, kind in _SEQUENCES.items():
        if not _are(getattr(batch, name), kind):
            yield _unexpected(name, getattr(batch, name), f"a sequence of {kind.__name__}")
    counts = batch.visual_counts
    if not isinstance(counts, Mapping) or not all(_are(held, int) for held in counts.values()):
        yield _unexpected("visual_counts", counts, "a mapping of counts")
    for name in (*_NUMBERS, *(["boundary_padding"] if batch.boundary_padding is not None else [])):
        if not _is(getattr(batch, name), int):
            yield _unexpected(name, getattr(batch, name), "an int")


def _unexpected(name: str, value: Any, kind: str) -> str:
    return f"type: {name} is {reprlib.repr(value)}, expected {kind}"


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(_is(each, kind) for each in values)


def _shapes(batch: PackedBatch) -> Iterator[str]:
    rank, size, total = batch.cp_rank, batch.cp_size, batch.total_tokens
    if not 0 <= rank < size or total % size:
        yield f"context_parallel: rank {rank} of {size} for a row of {total} tokens, which must divide evenly"
        return
    row = list(batch.tokens.shape)
    for name, tensor in batch.token_tensors.items():
        shape = list(tensor.shape)
        if len(row) != 2 or row[0] != 1 or (shape != row and not (name == "position_ids" and shape == [3, *row])):
            yield f"shape: {name} is {shape}, tokens are {row}, expected [1, T]"
    for field in TOKEN_FIELDS:
        if (actual := getattr(batch, field.name).dtype) != field.dtype:
            yield f"dtype: {field.name} is {actual}, expected {field.dtype}"
    for label, boundaries in (("cu_seqlens", batch.cu_seqlens), ("cu_seqlens_padded", batch.cu_seqlens_padded)):
        if boundaries is None:
            continue
        if str(boundaries.dtype) != "torch.int32" or boundaries.dim() != 1:
            shape = list(boundaries.shape)
            yield f"boundary_dtype: {label} is {boundaries.dtype} {shape}, expected torch.int32 [segments + 1]"
        elif boundaries.numel() != batch.cu_seqlens.numel():
            yield f"boundary_dtype: {label} has {boundaries.numel()} entries, cu_seqlens {batch.cu_seqlens.numel()}"
    if batch.num_segments < 1 or (batch.boundary_padding or 0) < 0:
        repeated, count = batch.boundary_padding, batch.cu_seqlens.numel()
        yield f"boundary_padding: {repeated} repeated of {count} boundaries leave {batch.num_segments} segments"


def _boundaries(batch: PackedBatch, real: np.ndarray, physical: np.ndarray, count: int) -> Iterator[str]:
    for label, boundaries in (("cu_seqlens", real), ("cu_seqlens_padded", physical)):
        if boundaries is real and label != "cu_seqlens":
            continue
        if boundaries[0] != 0:
            yield f"starts_at_zero: {label} starts at {boundaries[0]}"
        if (steps := np.diff(boundaries[: count + 1])).min() <= 0:
            segment = int(steps.argmin())
            yield f"strictly_increasing: {label} gives segment {segment} the length {steps[segment]}"
        repeated = boundaries[count + 1 :]
        if (repeated != boundaries[count]).any():
            yield f"boundary_padding: {label} ends with {repeated.tolist()}, expected repeats of {boundaries[count]}"
    if (excess := np.diff(real[: count + 1]) - np.diff(physical[: count + 1])).max() > 0:
        segment = int(excess.argmax())
        yield f"real_within_physical: segment {segment} is {excess[segment]} tokens longer than its place"
    total, row = batch.total_tokens, batch.tokens.shape[1] * batch.cp_size
    if not physical[count] == total == row:
        yield f"covers_row: the last boundary is {physical[count]}, total_tokens {total}, the row has {row} tokens"


def _places(batch: PackedBatch, real: np.ndarray, physical: np.ndarray, multiple: int) -> Iterator[str]:
    places = np.diff(physical)
    has_padded, rest = batch.cu_seqlens_padded is not None, places % multiple
    if has_padded if multiple == 1 else not has_padded and rest.any():
        yield f"padded_presence: cu_seqlens_padded is {'set' if has_padded else 'missing'} for multiple {multiple}"
    if rest.any():
        segment = int(rest.argmax())
        yield f"aligned: segment {segment} occupies {places[segment]} tokens, not a multiple of {multiple}"
    longest = int(places.max())
    if batch.max_seqlen < longest or (batch.boundary_padding is None and batch.max_seqlen != longest):
        yield f"max_seqlen: it is {batch.max_seqlen}, the longest physical segment has {longest} tokens"
    # As Transformer Engine 2.2 to 2.17.1 compares the two; a row that looks unpadded to it must be unpadded.
    if real[-1] != physical[-1] and (real[:-1] == physical[:-1]).all():
        own, place = real[-1] - real[-2], physical[-1] - physical[-2]
        yield f"padding_is_visible: only the last segment is padded, {own} tokens in a place of {place}"


def _samples(batch: PackedBatch, real: np.ndarray, multiple: int) -> Iterator[str]:
    samples, keys = batch.num_samples, len(batch.sample_keys)
    rows = samples + batch.fillers  # `_content` checks that fillers hold only padding
    if rows < 1 or keys != samples or (real.size - rows) not in (0, 1):
        yield f"samples: {keys} keys and {samples} lengths for {real.size} segments"
        return
    lengths = np.asarray(batch.sample_lengths, dtype=np.int64)
    if not batch.pad_between_seqs:  # padding is part of its sample, or there is none
        lengths = -(-lengths // multiple) * multiple
    if (wrong := np.flatnonzero(real[:samples] != lengths)).size:
        at = int(wrong[0])
        yield f"samples: {batch.sample_keys[at]} has length {batch.sample_lengths[at]}, its segment {real[at]}"
    for name, tensor in (batch.visual_inputs or {}).items():
        counts = batch.visual_counts.get(name, ())
        if len(counts) != rows or sum(counts) != tensor.shape[0]:
            yield f"visual_counts: {name} has {tensor.shape[0]} entries, its {len(counts)} counts add to {sum(counts)}"


def _content(batch: PackedBatch, physical: np.ndarray) -> Iterator[str]:
    labels, loss_mask, padding, positions = (
        getattr(batch, name).cpu().numpy() for name in ("labels", "loss_mask", "padding_mask", "position_ids")
    )
    labels, loss_mask, padding = labels[0], loss_mask[0], padding[0]
    starts, lengths = physical[:-1], np.diff(physical)
    own = np.zeros_like(lengths)  # a masked tail segment is all padding, whatever its boundaries state
    own[: batch.num_samples] = batch.sample_lengths
    expected = np.repeat(np.tile([False, True], lengths.size), np.stack([own, lengths - own], axis=1).reshape(-1))
    if (at := _first(expected != padding)) is not None:
        yield f"padding_mask: position {at} is marked {bool(padding[at])}, expected {bool(expected[at])}"
    if (at := _first(((labels != IGNORE_INDEX) | (loss_mask != 0)) & expected)) is not None:
        yield f"padding_targets: padding at {at} has label {labels[at]} and weight {loss_mask[at]:g}"
    ends = (starts + own - 1)[: batch.num_samples]
    if (segment := _first((labels[ends] != IGNORE_INDEX) | (loss_mask[ends] != 0))) is not None:
        at, key = int(ends[segment]), batch.sample_keys[segment]
        yield f"segment_end: sample {key} ends at {at} with label {labels[at]} and weight {loss_mask[at]:g}"
    if not (loss_mask.min() >= 0 and loss_mask.max() < np.inf):
        at = _first(~((loss_mask >= 0) & (loss_mask < np.inf)))
        yield f"loss_weight: position {at} has weight {loss_mask[at]}"
    elif (at := _first((loss_mask > 0) & (labels < 0))) is not None:
        yield f"loss_weight: position {at} has weight {loss_mask[at]:g} but label {labels[at]}"
    first = np.zeros_like(lengths)
    first[: len(batch.position_starts)] = batch.position_starts
    yield from _positions(positions, starts, lengths, first)


def _positions(positions: np.ndarray, starts: np.ndarray, lengths: np.ndarray, first: np.ndarray) -> Iterator[str]:
    if positions.ndim == 2:
        counted = np.arange(positions.shape[1])
        counted -= np.repeat(starts - first, lengths)
        if (at := _first(positions[0] != counted)) is not None:
            yield f"positions: position {at} of the row has {positions[0, at]}, expected {counted[at]}"
        return
    axes = positions[:, 0]
    at_start = axes[:, starts]
    if (at_start != first).any():
        axis, segment = np.argwhere(at_start != first)[0].tolist()
        at = at_start[axis, segment]
        yield f"positions: segment {segment} starts at {at} on axis {axis}, expected {first[segment]}"
    elif axes.min() < 0:
        axis, at = np.argwhere(axes < 0)[0].tolist()
        yield f"positions: position {at} of the row has {axes[axis, at]} on axis {axis}"


def _first(wrong: Any) -> int | None:
    """Index of the first True, or None; `argmax` stops early and builds no list of indices."""
    at = int(wrong.argmax()) if wrong.size else -1
    return at if at >= 0 and wrong[at] else None
