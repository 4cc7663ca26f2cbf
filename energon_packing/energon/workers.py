"""The worker processes of a loader: what they start with, and what ends them, as one sentence.

glibc returns a large block to the kernel when it is freed, and the kernel clears every page of the next one: between a
twentieth and a third of the CPU time of a worker that renders photographs. So workers keep freed memory. And a worker
tokenizes one text at a time, which is quicker where the tokenizers library starts no threads.

Torch hands over each tensor of a pack by a file in shared memory and a connection of its own. Here all small tensors
share one, with the rest of the pack.
"""

import contextlib
import ctypes
import errno
import functools
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from energon_packing.encoders.tokenized import use_one_thread
from energon_packing.energon.pack_bytes import as_bytes, pack_from_bytes, pack_to_bytes
from energon_packing.energon.samples import Pack
from energon_packing.errors import PackingError, UserError
from energon_packing.media.decoding_process import NAME as DECODER
from energon_packing.media.decoding_process import trim

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt(3), from glibc's malloc.h
TRIM_SECONDS = 60.0
"""Between two times that a worker returns what it has freed and kept: else each largest pack so far would last."""


def keep_freed_memory() -> bool:
    """Makes this process keep freed memory for its next allocations, so that it stays at its peak size; returns whether
    the C library can, which only glibc does."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:
        return False
    # Smaller blocks come from the heap, which is kept. 1 GiB is more than a decoded sample may be by default, 32 MiB
    # the most that older versions of glibc allow. The heap grows by 256 MiB; the kernel gives a page at first touch.
    kept = mallopt(_MMAP_THRESHOLD, 1 << 30) or mallopt(_MMAP_THRESHOLD, 32 << 20)
    return bool(kept and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1) and mallopt(_TOP_PAD, 256 << 20))


def in_workers(loader: Any, *, keep_memory: bool = True) -> None:
    """Makes every worker that a ``torch.utils.data.DataLoader`` starts from now on tokenize without threads. Call it
    just before they start: what only a cycle holds ends here. A worker is a fork, whose first garbage collection would
    end a model's tensors or an open decoder without the threads they belong to, and crash."""
    if loader.num_workers:
        # With what is frozen, which Energon unfreezes in the worker at the end of an epoch.
        frozen = gc.get_freeze_count()
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()
    loader.worker_init_fn = functools.partial(_start, loader.worker_init_fn, keep_memory)


def _start(own: Callable[[int], None] | None, keep_memory: bool, worker: int) -> None:
    if torch.utils.data.get_worker_info() is not None:
        leave_to_rank()
    use_one_thread()
    if keep_memory and keep_freed_memory():
        threading.Thread(target=_trim_at_times, name="trim", daemon=True).start()
    ForkingPickler.register(Pack, _together)
    if own is not None:
        own(worker)


def _trim_at_times() -> None:
    while True:  # by the clock: for 100 texts it would take longer than they do
        time.sleep(TRIM_SECONDS)
        trim(0)


def largest_private() -> dict[str, int]:
    """Bytes of private memory of the largest ``worker`` and the largest ``decoder`` below this process, if any."""
    largest: dict[str, int] = {}
    kinds = {"pt_data_worker": "worker", DECODER: "decoder"}  # by their names, the first one torch's
    pids = [os.getpid()]
    for pid in pids:  # which grows
        with contextlib.suppress(OSError):  # it has ended, or is no Linux process
            if kind := kinds.get(Path(f"/proc/{pid}/comm").read_text().strip()):
                sizes = re.findall(r"(?m)^Private_\w+: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())
                largest[kind] = max(largest.get(kind, 0), sum(map(int, sizes)) << 10)
            for file in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, file.read_text().split())
    return largest


