"""A packed row as one buffer of bytes, for ranks that receive their packs from another rank.

The layout is 8 bytes with the length of a JSON header, the header (the class, names, dtypes, shapes, offsets and all
plain values), and the tensors, each at a multiple of 64 bytes. One buffer is one message. Reading it copies nothing.
Tensors that are sent apart from the buffer have an entry in the header and no bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from energon_packing.sample_kind import all_kinds
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.pixels import PIXELS, forms_of

AnyPack = Any
"""The `SampleKind.batch_class` of some kind."""

_ALIGNMENT = 64
_MAPPINGS = ("visual_inputs", "extra")
_FOREIGN = ("video_metadata",)
"""Tuples of values that other libraries define; a list inside them stays a list."""


def pack_to_bytes(batch: AnyPack, *, pixels: bool = True, apart: Collection[str] = ()) -> torch.Tensor:
    """Returns the batch as uint8 ``[n]``.

    Args:
        batch: on the host.
        pixels: False omits `PIXELS`; Bridge's ``vlm_step`` drops the same two on later stages.
        apart: names of tensors, as in `tensors_of`, whose bytes are sent apart.
    """
    if not pixels and isinstance(batch, PackedBatch):
        batch = dataclasses.replace(batch, pixel_forms={})
    tensors = tensors_of(batch, pixels=pixels)
    plain = {
        spec.name: getattr(batch, spec.name)
        for spec in dataclasses.fields(batch)
        if spec.name not in _MAPPINGS and not isinstance(getattr(batch, spec.name), torch.Tensor)
    }
    entries: list[tuple[str, str, list[int], int | None]] = []
    offset = 0
    for name, tensor in tensors.items():
        offset = _aligned(offset)
        place = None if name in apart else offset
        entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), place))
        offset += 0 if place is None else tensor.nbytes
    mappings = [name for name in _mappings(type(batch)) if getattr(batch, name) is not None]
    if "pixel_forms" in plain:
        plain["pixel_forms"] = {name: dataclasses.asdict(form) for name, form in plain["pixel_forms"].items()}
    header = {"class": type(batch).__name__, "plain": plain, "tensors": entries, "mappings": mappings}
    text = json.dumps(header).encode()
    start = _aligned(8 + len(text))
    buffer = _new_buffer(start + offset)
    buffer[:8] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little")), dtype=torch.uint8)
    buffer[8 : 8 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for (_, _, _, at), tensor in zip(entries, tensors.values(), strict=True):
        if at is not None and tensor.nbytes:
            buffer[start + at : start + at + tensor.nbytes] = _as_bytes(tensor)
    return buffer


def pack_from_bytes(buffer: torch.Tensor, apart: Sequence[torch.Tensor] = ()) -> Any:
    """Returns the batch that `pack_to_bytes` wrote, of the same class; its tensors are views of ``buffer``.

    Args:
        apart: uint8 ``[n]``, bytes of the tensors that were sent apart, in the order of `tensors_of`.
    """
    sent_apart = iter(apart)
    length = int.from_bytes(bytes(buffer[:8].tolist()), "little")
    header = json.loads(bytes(buffer[8 : 8 + length].numpy()))
    start = _aligned(8 + length)
    (kind,) = {own.batch_class for own in all_kinds() if own.batch_class.__name__ == header["class"]}
    fields: dict[str, Any] = {
        name: tuple(value) if name in _FOREIGN else _tuples(value) for name, value in header["plain"].items()
    }
    if "pixel_forms" in fields:
        fields["pixel_forms"] = forms_of(fields["pixel_forms"])
    for name in _mappings(kind):
        fields[name] = {} if name in header["mappings"] else None
    for name, dtype_name, shape, at in header["tensors"]:
        dtype = getattr(torch, dtype_name)
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        data = next(sent_apart) if at is None else buffer[start + at : start + at + count]
        tensor = data.view(dtype).view(shape)
        mapping, _, key = name.partition("/")
        if key:
            fields[mapping][key] = tensor
        else:
            fields[name] = tensor
    return kind(**fields)


def field_digests(batch: AnyPack) -> dict[str, str]:
    """Maps the name of each tensor to a digest of its values, dtype and shape, 16 hexadecimal digits."""
    digests = {}
    for name, tensor in tensors_of(batch).items():
        digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
        if tensor.nbytes:
            digest.update(_as_bytes(tensor).numpy())
        digests[name] = digest.hexdigest()
    return digests


def tensors_of(batch: AnyPack, *, pixels: bool = True) -> dict[str, torch.Tensor]:
    """Every tensor of a batch by name; one inside a mapping is named like ``visual_inputs/pixel_values``."""
    found: dict[str, torch.Tensor] = {}
    for spec in dataclasses.fields(batch):
        value = getattr(batch, spec.name)
        if isinstance(value, torch.Tensor):
            found[spec.name] = value
        elif spec.name in _MAPPINGS and value:
            for name, tensor in value.items():
                if pixels or name not in PIXELS:
                    found[f"{spec.name}/{name}"] = tensor
    return found


def with_tensors(batch: AnyPack, changed: Mapping[str, torch.Tensor]) -> Any:
    """The batch with other tensors under some names of `tensors_of`."""
    fields: dict[str, Any] = {}
    for name, tensor in changed.items():
        mapping, _, key = name.partition("/")
        if key:
            fields.setdefault(mapping, dict(getattr(batch, mapping)))[key] = tensor
        else:
            fields[name] = tensor
    return dataclasses.replace(batch, **fields)


def _mappings(kind: type) -> list[str]:
    """Fields of a class that hold tensors by name."""
    return [spec.name for spec in dataclasses.fields(kind) if spec.name in _MAPPINGS]


def _tuples(value: Any) -> Any:
    """Turns lists into tuples: JSON has only lists, a batch only tuples."""
    if isinstance(value, list):
        return tuple(_tuples(each) for each in value)
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return value


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _new_buffer(size: int) -> torch.Tensor:
    """A buffer, page-locked if there is a GPU, as the packs of a loader are."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
