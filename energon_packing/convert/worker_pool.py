"""Several workers: tasks go out in order, results come back in order, whoever does them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Protocol

from energon_packing.convert.audit import Assignment, ChunkAudit, Task, Worker
from energon_packing.convert.media_checks import Recall
from energon_packing.errors import UserError

_AHEAD = 4
"""Tasks per worker that may be given out or done before the first of them is taken."""
_SMALL = 1 << 14
"""Bytes of a message that fits into a socket's buffer, so that sending it never waits for a busy worker."""


class Workers(Protocol):
    """Does tasks."""

    def results(self, tasks: Iterable[Task]) -> Generator[tuple[Task, ChunkAudit | None], None, None]:
        """Yields each task with its result, in the order of the tasks."""


class CallingProcess:
    """Does the tasks one after the other, in this process."""

    def __init__(self, assignment: Assignment, recall: Recall) -> None:
        self._worker = Worker(assignment, recall)

    def __enter__(self) -> CallingProcess:
        self._worker.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._worker.__exit__(kind, error, tb)

    def results(self, tasks: Iterable[Task]) -> Generator[tuple[Task, ChunkAudit | None], None, None]:
        """See `Workers`."""
        for task in tasks:
            yield task, self._worker.do(task)


@dataclass(kw_only=True, slots=True, eq=False)
class _Process:
    """A worker process and the tasks that it has."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    given: deque[int] = field(default_factory=deque)


class WorkerProcesses:
    """Worker processes, which end with this object and with the calling process."""

    def __init__(self, assignment: Assignment, count: int, recall: Recall) -> None:
        """
        Args:
            assignment: for all of them.
            count: how many; at least 1.
            recall: looks up earlier checks of media for them.
        """
        self._assignment = assignment
        self._count = count
        self._recall = recall
        self._processes: list[_Process] = []

    def __enter__(self) -> WorkerProcesses:
        try:
            for number in range(self._count):
                ours, theirs = Pipe()
                code = (
                    f"import sys; sys.path[:] = {sys.path!r}; "
                    f"from energon_packing.convert.audit import serve; serve({theirs.fileno()}, {os.getpid()})"
                )
                # Blocked in the child from its first instruction on: Ctrl-C is for the parent, which ends its workers.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                self._processes.append(_Process(number=number, process=process, connection=ours))
                theirs.close()
                ours.send(self._assignment)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end(kindly=kind is None)

    def _end(self, *, kindly: bool = False) -> None:
        """Ends all workers: after their last task if all went well, at once otherwise."""
        for worker in self._processes:
            worker.connection.close()
            if not kindly:
                worker.process.kill()
        for worker in self._processes:
            worker.process.wait()
        self._processes = []

    def results(self, tasks: Iterable[Task]) -> Generator[tuple[Task, ChunkAudit | None], None, None]:
        """See `Workers`.

        Raises:
            UserError: a worker process died.
            Exception: what a worker raised.
        """
        source = iter(tasks)
        waiting: deque[tuple[int, Task]] = deque()  # given out, not yielded yet
        done: dict[int, ChunkAudit | None] = {}
        given = 0
        next_message: tuple[int, Task, bytes] | None = None
        exhausted = False
        while True:
            while waiting and waiting[0][0] in done:
                number, task = waiting.popleft()
                yield task, done.pop(number)
            while len(waiting) < _AHEAD * self._count:
                if next_message is None and not exhausted:
                    if (task_or_none := next(source, None)) is None:
                        exhausted = True
                    else:
                        next_message = given, task_or_none, pickle.dumps(("task", task_or_none))
                        given += 1
                if next_message is None:
                    break
                number, task, message = next_message
                if (worker := self._free(len(message))) is None:
                    break
                self._send(worker, message)
                worker.given.append(number)
                waiting.append((number, task))
                next_message = None
            if not waiting:
                return
            self._receive(done)

    def _free(self, size: int) -> _Process | None:
        """The worker with the fewest tasks that can take a message of this size without waiting."""
        least = min(self._processes, key=lambda worker: len(worker.given))
        return least if len(least.given) < (2 if size < _SMALL else 1) else None

    def _send(self, worker: _Process, message: bytes) -> None:
        try:
            worker.connection.send_bytes(message)
        except OSError as error:
            raise self._death(worker) from error

    def _receive(self, done: dict[int, ChunkAudit | None]) -> None:
        """Waits for messages and answers them."""
        of = {worker.connection: worker for worker in self._processes}
        for connection in wait(list(of)):
            worker = of[connection]  # type: ignore[index]
            try:
                kind, value = worker.connection.recv()
            except (EOFError, OSError) as error:
                raise self._death(worker) from error
            if kind == "recall":
                self._send(worker, pickle.dumps(("recalled", self._recall(value))))
            elif kind == "failed":
                raise value
            else:
                done[worker.given.popleft()] = value

    def _death(self, worker: _Process) -> UserError:
        code = worker.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = ", which the kernel also sends when memory runs out" if code == -signal.SIGKILL else ""
        return UserError(
            f"worker {worker.number + 1} of {self._count} (process {worker.process.pid}) {how}{hint}; start again with "
            "--resume, and with fewer --workers if memory is short"
        )
