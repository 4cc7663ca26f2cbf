"""The errors that cross module boundaries, one class per audience.

* `UserError`: the user asked for something impossible. The command line prints the message and exits with code 2.
* `SampleRejected`: one record or sample is bad. It is written to the rejects file or the ledger; the run continues.
* `PackingError`: an internal invariant does not hold. Never caught inside the package.
"""

import errno
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK = (*FULL, errno.EROFS, errno.EFBIG)
UNWRITABLE = (*_DISK, errno.EIO)
"""Error numbers of a disk that takes no more."""
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
    return "disk" if error.errno in _DISK else "file" if error.errno in _FILE else "store"


def is_machines(error: BaseException) -> bool:
    """Whether an error is this machine's or a store's (no memory, no open files left, a read that failed) and says
    nothing of the data. What Pillow raises about bytes has no number of the system's."""
    of_system = isinstance(error, OSError) and error.errno is not None and fault_of(error) != "file"
    return of_system or isinstance(error, MemoryError)


class UserError(Exception):
    """A user's mistake. The message states in one sentence what is wrong, where, and how to fix it. Exit code 2."""


class ConfigError(UserError):
    """A configuration value that cannot work. The message names the key and the value."""


def refuse(*mistakes: tuple[object, str]) -> None:
    """Raises a `ConfigError` with the sentence of the first mistake whose condition holds."""
    for is_made, sentence in mistakes:
        if is_made:
            raise ConfigError(sentence)


class SampleRejected(Exception):
    """One sample cannot be used.

    Args:
        reason: a short, stable word for counting, such as ``"missing_media"`` or ``"oversize"``.
        detail: one sentence for a reader, with the values.
        length: tokens of the sample if it is rejected for its length, for use by programs; None otherwise.
    """

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


PAUSES = (0.1, 0.4, 1.6)
"""Seconds before the second, third and fourth try."""

_failing: set[Hashable] = set()


def read_again[T](place: Hashable, read: Callable[[], T], forget: Callable[[], None] | None = None) -> T:
    """Returns what ``read`` returns; after a failure of the store or of memory, on another try.

    Args:
        place: of the file. Where the last read failed after all tries, only one is made until one succeeds, so a shard
            that is gone for good costs its pauses once and not for every sample.
        forget: called after each failure; closes what may be in any state.

    Raises:
        OSError, MemoryError: of the last try. Other errors, and those that will not go away, are raised at once.
    """
    pauses = iter(() if place in _failing else PAUSES)
    while True:
        try:
            value = read()
        except (OSError, MemoryError) as error:
            if forget is not None:
                forget()
            if isinstance(error, OSError) and fault_of(error) != "store":
                raise
            if (pause := next(pauses, None)) is None:
                _failing.add(place)
                raise
            time.sleep(pause)
        else:
            _failing.discard(place)
            return value
