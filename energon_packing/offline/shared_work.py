"""What the commands `measure`, `pack` and `verify` have alike: who works, how several share the shards, and a job of
Slurm that does.
"""

import os
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import batched, count
from pathlib import Path
from typing import Any

from energon_packing.errors import UserError, refuse, said_of_system
from energon_packing.executors.work import ExecutorConfig, GivenUp, ended_by_sigterm
from energon_packing.offline.files import remove_leftovers, replacing, writing
from energon_packing.remote_files import names_in, remote_address


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    """Who works; see `ExecutorConfig`."""

    executor: str = "local"
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
    tasks: Path | None = None  # a file that names the shards of this one instead, one a line
    slurm: Path | None = None  # where nothing is done, but a job of `command` for Slurm is written, see `write_job`
    shards_per_task: int | None = None  # of its array; None for 1,000 tasks at most
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        divided = self.world_size > 1 or self.tasks is not None
        nowhere = f"does not exist with --world-size {self.world_size}"
        refuse(
            (not 0 <= self.rank < self.world_size, f"--rank {self.rank} {nowhere}."),
            (self.world_size > 1 and self.tasks, "--tasks names the shards; leave --rank and --world-size out."),
            (self.slurm and remote_address(self.slurm), "--slurm writes to this machine; name a local directory."),
            (self.slurm and divided, "--slurm divides the shards itself; leave --tasks, --rank and --world-size out."),
            (self.shards_per_task and not self.slurm, "--shards-per-task is of a job for Slurm; add --slurm DIR."),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedResults:
    """What became of all shards: the result of each task, if all are there; how many of its share were missing when the
    command began, and were there; how many of all another command has not done yet; and why others are not done."""

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
    hole: Callable[[Any], Any] = lambda _: None,
    file: Callable[[Any], Path] | None = None,
    size: Callable[[Any], int],
    progress: Callable[[int, int], None],
    directories: Sequence[Path] = (),
) -> SharedResults:
    """Does the tasks of a command that nobody has done; they have their places in the list as ``number``. A task that
    `work` does to None is being done by another command; it comes again at the end, with ``wait`` set. `label` is what
    a task is called in a list, `there` the result of one that is done already, else None, and `aside` that of one at
    which too many workers died, else None, `hole` that of one that another command set aside, else None; those without
    the `file` that they make are counted at a glance, as `there` opens what was made. The `size` of tasks is for
    `progress`, which is called with what is done and all that there is to do. In `directories` files are left over if
    the work ends with an error."""
    shared = config if isinstance(config, SharedConfig) else SharedConfig()
    results: list[Any] = [None] * len(tasks)
    named, share = shared.tasks, tasks[shared.rank :: shared.world_size]
    if named is not None:
        share = _listed(named, {label(task): task for task in tasks})
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
    for again in range(2):  # no more: some file systems refuse a lock even to those who wait for it
        if not left:
            break
        if again:
            waited = f"{', '.join(map(label, left)):.300}"
            warnings.warn(f"Waiting for another command that is making {waited}.", stacklevel=2)
        try:
            # Not this process for one task, which may kill it.
            executor = config.executor_config().executor(max(2, len(left)))
            # Closed at once, whatever happens: else its processes would end only when nothing refers to it any more.
            with ended_by_sigterm(), closing(executor.results(left, work)) as ended:
                for task, result in ended:
                    # Else another command has done it meanwhile.
                    if isinstance(why := result, GivenUp) and (result := there(task)) is None:
                        dead[task.number] = str(why)
                        result = aside(task, why)
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
    if not (missing := (_absent([file(task) for task in others]) if file else 0) if named is None else len(others)):
        _look(there, others, results, directories)
        for task in others:
            if results[task.number] is None and (result := hole(task)) is not None:
                results[task.number], dead[task.number] = result, f"{label(task)} was set aside by another command"
        missing = [results[task.number] for task in others].count(None)
    dead |= {it.number: f"{label(it)} is being made by another command" for it in left if results[it.number] is None}
    told = tuple(dead[number] for number in sorted(dead))
    done = sum(results[task.number] is not None and task.number not in dead for task in mine)
    return SharedResults(results=results, done=done, reused=reused, missing=missing, set_aside=told)


def _absent(files: Sequence[Path]) -> int:
    """How many of some files are not there, from one list of each directory."""
    names = dict[Path, set[str]]()
    for directory in {path.parent for path in files}:
        with said_of_system(f"{directory} cannot be listed"):
            names[directory] = {*names_in(directory)}
    return sum(path.name not in names[path.parent] for path in files)


