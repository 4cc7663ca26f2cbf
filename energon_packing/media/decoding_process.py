"""A child process that decodes: one that hangs is killed at a deadline, and one that crashes takes nothing along.

Decoders are C libraries that read what strangers wrote. One that loops forever, or writes outside of its memory, would
hold or end the process that calls it. The child is forked when the first sample needs it and serves one sample after
another. Files are read in the parent, which has the open shards.

Files and tensors travel in memory that both map. A tensor is made where the parent reads it (`empty_result`), and the
parent's tensors are that memory: nothing is copied, and the same pages serve one sample after another, in the caches of
both processes. A part of it is used again when the last tensor in it is gone; until then the child can only read it.
Small tensors, and those beyond `KEPT`, are copied.
"""

import contextlib
import ctypes
import functools
import gc
import math
import mmap
import os
import pickle
import signal
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from energon_packing.drops import CRASH, ENDED, TIMEOUT
from energon_packing.errors import SampleRejected, UserError

ROOM = 768 << 20  # Bytes for tensors; what is larger goes through the pipe. The kernel provides a page when it is used.
KEPT = 256 << 20
"""Bytes of these, from the beginning, in which tensors of the parent may lie, and whose pages stay in use."""
FILES = 256 << 20  # Bytes for the files of a sample
_KEPT_FILES = 64 << 20
_SMALL = 4096  # Bytes: a smaller tensor is copied, which takes less time than to follow it
_ALIGN = 64
_GUARD = 1 << 20
"""Bytes before and after the rest that nobody may touch: a decoder that writes beyond the end of its memory may reach
the next mapping."""
_NONE, _READ, _WRITE = 0, 1, 2  # Protections of mprotect(2)
_libc: Any = ctypes.CDLL(None)
_mprotect: Any = getattr(_libc, "mprotect", None)
trim: Any = getattr(_libc, "malloc_trim", bool)  # another library than glibc keeps little
Place = tuple[int, int]  # Where a file lies in the memory, and its bytes


