"""Named arrays and plain values as bytes, in files that come from elsewhere: nothing is believed before it is checked.

The layout is 8 bytes with the length of a JSON header, the header, and the arrays, each at a multiple of 64 bytes. The
header has ``values`` (of the caller) and ``arrays``: name, dtype, shape and place of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

MOST_HEADER = 1 << 26
"""Bytes of a header that is read. That of a pack of a thousand samples with media has less than a hundredth."""
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float32", "float64", "bool", "float16")
_ALIGNMENT = 64


class DamagedBytes(ValueError):
    """Bytes that `to_bytes` did not write. The message says what is wrong with them."""


def to_bytes(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[bytes | memoryview]:
    """Returns parts of a record, whose bytes follow each other; equal arguments make equal bytes.

    Args:
        values: anything that JSON can express.
        arrays: of the types `DTYPES`.
    """
    entries: list[tuple[str, str, list[int], int]] = []
    offset = 0
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise TypeError(f"array {name} is {array.dtype}, which has no stored form")
        offset = _aligned(offset)
        entries.append((name, array.dtype.name, list(array.shape), offset))
        offset += array.nbytes
    header = json.dumps({"values": values, "arrays": entries}, sort_keys=True, separators=(",", ":")).encode()
    start = _aligned(8 + len(header))
    parts: list[bytes | memoryview] = [len(header).to_bytes(8, "little"), header, bytes(start - 8 - len(header))]
    end = 0
    for (*_, at), array in zip(entries, arrays.values(), strict=True):
        parts += (bytes(at - end), memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        end = at + array.nbytes
    parts.append(bytes(_aligned(end) - end))
    return [part for part in parts if len(part)]


def from_bytes(buffer: memoryview) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns values and arrays of a record; the arrays are views of the buffer.

    Raises:
        DamagedBytes: the header is none, or an array would lie outside the buffer.
    """
    size = len(buffer)
    length = int.from_bytes(buffer[:8], "little")
    if size < 8 or length > min(size - 8, MOST_HEADER):
        raise DamagedBytes(f"its header would have {length} bytes, the record has {size}")
    try:
        header = json.loads(bytes(buffer[8 : 8 + length]))
        values, entries = header["values"], header["arrays"]
        if not isinstance(values, dict):
            raise TypeError("values are no mapping")
        start = _aligned(8 + length)
        return values, {str(name): _array(buffer, start, dtype, shape, at) for name, dtype, shape, at in entries}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, DamagedBytes):
            raise
        raise DamagedBytes(f"its header cannot be read ({error})") from error


def _array(buffer: memoryview, start: int, dtype: str, shape: list[int], at: int) -> np.ndarray:
    if dtype not in DTYPES or not all(isinstance(each, int) and each >= 0 for each in (*shape, at)):
        raise DamagedBytes(f"an array of {dtype!r} {shape!r} at {at!r} cannot be")
    kind = np.dtype(dtype)
    count = math.prod(shape)
    if start + at + count * kind.itemsize > len(buffer):
        raise DamagedBytes(f"an array of {dtype} {shape} at {at} does not fit into {len(buffer)} bytes")
    return np.frombuffer(buffer, kind, count, start + at).reshape(shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
