"""Workers of a Ray cluster, which see the same files as the calling process.

They have no way to ask it for earlier checks of media while they work. So the checks of an interrupted conversion are
in a file for them, and a file that several of them meet is checked by each.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from energon_packing.convert.audit import Assignment, ChunkAudit, Task, Worker
from energon_packing.convert.chunks import Chunk
from energon_packing.convert.layout import open_scratch
from energon_packing.convert.media_checks import Recall, journal_entries
from energon_packing.executors.in_order import in_order
from energon_packing.executors.on_ray import RayWorkers

_AHEAD = 4
"""Tasks per worker that may be given out or done before the first of them is taken."""


class _Converting:
    """A `energon_packing.executors.work.Work`: audits chunks and writes pieces."""

    def __init__(self, assignment: Assignment, checks: Path) -> None:
        """
        Args:
            assignment: with absolute paths.
            checks: of an interrupted conversion, see `_write_checks`.
        """
        self._assignment = assignment
        self._checks = checks
        self._worker: Worker | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Converting, (self._assignment, self._checks)

    def begin(self) -> None:
        """Opens the files of a new worker."""
        self._worker = Worker(self._assignment, _recall(self._checks)).__enter__()

    def do(self, task: Task) -> ChunkAudit | None:
        """Does it."""
        assert self._worker is not None, "the worker has not begun"
        done = self._worker.do(task)
        if done is not None:
            self._worker.sync()
        return done

    def name(self, task: Task) -> str:
        """Of the records or the shard."""
        if isinstance(task, Chunk):
            return f"reading {task.source.name} from record {task.first} on"
        return f"writing {task[1].name}"


class RayProcesses:
    """Workers of a Ray cluster, as `worker_pool.Workers` describes them."""

    def __init__(self, assignment: Assignment, cluster: RayWorkers, checks: Path) -> None:
        """
        Args:
            assignment: with absolute paths, which all nodes see.
            cluster: who works.
            checks: file to make, of what the journal holds.
        """
        self._cluster = cluster
        self._stack = ExitStack()
        _write_checks(assignment.journal, checks)
        self._work = _Converting(assignment, checks)

    def __enter__(self) -> RayProcesses:
        self._stack.enter_context(self._cluster.connected())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def results(self, tasks: Iterable[Task]) -> Generator[tuple[Task, ChunkAudit | None], None, None]:
        """See `worker_pool.Workers`.

        Raises:
            UserError: two workers died at the same task, or there are none.
            Exception: what a worker raised.
        """
        return in_order(self._cluster, tasks, self._work, ahead=_AHEAD * self._cluster.count)


def _write_checks(journal: Path, path: Path) -> None:
    database = open_scratch(path)
    database.execute("CREATE TABLE checks (place TEXT PRIMARY KEY, entry TEXT) WITHOUT ROWID")
    database.executemany("INSERT OR REPLACE INTO checks VALUES (?, ?)", journal_entries(journal))
    database.execute("COMMIT")
    database.close()


def _recall(path: Path) -> Recall:
    # Nobody writes to it any more, so that it needs no locks, which network file systems may lack.
    database = sqlite3.connect(f"file:{quote(str(path))}?immutable=1", uri=True)

    def recall(places: list[str]) -> list[str | None]:
        query = "SELECT entry FROM checks WHERE place = ?"
        found = (database.execute(query, (place,)).fetchone() for place in places)
        return [None if row is None else row[0] for row in found]

    return recall
