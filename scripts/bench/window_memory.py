"""What a sample in the packing window costs its worker: the same loader with a small and with a large window.

Each window runs in a fresh process that does a worker's work itself (without a worker process, garbage can be collected
and freed memory returned before the measurement). Two figures share no code: the process's own memory, and a count of
all objects that the window reaches.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import gc
import itertools
import json
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.loader_run import LoaderJob, read_job, run_config

PACKS = 4
"""Packs read before the measurement, so that everything that is made only once already exists."""


def measure(job: LoaderJob) -> dict[str, Any]:
    """Reads a few packs and measures what the process then holds.

    Returns:
        ``held`` samples in the window and in the plans, ``anonymous`` bytes of the process (resident memory without
        file pages, which other processes affect), ``reachable`` bytes of all objects that the held samples and their
        restore keys reach, and the number of ``media`` of the held samples.
    """
    from megatron.energon import get_loader

    from energon_packing.energon.loader import build_dataset

    dataset = build_dataset(run_config(job, workers=0, repeat=True))
    loader = get_loader(dataset)
    for _ in itertools.islice(loader, PACKS):
        pass
    window = _window_of(dataset)
    give_back()
    held = [*window._window.buffer, *window._planned.buffer]
    keys = [*window._window._restore_keys, *window._planned._restore_keys]
    return {
        "held": len(held),
        "media": sum(len(sample.measured.media) for sample in held),
        "anonymous": anonymous_bytes(),
        "reachable": reachable_bytes([*held, *keys]),
    }


def _window_of(dataset: Any) -> Any:
    from energon_packing.energon.window import WindowPackingDataset

    while not isinstance(dataset, WindowPackingDataset):
        dataset = dataset.dataset
    return dataset


def give_back() -> None:
    """Collects garbage and returns freed memory to the kernel, if the C library can."""
    gc.collect()
    name = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None
    if trim is not None:
        trim(0)


def anonymous_bytes() -> int:
    """Returns the bytes of this process's resident memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def reachable_bytes(roots: Iterable[Any]) -> int:
    """Returns the total bytes of all objects that `roots` reach, each counted once; arrays with their data.

    Classes, modules, functions and media stores are not followed: they exist once, however many samples are held.
    """
    from megatron.energon.cache import FileStore

    shared = (type, types.ModuleType, types.FunctionType, types.MethodType, FileStore)
    seen: set[int] = set()
    total = 0
    open_objects = list(roots)
    while open_objects:
        found = open_objects.pop()
        if id(found) in seen or isinstance(found, shared):
            continue
        seen.add(id(found))
        total += sys.getsizeof(found)
        if (base := getattr(found, "base", None)) is not None and hasattr(found, "nbytes"):
            open_objects.append(base)  # a view keeps its whole array alive
        open_objects.extend(gc.get_referents(found))
    return total


def compare(small: dict[str, Any], large: dict[str, Any]) -> dict[str, Any]:
    """Returns the bytes per additional sample held, by the process's memory and by the count of objects."""
    samples = large["held"] - small["held"]
    return {
        "benchmark": "loader.memory",
        "held": [small["held"], large["held"]],
        "media_per_sample": round(large["media"] / large["held"], 2),
        "process_bytes_per_sample": round((large["anonymous"] - small["anonymous"]) / samples),
        "object_bytes_per_sample": round((large["reachable"] - small["reachable"]) / samples),
    }


def main() -> None:
    """Runs the `LoaderJob` that the first argument holds as JSON; writes the result to the file of the second."""
    job = read_job(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(measure(job) | {"job": dataclasses.asdict(job)}), encoding="utf-8")


if __name__ == "__main__":
    main()
