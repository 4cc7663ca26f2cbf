"""Benchmark of training from an object store: packs per second, of those from local files, and requests per pack.

The store is one of this machine that answers after 30 ms and sends 100 MB/s for each request (`bench.slow_store`).
Records and media of the data set and the packed directories are in it; its plan is local. Two loaders are open, one on
local files and one on the store, and are timed in turn, so that other work on the machine hurts both; the medians of
all turns count, and of their ratios, with quartiles. Packs that workers made while the other loader was timed do not
count. The store takes its CPU time from the same cores, and local files are in the page cache: both speak against it.
"""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.loader_data import prepare_data
from bench.loader_run import LoaderJob, _children_of, _cpu_of, run_config
from bench.slow_store import slow_store
from energon_packing.config import PlanConfig
from energon_packing.demo import processor_path
from energon_packing.offline.packed import Media, Store

REACH = {"plan": 0.6, "packed, media copied": 0.9}
"""Share of the local rate."""
_WAYS: dict[str, tuple[Store, Media]] = {
    "packed, media copied": ("tokens", "copy"),
    "packed, pixels": ("pixels", "reference"),
}


def loaders(place: Path, address: str, given: argparse.Namespace) -> Iterator[tuple[str, Any, Any]]:
    """Name of each way, and functions that build its loader: from local files, and from the store."""
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.open_loader import open_loader
    from energon_packing.offline.pack import PackConfig, pack
    from energon_packing.offline.planner import make_plan

    data = prepare_data(place / "served", conversations=given.conversations, camera_images=True)
    job = LoaderJob(
        path="ours", data=str(data.root), processor=str(processor_path("qwen2_5_vl")), seq_length=given.seq_length
    )
    run = dataclasses.replace(run_config(job, workers=given.workers, repeat=True), plan=PlanConfig(max_data_parallel=8))

    def at(path: str | Path) -> Any:
        return dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(path)))

    plans = {}
    for name, root in (("local", data.root), ("store", Path(f"{address}/{data.root.name}"))):
        measure(MeasureConfig(paths=(root,), out=place / f"index-{name}", workers=0), run)
        plans[name] = place / f"{name}.parquet"
        make_plan([place / f"index-{name}"], run, plans[name])
    local, stored = (functools.partial(open_loader, at(plans[name])) for name in ("local", "store"))
    yield "plan", local, stored
    for number, (name, (store, media)) in enumerate(_WAYS.items()):
        out = place / "served" / f"packed-{number}"
        pack(PackConfig(plan=plans["local"], out=out, store=store, media=media, shard_packs=given.shard_packs))
        yield (
            name,
            functools.partial(open_loader, at(out)),
            functools.partial(open_loader, at(f"{address}/{out.name}")),
        )


class Lane:
    """A loader of one way, with its own workers, that is timed for some packs at a time."""

    def __init__(self, build: Any, warm: int) -> None:
        before = set(multiprocessing.active_children())
        self._rows, self.packs = iter(build()), 0
        self.rates: list[float] = []
        next(self._rows)
        self._workers = [each.pid for each in multiprocessing.active_children() if each not in before]
        self._take(warm)
        self._begun, self.packs = self._cpu(), 0

    def _take(self, packs: int) -> None:
        for _ in range(packs):
            next(self._rows)
        self.packs += packs

    def _cpu(self) -> float:
        return sum(_cpu_of(pid) for worker in self._workers for pid in [worker, *_children_of(worker)])

    def time(self, ready: int, packs: int) -> None:
        """Times some packs, after those that workers had ready."""
        self._take(ready)
        start = time.perf_counter()
        self._take(packs)
        self.rates.append(packs / (time.perf_counter() - start))

    def cpu_milliseconds(self) -> float:
        """Of the workers and the processes that decode for them, for each pack."""
        return 1e3 * (self._cpu() - self._begun) / self.packs


def run(place: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a line for each way."""
    (place / "served").mkdir()
    latency, speed = given.milliseconds / 1e3, given.megabytes_per_second * 1e6
    with slow_store(place / "served", place / "msc.json", latency=latency, rate=speed) as (store, address):
        os.environ["MSC_CONFIG"] = str(place / "msc.json")
        for name, local, remote in loaders(place, address, given):
            if given.way and name not in given.way:
                continue
            before = store.counts()
            here, there = Lane(local, given.warm), Lane(remote, given.warm)
            for _ in range(given.turns):
                for lane in (here, there):
                    lane.time(2 * given.workers, given.packs)
            spent = {kind: count - before[kind] for kind, count in store.counts().items()}
            read = there.packs + given.warm + 1
            asked = (spent["get"] + spent["head"] + spent["list"]) / read
            shares = sorted(b / a for a, b in zip(here.rates, there.rates, strict=True))
            yield {
                "way": name,
                "workers": given.workers,
                "milliseconds": given.milliseconds,
                "megabytes_per_second": given.megabytes_per_second,
                "local_packs_per_second": round(statistics.median(here.rates), 2),
                "store_packs_per_second": round(statistics.median(there.rates), 2),
                "share": round(statistics.median(shares), 2),
                "shares": [round(shares[len(shares) // 4], 2), round(shares[-1 - len(shares) // 4], 2)],
                "reach": REACH.get(name),
                "local_cpu_ms_per_pack": round(here.cpu_milliseconds(), 1),
                "store_cpu_ms_per_pack": round(there.cpu_milliseconds(), 1),
                "requests_per_pack": round(asked, 2),
                "heads_per_pack": round(spent["head"] / read, 3),
                "megabytes_per_pack": round(spent["bytes"] / read / 1e6, 2),
                "usd_per_million_packs": round(asked * given.usd_per_million_requests, 2),
            }
            del here, there  # their workers would read ahead from a store that is gone


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=600)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--shard-packs", type=int, default=64)
    parser.add_argument("--packs", type=int, default=32, help="that are timed at a time")
    parser.add_argument("--warm", type=int, default=16, help="packs before them")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--milliseconds", type=float, default=30.0, help="before each answer")
    parser.add_argument("--megabytes-per-second", type=float, default=100.0, help="of each answer")
    parser.add_argument("--usd-per-million-requests", type=float, default=0.4, help="list price of a GET, in 2026")
    parser.add_argument("--way", action="append", choices=("plan", *_WAYS), help="only this one")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for result in run(Path(folder), given):
            print(json.dumps(result), flush=True)
    return 0
