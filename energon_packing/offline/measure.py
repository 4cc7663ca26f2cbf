"""``measure``: brings an index up to date, shard by shard, in several processes."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from energon_packing.config import EncoderConfig, RunConfig, to_mapping
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline.index import INDEX_FILE, Index, IndexedDataset, IndexedShard
from energon_packing.offline.measuring import ShardMeasurer
from energon_packing.offline.parquet import remove_leftovers
from energon_packing.offline.source_part import SourcePart, source_parts

Progress = Callable[[str, int, int], None]
"""Called with the stage ``measure``, the samples that are done, and all samples."""
LOST_TWICE = 2
"""A shard whose process died this often is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureConfig:
    """What to measure, and where to.

    Attributes:
        paths: data sets, as ``data.path`` takes them.
        out: directory of the index; made or brought up to date.
        split: part of each data set.
        workers: processes; 0 measures in this one.
        rank, world_size: of several such commands on one file system, this one measures every `world_size`-th shard.
    """

    paths: tuple[Path, ...]
    out: Path
    split: str = "train"
    workers: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("measure needs at least one data set.")
        if self.workers < 0:
            raise ConfigError(f"--workers is {self.workers}; it must be at least 0.")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"--rank {self.rank} does not exist with --world-size {self.world_size}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureReport:
    """What `measure` did.

    Attributes:
        index: as it is now; None if shards of other ranks are still missing.
        measured, reused: shards that this command measured, and those that were up to date.
        missing: shards that other ranks have not measured yet.
    """

    index: Index | None
    measured: int
    reused: int
    missing: int


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    dataset: int
    part: SourcePart
    shard: str
    directory: Path


