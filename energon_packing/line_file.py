"""A file of JSON objects, one a line, that one process appends to and that survives its kill at any byte.

And locks on open files. Lustre without ``-o flock``, GCS FUSE and NFS without a lock manager refuse every lock: one
warning, and the work goes on, since a lock only keeps two commands that write to one place apart.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK})


def lock(file: IO[bytes] | IO[str], place: Path, *, wait: bool, byte: int | None = None) -> None:
    """Locks an open file until it is closed: one ``byte`` of it for this process (POSIX), or the open file (BSD).
    ``place`` is what the lock is for, as the user knows it. Raises BlockingIOError, PermissionError: another process
    has the lock, for which it is not to ``wait``; OSError: it fails. Warns UserWarning: it has no locks."""
    how = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
    try:
        if byte is None:
            fcntl.flock(file, how)
        else:
            fcntl.lockf(file, how, 1, byte)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"The file system of {place} has no file locks ({error.strerror}); do not run two commands that write to "
            "it at once.",
            stacklevel=3,
        )


_BLOCK = 1 << 16


class LineFile:
    """Appends whole lines to a file, made with its directories if missing. Raises OSError: it cannot be written. A last
    line that lacks its end, as a kill or a full disk leaves it, is moved to ``NAME.cut`` beside the file when it is
    opened, so it is neither read as an entry nor joined to the next."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if stat.S_ISREG(os.fstat(self._file).st_mode):
            self._set_aside(path.with_suffix(".cut"))

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes one line, which other processes can read at once. Raises ``OSError``: it cannot be written; nothing of
        the line is left where the file can be shortened."""
        # Half of a surrogate pair has no UTF-8 encoding; its backslash escape is also its JSON escape.
        left = memoryview((json.dumps(entry, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
        whole = len(left)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            if len(left) < whole:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, os.fstat(self._file).st_size - (whole - len(left)))
            raise

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._file)

    def _set_aside(self, place: Path) -> None:
        size = end = os.fstat(self._file).st_size
        last = -1
        while end and last < 0:
            start = max(0, end - _BLOCK)
            last = os.pread(self._file, end - start, start).rfind(b"\n")
            end = start + last + 1
        if end < size:
            with place.open("ab") as aside:
                aside.write(os.pread(self._file, size - end, end) + b"\n")
            os.ftruncate(self._file, end)


def read_lines(path: Path, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """The entries of a file, which may still be written, of lines that contain some bytes; lines that are no JSON
    object are left out. Raises ``OSError``: it cannot be read."""
    with path.open("rb") as stream:
        whole = itertools.takewhile(lambda line: line.endswith(b"\n"), stream)
        yield from _entries(line for line in whole if having in line)


class LineFollower:
    """Reads what is appended to a file of lines, which need not exist yet, each entry once; an unfinished last line
    waits for its end. With ``skip``, what an existing file holds is left out."""

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        self._path = path
        self._at = path.stat().st_size if skip and path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """The entries since the last call; lines that are no JSON object are left out. Raises ``OSError``: the file
        exists and cannot be read."""
        try:
            stream = self._path.open("rb")
        except FileNotFoundError:
            self._at = 0  # whatever is written from now on is new
            return []
        with stream:
            if os.fstat(stream.fileno()).st_size < self._at:
                self._at = 0  # another file took its place
            stream.seek(self._at)
            data = stream.read()
        end = data.rfind(b"\n") + 1
        self._at += end
        # The first line may have begun before the place where reading began; what is left of it is no JSON object.
        return list(_entries(data[:end].split(b"\n")))


def _entries(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield entry
