"""What does an offline run of many samples take? From a probe of your own data on this machine; see ``--help``."""

import dataclasses
import functools
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import click
import pyarrow as pa
from rich.console import Console

from energon_packing.cli.terminal import table
from energon_packing.config import RunConfig, load_config, to_mapping
from energon_packing.convert.workspace import dry_workspace
from energon_packing.errors import UserError
from energon_packing.executors.local import LocalProcesses
from energon_packing.offline.files import write_table
from energon_packing.offline.index import SCHEMA, Index, IndexedDataset, IndexedShard
from energon_packing.offline.measure import MeasureTask, ShardMeasurer
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.packs import SampleRemeasurer
from energon_packing.offline.planner import make_plan
from energon_packing.offline.source import SourcePart, source_parts
from energon_packing.sample_kind import kind_of_config

PLANNED = 200_000
"""Samples of the plan that is probed: the packed ones again and again."""
STORES: Mapping[str, dict[str, Any]] = {"tokens": {}, "copied": {"media": "copy"}, "pixels": {"store": "pixels"}}


class Used(NamedTuple):
    """CPU seconds, bytes written and samples of one probe; and its peak memory in bytes."""

    seconds: float
    bytes: int
    samples: int
    memory: int = 0


class _Probing:
    """A `energon_packing.executors.work.Work`: each probe in a process of its own, so that its peak is its own."""

    def begin(self) -> None:
        pass

    def do(self, task: Callable[[], Used]) -> Used:
        # Linux counts kibibytes.
        return task()._replace(memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)

    def name(self, task: Any) -> str:
        return "a probe"


def size(
    paths: Sequence[Path], run: RunConfig, place: Path, *, samples: int, probe: int, split: str
) -> list[dict[str, Any]]:
    """Measures one shard of each data set, plans and packs a part of it, and multiplies.

    Args:
        place: an empty directory, for what the probe writes.
        probe: samples that are packed for the estimate; of each data set its share. One shard of each is measured.

    Returns:
        What each command takes for all samples: ``stage`` (``measure``, ``plan``, or ``pack`` with the form that it
        stores), ``cpu_hours`` of one core of this machine, ``bytes`` that it writes, ``memory`` of a process at its
        peak, and ``probed``: the samples from which the figures are.

    Raises:
        UserError: a data set cannot be used, or none of its probed samples can be packed.
    """
    parts = [part for path in paths for part in source_parts(path, split)]
    measured = _probed(_measure, run, parts, place / "measured")
    repeated = _repeated(_cut(probe, run, parts, place), place / "repeated", min(PLANNED, samples))
    few = _probed(_plan, run, place / "probe", place / "probe.parquet")
    many = _probed(_plan, run, place / "repeated", place / "repeated.parquet")
    slope = max(0.0, (many.memory - few.memory) / max(1, many.samples - few.samples))
    stages = [
        _stage("measure", measured, samples / measured.samples),
        _stage("plan", many, samples / repeated) | {"memory": round(few.memory + slope * samples)},
    ]
    for way, settings in STORES.items():
        used = _probed(_pack, run, place / "probe.parquet", place / way, few.samples, settings)
        stages.append(_stage(f"pack ({way})", used, samples / used.samples))
        shutil.rmtree(place / way)
    return stages


def _stage(name: str, used: Used, times: float) -> dict[str, Any]:
    return {
        "stage": name,
        "cpu_hours": used.seconds * times / 3600,
        "bytes": round(used.bytes * times),
        "memory": used.memory,
        "probed": used.samples,
    }


def _probed(task: Callable[..., Used], *arguments: Any) -> Used:
    with closing(LocalProcesses(1).results([functools.partial(task, *arguments)], _Probing())) as results:
        ((_, used),) = results
    return used


def _measure(run: RunConfig, parts: Sequence[SourcePart], directory: Path) -> Used:
    measurer = ShardMeasurer(run)
    start = time.process_time()
    shards = [measurer.measure(part, part.shards[0], directory / str(number)) for number, part in enumerate(parts)]
    seconds = time.process_time() - start
    written = sum((directory / str(number) / shard.file).stat().st_size for number, shard in enumerate(shards))
    return Used(seconds, written, sum(shard.samples for shard in shards))


def _plan(run: RunConfig, index: Path, out: Path) -> Used:
    encoder = kind_of_config(run).packing_encoder(run)
    remeasure = SampleRemeasurer(encoder, [index])
    start = time.process_time()
    make_plan([index], run, out, limits=encoder.limits, remeasure=remeasure)
    seconds = time.process_time() - start
    samples = sum(shard.samples for part in Index.open(index).datasets for shard in part.shards)
    return Used(seconds, out.stat().st_size, samples)


