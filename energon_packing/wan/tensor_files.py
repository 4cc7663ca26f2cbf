"""Files of stored latents and text embeddings (``.npy``, ``.safetensors``, ``.pt``, ``.pickle``): hostile input.

Sizes come from the header and are compared with the file's length before anything is allocated. A ``.pt`` file is a
pickle inside a zip: torch's ``weights_only`` unpickler reads it, which builds tensors and plain containers and refuses
every other class. Files in the old format, which are bare pickles, are not opened at all; a ``.pickle`` of one tensor,
as Bridge's ``prepare_dataset_wan.py`` writes them, may name three functions that build it, and no others.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import math
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.tars import OF_LISTS
from energon_packing.errors import SampleRejected, is_machines
from energon_packing.wan.record import AXES, StoredTensor, TensorRole

if TYPE_CHECKING:
    import torch


SUFFIXES = ("npy", "safetensors", "pt", "pth", "pickle")
_OF_TORCH = SUFFIXES[2:]
_OPCODES = OF_LISTS - {"LONG_BINPUT"} | {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BININT", "BININT1", "BININT2"}
_OPCODES |= {"NEWTRUE", "NEWFALSE"}
"""Those of a pickled tensor; of the others, some allocate what they claim."""
MAX_HEADER = 1 << 20
"""Most bytes of a header. A safetensors header has 100 bytes per tensor, that of a .npy file 128 in all."""
_NPY_DTYPES = {"f2": "float16", "f4": "float32", "f8": "float64"}
_SAFETENSORS_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_STORAGES = ("torch HalfStorage", "torch BFloat16Storage", "torch FloatStorage", "torch DoubleStorage")


class TensorInfo(NamedTuple):
    """Where a tensor lies in its file."""

    tensor: str  # its name inside the file; empty if the file is the tensor
    shape: tuple[int, ...]
    dtype: str  # Torch's name of it, such as ``float16``
    start: int  # byte at which its values begin; -1 for ``.pt``, for which only torch knows it
    order: str = "<"
    fortran: bool = False  # whether the first axis varies fastest


def tensor_info(stream: BinaryIO, suffix: str, names: Sequence[str] = ()) -> TensorInfo:
    """Returns what the header of a seekable file says; ``names`` are candidates in a file with several tensors, of
    which the first that it holds is taken. Raises SampleRejected: ``unknown_tensor_format``, ``corrupt_tensor`` (not a
    file of that format, or cut off), ``unsafe_pickle``, ``no_such_tensor``, ``wrong_dtype`` (no floating-point
    numbers), ``wrong_shape`` (empty)."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    if suffix == "npy":
        return _npy_info(stream, size)
    if suffix == "safetensors":
        return _safetensors_info(stream, size, names)
    if suffix in _OF_TORCH:
        name, tensor = _load(stream, size, suffix, names)
        return TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), -1)
    raise SampleRejected("unknown_tensor_format", f"'.{suffix[:20]}' is not one of {', '.join(SUFFIXES)}")


def read_tensor(data: bytes, suffix: str, names: Sequence[str] = ()) -> torch.Tensor:
    """Returns the tensor of a file, in its own shape and dtype, on the CPU; it shares no memory with ``data``. Raises
    SampleRejected: as `tensor_info`."""
    import numpy as np
    import torch

    if suffix in _OF_TORCH:
        return _load(io.BytesIO(data), len(data), suffix, names)[1].clone(memory_format=torch.contiguous_format)
    info = tensor_info(io.BytesIO(data), suffix, names)
    count = math.prod(info.shape)
    if info.dtype == "bfloat16":
        flat = torch.frombuffer(bytearray(data), dtype=torch.bfloat16, offset=info.start, count=count)
        return flat.clone().reshape(info.shape)
    kind = np.dtype(f"{info.order}f{_SIZES[info.dtype]}")
    values = np.frombuffer(data, dtype=kind, offset=info.start, count=count)
    values = values.reshape(info.shape, order="F" if info.fortran else "C")
    return torch.from_numpy(np.array(values, dtype=kind.newbyteorder("="), order="C"))


