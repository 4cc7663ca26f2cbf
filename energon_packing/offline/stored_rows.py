"""A packed row in few bytes, without loss: what follows from other fields is not stored.

A row of 32,768 tokens takes 950 kB as tensors, and 140 kB here. Each field has one or more short forms. A short form is
used only if the field that is read back from it equals the field bit for bit; otherwise the field is stored as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from energon_packing.offline.stored_arrays import DamagedBytes
from energon_packing.thd.batch import IGNORE_INDEX, PackedBatch
from energon_packing.thd.pixels import forms_of

_PLAIN = ("max_seqlen", "total_tokens", "sample_keys", "sample_lengths", "position_starts", "fillers")
_SMALLER = ("int8", "int16", "int32")
_TYPES = {
    name: getattr(torch, name) for name in ("uint8", "int32", "int64", "float32", "bool", "float16", "float64", "int8")
}


def encode_row(batch: PackedBatch) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns plain values and arrays of a whole row on the host.

    Raises:
        TypeError: a tensor is of a type that has no stored form, such as bfloat16; pixels are stored as bytes.
    """
    values: dict[str, Any] = {name: getattr(batch, name) for name in _PLAIN}
    values["visual_counts"] = dict(batch.visual_counts)
    values["pixel_forms"] = {name: dataclasses.asdict(form) for name, form in batch.pixel_forms.items()}
    arrays: dict[str, np.ndarray] = {"cu_seqlens": batch.cu_seqlens.numpy()}
    if batch.cu_seqlens_padded is not None:
        values["padded"] = "equal" if batch.cu_seqlens_padded is batch.cu_seqlens else "other"
        if values["padded"] == "other":
            arrays["cu_seqlens_padded"] = batch.cu_seqlens_padded.numpy()
    physical = batch.boundaries.numpy().astype(np.int64)
    tokens, labels = batch.tokens[0].numpy(), batch.labels[0].numpy()
    weights = batch.loss_mask[0].numpy()
    arrays["tokens"] = _narrow(tokens)
    arrays |= _encoded_weights(weights, physical)
    if not np.array_equal(_following(tokens, weights), labels):
        arrays["labels"] = _narrow(labels)
    positions = batch.position_ids.numpy()
    values["axes"] = list(positions.shape[:-1])
    if not np.array_equal(np.broadcast_to(_counted(physical, batch.position_starts), positions.shape), positions):
        arrays["position_ids"] = _narrow(positions)
    padding = batch.padding_mask[0].numpy()
    if not np.array_equal(_outside(physical, batch.sample_lengths), padding):
        arrays["padding_mask"] = np.packbits(padding)
    types: dict[str, str] = {}
    for prefix, tensors in (("extra", batch.extra), ("visual_inputs", batch.visual_inputs or {})):
        for name, tensor in tensors.items():
            types[f"{prefix}/{name}"] = str(tensor.dtype).removeprefix("torch.")
            if types[f"{prefix}/{name}"] not in _TYPES:
                raise TypeError(f"{name} is {tensor.dtype}, which has no stored form")
            array = tensor.numpy()
            arrays[f"{prefix}/{name}"] = _narrow(array) if array.dtype == np.int64 else array
    values["types"] = types
    values["has_visual"] = batch.visual_inputs is not None
    return values, arrays


