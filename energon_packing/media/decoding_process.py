"""A child process that decodes: one that hangs is killed at a deadline, and one that crashes takes nothing along.

Decoders are C libraries that read what strangers wrote. One that loops forever, or writes outside of its memory, would
hold or end the process that calls it. The child is forked when the first sample needs it and serves one sample after
another. Files are read in the parent, which has the open shards; bytes and tensors travel in memory that both map.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import os
import pickle
import select
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import torch

from energon_packing.errors import SampleRejected, UserError
from energon_packing.quarantine import CRASH, TIMEOUT

MOST_IN_A_ROW = 8
"""Samples that may end the child one after another before the run stops."""
GRACE = 1.0
"""Seconds after the deadline, in which the decoder may notice it itself and say at which frame it was."""
ROOM = 1 << 30
"""Bytes that both processes map; what is larger goes through the pipe. The kernel provides a page when it is used."""
_KEPT = 256 << 20
"""Bytes of it that stay in use between two samples."""
_ALIGN = 64
_PR_SET_PDEATHSIG = 1
MOST_CHILDREN = 4
"""Children of one process; the one that was idle longest ends for a new one. Encoders may be many: those of several
data sets, or of a training and a validation loader."""
_OURS = (
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT),
    *(signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGHUP),
)

Read = Callable[[str], bytes]
Work = Callable[[Any, Read], Mapping[str, Any]]


class _Tensor(NamedTuple):
    """Where a tensor lies in the shared memory; its bytes instead, if it does not fit."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    place: int
    data: bytes | None


class _Child(NamedTuple):
    pid: int
    owner: int
    connection: Connection
    memory: mmap.mmap


class DecodingProcess:
    """Calls a function in a child process that can be killed.

    Args:
        work: takes a request, which is pickled, and a function that reads a file by its name. It returns a mapping
            whose values are tensors, mappings of tensors, or what pickle takes.
        seconds: wall-clock limit of one call, reading excluded; None sets none.
        named: the setting of the limit, for messages.
    """

    def __init__(self, work: Work, seconds: float | None, *, named: str = "encoder.decode_seconds") -> None:
        self._work, self._seconds, self._named = work, seconds, named
        self._child: _Child | None = None
        self._in_a_row = 0
        self._busy = False

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(DecodingProcess, named=self._named), (self._work, self._seconds)

    def __call__(self, request: Any, read: Read) -> dict[str, Any]:
        """Returns what ``work(request, read)`` returns there; its tensors are copies of their own.

        Args:
            request: what is decoded.
            read: called in this process; its errors reach the function.

        Raises:
            SampleRejected: `TIMEOUT` or `CRASH`; the next call has a new child. Also whatever the function raises.
            UserError: `MOST_IN_A_ROW` calls in a row ended the child.
        """
        if self._child is None and torch.cuda.is_initialized():
            # Pinned memory, which devices write to, must not be shared with a fork.
            return dict(self._work(request, read))
        with _lock:
            self._busy = True
        try:
            return self._answer(request, read)
        finally:
            self._busy = False

    def _answer(self, request: Any, read: Read) -> dict[str, Any]:
        child = self._started()
        try:
            child.connection.send(("decode", request))
        except OSError:  # it ended between two calls, with the thread that started it for example
            self.close()
            child = self._started()
            child.connection.send(("decode", request))
        left = None if self._seconds is None else self._seconds + GRACE
        while True:
            began = time.monotonic()
            if not _ready(child.connection, left):
                self.close()
                raise self._ended(TIMEOUT, f"decoding hung and was ended after {self._named}={self._seconds} s")
            try:
                kind, answer = child.connection.recv()
            except (EOFError, OSError):
                raise self._ended(CRASH, f"the decoder crashed: {_cause(self._reap())}") from None
            left = None if left is None else max(0.0, left - (time.monotonic() - began))
            if kind == "read":
                _answer_read(child, read, answer)
                continue
            self._in_a_row = 0
            if kind == "raised":
                raise answer
            return {name: _taken(value, child.memory) for name, value in answer.items()}

    def close(self) -> None:
        """Ends the child, whatever it does."""
        self._reap()

    def is_idle(self) -> bool:
        """Whether a child of this process waits for work. One that is busy serves another thread."""
        return not self._busy and self._child is not None and self._child.owner == os.getpid()

    def _started(self) -> _Child:
        child = self._child
        if child is not None and child.owner != os.getpid():
            child.connection.close()  # this process is a fork of the one that the child serves
            child = None
        if child is None:
            with _lock:
                for parent in _idle()[: 1 - MOST_CHILDREN or None]:
                    parent.close()
            child = self._child = _fork(self._work, self._seconds)
            self._finalizer = weakref.finalize(self, _end, child)
        _PARENTS.pop(id(self), None)
        _PARENTS[id(self)] = weakref.ref(self)
        return child

    def _reap(self) -> int:
        """Ends the child; returns its wait status, or 0 if there is none."""
        child, self._child = self._child, None
        if child is None:
            return 0
        self._finalizer.detach()
        return _end(child)

    def _ended(self, reason: str, detail: str) -> Exception:
        self._in_a_row += 1
        if self._in_a_row < MOST_IN_A_ROW:
            return SampleRejected(reason, detail)
        return UserError(
            f"{self._in_a_row} samples in a row ended the decoding process, the last one because {detail}. So many in "
            "a row are rather the decoder's fault (its installation, or memory) than the data's; "
            "encoder.decode_in_child=false decodes in the loader's own process, which shows the error itself."
        )


