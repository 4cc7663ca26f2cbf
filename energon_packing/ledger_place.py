"""Where a loader writes its ledger, and that one run at a time does: lines of two would be counted as one run's."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import weakref
from pathlib import Path
from typing import Any

from energon_packing.errors import UserError


def without_ledger[Run: Any](run: Run) -> Run:
    """Returns the configuration of a loader that writes no ledger: of a command that looks, or of a rank of a replica
    whose packs another rank reads too."""
    return dataclasses.replace(run, packing=dataclasses.replace(run.packing, ledger=None))


def ledger_apart[Run: Any](run: Run, name: str) -> Run:
    """Returns the configuration of a loader beside the training's, such as its evaluation: the ledger is in a folder of
    its own in the training's."""
    if run.packing.ledger is None:
        return run
    return dataclasses.replace(
        run, packing=dataclasses.replace(run.packing, ledger=os.path.join(run.packing.ledger, name))
    )


class LedgerLock:
    """Keeps other processes from writing the ledger of a rank as long as it exists.

    It is a POSIX record lock: nothing is left over after a kill, network file systems know it, and the workers that a
    process forks need no lock of their own.

    Args:
        directory: of the ledger; None locks nothing.
        rank: data-parallel rank.
    """

    def __init__(self, directory: str | None, rank: int) -> None:
        self._path = None if directory is None else Path(directory) / f"rank{rank}.lock"
        self._held: _Held | None = None

    def hold(self) -> None:
        """Takes the lock, which all loaders of this process share.

        Raises:
            UserError: another process holds it, or the directory cannot be written.
        """
        if self._path is None or self._held is not None:
            return
        key = os.getpid(), os.path.realpath(self._path)
        held = _HELD.get(key)
        if held is None:
            held = _HELD[key] = _Held(self._path)
        self._held = held


class _Held:
    """An open and locked file; closing any descriptor of it ends the lock, so there is one per process."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserError(
                f"The ledger {path.parent} cannot be written ({error.strerror}). Set packing.ledger to another "
                "directory."
            ) from error
        weakref.finalize(self, os.close, descriptor).atexit = False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            raise UserError(
                f"Another run that is alive writes the ledger {path.parent}, for the same rank. Wait for its end, or "
                "set packing.ledger to a directory for each run."
            ) from error


_HELD: weakref.WeakValueDictionary[tuple[int, str], _Held] = weakref.WeakValueDictionary()