def _pack(run: RunConfig, plan: Path, out: Path, samples: int, settings: Mapping[str, Any]) -> Used:
    for _ in range(2):  # the first time imports
        start = time.process_time()
        kind_of_config(run).packing_encoder(run)
        loading = time.process_time() - start
    start = time.process_time()
    report = pack(PackConfig(plan=plan, out=out, workers=0, **settings))
    seconds = time.process_time() - start - loading
    assert report.facts is not None, "a directory of shards is complete after one command"
    return Used(max(seconds, 0.0), sum(shard.bytes + shard.media_bytes for shard in report.facts.shards), samples)


def _cut(probe: int, run: RunConfig, parts: Sequence[SourcePart], place: Path) -> Index:
    """An index of the first samples of the measured shards, of each data set as many as its share of all."""
    measurer = ShardMeasurer(run)
    counts = [sum(measurer.index_of(part.root).samples[shard] for shard in part.shards) for part in parts]
    datasets = []
    for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
        shard = measurer.measured(MeasureTask(number, part, part.shards[0], place / "measured" / str(number)))
        assert shard is not None  # it was measured a moment ago
        whole = IndexedDataset(
            name=str(number),
            media_shards=measurer.index_of(part.media_root).shards,
            shards=(shard,),
            **{name: getattr(part, name) for name in ("path", "split", "root", "media_root", "subflavors")},
        )
        rows = Index(directory=place / "measured").rows(whole, shard)
        rows = rows.slice(0, max(1, round(probe * count / max(1, sum(counts)))))
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
    own = sum(part.shards[0].samples for part in index.datasets)
    times = -(-samples // own)
    datasets = []
    for part in index.datasets:
        rows = pa.concat_tables([index.rows(part, part.shards[0])] * times)
        datasets.append(dataclasses.replace(part, shards=(_written(directory / part.name, part.shards[0], rows),)))
    dataclasses.replace(index, directory=directory, datasets=tuple(datasets)).save()
    return own * times


def _written(directory: Path, shard: IndexedShard, rows: pa.Table) -> IndexedShard:
    reasons = rows.column("reason")
    kept = rows.filter(reasons.is_null())
    if not kept.num_rows:
        raise UserError(
            f"all {rows.num_rows} probed samples of {shard.name} are dropped, the first as {reasons[0]}; choose a "
            "larger --probe, or look at the reasons with 'energon-packing measure'"
        )
    directory.mkdir(parents=True)
    tokens = sum(sum(kept.column(name).to_pylist()) for name in ("length", "second"))
    made = dataclasses.replace(shard, samples=rows.num_rows, dropped=rows.num_rows - kept.num_rows, tokens=tokens)
    write_table(directory / made.file, SCHEMA, [rows], {"identity": dict(shard.identity)})
    return made


@click.command()
@click.argument("paths", metavar="DATASET...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--config", "config_path", metavar="CFG", required=True, type=click.Path(), help="YAML configuration.")
@click.option("--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True, help="Change a value; may be repeated.")
@click.option("--split", default="train", show_default=True, help="Part of each data set.")
@click.option("--samples", required=True, type=click.FloatRange(1, 1e15), help="Of the whole run, such as 100e6.")
@click.option("--probe", default=200, show_default=True, type=click.IntRange(min=1), help="Samples to pack.")
@click.option("--cores", default=1, show_default=True, type=click.IntRange(min=1), help="For hours by the clock.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(
    paths: tuple[Path, ...],
    config_path: str,
    overrides: tuple[str, ...],
    split: str,
    samples: float,
    probe: int,
    cores: int,
    as_json: bool,
) -> None:
    """Hours, storage and memory of measuring, planning and packing so many samples.

    One shard of each data set is measured here, some of its samples are planned and packed in every form, and CPU time,
    bytes and memory of that are multiplied.
    """
    try:
        run = load_config(config_path, overrides)
        with dry_workspace() as folder:
            stages = size(paths, run, folder, samples=round(samples), probe=probe, split=split)
    except UserError as error:
        click.echo(json.dumps({"error": str(error)}) if as_json else f"Error: {error}", err=not as_json)
        sys.exit(2)
    # `plan` works in one process.
    rows = [each | {"hours": each["cpu_hours"] / (1 if each["stage"] == "plan" else cores)} for each in stages]
    if as_json:
        click.echo(json.dumps({"samples": round(samples), "cores": cores, "stages": rows}))
        return
    shown = [row | {name: row[name] / 2**30 for name in ("bytes", "memory")} for row in rows]
    figures = ("cpu_hours", "hours", "bytes", "memory")
    names = ("CPU hours", f"hours on {cores:,} cores", "storage, GiB", "memory of a process, GiB", "from")
    texts = [(row["stage"], *(f"{row[name]:,.2f}" for name in figures), f"{row['probed']:,} samples") for row in shown]
    Console().print(table(texts, left=("command",), right=names))


if __name__ == "__main__":
    main()
