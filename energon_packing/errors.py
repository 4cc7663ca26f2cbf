"""The errors that cross module boundaries, one class per audience.

* `UserError`: the user asked for something impossible. The command line prints the message and exits with code 2.
* `SampleRejected`: one record or sample is bad. It is written to the rejects file or the ledger; the run continues.
* `PackingError`: an internal invariant does not hold. Never caught inside the package.
"""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK = (*FULL, errno.EROFS, errno.EFBIG)
_NO_FILES = (errno.EMFILE, errno.ENFILE)
UNWRITABLE = (*_DISK, errno.EIO)  # error numbers of a disk that takes no more
_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES),
    *(errno.EPERM, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP),
}


def some_of(names: Sequence[object], most: int) -> str:
    """Returns the first of what a message is about, and how many more there are: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def fault_of(error: OSError) -> Literal["disk", "file", "store"]:
    """Returns what an error is about: this machine's disk, which takes no more; the one file, which another try does
    not give and which is the sample's fault; else the store, which may answer later and says nothing of the sample."""
    of_file = error.errno in _FILE or isinstance(error, FileNotFoundError)  # that of a client has no number
    return "disk" if error.errno in _DISK else "file" if of_file else "store"


def is_machines(error: BaseException) -> bool:
    """Whether an error is this machine's or a store's (no memory, no open files left, a read that failed) and says
    nothing of the data. What Pillow raises about bytes has no number of the system's."""
    of_system = isinstance(error, OSError) and error.errno is not None and fault_of(error) != "file"
    return of_system or isinstance(error, MemoryError)


class UserError(Exception):
    """A user's mistake. The message states in one sentence what is wrong, where, and how to fix it. Exit code 2."""


