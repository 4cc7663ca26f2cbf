"""Benchmark of planning: seconds and memory from an index to a plan, fill compared with the bound, balance of steps."""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.offline_index import write_index
from energon_packing.config import RunConfig, from_mapping
from energon_packing.offline import bands
from energon_packing.offline.plan import Plan
from energon_packing.offline.planner import make_plan

SEQ_LENGTH = 32768
LIMITS: dict[str, dict[str, int]] = {
    "tokens": {},
    "images": {"max_images_per_pack": 120},
    "all": {"max_images_per_pack": 120, "max_patches_per_pack": 80_000, "max_segments_per_pack": 96},
}
"""What packs are limited by, by name: scarce enough that packs by tokens alone would break each limit."""


def run(
    samples: Sequence[int], limited: Sequence[str], directory: Path | None = None, band: int = bands.BAND
) -> Iterator[dict[str, Any]]:
    """Plans a drawn index of each size under each set of limits, each in a process of its own.

    Yields:
        ``samples, limits, seconds`` (index to file), ``cpu_seconds`` (of all threads), ``peak_gib`` (of the process),
        ``open_ms``, ``first_pack_ms`` and ``restart_ms`` (to open the plan, and then to read its first pack and one in
        its middle), bytes of index and plan per sample, ``parts`` (files, 0 for a plan of one), and the figures of
        the plan's summary. Of several sizes, the last line is of each set of limits the ``exponent`` of the CPU's
        time in the number of samples, fitted over them.
    """
    seconds: dict[str, list[tuple[int, float]]] = {}
    for size in samples:
        with tempfile.TemporaryDirectory(dir=directory) as place:
            write_index(Path(place) / "index", size)
            for name in limited:
                command = [sys.executable, "-m", "bench.plan", place, name, str(band)]
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1]
                )
                if done.returncode:
                    raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
                found = {"samples": size, **json.loads(done.stdout.splitlines()[-1])}
                seconds.setdefault(name, []).append((size, found["cpu_seconds"]))
                index = sum(file.stat().st_size for file in (Path(place) / "index").rglob("*.*"))
                yield found | {
                    "us_per_sample": round(found["cpu_seconds"] / size * 1e6, 3),
                    "index_bytes_per_sample": round(index / size, 1),
                    "plan_bytes_per_sample": round(found["plan_mib"] * 2**20 / size, 1),
                }
    for name, points in seconds.items():
        if len(points) > 1:
            many, took = np.log(np.array(points, np.float64)).T
            yield {"limits": name, "exponent": round(float(np.polyfit(many, took, 1)[0]), 3)}


def planned(place: Path, name: str, band: int = bands.BAND) -> dict[str, Any]:
    """Plans the index in `place` once, in bands of so many rows."""
    bands.BAND = band
    settings = {"seq_length": SEQ_LENGTH, **LIMITS[name]}
    values = {"packing": settings, "parallel": {"context_parallel": 4}}
    config = from_mapping(RunConfig, values, where="the benchmark")
    out = place / f"{name}.parquet"
    start, cpu = time.perf_counter(), time.process_time()
    facts = make_plan([place / "index"], config, out)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start = time.perf_counter()
    plan = Plan.open(out)
    opened = time.perf_counter()
    plan.packs(0, 1)
    first = time.perf_counter()
    plan.packs(len(plan) // 2, len(plan) // 2 + 1)
    read = time.perf_counter()
    files = [out] if out.is_file() else [*out.iterdir()]
    size = sum(file.stat().st_size for file in files)
    if out.is_file():
        out.unlink()
    else:
        shutil.rmtree(out)
    return {
        "limits": name,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "peak_gib": round(peak, 2),
        "plan_mib": round(size / 2**20, 1),
        "open_ms": round((opened - start) * 1e3, 1),
        "first_pack_ms": round((first - opened) * 1e3, 1),
        "restart_ms": round((read - first) * 1e3, 1),
        "parts": len(facts.parts),
        "packs": facts.packs,
        "of_bound": facts.summary["of_bound"],
        "aligned_fill": facts.summary["aligned_fill"],
        **{f"efficiency_{ranks}": facts.summary["balance"].get(str(ranks)) for ranks in (8, 64, 512)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line per plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, action="append", help="size of the index; may be repeated")
    parser.add_argument("--limits", choices=sorted(LIMITS), action="append", help="what packs are limited by")
    parser.add_argument("--directory", type=Path, help="where the index is made; a temporary directory by default")
    parser.add_argument("--band", type=int, default=bands.BAND, help="rows that are packed at once")
    given = parser.parse_args(arguments)
    for result in run(given.samples or [1_000_000], given.limits or list(LIMITS), given.directory, given.band):
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    print(json.dumps(planned(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
