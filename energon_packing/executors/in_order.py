"""Results in the order of their tasks, whoever does them and however long it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing

from energon_packing.executors.work import NOT_YET, Executor, Results, Work


class _Numbered[Task, Result]:
    """Work at tasks that have a number.

    Args:
        work: at the tasks themselves.
    """

    def __init__(self, work: Work[Task, Result]) -> None:
        self._work = work

    def begin(self) -> None:
        """See `Work`."""
        self._work.begin()

    def do(self, task: tuple[int, Task]) -> Result:
        """See `Work`."""
        return self._work.do(task[1])

    def name(self, task: tuple[int, Task]) -> str:
        """See `Work`."""
        return self._work.name(task[1])


def in_order[Task, Result](
    executor: Executor, tasks: Iterable[Task], work: Work[Task, Result], *, ahead: int
) -> Results[Task, Result]:
    """Yields each task with its result, in the order of the tasks.

    Args:
        executor: does them; errors are those of `Executor.results`.
        tasks: taken one at a time.
        ahead: no more tasks than these are taken before the result of the first of them, so that results which wait
            for it stay few.
    """
    done: dict[int, tuple[Task, Result]] = {}
    first = 0  # whose result is the next to be yielded

    def numbered() -> Iterator[tuple[int, Task]]:
        for number, task in enumerate(tasks):
            while number >= first + ahead:
                yield NOT_YET
            yield number, task

    with closing(executor.results(numbered(), _Numbered(work))) as results:
        for (number, task), result in results:
            done[number] = task, result
            while first in done:
                found = done.pop(first)
                first += 1
                yield found
