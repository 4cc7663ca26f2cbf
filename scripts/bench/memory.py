"""Benchmark of memory: whether a loader's worker, or its process that decodes, grows over many samples.

One worker reads conversations with texts, images and videos again and again. Private memory is the kernel's, measured
between two packs, at `POINTS` places of the run. The slope is the median over all pairs of those after a third of the
samples, when all that is made once exists: a worker returns freed memory once a minute, and a line by least squares
follows these jumps. Exit code 1 if it is above ``--most`` for one of the processes.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

from bench.loader_data import prepare_data
from bench.loader_run import MEGABYTE, LoaderJob, run_config
from energon_packing.demo import processor_path

POINTS = 60


def measure(job: LoaderJob, samples: int, seconds: float) -> tuple[list[int], dict[str, list[float]]]:
    """Reads so many samples, or for so many seconds.

    Returns:
        Samples read at each point; private memory of the largest ``worker`` and ``decoder`` there, in MiB.
    """
    from energon_packing.energon.loader import build_loader
    from energon_packing.energon.workers import largest_private

    places: list[int] = []
    memory: dict[str, list[float]] = {"worker": [], "decoder": []}
    read, end = 0, time.monotonic() + seconds
    due = [samples * (point + 1) // POINTS for point in range(POINTS)]
    times = [end - seconds * (POINTS - 1 - point) / POINTS for point in range(POINTS)]
    for pack in build_loader(run_config(job, workers=1, repeat=True)):
        read += len(pack.keys)
        if read >= due[len(places)] or time.monotonic() >= times[len(places)]:
            found = largest_private()
            places.append(read)
            for kind, sizes in memory.items():
                sizes.append(found.get(kind, 0) / MEGABYTE)
        if len(places) == POINTS:
            return places, memory
    raise AssertionError("a loader that repeats does not end")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line per process; returns 1 if one of them grows."""
    parser = argparse.ArgumentParser(prog="bench.py memory", description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which it ends with fewer samples")
    parser.add_argument("--conversations", type=int, default=500, help="of the data set")
    parser.add_argument("--most", type=float, default=1.0, help="MiB per 10,000 samples that a process may grow")
    parser.add_argument("--give-back", action="store_false", dest="keep_memory", help="data.keep_memory is false")
    given = parser.parse_args(arguments)
    grows = False
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as work:
        data = prepare_data(Path(work), conversations=given.conversations)
        processor = str(processor_path("qwen2_5_vl"))
        job = LoaderJob(
            path="ours", data=str(data.root), processor=processor, seq_length=8192, keep_memory=given.keep_memory
        )
        places, memory = measure(job, given.samples, given.seconds)
    first = next(at for at, place in enumerate(places) if 3 * place >= places[-1])  # many points are in a slow start
    for kind, sizes in memory.items():
        pairs = combinations(zip(places[first:], sizes[first:], strict=True), 2)
        slope = median((more - size) / (later - place) for (place, size), (later, more) in pairs) * 10_000
        grows |= slope > given.most or not all(sizes[first:])
        row = {
            "benchmark": "memory",
            "process": kind,
            "samples": places[-1],
            "first_mib": round(sizes[0], 1),
            "third_mib": round(sizes[first], 1),
            "last_mib": round(sizes[-1], 1),
            "most_mib": round(max(sizes), 1),
            "mib_per_10000": round(slope, 2),
            "keep_memory": given.keep_memory,
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(row), flush=True)
    return int(grows)


if __name__ == "__main__":
    sys.exit(main())