def measure(config: MeasureConfig, run: RunConfig, progress: Progress = lambda *_: None) -> MeasureReport:
    """Measures the shards that the index lacks, and writes ``index.json``.

    Args:
        run: its ``encoder`` section is used.

    Raises:
        UserError: a data set or the processor cannot be used, the index was made with another encoder, or a shard
            cannot be measured.
    """
    measurer = ShardMeasurer(run.encoder)
    before = _index(config.out, measurer)
    parts = [part for path in config.paths for part in source_parts(path, config.split)]
    names = [_name(part) for part in parts]
    for name, part in zip(names, parts, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{part.root} is named twice with split {part.split!r}; name each data set once")
    for name in names:
        remove_leftovers(config.out / name)
    done: dict[tuple[int, str], IndexedShard] = {}
    todo: list[_Task] = []
    tasks = [
        _Task(number, part, shard, config.out / name)
        for number, (name, part) in enumerate(zip(names, parts, strict=True))
        for shard in part.shards
    ]
    for task in tasks:
        found = measurer.measured(task.part, task.shard, task.directory)
        if found is None:
            todo.append(task)
        else:
            done[task.dataset, task.shard] = found
    reused = len(done)
    # By the number of the shard, not by what is left: ranks look at different times.
    mine = [task for task in todo if tasks.index(task) % config.world_size == config.rank]
    total = sum(measurer.index_of(task.part.root).samples[task.shard] for task in mine)
    progress("measure", 0, total)
    samples = 0
    for task, shard in _results(mine, measurer, config.workers):
        done[task.dataset, task.shard] = shard
        samples += shard.samples
        progress("measure", samples, total)
    for task in tasks:  # of other ranks, which may have finished meanwhile
        if (task.dataset, task.shard) not in done:
            found = measurer.measured(task.part, task.shard, task.directory)
            if found is not None:
                done[task.dataset, task.shard] = found
    missing = len(tasks) - len(done)
    index = None
    if not missing:
        datasets = [
            IndexedDataset(
                name=name,
                path=part.path,
                split=part.split,
                root=part.root,
                media_root=part.media_root,
                media_shards=measurer.index_of(part.media_root).shards,
                shards=tuple(done[number, shard] for shard in part.shards),
                subflavors=part.subflavors,
            )
            for number, (name, part) in enumerate(zip(names, parts, strict=True))
        ]
        index = _saved(config.out, measurer, before, datasets, run.encoder)
    return MeasureReport(index=index, measured=len(mine), reused=reused, missing=missing)


def _index(out: Path, measurer: ShardMeasurer) -> Index | None:
    """The index that is there already.

    Raises:
        UserError: `out` is something else, or the index was made with another encoder.
    """
    if not (out / INDEX_FILE).exists():
        if out.exists() and (
            not out.is_dir() or any(entry.name[0] != "." for entry in out.iterdir() if entry.is_file())
        ):
            raise UserError(f"{out} is there and is not an index; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        return None
    found = Index.open(out)
    differing = [
        name
        for name in sorted({*found.fingerprint, *measurer.fingerprint})
        if found.fingerprint.get(name) != measurer.fingerprint.get(name)
    ]
    if differing:
        name = differing[0]
        raise UserError(
            f"{out} was measured with another encoder: {name} was {found.fingerprint.get(name)}, now it is "
            f"{measurer.fingerprint.get(name)}; choose another --out"
        )
    return found


def _saved(
    out: Path, measurer: ShardMeasurer, before: Index | None, datasets: Sequence[IndexedDataset], encoder: EncoderConfig
) -> Index:
    """Writes the index with the data sets of this command in it, beside those that are there."""
    with _locked(out):
        if before is not None:
            before = Index.open(out)  # another command may have added a data set meanwhile
        kept = {each.name: each for each in (before.datasets if before else ())}
        kept.update({each.name: each for each in datasets})
        index = Index(
            directory=out,
            datasets=tuple(kept.values()),
            encoder=to_mapping(encoder),
            fingerprint=measurer.fingerprint,
        )
        index.save()
    return index


def _name(part: SourcePart) -> str:
    """Directory of a part in the index: readable, and unique for root and split."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{Path(part.path).name}-{part.split}").strip("-")[:40]
    return f"{readable}-{hashlib.sha256(f'{part.root}\0{part.split}'.encode()).hexdigest()[:8]}"


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Waits until no other command writes ``index.json``."""
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- Processes -------------------------------------------------------------------------------------------------------

_of_this_process: ShardMeasurer | None = None


def _start(measurer: ShardMeasurer) -> None:
    global _of_this_process
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, and the calling process says so
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    measurer.forget_open_files()
    _of_this_process = measurer


def _measure(task: _Task) -> IndexedShard:
    assert _of_this_process is not None, "the process was not started by _start"
    return _of_this_process.measure(task.part, task.shard, task.directory)


def _results(tasks: Sequence[_Task], measurer: ShardMeasurer, workers: int) -> Iterator[tuple[_Task, IndexedShard]]:
    """Measured shards, in the order in which they are finished. A process that dies costs its shard once.

    Raises:
        UserError: processes died twice at one shard.
    """
    if workers == 0 or len(tasks) == 1:
        for task in tasks:
            yield task, measurer.measure(task.part, task.shard, task.directory)
        return
    left = list(tasks)
    lost: dict[_Task, int] = {}
    while left:
        suspects = [task for task in left if lost.get(task)]
        # After a death it is unknown whose shard it was, so those that were in work run alone, one after the other.
        batch = suspects[:1] or left
        # Forked, as a loader's workers are: they share the imports and the processor, and start at once.
        forked = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(min(workers, len(batch)), forked, _start, (measurer,)) as pool:
            waiting: dict[Future[IndexedShard], _Task] = {}
            ahead = iter(batch)
            try:
                for task, shard in _until_broken(pool, ahead, waiting, 2 * workers):
                    left.remove(task)
                    lost.pop(task, None)
                    yield task, shard
            except BrokenProcessPool:
                for task in waiting.values():
                    lost[task] = lost.get(task, 0) + 1
                    if lost[task] > LOST_TWICE:
                        raise UserError(
                            f"processes that measured {task.shard} of {task.part.root} died {lost[task]} times, out of "
                            "memory perhaps; use fewer --workers"
                        ) from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _until_broken(
    pool: ProcessPoolExecutor, tasks: Iterator[_Task], waiting: dict[Future[IndexedShard], _Task], most: int
) -> Iterator[tuple[_Task, IndexedShard]]:
    """Results of a pool; `waiting` holds what it works on, also when it breaks."""
    more = True
    while more or waiting:
        while more and len(waiting) < most:
            task = next(tasks, None)
            if task is None:
                more = False
                break
            waiting[pool.submit(_measure, task)] = task
        if not waiting:
            return
        ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in ended:
            shard = future.result()
            yield waiting.pop(future), shard
