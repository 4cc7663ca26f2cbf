"""What the commands `measure`, `pack` and `verify` have alike: who works, and how several share the shards."""

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from energon_packing.errors import ConfigError
from energon_packing.executors.work import ExecutorConfig, ExecutorKind
from energon_packing.offline.files import remove_leftovers


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    """Who works; see `ExecutorConfig`."""

    executor: ExecutorKind = "local"
    workers: int | None = 1
    address: str | None = None

    def __post_init__(self) -> None:
        self.executor_config()  # refuses what cannot be

    def executor_config(self) -> ExecutorConfig:
        """Returns who works; a ConfigError if nobody can be that."""
        return ExecutorConfig(kind=self.executor, workers=self.workers, address=self.address)


@dataclass(frozen=True, kw_only=True)
class SharedConfig(WorkersConfig):
    """Who works, of several such commands on one file system; this one does every `world_size`-th shard."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"--rank {self.rank} does not exist with --world-size {self.world_size}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedResults:
    """What became of all shards: the result of each task, if all are there; how many of its share were missing when the
    command began, and were there; and how many of all another command has not done yet."""

    results: list[Any]
    done: int
    reused: int
    missing: int


def work_shared(
    config: WorkersConfig,
    tasks: Sequence[Any],
    work: Any,
    *,
    there: Callable[[Any], Any] = lambda _: None,
    absent: Callable[[list[Any]], int] = lambda _: 0,
    size: Callable[[Any], int],
    progress: Callable[[int, int], None],
    directories: Sequence[Path] = (),
) -> SharedResults:
    """Does the tasks of a command that nobody has done.

    Args:
        tasks: with their places in this list as ``number``. A task that `work` does to None is being done by another
            command; it comes again at the end, with ``wait`` set.
        there: the result of a task that is done already, else None.
        absent: how many of some tasks are not done for sure, at a glance; `there` opens what was made.
        size: of a task, for `progress`, which is called with what is done and all that there is to do.
        directories: in which files are left over if the work ends with an error.
    """
    rank, world_size = getattr(config, "rank", 0), getattr(config, "world_size", 1)
    results: list[Any] = [None] * len(tasks)
    results[rank::world_size] = map(there, tasks[rank::world_size])
    # Not every world_size-th of what is left: ranks look at different times.
    mine = left = [task for task in tasks[rank::world_size] if results[task.number] is None]
    done, total = 0, sum(map(size, mine))
    progress(done, total)
    for _ in range(2):  # no more: some file systems refuse a lock even to those who wait for it
        if not left:
            break
        try:
            # Closed at once, whatever happens: else its processes would end only when nothing refers to it any more.
            with closing(config.executor_config().executor(len(left)).results(left, work)) as ended:
                for task, result in ended:
                    results[task.number] = result
                    if result is not None:
                        done += size(task)
                        progress(done, total)
        except BaseException:  # which killed those that were writing
            for directory in directories:
                with suppress(OSError):  # what is raised already says more
                    remove_leftovers(directory)
            raise
        left = [replace(task, wait=True) for task in left if results[task.number] is None]
    reused = len(tasks[rank::world_size]) - len(mine)
    # Other ranks may have finished meanwhile.
    others = [task for task in tasks if results[task.number] is None]
    if not (missing := absent(others)):
        for task in others:
            results[task.number] = there(task)
        missing = results.count(None)
    return SharedResults(results=results, done=len(mine), reused=reused, missing=missing)
