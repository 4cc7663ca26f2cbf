"""Reads pieces of tars by their positions, with a bounded number of files open."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from pathlib import Path

from energon_packing.errors import UserError
from energon_packing.read_again import read_again
from energon_packing.remote_files import PIECE_BYTES, read_range, remote_address, shown

MOST_OPEN = 128
"""Open tars of one process. Opening one costs some microseconds, so a small number does no harm."""


_NEAR = 1 << 16
"""Bytes between two pieces that count as following each other."""


@functools.lru_cache(maxsize=1 << 14)
def inside(root: Path, name: str) -> Path:
    """The path of a shard that a file of ours names.

    Raises:
        UserError: the name leaves its directory, as no file of ours does.
    """
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise UserError(f"{name!r} is not a name of a shard in {root}; measure and plan again")
    return root / name


class _RemotePieces:
    """Reads pieces of files in object stores; ahead where pieces follow each other, as those of records do.

    A store answers in milliseconds, whether it is asked for a record or for a thousand.
    """

    def __init__(self) -> None:
        self._address = ""
        self._start = 0
        self._ahead = b""
        self._end = -1  # of the piece before

    def read(self, address: str, offset: int, size: int) -> bytes:
        """As many of these bytes as there are.

        Raises:
            OSError: they cannot be read.
        """
        follows = address == self._address and 0 <= offset - self._end <= _NEAR
        start = offset - self._start
        if address != self._address or start < 0 or start + size > len(self._ahead):
            self._ahead = read_range(address, offset, max(size, PIECE_BYTES) if follows else size)
            self._address, self._start, start = address, offset, 0
        self._end = offset + size
        return self._ahead[start : start + size]


class TarFiles:
    """Open tars, the least recently used closed first; of tars in object stores, pieces are read
    (`energon_packing.remote_files`). Not for several threads or across a fork.
    """

    def __init__(self, most: int = MOST_OPEN) -> None:
        self._most = most
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._process = os.getpid()
        self._remote = _RemotePieces()

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Returns `size` bytes of `path` from byte `offset` on.

        Raises:
            UserError: the file is missing, unreadable, or ends before that.
        """
        address = remote_address(path)
        try:
            if address is not None:
                found = self._remote.read(address, offset, size)
            else:
                found = read_again(path, lambda: self._some(path, offset, size), lambda: self._forget(path))
        except OSError as error:
            raise UserError(f"{shown(path)} cannot be read: {error.strerror or error}; put the shard back") from error
        if len(found) != size:
            raise UserError(f"{shown(path)} ends before byte {offset + size}; the shard changed since it was measured")
        return found

    def _some(self, path: Path, offset: int, size: int) -> bytes:
        """As many of these bytes as there are."""
        found = os.pread(self._descriptor(path), size, offset)
        while 0 < len(found) < size:  # a signal, or a file system that reads less at a time
            more = os.pread(self._descriptor(path), size - len(found), offset + len(found))
            if not more:
                break
            found += more
        return found

    def _forget(self, path: Path) -> None:
        """Closes a file that failed; the next read opens it again."""
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def _descriptor(self, path: Path) -> int:
        if self._process != os.getpid():  # descriptors are shared with the parent, which may close them
            self._open.clear()
            self._process = os.getpid()
        found = self._open.get(path)
        if found is not None:
            self._open.move_to_end(path)
            return found
        while len(self._open) >= self._most:
            os.close(self._open.popitem(last=False)[1])
        found = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return found

    def close(self) -> None:
        """Closes all of them."""
        if self._process == os.getpid():
            for descriptor in self._open.values():
                os.close(descriptor)
        self._open.clear()