def _corrupt(detail: str) -> SampleRejected:
    return SampleRejected("corrupt_tensor", detail)


def _check_length(info: TensorInfo, end: int) -> TensorInfo:
    if math.prod(info.shape) == 0:
        raise SampleRejected("wrong_shape", f"the tensor of shape {list(info.shape)} is empty")
    wanted = math.prod(info.shape) * _SIZES[info.dtype]
    if end - info.start != wanted:
        needs = f"{info.dtype} of shape {list(info.shape)} needs {wanted} bytes"
        raise _corrupt(f"{needs}, but the file holds {end - info.start}")
    return info


def _npy_info(stream: BinaryIO, size: int) -> TensorInfo:
    head = stream.read(8)
    if len(head) < 8 or head[:6] != b"\x93NUMPY" or head[6] not in (1, 2, 3):
        raise _corrupt("not a .npy file")
    width = 2 if head[6] == 1 else 4
    length_bytes = stream.read(width)
    length = int.from_bytes(length_bytes, "little")
    if len(length_bytes) < width or length > min(MAX_HEADER, size):
        raise _corrupt(f"its header claims {length} bytes, more than the file or the limit allows")
    try:
        header = ast.literal_eval(stream.read(length).decode("utf-8").strip())
        descr, fortran, shape = header["descr"], header["fortran_order"], header["shape"]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise _corrupt("its header cannot be read") from error
    if not isinstance(descr, str) or descr[1:] not in _NPY_DTYPES or descr[:1] not in ("<", ">"):
        detail = f"it holds {str(descr)[:40]!r}, expected floating-point numbers (bfloat16: use safetensors)"
        raise SampleRejected("wrong_dtype", detail)
    info = TensorInfo("", _sides(shape), _NPY_DTYPES[descr[1:]], stream.tell(), descr[0], bool(fortran))
    return _check_length(info, size)


def _sides(shape: Any) -> tuple[int, ...]:
    sides = shape if isinstance(shape, list | tuple) else (None,)
    if len(sides) > 8 or any(isinstance(side, bool) or not isinstance(side, int) or side < 0 for side in sides):
        raise _corrupt("its header has no valid shape")
    return tuple(sides)


def _safetensors_info(stream: BinaryIO, size: int, names: Sequence[str]) -> TensorInfo:
    head = stream.read(8)
    length = int.from_bytes(head, "little") if len(head) == 8 else size
    if length > min(MAX_HEADER, size - 8):
        raise _corrupt("not a safetensors file, or one with too many tensors")
    try:
        header = json.loads(stream.read(length).decode("utf-8"))
        header.pop("__metadata__", None)
        name = _choose(list(header), names)
        (begin, end), dtype = header[name]["data_offsets"], header[name]["dtype"]
        shape = _sides(header[name]["shape"])
        if not (type(begin) is type(end) is int and 0 <= begin <= end <= size - 8 - length):
            raise ValueError("offsets outside of the file")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _corrupt(f"its header cannot be read: {str(error)[:80]}") from error
    if not isinstance(dtype, str) or dtype not in _SAFETENSORS_DTYPES:
        raise SampleRejected("wrong_dtype", f"it holds {str(dtype)[:40]!r}, expected floating-point numbers")
    return _check_length(TensorInfo(name, shape, _SAFETENSORS_DTYPES[dtype], 8 + length + begin), end=8 + length + end)


def _choose(held: list[str], names: Sequence[str]) -> str:
    for name in held if len(held) == 1 else names:
        if name in held:
            return name
    shown = ", ".join(repr(name[:40]) for name in held[:8]) or "nothing"
    raise SampleRejected("no_such_tensor", f"the file holds {shown}; expected one tensor, or {' or '.join(names)}")