_PARENTS: dict[int, weakref.ref[DecodingProcess]] = {}
"""Those that started a child, the one that was used last at the end."""


_lock = threading.Lock()
"""Held while it is decided which one is idle, so that no thread loses its child while it begins to use it."""


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it


def _idle() -> list[DecodingProcess]:
    """Those with an idle child of this process, the one that was idle longest first."""
    for key in [key for key, parent in _PARENTS.items() if parent() is None]:
        _PARENTS.pop(key, None)
    parents = [parent() for parent in list(_PARENTS.values())]
    return [each for each in parents if each is not None and each.is_idle()]


def _fork(work: Work, seconds: float | None) -> _Child:
    memory = mmap.mmap(-1, ROOM, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    ours, theirs = Pipe()
    owner = os.getpid()
    with warnings.catch_warnings():
        # The child only decodes, on one thread; what other threads held at the fork is never asked for.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _serve(theirs, memory, work, seconds, owner)
        finally:
            os._exit(1)
    theirs.close()
    return _Child(pid, owner, ours, memory)


def _end(child: _Child) -> int:
    """Kills a child of this process and returns its wait status, which is its own if it had ended before."""
    if child.owner != os.getpid():
        return 0
    with contextlib.suppress(OSError):
        child.connection.close()
    with contextlib.suppress(OSError):
        # One that is already ending keeps its own status.
        os.kill(child.pid, signal.SIGKILL)
        return os.waitpid(child.pid, 0)[1]
    return 0


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = {each.value: each.name for each in signal.Signals}
        out = ", as where memory runs out" if number == signal.SIGKILL else ""
        return f"its process ended by {known.get(number, f'signal {number}')}{out}"
    return f"its process ended with exit code {os.waitstatus_to_exitcode(status)}"


def _ready(connection: Connection, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def _answer_read(child: _Child, read: Read, name: str) -> None:
    try:
        data = read(name)
    except Exception as error:
        child.connection.send((_portable(error), 0, b""))
        return
    fits = len(data) <= ROOM
    if fits:
        child.memory[: len(data)] = data
    with contextlib.suppress(OSError):  # a child that died is noticed where its answer is awaited
        child.connection.send((None, len(data), b"" if fits else data))


def _serve(connection: Connection, memory: mmap.mmap, work: Work, seconds: float | None, parent: int) -> NoReturn:
    """The child: decodes until its parent is gone."""
    for number in _OURS:
        signal.signal(number, signal.SIG_DFL)  # torch's workers say in theirs that a worker died
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    gc.freeze()
    torch.set_num_threads(1)  # OpenMP's other threads are not in a fork

    def read(name: str) -> bytes:
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(("read", name))
        error, size, data = connection.recv()
        _limit(seconds)
        if error is not None:
            raise error
        return data or memory[:size]

    while True:
        try:
            _, request = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        _limit(seconds)
        try:
            made = work(request, read)
            answer: tuple[str, Any] = ("made", _put(made, memory))
        except Exception as error:
            answer = ("raised", _portable(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send(answer)
        except OSError:
            os._exit(0)


def _limit(seconds: float | None) -> None:
    """Has the kernel end this process should nobody else do it, in case the parent hangs or is gone."""
    if seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds + 30 * GRACE)


def _portable(error: Exception) -> Exception:
    """The error, without what refers to this process; one of its text if it cannot be sent."""
    error = error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _put(made: Mapping[str, Any], memory: mmap.mmap) -> dict[str, Any]:
    """The values with their tensors in shared memory."""
    at = 0

    def placed(value: Any) -> Any:
        nonlocal at
        if isinstance(value, Mapping):
            return {name: placed(inner) for name, inner in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        stride = tuple(torch.empty_like(value, device="meta").stride())
        size = value.numel() * value.element_size()
        if not size or at + size > ROOM:
            dense = torch.empty_like(value).copy_(value)
            data = bytes(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()) if size else b""
            return _Tensor(value.dtype, tuple(value.shape), stride, 0, data)
        place, at = at, -(-(at + size) // _ALIGN) * _ALIGN
        _view(memory, value.dtype, tuple(value.shape), stride, place).copy_(value)
        return _Tensor(value.dtype, tuple(value.shape), stride, place, None)

    return {name: placed(value) for name, value in made.items()}


def _taken(value: Any, memory: mmap.mmap) -> Any:
    """The value with its tensors in this process's own memory."""
    if isinstance(value, _Tensor):
        if value.data is not None:
            flat = torch.frombuffer(bytearray(value.data), dtype=value.dtype) if value.data else torch.empty(0)
            return flat.to(value.dtype).as_strided(value.size, value.stride)
        taken = _view(memory, value.dtype, value.size, value.stride, value.place).clone()
        end = value.place + taken.numel() * taken.element_size()
        if end > _KEPT and hasattr(mmap, "MADV_REMOVE"):
            start = max(_KEPT, value.place)
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if end > start:
                memory.madvise(mmap.MADV_REMOVE, start, end - start)
        return taken
    if isinstance(value, Mapping):
        return {name: _taken(inner, memory) for name, inner in value.items()}
    return value


def _view(
    memory: mmap.mmap, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], place: int
) -> torch.Tensor:
    count = 1
    for side in size:
        count *= side
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=place).as_strided(size, stride)