def decode_row(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> PackedBatch:
    """Returns the row; visual inputs are views of the arrays, all else is new memory.

    Raises:
        DamagedBytes: values or arrays do not belong together.
    """
    try:
        return _decoded(values, arrays)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        if isinstance(error, DamagedBytes):
            raise
        raise DamagedBytes(f"it is no packed row ({type(error).__name__}: {error})") from error


def _decoded(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> PackedBatch:
    width = int(values["total_tokens"])
    tokens = arrays["tokens"].astype(np.int64)
    if tokens.shape != (width,):
        raise DamagedBytes(f"{tokens.shape} tokens are in a row of {width}")
    real = _tensor(arrays["cu_seqlens"], copy=True)
    padded = {"equal": real, "other": None, None: None}[values.get("padded")]
    if values.get("padded") == "other":
        padded = _tensor(arrays["cu_seqlens_padded"], copy=True)
    lengths = tuple(int(length) for length in values["sample_lengths"])
    starts = tuple(int(start) for start in values["position_starts"])
    physical = (real if padded is None else padded).numpy().astype(np.int64)
    if physical[0] != 0 or physical[-1] != width or (np.diff(physical) < 0).any() or len(lengths) >= physical.size:
        raise DamagedBytes(f"its boundaries are {physical.tolist()} in a row of {width} tokens")
    weights = _decoded_weights(arrays, physical)
    labels = arrays["labels"].astype(np.int64) if "labels" in arrays else _following(tokens, weights)
    axes = tuple(values["axes"])
    if "position_ids" in arrays:
        positions = arrays["position_ids"].astype(np.int64)
    elif axes == (1,):
        positions = _counted(physical, starts)[None]
    elif axes == (3, 1):
        positions = np.ascontiguousarray(np.broadcast_to(_counted(physical, starts), (*axes, width)))
    else:
        raise DamagedBytes(f"positions cannot have the axes {axes}")
    padding = _outside(physical, lengths)
    if "padding_mask" in arrays:
        padding = np.unpackbits(arrays["padding_mask"], count=width).astype(np.bool_)
    named: dict[str, dict[str, torch.Tensor]] = {"extra": {}, "visual_inputs": {}}
    for path, kind in values["types"].items():
        prefix, _, name = path.partition("/")
        named[prefix][name] = _tensor(arrays[path], _TYPES[kind], copy=prefix == "extra")
    return PackedBatch(
        tokens=torch.from_numpy(tokens)[None],
        labels=torch.from_numpy(labels)[None],
        loss_mask=torch.from_numpy(weights)[None],
        position_ids=torch.from_numpy(positions),
        padding_mask=torch.from_numpy(padding)[None],
        cu_seqlens=real,
        cu_seqlens_padded=padded,
        max_seqlen=int(values["max_seqlen"]),
        total_tokens=width,
        visual_inputs=named["visual_inputs"] if values["has_visual"] else None,
        visual_counts={name: tuple(counts) for name, counts in values["visual_counts"].items()},
        pixel_forms=forms_of(values["pixel_forms"]),
        sample_keys=tuple(values["sample_keys"]),
        sample_lengths=lengths,
        position_starts=starts,
        fillers=int(values["fillers"]),
        extra=named["extra"],
    )


def _tensor(array: np.ndarray, kind: torch.dtype | None = None, *, copy: bool = False) -> torch.Tensor:
    # A view of a buffer that cannot be written to: nobody writes to visual inputs, and torch only warns.
    made = torch.from_numpy(array.copy() if copy or (not array.flags.writeable and array.nbytes == 0) else array)
    return made if kind is None or made.dtype == kind else made.to(kind)


def _narrow(array: np.ndarray) -> np.ndarray:
    """The array in the smallest whole numbers that hold it."""
    if array.size == 0:
        return array
    low, high = int(array.min()), int(array.max())
    for name in _SMALLER:
        limits = np.iinfo(name)
        if limits.min <= low and high <= limits.max:
            return array.astype(name)
    return array


def _following(tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The labels ``[T]`` of a row in which every position with a weight learns the token after it."""
    labels = np.full(tokens.shape, IGNORE_INDEX, dtype=np.int64)
    labels[:-1] = np.where(weights[:-1] > 0, tokens[1:], IGNORE_INDEX)
    return labels


def _counted(physical: np.ndarray, starts: tuple[int, ...]) -> np.ndarray:
    """Positions ``[T]`` that count through every segment, from 0 or from the segment's start."""
    first = np.zeros(physical.size - 1, dtype=np.int64)
    first[: len(starts)] = starts
    return np.arange(physical[-1]) - np.repeat(physical[:-1] - first, np.diff(physical))


def _outside(physical: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Bool ``[T]``, True outside the samples, of which segment ``i`` holds ``lengths[i]`` tokens from its start on."""
    edges = np.zeros(int(physical[-1]) + 1, dtype=np.int8)
    own = physical[: len(lengths)]
    edges[own] += 1
    edges[own + np.asarray(lengths, dtype=np.int64)] -= 1
    return np.cumsum(edges[:-1], dtype=np.int8) == 0


def _encoded_weights(weights: np.ndarray, physical: np.ndarray) -> dict[str, np.ndarray]:
    """One bit per token and one weight per segment, or all weights."""
    learned = weights > 0
    highest = np.maximum.reduceat(weights, physical[:-1]) if physical.size > 1 else weights[:1]
    short: dict[str, np.ndarray] = {"learned": np.packbits(learned), "weights": highest.astype(np.float32)}
    return short if np.array_equal(_decoded_weights(short, physical), weights) else {"loss_mask": weights}


def _decoded_weights(arrays: Mapping[str, np.ndarray], physical: np.ndarray) -> np.ndarray:
    if "loss_mask" in arrays:
        return arrays["loss_mask"].copy()
    learned = np.unpackbits(arrays["learned"], count=int(physical[-1])).astype(np.float32)
    weights = arrays["weights"]
    if (weights != 1).any():
        learned *= np.repeat(weights, np.diff(physical))
    return learned