def _check_parts(archive: zipfile.ZipFile, size: int) -> None:
    """Refuses what torch's reader does not notice: it reads no checksum, and reads beyond the end of a stream for ever.
    Raises SampleRejected: ``corrupt_tensor``."""
    entries = archive.infolist()
    packed = any(e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size for e in entries)
    if packed or sum(entry.file_size for entry in entries) > size:
        why = "compressed, which torch never does, or said to be larger than the file"
        raise _corrupt(f"the parts of its zip are {why}")
    try:
        damaged = archive.testzip()
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise _corrupt(f"a part of its zip cannot be read: {str(error)[:80]}") from error
    if damaged is not None:
        raise _corrupt(f"the checksum of its part {damaged[:80]!r} differs")


class _TensorUnpickler(pickle.Unpickler):
    has_storage = False

    def find_class(self, module: str, name: str) -> Any:
        builders = {
            # No view reaches beyond the values, for which torch's own function would make room.
            "torch._utils._rebuild_tensor_v2": lambda flat, at, size, stride, *_: flat.as_strided(size, stride, at),
            "torch.storage._load_from_bytes": self._storage,
            "megatron.core.safe_globals.safe_load_from_bytes": self._storage,  # where Megatron-Core was imported
            "collections.OrderedDict": dict,  # of hooks, always empty
        }
        if (found := builders.get(f"{module}.{name}")) is None:
            raise SampleRejected("unsafe_pickle", f"it names {module[:40]}.{name[:40]}, which builds no tensor")
        return found

    def _storage(self, data: bytes) -> torch.Tensor:
        """A storage in torch's old form: five pickles, of which none is run, the number of values, and their bytes."""
        import torch

        stream, kinds = io.BytesIO(data), list[str]()
        for _ in ("magic number", "version", "system", "storage", "keys"):
            kinds += [str(value) for opcode, value, _ in pickletools.genops(stream) if opcode.name == "GLOBAL"]
        dtype = dict(zip(_STORAGES, _SIZES, strict=True)).get(kinds[0]) if len(kinds) == 1 else None
        if dtype is None or self.has_storage:
            detail = f"it holds {', '.join(kinds)[:80]}, expected one floating-point storage"
            raise SampleRejected("wrong_dtype", detail)
        self.has_storage = True
        count = int.from_bytes(stream.read(8), "little")
        return torch.frombuffer(bytearray(stream.read()), dtype=getattr(torch, dtype), count=count)


def _unpickled(stream: BinaryIO, size: int) -> Any:
    data = stream.read(size)
    for count, (opcode, _, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in _OPCODES or count > 200:  # a tensor takes some 40
            raise SampleRejected("unsafe_pickle", f"it does more than build a tensor ({opcode.name})")
    return _TensorUnpickler(io.BytesIO(data)).load()


def _zipped(stream: BinaryIO, size: int) -> Any:
    import torch

    try:
        with zipfile.ZipFile(stream) as archive:
            _check_parts(archive, size)
            if any(b"bytearray" in archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")):
                raise SampleRejected("unsafe_pickle", "it asks for bytes of any size")
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError) as error:
        detail = "not torch's zip form; save it again with torch.save, or as .npy or .safetensors"
        raise SampleRejected("unsafe_pickle", detail) from error
    stream.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(stream, map_location="cpu", weights_only=True)


def _load(stream: BinaryIO, size: int, suffix: str, names: Sequence[str]) -> tuple[str, torch.Tensor]:
    import torch

    try:
        loaded = (_unpickled if suffix == "pickle" else _zipped)(stream, size)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]{1,80})", str(error))
        what = f"it names {named[1]}" if named else "it does more than build tensors"
        raise SampleRejected("unsafe_pickle", f"torch's weights_only reader refuses it: {what}") from error
    except Exception as error:  # torch reports a damaged file in many ways
        if isinstance(error, SampleRejected) or is_machines(error):
            raise
        raise _corrupt(f"torch cannot read it: {type(error).__name__}") from error
    name = ""
    if isinstance(loaded, dict):
        name = _choose([each for each in loaded if isinstance(each, str)], names)
        loaded = loaded[name]
    if not isinstance(loaded, torch.Tensor) or loaded.layout != torch.strided or loaded.device.type != "cpu":
        raise SampleRejected("no_such_tensor", f"it holds a {type(loaded).__name__}, expected a dense tensor")
    if str(loaded.dtype).removeprefix("torch.") not in _SIZES:
        raise SampleRejected("wrong_dtype", f"it holds {loaded.dtype}, expected floating-point numbers")
    if loaded.numel() == 0:
        raise SampleRejected("wrong_shape", f"the tensor of shape {list(loaded.shape)} is empty")
    # A view can repeat one value to any size; the file must hold every byte that is allocated later.
    if loaded.numel() * loaded.element_size() > size:
        raise _corrupt(f"a tensor of shape {list(loaded.shape)} does not fit in a file of {size} bytes")
    return name, loaded.detach()


