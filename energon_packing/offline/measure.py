"""``measure``: brings an index up to date, shard by shard, in several processes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from energon_packing.config import RunConfig, to_mapping
from energon_packing.convert.report import counted_pairs
from energon_packing.encoders.tokenized import use_one_thread
from energon_packing.errors import ConfigError, UserError
from energon_packing.executors.choice import ExecutorConfig, ExecutorKind, check_rank
from energon_packing.file_lock import lock
from energon_packing.offline.index import INDEX_FILE, Index, IndexedDataset, IndexedShard
from energon_packing.offline.kinds import kind_of_config
from energon_packing.offline.measuring import ShardMeasurer, cannot_write
from energon_packing.offline.parquet import no_leftovers, remove_leftovers
from energon_packing.offline.sample_kind import AnyEncoderConfig, AnyRun
from energon_packing.offline.source_part import SourcePart, source_parts
from energon_packing.remote_files import check_local, shown

Progress = Callable[[str, int, int], None]
"""Called with the stage ``measure``, the samples that are done, and all samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureConfig:
    """What to measure, and where to.

    Attributes:
        paths: data sets, as ``data.path`` takes them.
        out: directory of the index; made or brought up to date.
        split: part of each data set.
        executor, workers, address: who measures, see `ExecutorConfig`.
        rank, world_size: of several such commands on one file system, this one measures every `world_size`-th shard.
    """

    paths: tuple[Path, ...]
    out: Path
    split: str = "train"
    executor: ExecutorKind = "local"
    workers: int | None = 1
    address: str | None = None
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("measure needs at least one data set.")
        check_local("--out", self.out)
        self.executor_config()  # refuses what cannot be
        check_rank(self.rank, self.world_size)

    def executor_config(self) -> ExecutorConfig:
        """Who measures.

        Raises:
            ConfigError: nobody can be that.
        """
        return ExecutorConfig(kind=self.executor, workers=self.workers, address=self.address)


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


class _Measuring:
    """A `energon_packing.executors.work.Work`: measures a shard."""

    def __init__(self, measurer: ShardMeasurer, directories: Sequence[Path]) -> None:
        self._measurer = measurer
        self._directories = tuple(directories)

    def begin(self) -> None:
        """Opens files anew, and removes those that killed processes of this host were writing."""
        use_one_thread()
        self._measurer.forget_open_files()
        for directory in self._directories:
            remove_leftovers(directory)

    def do(self, task: _Task) -> IndexedShard:
        """Measures it."""
        return self._measurer.measure(task.part, task.shard, task.directory)

    def name(self, task: _Task) -> str:
        """Of the shard."""
        return f"measuring {task.shard} of {task.part.root}"


def measure(config: MeasureConfig, run: AnyRun, progress: Progress = lambda *_: None) -> MeasureReport:
    """Measures the shards that the index lacks, and writes ``index.json``.

    Args:
        run: its ``encoder`` section is used; a `TextToVideoRunConfig` for clips.

    Raises:
        UserError: a data set or the processor cannot be used, the index was made with another encoder, or a shard
            cannot be measured.
    """
    kind = kind_of_config(run).name
    measurer = ShardMeasurer(run)
    _index(config.out, measurer)  # refused before anything is measured
    with _locked(config.out):  # so that a file system without locks is told of before the work
        pass
    parts = [part for path in config.paths for part in source_parts(path, config.split, kind)]
    names = [_name(part) for part in parts]
    for name, part in zip(names, parts, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{part.root} is named twice with split {part.split!r}; name each data set once")
    if isinstance(run, RunConfig):
        known = counted_pairs(Path(part.root) for part in parts)
        known.check(", ".join(map(shown, config.paths)), run.packing.pairs)
    out = config.out.absolute()  # workers may have another current directory
    directories = [out / name for name in names]
    work = _Measuring(measurer, directories)
    done: dict[tuple[int, str], IndexedShard] = {}
    mine: list[_Task] = []
    tasks = [
        _Task(number, part, shard, out / name)
        for number, (name, part) in enumerate(zip(names, parts, strict=True))
        for shard in part.shards
    ]
    for at, task in enumerate(tasks):
        found = measurer.measured(task.part, task.shard, task.directory)
        if found is not None:
            done[task.dataset, task.shard] = found
        elif at % config.world_size == config.rank:  # not by what is left: ranks look at different times
            mine.append(task)
    reused = len(done)
    total = sum(measurer.index_of(task.part.root).samples[task.shard] for task in mine)
    progress("measure", 0, total)
    samples = 0
    # Closed at once, whatever happens: else its processes would end only when nothing refers to it any more.
    with (
        no_leftovers(*directories),
        closing(config.executor_config().executor(len(mine)).results(mine, work)) as results,
    ):
        for task, measured in results:
            done[task.dataset, task.shard] = measured
            samples += measured.samples
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
                weight=part.weight,
                repetitions=part.repetitions,
            )
            for number, (name, part) in enumerate(zip(names, parts, strict=True))
        ]
        try:
            index = _saved(config.out, measurer, datasets, run.encoder)
        except OSError as error:
            raise cannot_write(config.out, error) from error
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
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(out, error) from error
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


def _saved(out: Path, measurer: ShardMeasurer, datasets: Sequence[IndexedDataset], encoder: AnyEncoderConfig) -> Index:
    """Writes the index with the data sets of this command in it, beside those that are there.

    Raises:
        UserError: meanwhile, another command has made it with another encoder.
    """
    with _locked(out):
        before = _index(out, measurer)  # another command may have added a data set meanwhile, or made the index
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
    with (out / ".lock").open("w") as file:
        lock(file, out, wait=True)
        yield
