"""What ends a loader's workers, as one sentence: an error of theirs, or a death from outside."""

from __future__ import annotations

import errno
import functools
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import NoReturn

from energon_packing.errors import PackingError, UserError

_TRACEBACK = re.compile(r"^Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback.*\n[\w.]+: ", re.DOTALL)
_DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal: ([\w ]*))"
)
_FILES = re.compile(r"received \d+ items of ancdata|Too many open files")
_ROOM = re.compile(r"No space left on device|unable to (?:write to|allocate|resize|mmap).*(?:torch_|shared memory)")
"""A full disk of the ledger is a `UserError` already."""
_LOOK_EVERY = 1.0
"""Seconds between looks at whether the workers that are asked are alive."""


def in_sentences[Pack](packs: Iterator[Pack]) -> Iterator[Pack]:
    """Yields packs of workers.

    Raises:
        UserError: a worker died, shared memory is full, too many files are open, or the data cannot be read any more.
            Other errors of a worker keep their class, and ours lose its traceback.
    """
    try:
        yield from packs
    except (UserError, PackingError) as error:
        raise _without_traceback(error) from None
    except (RuntimeError, OSError, EOFError) as error:
        if (told := _told(error)) is not None:
            raise UserError(told) from error
        raise


def answered[Answer](ask: Callable[[], Answer], workers: Sequence[BaseProcess]) -> Answer:
    """Returns what workers answer to a question, which Energon would wait for in vain once one of them is gone.

    Args:
        ask: asks all of them; runs in a thread of its own.
        workers: their processes; without any, ``ask`` is just called.

    Raises:
        UserError: a worker was killed.
    """
    if not workers:
        return ask()
    answers: queue.SimpleQueue[Callable[[], Answer]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_outcome(ask)), name="state of the workers", daemon=True).start()
    while True:
        try:
            return answers.get(timeout=_LOOK_EVERY)()
        except queue.Empty:
            if gone := [str(worker.pid) for worker in workers if not worker.is_alive()]:
                raise UserError(_killed("", ", ".join(gone))) from None
        except RuntimeError as error:  # torch raises it in whatever runs when a worker ends
            if (told := _told(error)) is not None:
                raise UserError(told) from error
            raise


def _outcome[Answer](ask: Callable[[], Answer]) -> Callable[[], Answer]:
    try:
        answer = ask()
    except Exception as error:
        return functools.partial(_raise, error)
    return lambda: answer


def _raise(error: Exception) -> NoReturn:
    raise error


def _without_traceback(error: Exception) -> Exception:
    """Returns the error with its original message: torch puts a worker's whole traceback into it."""
    message = str(error)
    if not _TRACEBACK.match(message):
        return error
    return type(error)(_TRACEBACK.sub("", message).strip())


def _told(error: Exception) -> str | None:
    """What a user can do about an error of torch; None for one that is not known."""
    text = str(error)
    if died := _DIED.search(text):
        pids, signal = died.groups()
        if signal == "Bus error":
            return _shared_memory(f"a loader's worker (pid {pids}) was ended by a bus error")
        return _killed(f" ({signal})" if signal else "", pids)
    if _FILES.search(text) or getattr(error, "errno", None) == errno.EMFILE:
        return "A process has too many open files for the packs of its workers; raise the limit (ulimit -n 65536)."
    if _ROOM.search(text):
        return _shared_memory(_last_line(text))
    # Of the socket through which it hands over a pack, which has no name; a missing file of the data has one.
    if isinstance(error, ConnectionError | EOFError) or text == "[Errno 2] No such file or directory":
        return _killed(f" while it handed over a pack ({_last_line(text)})")
    if isinstance(error, OSError):
        return (
            f"The data cannot be read any more: {_last_line(text)}. See whether the data set and its storage are there "
            "and continue from the last checkpoint."
        )
    return None


def _killed(how: str, pids: str = "") -> str:
    which = f" (pid {pids})" if pids else ""
    return (
        f"A loader's worker{which} was killed{how}, as the kernel does where memory runs out. Give the job more "
        "memory, or lower data.workers, and continue from the last checkpoint."
    )


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:300] if text.strip() else "no reason was given"


def _shared_memory(what: str) -> str:
    return f"Shared memory is full ({what}); make /dev/shm larger (docker run --shm-size=16g), or lower data.workers."
