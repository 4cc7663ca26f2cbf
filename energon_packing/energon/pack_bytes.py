"""A packed row as one buffer of bytes, for ranks that receive their packs from another rank of the run.

The layout is 8 bytes with the length of a header, the header (a pickle of the batch with a place for each tensor), and
the tensors, each at a multiple of 64 bytes. One buffer is one message. Reading it copies nothing. Tensors that are sent
apart from the buffer have a place in the header and no bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.pixels import PIXELS

LARGE = 1 << 20
"""Bytes from which a tensor is sent apart, where that is possible."""
_ALIGNMENT = 64


class _Header(pickle.Pickler):
    """Writes a batch; ``placed`` are the tensors that it met, each once, and where their bytes go."""

    def __init__(self, file: Any, apart: list[torch.Tensor] | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.apart, self.end = apart, 0
        self.placed: list[tuple[torch.Tensor, int]] = []
        self._ids: dict[int, tuple[int, torch.dtype, tuple[int, ...], int | None]] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) not in self._ids:
            place = None
            if self.apart is not None and value.nbytes >= LARGE:
                self.apart.append(value)
            else:
                place, self.end = self.end, _aligned(self.end + value.nbytes)
                self.placed.append((value, place))
            self._ids[id(value)] = len(self._ids), value.dtype, tuple(value.shape), place
        return self._ids[id(value)] if isinstance(value, torch.Tensor) else None


class _Reader(pickle.Unpickler):
    """Reads a batch whose tensors are in memory already; one that stands at two places is one tensor again."""

    def __init__(self, file: Any, memory: torch.Tensor, apart: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._memory, self._apart = memory, iter(apart)
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number, dtype, shape, place = pid
        if number not in self._tensors:
            size = math.prod(shape) * dtype.itemsize
            data = next(self._apart) if place is None else self._memory[place : place + size]
            self._tensors[number] = data.view(dtype).view(shape)
        return self._tensors[number]


def pack_to_bytes(batch: Any, *, pixels: bool = True, apart: list[torch.Tensor] | None = None) -> torch.Tensor:
    """Returns a batch as uint8 ``[n]``, in page-locked memory if there is a GPU, as the packs of a loader are.

    Args:
        batch: a dataclass with tensors on the host, such as a `PackedBatch`.
        pixels: False omits `PIXELS` of a `PackedBatch`; Bridge's ``vlm_step`` drops the same two on later stages.
        apart: is given the tensors of at least `LARGE` bytes, which are not in the result; None keeps all in it.
    """
    if not pixels and isinstance(batch, PackedBatch) and batch.visual_inputs is not None:
        kept = {name: tensor for name, tensor in batch.visual_inputs.items() if name not in PIXELS}
        batch = dataclasses.replace(batch, visual_inputs=kept, pixel_forms={})
    file = io.BytesIO()
    header = _Header(file, apart)
    header.dump(batch)
    text = len(file.getbuffer()).to_bytes(8, "little") + file.getvalue()
    start = _aligned(len(text))
    buffer = torch.empty(start + header.end, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for tensor, place in header.placed:
        if tensor.nbytes:
            buffer[start + place : start + place + tensor.nbytes] = _as_bytes(tensor)
    return buffer


def pack_from_bytes(buffer: torch.Tensor, apart: Sequence[torch.Tensor] = ()) -> Any:
    """Returns the batch that `pack_to_bytes` wrote, of the same class; its tensors are views of ``buffer``.

    Args:
        apart: uint8 ``[n]``, bytes of the tensors that were sent apart, in their order.
    """
    end = 8 + int.from_bytes(bytes(buffer[:8].tolist()), "little")
    return _Reader(io.BytesIO(bytes(buffer[8:end].numpy())), buffer[_aligned(end) :], apart).load()


def field_digests(batch: Any) -> dict[str, str]:
    """Maps the name of each tensor to a digest of its values, dtype and shape, 16 hexadecimal digits."""
    digests = {}
    for name, tensor in tensors_of(batch).items():
        digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
        if tensor.nbytes:
            digest.update(_as_bytes(tensor).numpy())
        digests[name] = digest.hexdigest()
    return digests


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a batch by name; one inside a mapping is named like ``visual_inputs/pixel_values``."""
    values = {spec.name: getattr(batch, spec.name) for spec in dataclasses.fields(batch)}
    for name, value in [*values.items()]:
        if isinstance(value, Mapping):
            values |= {f"{name}/{key}": tensor for key, tensor in value.items()}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
