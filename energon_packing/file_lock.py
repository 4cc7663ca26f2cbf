"""Locks on open files, and what happens on file systems that have none: one warning, and the work goes on.

Lustre without ``-o flock``, GCS FUSE and NFS without a lock manager refuse every lock. A lock keeps two commands that
write to one place apart, so a single command needs none.
"""

from __future__ import annotations

import errno
import fcntl
import warnings
from pathlib import Path
from typing import IO

_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK})


def lock(file: IO[bytes] | IO[str], place: Path, *, wait: bool, byte: int | None = None) -> None:
    """Locks an open file until it is closed.

    Args:
        place: that the lock is for, as the user knows it.
        wait: whether to wait for another process that has the lock.
        byte: locks one byte of the file for this process (POSIX); None locks the open file (BSD).

    Raises:
        BlockingIOError, PermissionError: another process has the lock.
        OSError: another failure of the file system.

    Warns:
        UserWarning: the file system has no locks.
    """
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