def _look(there: Callable[[Any], Any], tasks: Sequence[Any], results: list[Any], directories: Sequence[Path]) -> None:
    """Sets the results of tasks that are done; several are looked for at once in an object store."""
    with ThreadPoolExecutor(32) as pool:  # they wait for the storage
        found = (pool.map if any(map(remote_address, directories)) else map)(there, tasks)
        for task, result in zip(tasks, found, strict=True):
            results[task.number] = result


def _listed(file: Path, named: dict[str, Any]) -> list[Any]:
    """The tasks that a file names, in the order of all."""
    try:
        names = {*os.fsdecode(file.read_bytes()).split("\n")} - {""}
    except OSError as error:
        raise UserError(f"--tasks {file} cannot be read ({error}); it is a list that --slurm writes") from error
    if unknown := names - {*named}:
        raise UserError(
            f"--tasks {file} names {min(unknown)!r:.200}, which is no shard of this command; write the lists anew"
        )
    return [task for name, task in named.items() if name in names]


MOST_TASKS = 1000  # by default; Slurm's own ``MaxArraySize`` is 1001
_JOB = """\
# The place for changes is header.sh. Submit it with: bash job.sh [OPTIONS OF SBATCH]
#SBATCH --job-name=energon-packing
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
{header}
cd {here} || exit 2
if [ "${{1:-}}" = --task ]; then
    exec energon-packing {name} --tasks={lists}/"$SLURM_ARRAY_TASK_ID" {words}
elif [ "${{1:-}}" = --complete ]; then
    energon-packing {name} --slurm={folder}{each} {words} && [ ! -s {missing} ]
else  # sbatch takes the last of an option that is there twice; of --array we take the limit, as in %10 or 0-99%10
    limit= name=
    for word; do
        [[ $name$word =~ ^(-a|--array=?)[0-9,:-]*(%[0-9]+)$ ]] && limit=${{BASH_REMATCH[2]}}
        [[ $word =~ ^(-a|--array)$ ]] && name=$word || name=
    done
    id=$(sbatch "$@" --parsable --array=0-{last}"$limit" {job} --task) &&
        sbatch "$@" --dependency=afterany:"${{id%%;*}}" --array=0 {job} --complete
fi
"""


def write_job(folder: Path, command: Sequence[str], missing: Sequence[str], shards_per_task: int | None) -> None:
    """Writes a job of a `command` (its name, its options, and the rest), an array whose tasks each run it for a list of
    shards, with a last step that looks: ``job.sh``, the lists, and ``missing.txt``, the shards that nobody has done;
    none leaves all else as it is. What is in a list is complete when the shard's own file is there. Lists of a job that
    was submitted before stay as they are. Raises UserError: `folder` cannot be written, or holds what is not of this
    command; or lists cannot tell the shards apart."""
    if odd := [it for it, times in Counter(missing).items() if times > 1 or "\n" in it]:
        why = f"{odd[0]!r:.200} is the name of two shards, or has a line break"
        raise UserError(f"--slurm lists shards by name, but {why}; share them with --rank and --world-size")
    folder = folder.absolute()
    files = {"job": folder / "job.sh", "missing": folder / "missing.txt", "folder": folder, "here": Path.cwd()}
    own = f"# Written for: {command[0]} {[it for it in command if it[:6] == '--out=']}"
    with writing(folder, command[0]):
        folder.mkdir(parents=True, exist_ok=True)
        there = files["job"] if files["job"].exists() else files["missing"]
        if there.exists() and there.stat().st_size and own.encode() not in there.read_bytes():
            raise UserError(f"--slurm {folder} has a {there.name} that is not of this command; name another directory")
        if not missing:
            return _write(files["missing"], missing)
        if not (folder / "header.sh").exists():
            _write(folder / "header.sh", ["# Head of job.sh, yours: #SBATCH, then what makes energon-packing known."])
        lists = next(it for it in (folder / f"lists-{number}" for number in count(1)) if not it.exists())
        lists.mkdir(exist_ok=True)  # the same command may write here now
        shares = list(batched(missing, shards_per_task or -(-len(missing) // MOST_TASKS)))
        for number, share in enumerate(shares):
            _write(lists / str(number), share)
        script = _JOB.format(
            **{name: shlex.quote(str(path)) for name, path in [*files.items(), ("lists", lists)]},
            header=os.fsdecode((folder / "header.sh").read_bytes()),
            name=command[0],
            words=shlex.join(command[1:]),
            each=f" --shards-per-task={shards_per_task}" if shards_per_task else "",
            last=len(shares) - 1,
        )
        _write(files["job"], ["#!/bin/bash", own, script])  # a file of its own, as a job may be reading the old one
        _write(files["missing"], missing)  # last, as it does not say whose it is


def _write(file: Path, lines: Sequence[str]) -> None:
    with replacing(file) as aside:
        aside.write_bytes(os.fsencode("".join(f"{line}\n" for line in lines)))  # names need not be UTF-8
