"""``size``: what an offline run of many samples takes, from a probe of the user's own data on this machine."""

from __future__ import annotations

import dataclasses
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from energon_packing.config import RunConfig, to_mapping
from energon_packing.errors import ConfigError, UserError
from energon_packing.executors.local import LocalProcesses
from energon_packing.offline.files import write_table
from energon_packing.offline.index import SCHEMA, Index, IndexedDataset, IndexedShard
from energon_packing.offline.measure import ShardMeasurer
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.packs import SampleRemeasurer
from energon_packing.offline.planner import make_plan
from energon_packing.offline.source import SourcePart, source_parts
from energon_packing.sample_kind import kind_of_config

PLANNED = 200_000
"""Samples of the plan that is probed: the packed ones again and again."""
STORES: Mapping[str, dict[str, Any]] = {"tokens": {}, "copied": {"media": "copy"}, "pixels": {"store": "pixels"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeConfig:
    """What to estimate, and from how much.

    Attributes:
        paths, split: data sets, as ``measure`` takes them.
        samples: of the run.
        probe: samples that are packed for the estimate; of each data set its share. One shard of each is measured.
    """

    paths: tuple[Path, ...]
    samples: int
    probe: int = 200
    split: str = "train"

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("size needs at least one data set.")
        for name in ("samples", "probe"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}; it must be at least 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSize:
    """What one command takes for all samples.

    Attributes:
        stage: ``measure``, ``plan``, or ``pack`` with the form that it stores.
        cpu_hours: of one core of this machine.
        bytes: that it writes.
        memory: bytes of a process at its peak.
        probed: samples from which the figures are.
    """

    stage: str
    cpu_hours: float
    bytes: int
    memory: int
    probed: int


@dataclass(frozen=True, slots=True)
class _Used:
    """CPU seconds, bytes written, and peak memory of one probe; and the samples it was about."""

    seconds: float
    bytes: int
    memory: int
    samples: int


class _Probing:
    """A `energon_packing.executors.work.Work`: each probe in a process of its own, so that its peak is its own."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def do(self, task: Callable[[], tuple[float, int, int]]) -> _Used:
        """Runs a probe."""
        seconds, written, samples = task()
        # Linux counts kibibytes.
        return _Used(seconds, written, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, samples)

    def name(self, task: Any) -> str:
        """Of the probe."""
        return "a probe"


def size(config: SizeConfig, run: RunConfig, place: Path) -> tuple[StageSize, ...]:
    """Measures one shard of each data set, plans and packs a part of it, and multiplies.

    Args:
        run: its ``encoder``, ``packing``, ``parallel`` and ``plan`` sections count.
        place: an empty directory, for what the probe writes.

    Raises:
        UserError: a data set cannot be used, or none of its probed samples can be packed.
    """
    parts = [part for path in config.paths for part in source_parts(path, config.split)]
    measuring = _probed(_Measure(run, tuple(parts), place / "measured"))
    probed = _cut(config, run, parts, place)
    repeated = _repeated(probed, place / "repeated", min(PLANNED, config.samples))
    few = _probed(_Plan(run, place / "probe", place / "probe.parquet"))
    many = _probed(_Plan(run, place / "repeated", place / "repeated.parquet"))
    times = config.samples / measuring.samples
    slope = max(0.0, (many.memory - few.memory) / max(1, many.samples - few.samples))
    found = [
        _stage("measure", measuring, times),
        dataclasses.replace(
            _stage("plan", many, config.samples / repeated),
            memory=round(few.memory + slope * config.samples),
        ),
    ]
    for way, settings in STORES.items():
        used = _probed(_Pack(run, place / "probe.parquet", place / way, few.samples, settings))
        found.append(_stage(f"pack ({way})", used, config.samples / used.samples))
        shutil.rmtree(place / way)
    return tuple(found)


def _stage(name: str, used: _Used, times: float) -> StageSize:
    return StageSize(
        stage=name,
        cpu_hours=used.seconds * times / 3600,
        bytes=round(used.bytes * times),
        memory=used.memory,
        probed=used.samples,
    )


def _probed(task: Callable[[], tuple[float, int, int]]) -> _Used:
    with closing(LocalProcesses(1).results([task], _Probing())) as results:
        (found,) = [used for _, used in results]
    return found


@dataclass(frozen=True, slots=True)
class _Measure:
    run: RunConfig
    parts: tuple[SourcePart, ...]
    directory: Path

    def __call__(self) -> tuple[float, int, int]:
        measurer = ShardMeasurer(self.run)
        start = time.process_time()
        samples = written = 0
        for number, part in enumerate(self.parts):
            shard = measurer.measure(part, part.shards[0], self.directory / str(number))
            samples += shard.samples
            written += (self.directory / str(number) / shard.file).stat().st_size
        return time.process_time() - start, written, samples


@dataclass(frozen=True, slots=True)
class _Plan:
    run: RunConfig
    index: Path
    out: Path

    def __call__(self) -> tuple[float, int, int]:
        encoder = kind_of_config(self.run).packing_encoder(self.run)
        remeasure = SampleRemeasurer(encoder, [self.index])
        start = time.process_time()
        make_plan([self.index], self.run, self.out, limits=encoder.limits, remeasure=remeasure)
        seconds = time.process_time() - start
        samples = sum(shard.samples for part in Index.open(self.index).datasets for shard in part.shards)
        return seconds, self.out.stat().st_size, samples


@dataclass(frozen=True, slots=True)
class _Pack:
    run: RunConfig
    plan: Path
    out: Path
    samples: int
    settings: Mapping[str, Any]

    def __call__(self) -> tuple[float, int, int]:
        kind_of_config(self.run).packing_encoder(self.run)  # imports
        start = time.process_time()
        kind_of_config(self.run).packing_encoder(self.run)
        loading = time.process_time() - start
        start = time.process_time()
        report = pack(PackConfig(plan=self.plan, out=self.out, workers=0, **self.settings))
        seconds = time.process_time() - start - loading
        return max(seconds, 0.0), sum(shard.bytes + shard.media_bytes for shard in report.facts.shards), self.samples


def _cut(config: SizeConfig, run: RunConfig, parts: list[SourcePart], place: Path) -> Index:
    """An index of the first samples of the measured shards, of each data set as many as its share of all."""
    measurer = ShardMeasurer(run)
    counts = [sum(measurer.index_of(part.root).samples[shard] for shard in part.shards) for part in parts]
    datasets = []
    for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
        shard = measurer.measured(part, part.shards[0], place / "measured" / str(number))
        assert shard is not None, "it was measured a moment ago"
        whole = IndexedDataset(
            name=str(number),
            path=part.path,
            split=part.split,
            root=part.root,
            media_root=part.media_root,
            media_shards=measurer.index_of(part.media_root).shards,
            shards=(shard,),
            subflavors=part.subflavors,
        )
        rows = Index(directory=place / "measured").rows(whole, shard)
        rows = rows.slice(0, max(1, round(config.probe * count / max(1, sum(counts)))))
        datasets.append(dataclasses.replace(whole, shards=(_written(place / "probe" / str(number), shard, rows),)))
    index = Index(
        directory=place / "probe",
        datasets=tuple(datasets),
        encoder=to_mapping(run.encoder),
        fingerprint=measurer.fingerprint,
    )
    index.save()
    return index


def _repeated(index: Index, directory: Path, samples: int) -> int:
    """Writes an index with the rows of `index` again and again, at least `samples` of them; returns how many."""
    known = sum(part.shards[0].samples for part in index.datasets)
    times = -(-samples // known)
    datasets = []
    for part in index.datasets:
        (shard,) = part.shards
        rows = pa.concat_tables([index.rows(part, shard)] * times)
        datasets.append(dataclasses.replace(part, shards=(_written(directory / part.name, shard, rows),)))
    dataclasses.replace(index, directory=directory, datasets=tuple(datasets)).save()
    return known * times


def _written(directory: Path, shard: IndexedShard, rows: pa.Table) -> IndexedShard:
    reasons = rows.column("reason")
    kept = rows.filter(reasons.is_null())
    if not kept.num_rows:
        raise UserError(
            f"all {rows.num_rows} probed samples of {shard.name} are dropped, the first as {reasons[0]}; choose a "
            "larger --probe, or look at the reasons with 'energon-packing measure'"
        )
    directory.mkdir(parents=True)
    tokens = sum(kept.column("length").to_pylist()) + sum(kept.column("second").to_pylist())
    made = dataclasses.replace(shard, samples=rows.num_rows, dropped=rows.num_rows - kept.num_rows, tokens=tokens)
    write_table(directory / made.file, SCHEMA, [rows], {"identity": dict(shard.identity)})
    return made