class Placed(NamedTuple):
    """Where a tensor lies in the memory; its bytes instead, if it does not fit."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    place: int
    data: bytes | None

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


class SharedRoom:
    """The memory, with ``room`` bytes for tensors; made by the parent, before it forks."""

    def __init__(self, room: int = ROOM) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, room + FILES + 2 * _GUARD, flags=flags)
        self._view = memoryview(self._memory)[_GUARD:-_GUARD]
        self._address = torch.frombuffer(self._view, dtype=torch.uint8, count=1).data_ptr()
        self._protect(-_GUARD, 0, _NONE)
        self._protect(room + FILES, room + FILES + _GUARD, _NONE)
        self.room, self._kept = room, min(KEPT, room // 3)
        self._held: dict[int, int] = {}  # first byte -> last one of each part that tensors of the parent lie in
        self._gone: deque[int] = deque()  # first bytes of those that no tensor lies in any more
        self._used, self._used_files = self._kept, _KEPT_FILES

    def free(self) -> int:
        """Returns the first byte that the next tensors may take; the parent calls it before it asks for them."""
        while self._gone:
            self._held.pop(self._gone.popleft())
        self._used = self._given_back(self._kept, self._used)
        return _whole_pages(max(self._held.values(), default=0))

    def put_files(self, files: Mapping[str, bytes]) -> dict[str, Place]:
        """Writes files over those of the last call; returns where each lies, by name, without those that do not fit."""
        self._used_files = self._given_back(self.room + _KEPT_FILES, self.room + self._used_files) - self.room
        places: dict[str, Place] = {}
        at = 0
        for name, data in files.items():
            if at + len(data) <= FILES:
                places[name] = self.room + at, len(data)
                self._view[self.room + at : self.room + at + len(data)] = data
                at += len(data)
        self._used_files = max(self._used_files, at)
        return places

    def file(self, place: Place) -> bytes:
        return bytes(self._view[place[0] : place[0] + place[1]])

    def taken(self, made: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
        """What a child described (`Results.put`), with its tensors, between the bytes ``start`` and ``end``."""
        self._used = max(self._used, end)
        held = None
        if start < end <= self._kept:
            held = self._view[start:end]
            self._held[start] = end
            weakref.finalize(held, self._gone.append, start).atexit = False
        return {name: self._taken(value, held, start) for name, value in made.items()}

    def _taken(self, value: Any, held: memoryview | None, start: int) -> Any:
        if isinstance(value, Mapping):
            return {name: self._taken(inner, held, start) for name, inner in value.items()}
        if not isinstance(value, Placed):
            return value
        if value.data is not None:
            flat = torch.frombuffer(bytearray(value.data), dtype=value.dtype) if value.data else torch.empty(0)
            return flat.to(value.dtype).as_strided(value.size, value.stride)
        if held is None or value.bytes < _SMALL:
            return self.tensor(value).clone()
        return _tensor(held, value, value.place - start)  # the tensor keeps `held`, whose end frees this part

    def tensor(self, placed: Placed) -> torch.Tensor:
        return _tensor(self._view, placed, placed.place)

    def place_of(self, tensor: torch.Tensor) -> int:
        """Returns where the first byte of a tensor lies, if it lies in this memory."""
        return tensor.data_ptr() - self._address

    def leave_alone(self, start: int) -> None:
        """Lets this process, the child, write nowhere but from byte `start` on, and not to files: a decoder that writes
        where it should not ends its process, and changes no tensor of another sample."""
        self._protect(0, start, _READ)
        self._protect(start, self.room, _READ | _WRITE)
        self._protect(self.room, self.room + FILES, _READ)

    def _protect(self, first: int, last: int, allowed: int) -> None:
        if last > first and _mprotect is not None:
            _mprotect(ctypes.c_void_p(self._address + first), ctypes.c_size_t(last - first), allowed)

    def _given_back(self, first: int, last: int) -> int:
        """Returns pages to the kernel, from byte `first` on; returns `first`."""
        whole = _whole_pages(first)
        if last > whole and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):  # where the kernel cannot, they stay
                self._memory.madvise(mmap.MADV_REMOVE, _GUARD + whole, last - whole)
        return first


class Results:
    """The part of the memory, from ``start`` on, that a child makes the tensors of one sample in."""

    def __init__(self, room: SharedRoom, start: int) -> None:
        self._room, self.start, self.end = room, start, start

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Returns a tensor in the memory, with any values; None if it does not fit."""
        size = tuple(shape)
        placed = self._place(dtype, size, torch.empty(size, device="meta").stride())
        return None if placed is None else self._room.tensor(placed)

    def put(self, value: Any) -> Any:
        """Returns a mapping with its tensors, in mappings in it too, as `Placed`; those elsewhere are copied."""
        if isinstance(value, Mapping):
            return {name: self.put(inner) for name, inner in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        size, stride = tuple(value.shape), tuple(torch.empty_like(value, device="meta").stride())
        count = value.numel() * value.element_size()
        place = self._room.place_of(value)
        if self.start <= place and place + count <= self.end and value.stride() == stride:
            return Placed(value.dtype, size, stride, place, None)
        if (placed := self._place(value.dtype, size, stride)) is not None:
            self._room.tensor(placed).copy_(value)
            return placed
        dense = torch.empty_like(value).copy_(value)
        data = bytes(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()) if count else b""
        return Placed(value.dtype, size, stride, 0, data)

    def _place(self, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> Placed | None:
        placed = Placed(dtype, size, stride, self.end, None)
        if not placed.bytes or self.end + placed.bytes > self._room.room:
            return None
        self.end += -(-placed.bytes // _ALIGN) * _ALIGN
        return placed


_results: Results | None = None  # Where `empty_result` takes memory in this process


def empty_result(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor with any values, for pixels of a sample: in a decoding child, in the parent's memory."""
    made = None if _results is None else _results.empty(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype) if made is None else made


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _tensor(memory: Any, placed: Placed, offset: int) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=placed.dtype, count=math.prod(placed.size), offset=offset)
    return flat.as_strided(placed.size, placed.stride)


MOST_IN_A_ROW = 8  # Samples that may end the child one after another before the run stops
GRACE = 1.0  # Seconds after the deadline, in which the decoder may notice it itself and say at which frame it was
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
NAME = "packing-decoder"  # of a child, as in top
TRIM_EVERY = 100
"""Samples after which a child returns freed memory. It inherits to keep it; holes in its heap would grow for weeks."""
MOST_GROWTH = 256 << 20  # bytes of anonymous memory beyond those at its start: a child with more is renewed
MOST_CHILDREN = 4
"""Children of one process; the one that was idle longest ends for a new one. Encoders may be many: those of several
data sets, or of a training and a validation loader."""
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)  # the sample's doing
_OURS = (*_FAULTS, signal.SIGALRM, signal.SIGCHLD, signal.SIGHUP)
Read = Callable[[str], bytes]
Work = Callable[[Any, Read], Mapping[str, Any]]


class _Child(NamedTuple):
    pid: int
    owner: int
    connection: Connection
    room: SharedRoom


class DecodingProcess:
    """Calls ``work`` in a child process that can be killed. It takes a request, which is pickled, and a function that
    reads a file by its name, and returns a mapping whose values are tensors, mappings of tensors, or what pickle takes.
    ``seconds`` is the wall-clock limit of one call (``encoder.decode_seconds``), reading excluded; None sets none."""

    def __init__(self, work: Work, seconds: float | None) -> None:
        self._work, self._seconds = work, seconds
        self._child: _Child | None = None
        self._in_a_row = 0
        self._busy = self._asked = self._again = False

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodingProcess, (self._work, self._seconds)

    def __call__(self, request: Any, read: Read, names: Sequence[str] = (), *, in_child: bool = True) -> dict[str, Any]:
        """Returns what ``work(request, read)`` returns there. What takes too long, or ends without a fault of its own,
        as by the kernel's memory killer, is tried once more in a new child. Raises SampleRejected: `CRASH`; at the
        second try `TIMEOUT` or `ENDED`. Also whatever the function raises; UserError: `MOST_IN_A_ROW` calls ended it.

        Args:
            read: called in this process; its errors reach the function, where that reads the file.
            names: of the files that the function reads: they travel with the request.
            in_child: False calls the function in this process.
        """
        if self._asked:  # an interrupt ended the last call, whose answer would be taken for that to this one
            self.close()
        with _lock:
            self._busy = True
        try:
            return self._answer(request, read, names, in_child)
        except SampleRejected as error:
            # Beside CUDA no new child can follow, and this process is not to hang.
            if error.reason not in (TIMEOUT, ENDED):
                raise
            if torch.cuda.is_initialized():
                raise SampleRejected(ENDED, error.detail) from error  # one time-out proves nothing
            self.close()
            self._in_a_row, self._again = max(0, self._in_a_row - 1), True  # counts samples
            return self._answer(request, read, names, in_child)
        finally:
            self._busy = self._again = False

    def _answer(self, request: Any, read: Read, names: Sequence[str], in_child: bool) -> dict[str, Any]:
        if not in_child or (self._child is None and torch.cuda.is_initialized()):
            # Pinned memory, which devices write to, must not be shared with a fork.
            return dict(self._work(request, read))
        files: dict[str, bytes | Exception] = {}
        for name in names:
            try:
                files[name] = read(name)
            except Exception as error:
                files[name] = _portable(error)
        child = self._started()
        try:
            start = _ask(child, request, files)
        except OSError:  # it ended between two calls, with the thread that started it for example
            self.close()
            child = self._started()
            start = _ask(child, request, files)
        if not child.connection.poll(None if self._seconds is None else self._seconds + GRACE):
            self.close()
            raise self._ended(TIMEOUT, f"decoding hung and was ended after encoder.decode_seconds={self._seconds} s")
        try:
            has_failed, answer, end, has_grown = pickle.loads(child.connection.recv_bytes())
        except (EOFError, OSError):
            status = self.close()
            reason = CRASH if os.WTERMSIG(status) in _FAULTS else ENDED
            raise self._ended(reason, f"the decoder crashed: {_cause(status)}") from None
        self._asked, self._in_a_row = False, 0
        if has_grown and not torch.cuda.is_initialized():
            self.close()
        if has_failed:
            raise answer
        return child.room.taken(answer, start, end)

    def close(self) -> int:
        """Ends the child, whatever it does; returns its wait status, or 0 if there is none."""
        child, self._child, self._asked = self._child, None, False
        if child is None:
            return 0
        self._finalizer.detach()
        return _end(child)

    def is_idle(self) -> bool:
        """Whether a child of this process waits for work. One that is busy serves another thread."""
        return not self._busy and self._child is not None and self._child.owner == os.getpid()

    def _started(self) -> _Child:
        child = self._child
        if child is not None and child.owner != os.getpid():
            child.connection.close()  # this process is a fork of the one that the child serves
            child = None
        with _lock:
            if child is None:
                idle = [parent for parent in _PARENTS.values() if parent.is_idle()]
                for parent in idle[: 1 - MOST_CHILDREN or None]:
                    parent.close()
            _PARENTS.pop(id(self), None)
            _PARENTS[id(self)] = self
        if child is None:
            child = self._child = _fork(self._work, self._seconds)
            self._finalizer = weakref.finalize(self, _end, child)
        self._asked = True
        return child

    def _ended(self, reason: str, detail: str) -> Exception:
        self._in_a_row += 1
        if self._in_a_row < MOST_IN_A_ROW or not (self._again or reason == CRASH):
            return SampleRejected(reason, detail)
        return UserError(
            f"{self._in_a_row} samples in a row ended the decoding process, the last one because {detail}. So many in "
            "a row are rather the decoder's fault (its installation, or memory) than the data's; "
            "encoder.decode_in_child=false decodes in the loader's own process, which shows the error itself."
        )


_PARENTS: weakref.WeakValueDictionary[int, DecodingProcess] = weakref.WeakValueDictionary()
"""Those that started a child, the one that was idle longest first."""
_lock = threading.Lock()
"""Held while it is decided which one is idle, so that no thread loses its child while it begins to use it."""


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it


def _fork(work: Work, seconds: float | None) -> _Child:
    room = SharedRoom(ROOM)
    ours, theirs = Pipe()
    owner = os.getpid()
    with warnings.catch_warnings():
        # The child only decodes, on one thread; what other threads held at the fork is never asked for.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _serve(theirs, room, work, seconds, owner)
        finally:
            os._exit(1)
    theirs.close()
    return _Child(pid, owner, ours, room)


def _end(child: _Child) -> int:
    """Kills a child of this process and returns its wait status, which is its own if it had ended before."""
    if child.owner != os.getpid():
        return 0
    with contextlib.suppress(OSError):
        child.connection.close()
    with contextlib.suppress(OSError):
        os.kill(child.pid, signal.SIGKILL)  # one that is already ending keeps its own status
        return os.waitpid(child.pid, 0)[1]
    return 0


def _cause(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"its process ended with exit code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    names = {each.value: each.name for each in signal.Signals}
    names[signal.SIGKILL] = "SIGKILL, as where memory runs out; lower data.workers if it does"
    return f"its process ended by {names.get(number, f'signal {number}')}"


def _ask(child: _Child, request: Any, files: Mapping[str, bytes | Exception]) -> int:
    """Sends a request with its files; returns the first byte of the memory that its results may take."""
    start = child.room.free()
    places = child.room.put_files({name: data for name, data in files.items() if isinstance(data, bytes)})
    child.connection.send_bytes(pickle.dumps((request, {**files, **places}, start), pickle.HIGHEST_PROTOCOL))
    return start


def _serve(connection: Connection, room: SharedRoom, work: Work, seconds: float | None, parent: int) -> NoReturn:
    """The child: decodes until its parent is gone."""
    global _results
    for number in _OURS:
        signal.signal(number, signal.SIG_DFL)  # torch's workers say in theirs that a worker died
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a job; the child ends with its parent
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _libc.prctl(_PR_SET_NAME, NAME.encode())
    if os.getppid() != parent:
        os._exit(0)
    gc.freeze()
    torch.set_num_threads(1)  # OpenMP's other threads are not in a fork
    trim(0)  # what the parent has freed would hide what this process grows by
    at_start, has_grown, served = _anonymous(), False, 0
    while True:
        try:
            request, files, start = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        if seconds is not None:  # the kernel ends this process should nobody else do it: the parent hangs or is gone
            signal.setitimer(signal.ITIMER_REAL, seconds + 30 * GRACE)
        room.leave_alone(start)
        _results = Results(room, start)
        try:
            made = _results.put(work(request, functools.partial(_file, room, files)))
            answer: tuple[bool, Any, int] = (False, made, _results.end)
        except Exception as error:
            answer = (True, _portable(error), start)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send_bytes(pickle.dumps((*answer, has_grown), pickle.HIGHEST_PROTOCOL))
        except OSError:
            os._exit(0)
        served += 1
        if served % TRIM_EVERY == 0:  # while the parent works
            trim(0)
            has_grown = _anonymous() - at_start > MOST_GROWTH


def _anonymous() -> int:
    """Bytes of this process that are of no file, those that its parent shares too."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_bytes().split())
    except OSError:  # no Linux
        return 0
    return (resident - shared) * mmap.PAGESIZE


def _file(room: SharedRoom, files: Mapping[str, bytes | Place | Exception], name: str) -> bytes:
    """A file that came with the request: in the memory, in the message if it was too large, or why it was not read."""
    found = files[name]
    if isinstance(found, Exception):
        raise found
    return found if isinstance(found, bytes) else room.file(found)


def _portable(error: Exception) -> Exception:
    """Returns the error without what refers to this process; one of its text if it cannot be sent."""
    error = error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
