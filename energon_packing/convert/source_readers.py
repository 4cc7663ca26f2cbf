"""Reads a file for the search of records: digests it on the way, and unpacks it if it is compressed."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from typing import Any, BinaryIO

from energon_packing.errors import SampleRejected, UserError

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