@contextlib.contextmanager
def said_of_system(what: str, then: str = "") -> Iterator[None]:
    """Raises a `UserError` of an ``OSError`` in its block: ``what``, a colon, the system's words, and ``then``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}{then}") from error


class ConfigError(UserError):
    """A configuration value that cannot work. The message names the key and the value."""


def refuse(*mistakes: tuple[object, str]) -> None:
    """Raises a `ConfigError` with the sentence of the first mistake whose condition holds."""
    for is_made, sentence in mistakes:
        if is_made:
            raise ConfigError(sentence)


class SampleRejected(Exception):
    """One sample cannot be used: ``reason`` is a short, stable word for counting, such as ``"missing_media"`` or
    ``"oversize"``; ``detail`` one sentence for a reader, with the values; ``length`` the sample's if it is rejected for
    that, for use by programs, None otherwise."""

    def __init__(self, reason: str, detail: str, length: int | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.length = length

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled between processes; the default would pass one argument for several parameters.
        return type(self), (self.reason, self.detail, self.length)


class PackingError(RuntimeError):
    """An invariant of the packer is broken: an invalid partition, or a length that differs from its prediction."""


PAUSES = (0.1, 0.4, 1.6)  # seconds before the second, third and fourth try
LATER_PAUSE = 5.0  # seconds before each further try of a patient read
_PATIENCE: ContextVar[float | None] = ContextVar("patience", default=None)


class StoreAway(UserError):
    """A store could not be read for as long as ``data.storage_patience`` says. It says nothing of any sample."""


def be_patient(seconds: float | None) -> contextlib.AbstractContextManager[Any]:
    """Sets how long each read of this thread, and of processes that it forks from now on, waits for its store
    (``data.storage_patience``); None ends it after `PAUSES`, as in commands that go on where they stopped. Holds for
    good, or inside the ``with`` that the call stands in."""
    return holding(_PATIENCE, seconds)


def holding[T](variable: ContextVar[T], value: T) -> contextlib.AbstractContextManager[Any]:
    """Sets a variable at once; after the ``with`` that the call stands in, it is what it was."""
    back = contextlib.ExitStack()
    back.callback(variable.reset, variable.set(value))
    return back


def read_again[T](place: object, read: Callable[[], T], forget: Callable[[], None] | None = None) -> T:
    """Returns what ``read`` returns; after a failure of a store or of memory, on another try. ``place`` is what is
    read, for the sentences; ``forget`` is called after each failure, and closes what may be in any state. Raises
    StoreAway: the store failed for longer than a patient read waits (`be_patient`); OSError, MemoryError: of the last
    try, where nobody is patient, or of the first, where another one does not help. Errors of multistorageclient and
    SQLite are among them (`_of_system`). Others are raised at once."""
    began, told, tries = time.monotonic(), False, 0
    while True:
        try:
            value = _of_system(read)
        except (OSError, MemoryError) as error:
            if forget is not None:
                forget()
            waited, late = time.monotonic() - began, tries >= len(PAUSES)
            longest = _PATIENCE.get() if _is_away(error) else None
            if longest is None:
                if late or (isinstance(error, OSError) and fault_of(error) != "store"):
                    if _PATIENCE.get() is not None and getattr(error, "errno", None) in _NO_FILES:
                        raise UserError(f"{place} cannot be opened ({error}); raise the limit (ulimit -n).") from error
                    raise
            else:
                why = getattr(error, "strerror", None) or error
                if waited >= longest and late:
                    run = ", longer than data.storage_patience. No sample was dropped for it: see to the storage, and "
                    raise StoreAway(
                        f"{place} could not be read for {waited:.0f} s ({why})"
                        + (run + "continue from the last checkpoint." if longest else "; see to the storage.")
                    ) from error
                if not told and (late or waited > sum(PAUSES)):  # no warning: Python gives those once
                    print(f"{place} cannot be read ({why}); waiting up to {longest:g} s.", file=sys.stderr, flush=True)
                    told = True
            time.sleep(min(LATER_PAUSE, longest - waited) if late and longest is not None else PAUSES[tries])
            # A worker for which nobody waits any more; what was not imported has started none.
            processes = sys.modules.get("multiprocessing.process")
            if processes and (parent := processes.parent_process()) and not parent.is_alive():
                os._exit(1)
            tries += 1
        else:
            if told:
                print(f"{place} is read again after {time.monotonic() - began:.0f} s.", file=sys.stderr, flush=True)
            return value


def _of_system[T](read: Callable[[], T]) -> T:
    """Calls ``read``. Its errors become the system's if they are a store's: multistorageclient's ``RetryableError`` is
    neither an ``OSError`` nor a ``RuntimeError``, as its others are; its files hide them in an ``OSError`` without
    number. SQLite has its own."""
    try:
        return read()
    except Exception as error:
        cause: BaseException = error
        while type(cause) in (OSError, RuntimeError) and getattr(cause, "errno", None) is None and cause.__cause__:
            cause = cause.__cause__
        if type(cause).__module__ == "sqlite3":
            of_store = getattr(cause, "sqlite_errorcode", 0) & 0xFF in (10, 14)  # SQLITE_IOERR, SQLITE_CANTOPEN
            try:
                os.close(os.open(os.devnull, os.O_RDONLY))
            except OSError as limit:  # SQLite does not say that no file can be opened
                cause = limit
        else:
            of_store = cause is not error or type(error).__name__ == "RetryableError"
        if not of_store:
            raise
        code = errno.ENOENT if isinstance(cause, FileNotFoundError) else getattr(cause, "errno", None) or errno.EIO
        raise OSError(code, " ".join(str(error).split())[:300]) from error


def _is_away(error: OSError | MemoryError) -> bool:
    """Whether the store is away, not the one file: also if that is not there and its directory is gone or empty, as
    where a file system is not mounted."""
    if isinstance(error, FileNotFoundError | NotADirectoryError) and error.filename:
        return is_lost(os.path.dirname(os.path.abspath(error.filename)))
    if isinstance(error, OSError) and error.errno is not None:
        return fault_of(error) == "store" and error.errno not in _NO_FILES
    return isinstance(error, TimeoutError | ConnectionError | PermissionError)  # of a client; 403, keys that ran out


def is_lost(folder: str) -> bool:
    """Whether a folder is empty, gone, or may not be listed, as a mount point is without its file system."""
    try:
        with os.scandir(folder) as found:
            return next(found, None) is None
    except OSError as error:
        return not isinstance(error, NotADirectoryError)
