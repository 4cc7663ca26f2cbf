"""A packed row as bytes, for ranks that receive their packs from another rank of the run.

It is a pickle of the batch, and one buffer is one message. A tensor that is read from it has memory of its own, as
``torch.save`` wants it. Tensors that are sent apart have a number in the pickle.
"""

import dataclasses
import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from energon_packing.thd.batch import PackedBatch

LARGE = 1 << 20  # bytes from which a tensor is sent apart, where that is possible


class _Writer(pickle.Pickler):
    def __init__(self, file: Any, apart: list[torch.Tensor] | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._apart = apart

    def persistent_id(self, value: Any) -> Any:
        if self._apart is None or not isinstance(value, torch.Tensor) or value.nbytes < LARGE:
            return None
        self._apart.append(value)
        return len(self._apart) - 1, value.dtype, tuple(value.shape)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        return _tensor, (as_bytes(value).numpy(), value.dtype, tuple(value.shape))


class _Reader(pickle.Unpickler):
    def __init__(self, file: Any, apart: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._apart = apart

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return _tensor(self._apart[pid[0]], *pid[1:])


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.as_tensor(data).view(dtype).view(shape)


def pack_to_bytes(batch: Any, *, pixels: bool = True, apart: list[torch.Tensor] | None = None) -> torch.Tensor:
    """Returns a batch, or another value for a rank, as uint8 ``[n]``. Without ``pixels`` those of a `PackedBatch` are
    left out; Bridge's ``vlm_step`` drops the same two on later stages. ``apart`` is given the tensors of at least
    `LARGE` bytes, which are not in the result; None keeps all in it."""
    if not pixels and isinstance(batch, PackedBatch):
        batch = batch.without_pixels()
    file = io.BytesIO()
    _Writer(file, apart).dump(batch)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def pack_from_bytes(buffer: torch.Tensor, apart: Sequence[torch.Tensor] = ()) -> Any:
    """Returns the batch that `pack_to_bytes` wrote, of the same class; its tensors are copies. ``apart`` are the bytes
    of those that were sent apart, uint8 ``[n]`` each, in their order."""
    return _Reader(io.BytesIO(memoryview(buffer.numpy())), apart).load()


def field_digests(batch: Any) -> dict[str, str]:
    """Maps the name of each tensor to a digest of its values, dtype and shape, 16 hexadecimal digits."""
    digests = {}
    for name, tensor in tensors_of(batch).items():
        digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
        if tensor.nbytes:
            digest.update(as_bytes(tensor).numpy())
        digests[name] = digest.hexdigest()
    return digests


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a batch by name; one inside a mapping is named like ``visual_inputs/pixel_values``."""
    values = {spec.name: getattr(batch, spec.name) for spec in dataclasses.fields(batch)}
    for name, value in [*values.items()]:
        if isinstance(value, Mapping):
            values |= {f"{name}/{key}": tensor for key, tensor in value.items()}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values as uint8 ``[n]``: a view where they are contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