def leave_to_rank() -> None:
    """Leaves SIGTERM, which a scheduler sends to all processes of a job, to the rank, which may still need this worker
    for its checkpoint. From the rank itself it ends the worker, as torch has it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # also of the threads and processes that follow

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait, name="end by the rank", daemon=True).start()


def _together(pack: Pack[Any]) -> tuple[Any, ...]:
    large: list[torch.Tensor] = []
    rest = pack_to_bytes(pack, apart=large)
    # Not through the pipe: a worker whose loader was killed would wait for ever to write more than it holds.
    return pack_from_bytes, (rest, [as_bytes(each) for each in large])


_TRACEBACK = re.compile(r"^Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback.*\n[\w.]+: ", re.DOTALL)
_DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal: ([\w ]*))"
)
_FILES = re.compile(r"received \d+ items of ancdata|Too many open files")
_ROOM = re.compile(r"No space left on device|unable to (?:write to|allocate|resize|mmap).*(?:torch_|shared memory)")
"""A full disk of the ledger is a `UserError` already."""


def in_sentences[Pack](packs: Iterator[Pack]) -> Iterator[Pack]:
    """Yields packs of workers. Raises `UserError`: a worker died, shared memory is full, too many files are open, or
    the data cannot be read any more. Other errors of a worker keep their class, and ours lose its traceback."""
    try:
        yield from packs
    except GeneratorExit:  # also when the interpreter ends, which has forgotten the names below by then
        raise
    except (UserError, PackingError) as error:  # torch puts a worker's whole traceback into the message
        raise type(error)(_TRACEBACK.sub("", str(error)).strip()) if _TRACEBACK.match(str(error)) else error from None
    except (RuntimeError, OSError, EOFError) as error:
        if told := _told(error):
            raise told from error
        raise


def answered[Answer](ask: Callable[[], Answer], workers: Sequence[BaseProcess]) -> Answer:
    """Returns what ``workers`` (processes) answer to a question, which Energon would wait for in vain once one of them
    is gone. ``ask`` asks all of them, in a thread of its own; without workers it is just called. Raises UserError: a
    worker was killed."""
    if not workers:
        return ask()
    answer: Future[Answer] = Future()

    def wait() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=wait, name="state of the workers", daemon=True).start()
    while True:
        try:
            return answer.result(1.0)
        except TimeoutError:
            if answer.done():  # a worker's own error, that of a store
                raise
            if gone := [worker for worker in workers if not worker.is_alive()]:
                how = f" ({signal.strsignal(-code)})" if (code := gone[0].exitcode or 0) < 0 else ""
                raise UserError(_killed(how, ", ".join(str(worker.pid) for worker in gone))) from None
        except RuntimeError as error:  # torch raises it in whatever runs when a worker ends
            if told := _told(error):
                raise told from error
            raise


def _told(error: Exception) -> UserError | None:
    """Returns what a user can do about an error of torch; None for one that is not known."""
    text = str(error)
    last = text.strip().splitlines()[-1][:300] if text.strip() else "no reason was given"
    died = _DIED.search(text)
    pids, ended_by = died.groups() if died else ("", "")
    if ended_by == "Bus error":
        told = _full(f"a loader's worker (pid {pids}) was ended by a bus error")
    elif died:
        told = _killed(f" ({ended_by})" if ended_by else "", pids)
    elif _FILES.search(text) or getattr(error, "errno", None) == errno.EMFILE:
        told = "A process has too many open files for the packs of its workers; raise the limit (ulimit -n 65536)."
    elif _ROOM.search(text):
        told = _full(last)
    # Of the socket through which it hands over a pack, which has no name; a missing file of the data has one.
    elif isinstance(error, ConnectionError | EOFError) or text == "[Errno 2] No such file or directory":
        told = _killed(f" while it handed over a pack ({last})")
    elif isinstance(error, OSError):
        fix = "See whether the data set and its storage are there and continue from the last checkpoint."
        told = f"The data cannot be read any more: {last}. {fix}"
    else:
        return None
    return UserError(told)


def _killed(how: str, pids: str = "") -> str:
    which = f" (pid {pids})" if pids else ""
    if how == " (Terminated)":
        return f"A loader's worker{which} was ended by SIGTERM as it started; continue from the last checkpoint."
    if how.startswith(" (") and how != " (Killed)":
        fix = "Continue from the last checkpoint; if it ends again, data.workers: 0 shows where."
        return f"A loader's worker{which} ended{how}, as by a defect of a library. {fix}"
    fix = "Give the job more memory, or lower data.workers, and continue from the last checkpoint."
    return f"A loader's worker{which} was killed{how}, as the kernel does where memory runs out. {fix}"


def _full(what: str) -> str:
    return f"Shared memory is full ({what}); make /dev/shm larger (docker run --shm-size=16g), or lower data.workers."
