"""A shard of packs: records of any size back to back, a table of their places, and what the shard is.

::

    records, each at a multiple of 64 bytes | table, int64 [records + 1] | checksums, uint32 [records] | facts, JSON
    | 8 bytes: length of the facts | 32 bytes: SHA-256 of all before them | 8 bytes: MAGIC

A record is read by its number; no other byte of the file is touched. Its checksum is the CRC-32 of its first `CHECKED`
bytes, where its header and its tokens are.

It holds named arrays and plain values: 8 bytes with the length of a JSON header, the header, and the arrays, each at a
multiple of 64 bytes. The header has ``values`` (of the caller) and ``arrays``: name, dtype, shape and place of each.
The files may come from elsewhere, so nothing is believed before it is checked.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from energon_packing.errors import UserError, read_again
from energon_packing.remote_files import TAIL_BYTES, present, read_range, remote_address, shown

MOST_HEADER = 1 << 26
"""Bytes of a header that is read. That of a pack of a thousand samples with media has less than a hundredth."""
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float32", "float64", "bool", "float16")
_ALIGNMENT = 64


class DamagedBytes(ValueError):
    """Bytes that `to_bytes` did not write. The message says what is wrong with them."""


def to_bytes(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[bytes | memoryview]:
    """Returns parts of a record, whose bytes follow each other; equal arguments make equal bytes. `values` are anything
    that JSON can express, `arrays` of the types `DTYPES`."""
    entries: list[tuple[str, str, list[int], int]] = []
    held: list[bytes | memoryview] = []
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise TypeError(f"array {name} is {array.dtype}, which has no stored form")
        entries.append((name, array.dtype.name, list(array.shape), sum(map(len, held))))
        held += (memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)), bytes(-array.nbytes % _ALIGNMENT))
    header = json.dumps({"values": values, "arrays": entries}, sort_keys=True, separators=(",", ":")).encode()
    padding = bytes(-(8 + len(header)) % _ALIGNMENT)
    return [part for part in (len(header).to_bytes(8, "little"), header, padding, *held) if len(part)]


def from_bytes(buffer: memoryview) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns values and arrays of a record; the arrays are views of the buffer. Raises DamagedBytes: the header is
    none, or an array would lie outside the buffer."""
    size = len(buffer)
    length = int.from_bytes(buffer[:8], "little")
    if size < 8 or length > min(size - 8, MOST_HEADER):
        raise DamagedBytes(f"its header would have {length} bytes, the record has {size}")
    try:
        header = json.loads(bytes(buffer[8 : 8 + length]))
        values, entries = header["values"], header["arrays"]
        if not isinstance(values, dict):
            raise TypeError("values are no mapping")
        start = -(-(8 + length) // _ALIGNMENT) * _ALIGNMENT
        return values, {str(name): _array(buffer, start, dtype, shape, at) for name, dtype, shape, at in entries}
    except DamagedBytes:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedBytes(f"its header cannot be read ({error})") from error


def _array(buffer: memoryview, start: int, dtype: str, shape: list[int], at: int) -> np.ndarray:
    if dtype not in DTYPES or not all(isinstance(each, int) and each >= 0 for each in (*shape, at)):
        raise DamagedBytes(f"an array of {dtype!r} {shape!r} at {at!r} cannot be")
    kind = np.dtype(dtype)
    count = math.prod(shape)
    if start + at + count * kind.itemsize > len(buffer):
        raise DamagedBytes(f"an array of {dtype} {shape} at {at} does not fit into {len(buffer)} bytes")
    return np.frombuffer(buffer, kind, count, start + at).reshape(shape)


MAGIC = b"epacks02"
_TAIL = 8 + 32 + 8
_CHUNK = 8 << 20
CHECKED = 1 << 20
"""Bytes of a record that are compared with its checksum whenever it is read: all but pixels, which `verify` reads. One
MiB takes a millisecond, a record with pixels would take thirty."""


class ShardWriter:
    """Writes the records of a shard to an open file that is not there yet under its name; see `replacing`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._places = [0]
        self._sums: list[int] = []

    def add(self, parts: list[bytes | memoryview]) -> None:
        """Writes one record."""
        checksum, left = 0, CHECKED
        for part in parts:
            self._digest.update(part)
            self._file.write(part)
            checksum = zlib.crc32(part[:left], checksum)
            left -= min(left, len(part))
        self._places.append(self._places[-1] + sum(len(part) for part in parts))
        self._sums.append(checksum)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Writes table and facts; the shard is complete then."""
        said = json.dumps(facts, sort_keys=True).encode()
        tables = np.asarray(self._places, dtype="<i8").tobytes() + np.asarray(self._sums, dtype="<u4").tobytes()
        for part in (tables, said, len(said).to_bytes(8, "little")):
            self._digest.update(part)
            self._file.write(part)
        self._file.write(self._digest.digest() + MAGIC)


class ShardFile:
    """A shard, opened to read. May be opened again by several processes; an open one belongs to its process. `content`
    reads places of one in a store, whose `size` in bytes is known. Raises UserError: it is missing, cut off, or no
    shard."""

    def __init__(self, path: Path, content: Callable[[Path, int, int], bytes] | None = None, size: int = 0) -> None:
        self.path, self._descriptor, self._address = path, -1, remote_address(path)
        self._content, self._size, self._end = content, size, b""
        place = shown(path)
        try:
            read_again(place, self._look, self.close)
        except OSError as error:
            raise UserError(f"{place} cannot be opened ({error.strerror}); run 'energon-packing pack' again") from error
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            self.close()
            raise UserError(f"{place} is damaged ({error}); delete it and run 'energon-packing pack' again") from error

    @staticmethod
    def end(path: Path, size: int) -> tuple[Path, int, int]:
        """What opening a shard of so many bytes in a store reads at once, with all of a short table."""
        return path, max(0, size - TAIL_BYTES), min(TAIL_BYTES, size)

    def _piece(self, size: int, at: int) -> bytes:
        if self._address is None:
            return os.pread(self._open(), size, at)
        if (begin := at - self.bytes + len(self._end)) >= 0:
            return self._end[begin : begin + size]
        return self._content(self.path, at, size) if self._content else read_range(self._address, at, size)

    def _open(self) -> int:
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptor

    def _look(self) -> None:
        if self._address is None:
            self.bytes = os.fstat(self._open()).st_size
        else:
            self.bytes = self._size or present(self._address).size
            _, at, size = self.end(self.path, self.bytes)
            self._end = self._piece(size, at)
        tail = self._piece(_TAIL, max(0, self.bytes - _TAIL))
        said = int.from_bytes(tail[:8], "little")
        if len(tail) < _TAIL or tail[-8:] != MAGIC or said > min(self.bytes - _TAIL, MOST_HEADER):
            raise ValueError("it does not end as a shard does")
        self.checksum = tail[8:40].hex()
        self.facts: dict[str, Any] = json.loads(self._piece(said, self.bytes - _TAIL - said))
        self.packs = int(self.facts["packs"])
        self._table_at = self.bytes - _TAIL - said - 8 * (self.packs + 1) - 4 * self.packs
        if self.packs < 0 or self._table_at < 0:
            raise ValueError(f"a table of {self.packs} packs does not fit into it")
        table = self._piece(8 * (self.packs + 1), self._table_at)
        self._places = np.frombuffer(table, dtype="<i8")
        sums = self._piece(4 * self.packs, self._table_at + len(table))
        self._sums = np.frombuffer(sums, dtype="<u4")
        if (
            len(self._sums) != self.packs
            or self._places[0] != 0
            or self._places[-1] != self._table_at
            or (self._places[1:] < self._places[:-1]).any()
        ):
            raise ValueError("its table of packs is damaged")
        self._end = b""

    def place(self, number: int) -> tuple[Path, int, int]:
        """Where a record lies: the file, its first byte and its bytes."""
        return self.path, int(self._places[number]), int(self._places[number + 1] - self._places[number])

    def record(self, number: int) -> memoryview:
        """The bytes of a record, in memory that may be written to without effect on the file. Raises UserError: the
        file became shorter meanwhile, or cannot be read; DamagedBytes: it holds other bytes than were written."""
        begin, end = int(self._places[number]), int(self._places[number + 1])

        def read() -> memoryview:
            left = buffer = memoryview(np.empty(end - begin, np.uint8))  # a mapping's page may end the process (SIGBUS)
            if self._address is not None and len(content := self._piece(len(left), begin)) == len(left):
                return memoryview(bytearray(content))
            while self._address is None and left and (some := os.preadv(self._open(), [left], end - len(left))):
                left = left[some:]
            if left:
                raise ValueError("it ends early")
            return buffer

        try:
            record = read_again(self.path, read, self.close)
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise UserError(f"{shown(self.path)} cannot be read ({said}); put it back as it was") from error
        if zlib.crc32(record[:CHECKED]) != self._sums[number]:
            raise DamagedBytes("its bytes are not those that were written")
        return record

    def digest(self) -> str:
        """The checksum of what the file holds now; that of a whole shard is `checksum`."""
        digest, end = hashlib.sha256(), self.bytes - 32 - len(MAGIC)
        for at in range(0, end, _CHUNK):
            digest.update(self._piece(min(_CHUNK, end - at), at))
        return digest.hexdigest()

    def close(self) -> None:
        """Closes the file; records that were read stay."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    __del__ = close
