"""Files of records, pieces of them, and single records: what the process that finds them and its workers exchange.

Reads a file for the search of records: digests it on the way, and unpacks it if it is compressed.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from energon_packing.errors import SampleRejected, UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberBytes:
    """The place of a file in a tar.

    Attributes:
        path: of the tar.
        name: of the member.
        offset, size: of its content, bytes.
    """

    path: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """The content."""
        with open(self.path, "rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of records.

    Attributes:
        path: where it is, or will be once it is fetched.
        name: its path in reports, relative to the directory that was named; unique in a conversion.
        origin: index into `ConvertConfig.sources`.
        size: bytes.
        address: of a file in an object store; None for one of this machine.
    """

    path: Path
    name: str
    origin: int
    size: int = 0
    address: str | None = None

    @property
    def place(self) -> str:
        """The address, or the absolute path."""
        return self.address or str(self.path.absolute())


@dataclass(kw_only=True, slots=True)  # made for every record; a frozen one takes four times as long
class RawRecord:
    """One record as it is in its file.

    Attributes:
        source: the file.
        number: line of a JSON Lines file, from 1; index in an array, from 0.
        where: ``name:line`` or ``name[index]``, for a reader.
        value: the parsed JSON; None if `error` is set.
        error: why it could not be parsed.
        members: of a record in a tar, the files beside it, by each name that it may use.
        warnings: names of oddities of the form in which the file holds it.
    """

    source: SourceFile
    number: int
    where: str
    value: Any
    error: SampleRejected | None = None
    members: Mapping[str, MemberBytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


Form = Literal["lines", "text", "array", "object", "rows", "samples"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Records of one file that follow each other, to be parsed elsewhere.

    Attributes:
        source: the file.
        form: how the records are written: ``text`` is a document per line, ``rows`` are those of a table, ``samples``
            those of a tar.
        start, end: their bytes in the file, unpacked; the brackets of an array are left out. Of a table, its rows.
        first: number of the first record: line of a JSON Lines file, from 1; index in an array, from 0.
        position: bytes of the file up to the end of the chunk, where they are not `end`; for progress alone.
        content: the bytes themselves, of a compressed file, which only one process unpacks.
        samples: name of each sample of a tar, and its members.
        error: in place of records, why the one at `first` and all that follow cannot be told apart.
    """

    source: SourceFile
    form: Form
    start: int
    end: int
    first: int
    error: SampleRejected | None = None
    position: int = -1
    content: bytes | None = None
    samples: tuple[tuple[str, tuple[MemberBytes, ...]], ...] = ()


def broken(source: SourceFile, number: int, where: str, detail: str, *, reason: str = "bad_json") -> RawRecord:
    """A record that cannot be read."""
    error = SampleRejected(reason, f"{where}: {detail}")
    return RawRecord(source=source, number=number, where=where, value=None, error=error)


def one_line(error: BaseException) -> str:
    """The message of an exception, short and without line breaks."""
    text = str(error) or type(error).__name__
    return " ".join(text.split())[:300]


_SMALLEST_CHUNK, _LARGEST_CHUNK = 1 << 12, 1 << 19
_SHORT, _LONG = 0.05, 0.5
"""Seconds for a chunk below which chunks grow, and above which they shrink. Media take far longer than text."""


class ChunkSize:
    """Bytes of the next chunk: few at first, then what takes a worker a moment."""

    def __init__(self) -> None:
        self._bytes = _SMALLEST_CHUNK

    def __call__(self) -> int:
        return self._bytes

    def learn(self, seconds: float) -> None:
        """Takes note of how long a chunk took."""
        if seconds < _SHORT:
            self._bytes = min(2 * self._bytes, _LARGEST_CHUNK)
        elif seconds > _LONG:
            self._bytes = max(self._bytes // 2, _SMALLEST_CHUNK)


_LARGEST_RATIO = 200
"""Text of conversations shrinks to a tenth, records that repeat each other to a hundredth; a bomb to a thousandth."""
_ALWAYS_ALLOWED = 64 << 20
_BLOCK = 1 << 16
_LARGEST_WINDOW = 1 << 27


class DigestingReader:
    """Reads a file and computes the SHA-256 of all of it on the way."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.position = 0
        """Bytes read so far."""

    def read(self, size: int) -> bytes:
        """Reads up to ``size`` bytes; fewer at the end only."""
        return self._take(self._stream.read(size))

    def readline(self, size: int) -> bytes:
        """Reads to the end of the line, at most ``size`` bytes."""
        return self._take(self._stream.readline(size))

    def _take(self, block: bytes) -> bytes:
        self._digest.update(block)
        self.position += len(block)
        return block

    def hexdigest(self) -> str:
        """Reads what is left and returns the digest of the file."""
        while self.read(1 << 20):
            pass
        return self._digest.hexdigest()


class UnpackingReader:
    """Reads a compressed file as if it were unpacked, and keeps what has been read until it is cut out."""

    def __init__(self, packed: DigestingReader, compression: str, name: str, *, keep: int) -> None:
        """
        Args:
            packed: reader of the file; its digest is that of the compressed bytes.
            compression: ``gzip`` or ``zstd``.
            name: of the file, for messages.
            keep: bytes to keep at most; what is read beyond them before the next cut is lost.

        Raises:
            UserError: the package that unpacks is not installed.
        """
        self._packed = packed
        self._name = name
        self._most = keep
        self._stream, self._damage = _open(packed, compression, name)
        self._ahead = bytearray()  # unpacked, not read yet
        self._unpacked = 0
        self._kept = bytearray()
        self._base = 0
        self.position = 0
        """Unpacked bytes read so far."""
        self.error: SampleRejected | None = None
        """Why reading ended before the end of the file."""

    def read(self, size: int) -> bytes:
        """Reads up to ``size`` bytes; fewer at the end, or where the file is damaged."""
        while len(self._ahead) < size and self._unpack():
            pass
        return self._take(size)

    def readline(self, size: int) -> bytes:
        """Reads to the end of the line, at most ``size`` bytes."""
        seen = 0
        while (end := self._ahead.find(b"\n", seen)) < 0 and len(self._ahead) < size:
            seen = len(self._ahead)
            if not self._unpack():
                break
        return self._take(size if end < 0 else min(size, end + 1))

    def _unpack(self) -> bool:
        """Unpacks some more bytes; False at the end, and from damage on."""
        if self.error is not None:
            return False
        try:
            block: bytes = self._stream.read1(_BLOCK)
        except self._damage as error:
            problem = " ".join(str(error).split())[:200]
            self.error = SampleRejected("corrupt_source", f"{self._name}: cannot be unpacked further: {problem}")
            return False
        self._unpacked += len(block)
        if self._unpacked > _ALWAYS_ALLOWED + _LARGEST_RATIO * self._packed.position:
            detail = f"{self._name}: unpacks to more than {_LARGEST_RATIO} times its size; unpack it if this is meant"
            self.error = SampleRejected("corrupt_source", detail)
            return False
        self._ahead += block
        return bool(block)

    def _take(self, size: int) -> bytes:
        block = bytes(self._ahead[:size])
        del self._ahead[:size]
        self.position += len(block)
        self._kept += block[: max(0, self._most - len(self._kept))]
        return block

    @property
    def packed_position(self) -> int:
        """Bytes of the compressed file read so far."""
        return self._packed.position

    def cut(self, start: int, end: int) -> bytes:
        """The unpacked bytes from ``start`` to ``end``; forgets all before ``end``."""
        content = bytes(self._kept[start - self._base : end - self._base])
        del self._kept[: end - self._base]
        self._base = end
        return content

    def hexdigest(self) -> str:
        """Reads what is left of the compressed file and returns its digest."""
        return self._packed.hexdigest()


def _open(packed: DigestingReader, compression: str, name: str) -> tuple[Any, tuple[type[BaseException], ...]]:
    """A stream of the unpacked bytes, and the exceptions that mean damage."""
    if compression == "gzip":
        stream: Any = gzip.GzipFile(fileobj=packed, mode="rb")  # type: ignore[call-overload]
        return stream, (gzip.BadGzipFile, EOFError, zlib.error)
    try:
        import zstandard
    except ImportError as error:
        raise UserError(
            f"{name} is compressed with zstd, which needs the package zstandard; run pip install "
            "'energon-packing[convert]', or unpack the file"
        ) from error
    unpacker: Any = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    return unpacker.stream_reader(packed, read_across_frames=True), (zstandard.ZstdError, EOFError)
