"""What executors have in common: the work that they do, the account of tasks whose worker died, and their order."""

import os
import signal
import sys
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Protocol

from energon_packing.errors import UserError, refuse
from energon_packing.registry import Registry

_MOST_WORKERS = 64  # on a machine of fewer than 16 processors; else 4 for each
MOST_DEATHS = 3  # a task is given up when this many workers died at it, the last one while no other task was done
MOST_LOSSES = 10  # or this many nodes vanished, from the third on while no other task was done
MOST_IN_VAIN = 100  # workers that may die before any task is done; few tasks that kill them may be all that is left
SLOW, SLOW_SECONDS = 2.0, 10.0
"""A task is slow if it takes so many times the median of those that are done, and at least so many seconds."""
_FEWEST, _ONE_IN = 3, 20
"""Tasks that must be done before one is slow; and one in so many is done twice at most, or one."""

NOT_YET: Final[Any] = object()
"""In an iterable of tasks: there is none now, but there may be one after the next result, which is to come."""

Progress = Callable[[str, int, int], None]
"""Called with the stage, what is done of it, and all of it: samples, packs, shards or bytes."""

type Results[Task, Result] = Generator[tuple[Task, Result], None, None]
"""Tasks with their results."""


class Work[Task, Result](Protocol):
    """What the workers of an executor do.

    Forked processes inherit it as it is, and other machines get it pickled. Tasks and results are pickled, too, and
    should be small: names and counts, not data. A worker may be killed at any moment and its task done again by
    another, so a task writes whole files or none, and the same ones each time.

    If it has an attribute ``queued``, a process of this machine may have so many tasks at once: the next one is there
    when the first is done. More than 1 is for short tasks, as the last may wait for a worker while others have none.
    """

    def begin(self) -> None:
        """Called in a new worker, before its first task; opens anew what a fork may not share."""

    def do(self, task: Task) -> Result:
        """Does one task. What it raises ends the command."""

    def name(self, task: Task) -> str:
        """What a task is called in a sentence, such as ``measuring train-000001.tar``."""