NAMES: Mapping[TensorRole, tuple[str, ...]] = {
    "latents": ("latents", "latent", "video_latents", ".pth"),
    "context": ("context", "context_embeddings", "prompt_embeds", "text_embeddings", ".pickle"),
}
"""Names that each may have as a column of a record, and in a file with several tensors; the last are Bridge's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFile(StoredTensor):
    """One distinct tensor file, checked; see `energon_packing.convert.media_files.MediaFile`."""

    kind: TensorRole
    path: str
    size: int

    transparent = False
    metadata = None  # Energon has none for it, and the records hold its shape

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # a journal returns it as a list


def check_tensor(stream: Any, path: str, size: int, role: TensorRole, config: ConvertConfig) -> TensorFile:
    """Reads and checks one open file; ``check_media: full`` checks every value. Text embeddings are always read,
    because their length matters. Raises SampleRejected: ``corrupt_tensor``, ``unknown_tensor_format``,
    ``unsafe_pickle``, ``no_such_tensor``, ``wrong_dtype``, ``wrong_shape``, ``not_finite`` (values that are NaN or
    infinite), ``empty_context`` (nothing but zeros)."""
    suffix = Path(path).suffix.lower().lstrip(".")
    info = tensor_info(stream, suffix, NAMES[role])
    batched = info.shape[:1] == (1,) and len(info.shape) == AXES[role] + 1  # the axis of 1 that encoders return
    if len(shape := info.shape[batched:]) != AXES[role]:
        wanted = "channels, frames, height, width" if role == "latents" else "tokens, width"
        raise SampleRejected("wrong_shape", f"shape {list(info.shape)}, expected ({wanted})")
    stream.seek(0)
    digest = hashlib.file_digest(stream, "sha256").hexdigest()[:32]
    rows = None
    if role == "context" or config.check_media == "full":
        stream.seek(0)
        rows = _filled_rows(stream.read(size), suffix, info, role)
    return TensorFile(
        kind=role,
        path=path,
        name=f"{digest}.{suffix}",
        size=size,
        tensor=info.tensor,
        shape=shape,
        dtype=info.dtype,
        rows=None if rows == shape[0] else rows,
    )


def _filled_rows(data: bytes, suffix: str, info: TensorInfo, role: TensorRole) -> int | None:
    from energon_packing.wan.pack import largest  # needs torch

    tensor = read_tensor(data, suffix, (info.tensor, *NAMES[role]))
    if not math.isfinite(largest(tensor)):
        raise SampleRejected("not_finite", "it holds NaN or infinite values")
    if role == "latents":
        return None
    filled = tensor.reshape(info.shape[-2:]).ne(0).any(dim=1).nonzero()
    if len(filled) == 0:
        raise SampleRejected("empty_context", "all embeddings of the text are zero")
    return int(filled[-1]) + 1
