"""What trust costs the whole loader: its throughput with ledger, checks and supervised decoding, over that without.

Throughput is per CPU second of all processes, which is that of a machine whose cores are all busy;
``wall_throughput`` is by the wall clock, and means something on an idle machine only.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.loader import PUBLISHED_PIXELS, LoaderBench, figures, median, start
from bench.loader_data import prepare_data
from bench.loader_run import LoaderJob
from energon_packing.demo import processor_path
from energon_packing.errors import PackingError

LEAST_THROUGHPUT = 0.97


def run(bench: LoaderBench, work: Path) -> Iterator[dict[str, Any]]:
    """Measures ours with a ledger, checked packs and supervised decoding, and with none of these.

    Args:
        bench: what is measured; ``repeat`` turns, which begin with either in turn.
        work: directory for the data and the logs of the measured processes.

    Yields:
        A dict per side, see `loader.figures`, then ``loader.guards`` with the medians over the turns of the ratios of
        guarded to bare.

    Raises:
        PackingError: a measured process failed, or their packs differ.
    """
    data = prepare_data(work, conversations=bench.conversations, seed=bench.seed, camera_images=bench.realistic)
    found: dict[str, list[dict[str, Any]]] = {"none": [], "all": []}
    keys: list[list[str]] = []
    for turn in range(bench.repeat):
        for guards in ("none", "all") if turn % 2 else ("all", "none"):
            ledger = work / f"ledger-{turn}" if guards == "all" else None
            job = LoaderJob(
                path="ours",
                data=str(data.root),
                processor=bench.processor or str(processor_path("qwen2_5_vl")),
                seq_length=bench.seq_length,
                window=bench.window,
                pixels=PUBLISHED_PIXELS if bench.realistic else None,
                guards=guards,
                ledger=None if ledger is None else str(ledger),
            )
            measured = start(job, work / f"guards-{guards}-{turn}.log")
            keys.append(measured["keys"])
            found[guards].append(figures(job, measured, data) | {"path": f"guards-{guards}"})
    if any(each != keys[0] for each in keys):
        raise PackingError("the packs with and without guards differ")
    yield from (median(entries) for entries in found.values())
    pairs = list(zip(found["all"], found["none"], strict=True))
    per_cpu = sorted(round(b["cpu_seconds_per_1000"] / a["cpu_seconds_per_1000"], 3) for a, b in pairs)
    per_second = sorted(round(a["tokens_per_second"] / b["tokens_per_second"], 3) for a, b in pairs)
    yield {
        "benchmark": "loader.guards",
        "throughput": statistics.median(per_cpu),
        "throughputs": per_cpu,
        "wall_throughput": statistics.median(per_second),
        "wall_throughputs": per_second,
        "least_throughput": LEAST_THROUGHPUT,
    }