class Executor(Protocol):
    """Does tasks."""

    def results[Task, Result](self, tasks: Iterable[Task], work: Work[Task, Result]) -> Results[Task, Result]:
        """Yields each task with its result, in the order in which they are done.

        Tasks are taken from the iterable only when a worker is free for them. A worker that dies costs its own task
        once: another worker does it again. Close the iterator to end all workers at once. Raises GivenUp: `MOST_DEATHS`
        workers died at the same task, or `MOST_LOSSES` nodes vanished; UserError: there are no workers; Exception: what
        a task raised.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorEntry:
    """An executor as its module declares it. `make` makes one from the number of workers (None: all that there are),
    the address of a cluster, and the number of tasks (None: unknown); `cluster` is whether its workers may be on other
    machines, which see the same files."""

    make: Callable[[int | None, str | None, int | None], Executor]
    cluster: bool = False


class CallingProcess:
    """Does the tasks in this process, one after the other."""

    def results[Task, Result](self, tasks: Iterable[Task], work: Work[Task, Result]) -> Results[Task, Result]:
        work.begin()
        for task in tasks:
            yield task, work.do(task)


class GivenUp(UserError):
    """Too many workers died at a task."""


@dataclass(slots=True, eq=False)
class Attempt[Task]:
    """A task that was given out, how many workers have it, died at it or were lost, since when, and whether it is
    done."""

    task: Task
    workers: int = 0
    deaths: int = 0
    losses: int = 0
    began: float = 0.0
    ended: bool = False


class Attempts[Task]:
    """Tasks that are still to be given out: those whose worker died first, then new ones, taken one at a time; those
    that one more death gives up come last. `running` are those that workers have and that nobody has done."""

    def __init__(self, tasks: Iterable[Task], work: Work[Task, Any]) -> None:
        self._new = iter(tasks)
        self._again: deque[Attempt[Task]] = deque()
        self._last: deque[Attempt[Task]] = deque()
        self._work = work
        self._apart: Callable[[Task], Task] | None = getattr(work, "again", None)
        self._seconds: list[float] = []  # of tasks that are done, ascending
        self._twice = self._deaths = 0
        self.running: set[Attempt[Task]] = set()

    def take(self) -> Attempt[Task] | None:
        """The next task to give out; None if all are given out, or if there is none yet."""
        if self._again:
            attempt = self._again.popleft()
        elif (task := next(self._new, NOT_YET)) is not NOT_YET:
            attempt = Attempt(task)
        elif self._last and not self.running:  # nothing else needs memory while it is done
            attempt = self._last.popleft()
        else:
            return None
        return self._taken(attempt)

    def take_slow(self) -> Attempt[Task] | None:
        """A slow task for a worker for which there is no other one; None if there is none."""
        attempt, seconds = self._slowest()
        if attempt is None or seconds > 0:
            return None
        self._twice += 1
        return self._taken(attempt)

    def _taken(self, attempt: Attempt[Task]) -> Attempt[Task]:
        self.running.add(attempt)
        attempt.workers += 1
        return attempt

    def patience(self) -> float | None:
        """Seconds until `take_slow` has a task, if none is done before; None if it will not have any."""
        attempt, seconds = self._slowest()
        return None if attempt is None else max(seconds, 0.0)

    def _slowest(self) -> tuple[Attempt[Task] | None, float]:
        # A task at which one died may be what kills them: two workers at it would be two deaths.
        alone = [each for each in self.running if each.workers == 1 and not each.deaths + each.losses]
        done = len(self._seconds)
        if self._apart is None or not alone or done < _FEWEST or self._twice >= max(1, done // _ONE_IN):
            return None, 0.0
        first = min(alone, key=lambda each: each.began)
        return first, first.began + max(SLOW * median(self._seconds), SLOW_SECONDS) - time.monotonic()

    def sent(self, attempt: Attempt[Task]) -> Task:
        """What a worker is told to do, now."""
        if attempt.workers > 1 and self._apart is not None:
            return self._apart(attempt.task)
        attempt.began = time.monotonic()
        return attempt.task

    def give_back(self, *attempts: Attempt[Task]) -> None:
        """Takes back tasks that no worker began; they are given out first, in this order."""
        self._twice -= sum(attempt.workers > 1 for attempt in attempts)
        self._again.extendleft(attempt for attempt in reversed(attempts) if self._is_left(attempt))

    def _is_left(self, attempt: Attempt[Task]) -> bool:
        """Whether nobody has a task any more, now that one worker less has it, and it is not done."""
        attempt.workers -= 1
        if attempt.workers == 0:
            self.running.discard(attempt)
        return not (attempt.workers or attempt.ended)

    def done(self, attempt: Attempt[Task]) -> bool:
        """Notes that a worker did a task; whether it is the first one."""
        first, attempt.ended = not attempt.ended, True
        self._is_left(attempt)
        self.running.discard(attempt)
        if first:
            insort(self._seconds, time.monotonic() - attempt.began)
        return first

    def died(self, attempt: Attempt[Task], how: str, *, lost: bool = False) -> GivenUp | None:
        """Notes that a worker died at a task (``how``: ``was killed by SIGKILL``), or was `lost` with its node, and
        another one does it again. The last one of `MOST_DEATHS`, or of `MOST_LOSSES`, gives it up: the result of a task
        that stands alone, else it is raised, as it is when `MOST_IN_VAIN` died: that is no matter of tasks."""
        attempt.losses += lost
        attempt.deaths += not lost
        self._deaths += not lost
        in_vain = self._deaths >= MOST_IN_VAIN and not self._seconds
        if not (self._is_left(attempt) or in_vain):
            return None
        if attempt.deaths < MOST_DEATHS and attempt.losses < MOST_LOSSES and not in_vain:
            suspect = attempt.deaths == MOST_DEATHS - 1 or attempt.losses >= MOST_DEATHS
            (self._last if suspect else self._again).append(attempt)
            return None
        attempt.ended = True
        vanished = f"{attempt.losses} nodes vanished or could not be reached while it was done"
        number, at = (self._deaths, "before anything was done") if in_vain else (attempt.deaths, "at it")
        died = f"{number} workers died {at}, and the last one {how}"
        why = f"{vanished if attempt.losses >= MOST_LOSSES else died}; if memory is short, use fewer --workers"
        given_up = GivenUp(f"{self._work.name(attempt.task)} was given up: {why}")
        if self._apart is None or in_vain:
            raise given_up
        return given_up


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM, which a scheduler sends first, an end that cleans up, unless the calling program handles it."""
    own = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        if own:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        yield
    finally:
        if own:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def in_order[Task, Result](
    executor: Executor, tasks: Iterable[Task], work: Work[Task, Result], *, ahead: int
) -> Results[Task, Result]:
    """Yields each task with its result as `Executor.results` does, in the order of the tasks. No more tasks than
    ``ahead`` are taken before the result of the first of them, so that few results wait for it."""
    given: deque[Task] = deque()  # in order, until they are yielded
    done: dict[int, Result] = {}  # by the identity of the task

    def bounded() -> Iterator[Task]:
        for task in tasks:
            while len(given) >= ahead:
                yield NOT_YET
            given.append(task)
            yield task

    with closing(executor.results(bounded(), work)) as results:
        for task, result in results:
            done[id(task)] = result
            while given and id(given[0]) in done:
                first = given.popleft()
                yield first, done.pop(id(first))


EXECUTORS: Registry[ExecutorEntry] = Registry(
    "executor", folder=__package__, declared=lambda module: getattr(module, "EXECUTOR", {}), setting="--executor"
)


def register_executor(name: str, entry: ExecutorEntry) -> None:
    """Adds an executor to this process; a ConfigError if the name is taken."""
    EXECUTORS.add(name, entry)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """Who does the tasks of a command."""

    # ``local`` (processes of this machine), ``ray`` (workers of a Ray cluster), or one that another package declares
    kind: str = "local"
    # how many; None for one per CPU of the machine or cluster. 0 works in the calling process
    workers: int | None = None
    address: str | None = None  # of a running cluster, see `energon_packing.executors.on_ray.RayWorkers`

    def __post_init__(self) -> None:
        cluster, workers = self.cluster, self.workers or 0
        most = max(_MOST_WORKERS, 4 * (os.cpu_count() or 1))
        refuse(
            (workers < 0, f"--workers is {workers}; it must be at least 0."),
            (not cluster and workers > most, f"--workers is {workers}; it must be at most {most} on this machine."),
            (
                cluster and self.workers == 0,
                f"--workers 0 works in this process; with --executor {self.kind}, --workers must be at least 1.",
            ),
            (not cluster and self.address is not None, "--address is of a Ray cluster; add --executor ray."),
        )

    @property
    def cluster(self) -> bool:
        """Whether the workers may be on other machines."""
        return EXECUTORS.find(self.kind).cluster

    def executor(self, tasks: int | None = None) -> Executor:
        """The executor for this many tasks; None if nobody has counted them."""
        return EXECUTORS.find(self.kind).make(self.workers, self.address, tasks)
