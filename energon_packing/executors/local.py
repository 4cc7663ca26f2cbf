"""Processes of this machine."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

from energon_packing.executors.work import Attempt, Attempts, CallingProcess, Executor, ExecutorEntry, Results, Work

_PR_SET_PDEATHSIG = 1
_SMALL = 1 << 14
"""Bytes of a task that fits into a pipe's buffer, so that sending it never waits for a worker that sends a result."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Worker:
    """A process, our end of its pipe, and the tasks that it has: the first is being done."""

    process: BaseProcess
    connection: Connection
    given: deque[Attempt[Any]] = field(default_factory=deque)

    def how_it_ended(self) -> str:
        """Waits for its end."""
        self.process.join()
        code = self.process.exitcode or 0
        if code >= 0:
            return f"ended with exit code {code}"
        hint = ", which the kernel also sends when memory runs out" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"


class LocalProcesses:
    """Forks of this process, as a loader's workers are: they share its imports and what the work holds, and start at
    once. They end with the calling process, however that ends. An executor as `Executor` describes it, of one process
    or more; one of another ``method`` of starting processes gets its work pickled."""

    method: Literal["fork", "spawn"] = "fork"

    def __init__(self, count: int) -> None:
        self._count = count

    def results[Task, Result](self, tasks: Iterable[Task], work: Work[Task, Result]) -> Results[Task, Result]:
        attempts = Attempts(tasks, work)
        workers: list[_Worker] = []
        done: list[tuple[Task, Any]] = []
        try:
            while True:
                self._give_out(attempts, work, workers)
                yield from done  # while the workers go on
                if not (attempts.running or done):
                    return
                done = []
                busy = {worker.connection: worker for worker in workers if worker.given}
                patience = attempts.patience() if len(busy) < self._count else None
                for connection in wait(list(busy), patience) if attempts.running else ():
                    worker = busy[connection]  # type: ignore[index]
                    attempt = worker.given.popleft()
                    try:
                        kind, value = worker.connection.recv()
                    except (EOFError, OSError):
                        kind = "died"
                    if kind == "failed" and not attempt.ended:
                        raise value
                    if kind == "done":
                        if attempts.done(attempt):
                            done.append((attempt.task, value))
                        for other in workers:  # its end is seen as that of any worker
                            if attempt in other.given:
                                other.process.kill()
                        continue
                    workers.remove(worker)
                    worker.connection.close()
                    if (given_up := attempts.died(attempt, worker.how_it_ended())) is not None:
                        done.append((attempt.task, given_up))
                    attempts.give_back(*worker.given)
        finally:
            started = [worker for worker in workers if worker.process.pid is not None]
            for worker in started:
                worker.process.kill()
                worker.connection.close()
            for worker in started:
                worker.process.join()

    def _give_out(self, attempts: Attempts[Any], work: Work[Any, Any], workers: list[_Worker]) -> None:
        """Gives every worker as many tasks as the work allows; new workers are started as long as there are tasks."""
        while True:
            worker = min(workers, key=lambda each: len(each.given), default=None)
            if len(workers) < self._count and (worker is None or worker.given):
                worker = None
            held = 0 if worker is None else len(worker.given)
            if worker is not None and not (held or worker.process.is_alive()):  # it died while it was idle
                workers.remove(worker)
                worker.connection.close()
                continue
            attempt = attempts.take() if held < getattr(work, "queued", 1) else None
            if attempt is None and (held or (attempt := attempts.take_slow()) is None):
                return
            message = ForkingPickler.dumps(attempts.sent(attempt))
            if held and len(message) > _SMALL:
                attempts.give_back(attempt)
                return
            started = worker or _started(work, workers, self.method)
            started.given.append(attempt)
            try:
                started.connection.send_bytes(message)
            except OSError:
                if worker is not None:  # else it died as it began, which counts
                    attempts.give_back(worker.given.pop())
                if held:
                    return


def _started(work: Work[Any, Any], workers: list[_Worker], method: Any) -> _Worker:
    """A new worker, which is one of the ``workers`` from now on."""
    ours, theirs = multiprocessing.Pipe()
    inherited = [ours, *(each.connection for each in workers)] if method == "fork" else []
    process = multiprocessing.get_context(method).Process(target=_serve, args=(work, theirs, inherited, os.getpid()))
    # Ctrl-C is for this process, which ends its workers, so this one is among them before it starts (another thread may
    # take the signal that is blocked here); theirs is blocked from their first instruction on.
    workers.append(_Worker(process=process, connection=ours))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return workers[-1]


def _serve(work: Work[Any, Any], connection: Connection, inherited: list[Connection], parent: int) -> None:
    """The life of a worker: tasks come in, ``(kind, value)`` goes out, until the other end closes. A fork that kept the
    ``inherited`` ends of pipes would keep other workers from ending."""
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # this process ends with its parent, whatever ends that
    if os.getppid() != parent:
        sys.exit(1)
    for each in inherited:
        each.close()
    # Else the first collection of garbage writes to every page that this process shares with the calling one.
    gc.freeze()
    # OpenMP's other threads are not in a fork, which would wait for them for ever; and workers share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    try:
        work.begin()
        for task in _received(connection):
            connection.send(("done", work.do(task)))
    except Exception as error:
        with contextlib.suppress(ConnectionError):
            connection.send(("failed", _sendable(error)))


def _received(connection: Connection) -> Iterator[Any]:
    """Tasks, until the calling process is gone. What a task raises is not raised here, whatever its class is."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            yield connection.recv()


def _sendable(error: Exception) -> Exception:
    """The exception with its traceback as a note; a `RuntimeError` of the same words if it cannot be sent. Some
    exceptions are pickled but cannot be read back, as their ``__init__`` has other parameters; the process that
    receives one would fail with an error of its own."""
    said = "".join(traceback.format_exception(error))
    error.add_note(said)
    try:
        pickle.loads(pickle.dumps(error))  # our own exception, in our own process
    except Exception:
        return RuntimeError(said)
    return error


def _local(workers: int | None, address: str | None, tasks: int | None) -> Executor:
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    count = min(8, len(usable)) if workers is None else workers
    count = count if tasks is None else min(count, tasks) if tasks > 1 else 0
    return LocalProcesses(count) if count else CallingProcess()


EXECUTOR = {"local": ExecutorEntry(make=_local)}
