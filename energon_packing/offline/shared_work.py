"""What the commands `measure`, `pack` and `verify` have alike: who works, and how several share the shards."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from energon_packing.errors import UserError, refuse
from energon_packing.executors.work import ExecutorConfig, ExecutorKind, GivenUp, ended_by_sigterm
from energon_packing.offline.files import remove_leftovers
from energon_packing.offline.slurm import write_job
from energon_packing.remote_files import remote_address


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
    """Who works, of several such commands on one file system; this one does every `world_size`-th shard.

    Attributes:
        tasks: a file that names the shards of this one instead, one a line.
        slurm: a directory; nothing is done, but a job of ``command`` for Slurm is written there, see `write_job`.
        shards_per_task: of its array; None for 1,000 tasks at most.
    """

    rank: int = 0
    world_size: int = 1
    tasks: Path | None = None
    slurm: Path | None = None
    shards_per_task: int | None = None
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        divided = self.world_size > 1 or self.tasks is not None
        refuse(
            (
                not 0 <= self.rank < self.world_size,
                f"--rank {self.rank} does not exist with --world-size {self.world_size}.",
            ),
            (self.world_size > 1 and self.tasks, "--tasks names the shards; leave --rank and --world-size out."),
            (self.slurm and divided, "--slurm divides the shards itself; leave --tasks, --rank and --world-size out."),
            (self.shards_per_task and not self.slurm, "--shards-per-task is of a job for Slurm; add --slurm DIR."),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedResults:
    """What became of all shards: the result of each task, if all are there; how many of its share were missing when the
    command began, and were there; how many of all another command has not done yet; and why others are not done, which
    are none of these."""

    results: list[Any]
    done: int
    reused: int
    missing: int
    set_aside: tuple[str, ...] = ()


def work_shared(
    config: WorkersConfig,
    tasks: Sequence[Any],
    work: Any,
    *,
    label: Callable[[Any], str] = str,
    there: Callable[[Any], Any] = lambda _: None,
    aside: Callable[[Any, GivenUp], Any] = lambda *_: None,
    absent: Callable[[list[Any]], int] = lambda _: 0,
    size: Callable[[Any], int],
    progress: Callable[[int, int], None],
    directories: Sequence[Path] = (),
) -> SharedResults:
    """Does the tasks of a command that nobody has done.

    Args:
        tasks: with their places in this list as ``number``. A task that `work` does to None is being done by another
            command; it comes again at the end, with ``wait`` set.
        label: what a task is called in a list.
        there: the result of a task that is done already, else None; threads ask if `directories` are in a store.
        aside: the result of one at which too many workers died, else None.
        absent: how many of some tasks are not done for sure, at a glance; `there` opens what was made.
        size: of a task, for `progress`, which is called with what is done and all that there is to do.
        directories: in which files are left over if the work ends with an error.
    """
    shared = config if isinstance(config, SharedConfig) else SharedConfig()
    results: list[Any] = [None] * len(tasks)
    listed, share = shared.tasks, tasks[shared.rank :: shared.world_size]
    if listed is not None:
        share = _listed(listed, {label(task): task for task in tasks})
    _look(there, share, results, directories)
    # Not every world_size-th of what is left: ranks look at different times.
    mine = left = [task for task in share if results[task.number] is None]
    reused, dead = len(share) - len(mine), dict[int, str]()
    if shared.slurm is not None:
        write_job(shared.slurm, shared.command, [label(task) for task in left], shared.shards_per_task)
        if left:
            return SharedResults(results=results, done=0, reused=reused, missing=len(left))
    done, total = 0, sum(map(size, mine))
    progress(done, total)
    for _ in range(2):  # no more: some file systems refuse a lock even to those who wait for it
        if not left:
            break
        try:
            # Not this process for one task, which may kill it.
            executor = config.executor_config().executor(max(2, len(left)))
            # Closed at once, whatever happens: else its processes would end only when nothing refers to it any more.
            with ended_by_sigterm(), closing(executor.results(left, work)) as ended:
                for task, result in ended:
                    if isinstance(result, GivenUp):
                        dead[task.number] = str(result)
                        result = aside(task, result)
                    results[task.number] = result
                    if result is not None:
                        done += size(task)
                        progress(done, total)
        finally:  # of those that were killed, if it was all that they were writing
            for directory in directories:
                with suppress(OSError):  # what is raised already says more
                    remove_leftovers(directory)
        left = [replace(task, wait=True) for task in left if results[task.number] is None and task.number not in dead]
    # Other ranks may have finished meanwhile; of those in lists somebody else looks.
    others = [task for task in tasks if results[task.number] is None and task.number not in dead]
    if not (missing := absent(others) if listed is None else len(others)):
        _look(there, others, results, directories)
        missing = [results[task.number] for task in others].count(None)
    told = tuple(dead[number] for number in sorted(dead))
    return SharedResults(results=results, done=len(mine) - len(dead), reused=reused, missing=missing, set_aside=told)


def _look(there: Callable[[Any], Any], tasks: Sequence[Any], results: list[Any], directories: Sequence[Path]) -> None:
    """Sets the results of tasks that are done; several are looked for at once in an object store."""
    with ThreadPoolExecutor(32) as pool:  # they wait for the storage
        found = (pool.map if any(map(remote_address, directories)) else map)(there, tasks)
        for task, result in zip(tasks, found, strict=True):
            results[task.number] = result


def _listed(file: Path, named: dict[str, Any]) -> list[Any]:
    """The tasks that a file names, in the order of all."""
    try:
        names = {*file.read_text(encoding="utf-8").splitlines()}
    except (OSError, ValueError) as error:
        raise UserError(f"--tasks {file} cannot be read ({error}); it is a list that --slurm writes") from error
    if unknown := names - {*named}:
        raise UserError(f"--tasks {file} names {min(unknown)}, which is no shard of this command; write the lists anew")
    return [task for name, task in named.items() if name in names]
