"""Tar shards: one process says what is in them, any process writes them, and the same input gives the same bytes."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from energon_packing.convert.media_checks import Stamp
from energon_packing.convert.media_files import open_regular
from energon_packing.convert.tar_members import BLOCK, ending, header, padding, stored_size
from energon_packing.errors import UserError

_BUFFER = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A media file to copy.

    Attributes:
        name: of the member.
        path: of the checked file.
        digest: its first 32 hexadecimal digits of SHA-256.
        stamp: of the check.
    """

    name: str
    path: str
    digest: str
    stamp: Stamp

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stamp.size


@dataclass(kw_only=True, slots=True)
class ShardPiece:
    """Members of one tar that follow each other. Where they begin is known, so pieces may be written in any order.

    Attributes:
        name: of the tar.
        start: bytes of the tar before the piece.
        first: samples of the tar before the piece.
        records: (member name, bytes, number of the spool file, offset in it); each begins a sample.
        files: number of a record -> media files that follow it; -1: before the first record.
        offsets: where each sample begins in the tar.
        end: bytes of the tar up to the end of the piece.
        last: whether nothing follows in the tar.
    """

    name: str
    start: int = 0
    first: int = 0
    records: list[tuple[str, int, int, int]] = field(default_factory=list)
    files: dict[int, list[StoredFile]] = field(default_factory=dict)
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    end: int = 0
    last: bool = False

    def begin_sample(self) -> None:
        """The next member begins a sample."""
        self.offsets.append(self.end)

    def add_record(self, name: str, size: int, spool: int, offset: int) -> int:
        """Adds a member whose content a spool file holds; returns where its content begins in the tar."""
        self.records.append((name, size, spool, offset))
        return self._add(size)

    def add_file(self, file: StoredFile) -> int:
        """Adds a media file; returns where its content begins in the tar."""
        self.files.setdefault(len(self.records) - 1, []).append(file)
        return self._add(file.size)

    def _add(self, size: int) -> int:
        content = self.end + BLOCK
        self.end += stored_size(size)
        return content

    def next_piece(self) -> ShardPiece:
        """An empty piece of the same tar that follows this one."""
        return ShardPiece(name=self.name, start=self.end, first=self.first + len(self.offsets), end=self.end)


def write_piece(piece: ShardPiece, directory: Path, spools: Sequence[Path]) -> None:
    """Writes a piece of a tar, and of Energon's index of its samples (``.tar.idx``).

    Args:
        piece: what is in it.
        directory: of the tar.
        spools: the files that hold its records.

    Raises:
        UserError: a media file changed or vanished after it was checked.
    """
    path = directory / piece.name
    streams: dict[int, BinaryIO] = {}
    places: dict[int, int] = {}  # of the streams; asking them is a system call
    try:
        with _opened_at(path, piece.start) as tar:
            parts: list[bytes] = []
            held = 0
            for file in piece.files.get(-1, ()):
                _copy(tar, file, parts)
            for number, (name, size, spool, offset) in enumerate(piece.records):
                if spool not in streams:
                    streams[spool] = spools[spool].open("rb", buffering=_BUFFER)
                    places[spool] = 0
                stream = streams[spool]
                if places[spool] != offset:
                    stream.seek(offset)
                places[spool] = offset + size
                parts += (header(name, size), stream.read(size), padding(size))
                held += size
                for file in piece.files.get(number, ()):
                    _copy(tar, file, parts)
                    held = 0
                if held >= _BUFFER:
                    _flush(tar, parts)
                    held = 0
            if piece.last:
                parts.append(ending(piece.end))
            _flush(tar, parts)
    finally:
        for stream in streams.values():
            stream.close()
    offsets = array("Q", [*piece.offsets, piece.end] if piece.last else piece.offsets)
    with _opened_at(path.with_suffix(".tar.idx"), piece.first * offsets.itemsize) as index:
        _flush(index, [offsets.tobytes()])


def _opened_at(path: Path, place: int) -> BinaryIO:
    """A file to write to from a place on, whatever other pieces it has."""
    stream = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0)
    stream.seek(place)
    return stream


def _flush(tar: BinaryIO, parts: list[bytes]) -> None:
    data = memoryview(b"".join(parts))
    while data:
        data = data[tar.write(data) :]
    parts.clear()


def _copy(tar: BinaryIO, file: StoredFile, parts: list[bytes]) -> None:
    """Copies a checked file and verifies that it has not changed since the check.

    The kernel copies it if a change would show in its time stamp; otherwise it is read and hashed once more.

    Args:
        tar: to write to.
        file: what to copy.
        parts: what to write before; gets the padding to write after.

    Raises:
        UserError: the file changed or vanished after it was checked.
    """
    changed = UserError(f"{file.path} changed while the conversion ran; start it again when nobody writes to it")
    parts.append(header(file.name, file.size))
    _flush(tar, parts)
    try:
        stream = open_regular(file.path)
    except OSError as error:
        raise changed from error
    with stream:
        before = os.fstat(stream.fileno())
        if file.stamp.settled and file.stamp.same_file(before):
            whole = _copied_by_kernel(tar.fileno(), stream.fileno(), file.size)
            whole &= file.stamp.same_file(os.fstat(stream.fileno()))
        else:
            whole = _copied_and_hashed(tar, stream, file)
    if not whole:
        raise changed
    parts.append(padding(file.size))


def _copied_by_kernel(target: int, source: int, size: int) -> bool:
    """Whether ``size`` bytes were there to copy."""
    left = size
    while left:
        copied = os.sendfile(target, source, None, left)
        if copied == 0:
            return False
        left -= copied
    return True


def _copied_and_hashed(tar: BinaryIO, stream: BinaryIO, file: StoredFile) -> bool:
    """Whether the file still has the size and the digest of its check."""
    digest = hashlib.sha256()
    left = file.size
    while left and (block := stream.read(min(left, _BUFFER))):
        digest.update(block)
        _flush(tar, [block])
        left -= len(block)
    return left == 0 and digest.hexdigest()[:32] == file.digest
