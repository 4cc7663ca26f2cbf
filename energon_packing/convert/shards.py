"""Tar shards: one process says what is in them, any process writes them, and the same input gives the same bytes.

Members of a tar shard, with the bytes that Python's `tarfile` writes for them.

`tarfile` takes 25 microseconds for the header of a member; most of the 512 bytes are the same for all members of a
shard. So one header of its own making is the template, and name, size and checksum are filled in.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tarfile
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from energon_packing.convert.media_files import Stamp, open_regular
from energon_packing.errors import UserError

BLOCK = tarfile.BLOCKSIZE
_LONGEST_NAME = 100
_LARGEST_SIZE = 8**11 - 1


def _by_tarfile(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)  # time, owner and group stay 0
    member.size = size
    member.mode = 0o644
    # USTAR: no extension records, so a member's offset is its header's, which Energon's index relies on.
    return member.tobuf(tarfile.USTAR_FORMAT)


_TEMPLATE = _by_tarfile("a", 0)
_FIXED_SUM = sum(_TEMPLATE[100:124] + _TEMPLATE[136:148] + _TEMPLATE[156:]) + 8 * ord(" ")
"""Of all but name, size and the checksum itself, which counts its own eight bytes as spaces."""
_PADDING = tuple(b"\0" * (-length % BLOCK) for length in range(BLOCK))


def header(name: str, size: int) -> bytes:
    """The header of a member, byte for byte what `tarfile` writes for it.

    Args:
        name: of the member.
        size: bytes of its content.
    """
    encoded = name.encode("utf-8")
    if len(encoded) > _LONGEST_NAME or size > _LARGEST_SIZE or name.startswith("/") or name.endswith("/"):
        return _by_tarfile(name, size)
    length = b"%011o\0" % size
    checksum = b"%06o\0 " % (_FIXED_SUM + sum(encoded) + sum(length))
    name_field = encoded.ljust(_LONGEST_NAME, b"\0")
    return b"".join((name_field, _TEMPLATE[100:124], length, _TEMPLATE[136:148], checksum, _TEMPLATE[156:]))


def padding(size: int) -> bytes:
    """The zeros after a content of ``size`` bytes."""
    return _PADDING[size % BLOCK]


def ending(size: int) -> bytes:
    """What follows the last member of a tar whose members take ``size`` bytes."""
    end = 2 * BLOCK
    return b"\0" * (end + -(size + end) % tarfile.RECORDSIZE)


_BUFFER = 1 << 20
_FALLOC_FL_KEEP_SIZE = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A checked media file to store.

    Attributes:
        name: of the member; in a media store, it begins with the digest of the content.
        path: of the file.
        digest: the first 32 hexadecimal digits of its SHA-256; by default those of the name.
        stamp: of the check.
        metadata: type and content in Energon's table of media; None for what Energon has none for.
    """

    name: str
    path: str
    stamp: Stamp
    metadata: tuple[str, str] | None = None
    digest: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.digest or self.name.partition(".")[0])


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

    def add_record(self, name: str, size: int, spool: int, offset: int) -> int:
        """Adds a member whose content a spool file holds; returns where its content begins in the tar."""
        self.records.append((name, size, spool, offset))
        return self._add(size)

    def add_file(self, file: StoredFile) -> int:
        """Adds a media file; returns where its content begins in the tar."""
        self.files.setdefault(len(self.records) - 1, []).append(file)
        return self._add(file.stamp.size)

    def _add(self, size: int) -> int:
        content = self.end + BLOCK
        self.end += BLOCK + size + -size % BLOCK
        return content

    def next_piece(self) -> ShardPiece:
        """An empty piece of the same tar that follows this one."""
        return ShardPiece(name=self.name, start=self.end, first=self.first + len(self.offsets), end=self.end)


def spool_file(scratch: Path, number: int) -> Path:
    """The file of the worker of a number for the JSON of good records, in the working directory of a conversion."""
    return scratch / f"records-{number}"


def write_piece(piece: ShardPiece, directory: Path, scratch: Path) -> None:
    """Writes a piece of a tar, and of Energon's index of its samples (``.tar.idx``).

    Args:
        piece: what is in it.
        directory: of the tar.
        scratch: where the files that hold its records are, see `spool_file`.

    Raises:
        UserError: a media file changed or vanished after it was checked.
    """
    path = directory / piece.name
    places: dict[int, int] = {}  # of the streams; asking them is a system call
    with ExitStack() as stack:
        streams: dict[int, BinaryIO] = {}
        tar = stack.enter_context(_opened_at(path, piece.start))
        _reserve(tar.fileno(), piece.start, piece.end - piece.start)
        for file in piece.files.get(-1, ()):
            _copy(tar, file)
        for number, (name, size, spool, offset) in enumerate(piece.records):
            if spool not in streams:
                stream = spool_file(scratch, spool).open("rb", buffering=_BUFFER)
                streams[spool] = stack.enter_context(stream)
            if places.get(spool) != offset:
                streams[spool].seek(offset)
            places[spool] = offset + size
            tar.write(b"".join((header(name, size), streams[spool].read(size), padding(size))))
            for file in piece.files.get(number, ()):
                _copy(tar, file)
        if piece.last:
            tar.write(ending(piece.end))
    offsets = array("Q", [*piece.offsets, piece.end] if piece.last else piece.offsets)
    with _opened_at(path.with_suffix(".tar.idx"), piece.first * offsets.itemsize) as index:
        index.write(offsets.tobytes())


def _opened_at(path: Path, place: int) -> BinaryIO:
    """A file to write to from a place on, whatever other pieces it has."""
    stream = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=_BUFFER)
    stream.seek(place)
    return stream


def _reserve(descriptor: int, start: int, size: int) -> None:
    """Asks the file system for the room of a piece at once, which costs less than block by block.

    The size of the file stays as it is. A file system that cannot do this, or has no room, says so when written to.
    """
    if sys.platform == "linux" and size > _BUFFER:
        libc: Any = ctypes.CDLL(None)
        libc.fallocate(descriptor, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(size))


def _copy(tar: BinaryIO, file: StoredFile) -> None:
    """Copies a checked file and verifies that it has not changed since the check.

    It is hashed once more unless a change would show in its time stamp.

    Raises:
        UserError: the file changed or vanished after it was checked.
    """
    changed = UserError(f"{file.path} changed while the conversion ran; start it again when nobody writes to it")
    left = file.stamp.size
    tar.write(header(file.name, left))
    try:
        stream = open_regular(file.path)
    except OSError as error:
        raise changed from error
    with stream:
        digest = None if file.stamp.settled and file.stamp.same_file(os.fstat(stream.fileno())) else hashlib.sha256()
        while left and (block := stream.read(min(left, _BUFFER))):
            tar.write(block)
            left -= len(block)
            if digest is not None:
                digest.update(block)
        same = (
            file.stamp.same_file(os.fstat(stream.fileno()))
            if digest is None
            else digest.hexdigest()[:32] == file.digest
        )
    if left or not same:
        raise changed
    tar.write(padding(file.stamp.size))


@dataclass(frozen=True, slots=True)
class Writing:
    """A `energon_packing.executors.work.Work`: writes pieces of shards, each with its directory.

    Attributes:
        scratch: where the files that hold the records are.
    """

    scratch: Path

    def begin(self) -> None:
        """Nothing to open."""

    def do(self, task: tuple[Path, ShardPiece]) -> None:
        """Writes one; raises as `write_piece` does."""
        write_piece(task[1], task[0], self.scratch)

    def name(self, task: tuple[Path, ShardPiece]) -> str:
        """Of the shard."""
        return f"writing {task[1].name}"
