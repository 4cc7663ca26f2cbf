"""Files of stored latents and text embeddings, checked at conversion as hostile input."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packing.convert.config import ConvertConfig
from energon_packing.errors import SampleRejected
from energon_packing.media.tensor import SUFFIXES, TensorInfo, read_tensor, tensor_info
from energon_packing.wan.record import AXES, StoredTensor, TensorRole

NAMES: Mapping[TensorRole, tuple[str, ...]] = {
    "latents": ("latents", "latent", "video_latents"),
    "context": ("context", "context_embeddings", "prompt_embeds", "text_embeddings"),
}
"""Names that each may have as a column of a record, and in a file with several tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFile:
    """One distinct tensor file, checked.

    Attributes:
        kind: what the record uses it for.
        path: the file, all links resolved.
        name: its entry in the media store, ``<32 hex digits of its SHA-256>.<extension>``.
        size: bytes.
        tensor, shape, dtype, rows: see `StoredTensor`.
    """

    kind: TensorRole
    path: str
    name: str
    size: int
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    rows: int | None

    transparent = False
    metadata = None  # Energon has none for it, and the records hold its shape

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # a journal returns it as a list

    def stored(self, name: str) -> StoredTensor:
        """The tensor as a record names it; ``name`` is its entry in the layout's media store."""
        return StoredTensor(name=name, tensor=self.tensor, shape=self.shape, dtype=self.dtype, rows=self.rows)


def check_tensor(stream: Any, path: str, size: int, role: TensorRole, config: ConvertConfig) -> TensorFile:
    """Reads and checks one open file; ``check_media: full`` checks every value.

    Text embeddings are always read, because their length matters.

    Raises:
        SampleRejected: ``corrupt_tensor``, ``unknown_tensor_format``, ``unsafe_pickle``, ``no_such_tensor``,
            ``wrong_dtype``, ``wrong_shape``, ``not_finite`` (values that are NaN or infinite), ``empty_context``
            (nothing but zeros).
    """
    suffix = Path(path).suffix.lower().lstrip(".")
    if suffix not in SUFFIXES:
        raise SampleRejected("unknown_tensor_format", f"'.{suffix[:20]}' is not one of {', '.join(SUFFIXES)}")
    digest = hashlib.file_digest(stream, "sha256").hexdigest()[:32]
    info = tensor_info(stream, suffix, NAMES[role])
    shape = _shape(info, role)
    rows = None
    if role == "context" or config.check_media == "full":
        stream.seek(0)
        rows = _check_values(stream.read(size), suffix, info, role)
    return TensorFile(
        kind=role,
        path=path,
        name=f"{digest}.{suffix}",
        size=size,
        tensor=info.tensor,
        shape=shape,
        dtype=info.dtype,
        rows=rows if role == "context" and rows != shape[0] else None,
    )


def _shape(info: TensorInfo, role: TensorRole) -> tuple[int, ...]:
    """The shape, without the batch axis of length 1 that encoders return."""
    shape = info.shape
    if len(shape) == AXES[role] + 1 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != AXES[role]:
        wanted = "channels, frames, height, width" if role == "latents" else "tokens, width"
        raise SampleRejected("wrong_shape", f"shape {list(info.shape)}, expected ({wanted})")
    return shape


def _check_values(data: bytes, suffix: str, info: TensorInfo, role: TensorRole) -> int:
    """Number of rows of text embeddings, without trailing rows of zeros; of latents, number of frames."""
    import torch

    tensor = read_tensor(data, suffix, (info.tensor, *NAMES[role]))
    if not torch.isfinite(tensor).all():
        raise SampleRejected("not_finite", "it holds NaN or infinite values")
    if role == "latents":
        return info.shape[-3]
    filled = tensor.reshape(info.shape[-2:]).ne(0).any(dim=1).nonzero()
    if len(filled) == 0:
        raise SampleRejected("empty_context", "all embeddings of the text are zero")
    return int(filled[-1]) + 1
