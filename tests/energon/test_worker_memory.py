"""Workers keep freed memory: counted in page faults, which say what the kernel had to give."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from energon_packing.energon import workers as worker_start
from energon_packing.energon.loader import build_loader
from energon_packing.offline.evaluation import evaluation_loader

FAULTS = """
import json, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from energon_packing.energon.workers import keep_freed_memory
from energon_packing.offline.evaluation import evaluation_loader
import numpy
if sys.argv[2] == "keep":
    assert keep_freed_memory()
seen = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    images = [numpy.ones(12 << 20, dtype=numpy.uint8) for _ in range(3)]
    del images
    seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps(seen))
"""

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")


def faults(how: str) -> list[int]:
    """Page faults of each of six rounds of three images."""
    root = str(Path(worker_start.__file__).resolve().parents[2])
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, root, how], env=own, capture_output=True, text=True, timeout=240, check=True
    )
    return list(json.loads(done.stdout))


def loader_of(kind, config):
    return build_loader(config) if kind == "online" else evaluation_loader(config, 2)


@needs_glibc
def test_images_after_the_first_ones_take_no_new_memory():
    """Three images of 12 MiB are 9,216 pages of 4 KiB; larger pages would be fewer faults, with and without."""
    kept, given_back = faults("keep"), faults("give back")
    assert sum(kept[1:]) * 4 < sum(given_back[1:])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["online", "evaluation"])
def test_loader_processes_keep_memory_where_so_configured_and_the_training_process_never_does(
    run_config, monkeypatch, tmp_path, kind, workers, keep
):
    called = tmp_path / "called"
    monkeypatch.setattr(worker_start, "keep_freed_memory", lambda: called.open("a").write("once\n"))
    config = run_config(data={"workers": workers, "keep_memory": keep}, seq_length=1024, drop_budget=1.0)
    assert next(iter(loader_of(kind, config)))
    assert (called.read_text().split() if called.exists() else []) == ["once"] * (workers if keep else 0)


@pytest.mark.parametrize("keep", [True, False])
def test_a_worker_tokenizes_without_threads_unless_the_user_says_otherwise(monkeypatch, keep):
    monkeypatch.setattr(worker_start, "keep_freed_memory", lambda: None)
    loader = SimpleNamespace(worker_init_fn=None, num_workers=1)
    worker_start.in_workers(loader, keep_memory=keep)
    for before, after in ((None, "false"), ("true", "true")):
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        if before is not None:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        loader.worker_init_fn(0)
        assert os.environ["TOKENIZERS_PARALLELISM"] == after


class Ended:
    """Part of a cycle, as a model is with its hooks; tells which process collects it."""

    def __init__(self, told):
        self.self, self.told = self, told

    def __del__(self):
        with self.told.open("a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.mark.parametrize("kind", ["online", "evaluation"])
def test_what_only_a_cycle_holds_ends_before_the_workers_start_and_not_in_them(run_config, tmp_path, kind):
    told = tmp_path / "told"
    config = run_config(data={"workers": 1}, seq_length=1024, drop_budget=1.0)
    loader = loader_of(kind, config)
    gc.disable()
    try:
        Ended(told)
        next(iter(loader))
        assert told.read_text().split() == [str(os.getpid())]
    finally:
        gc.enable()


def test_a_workers_own_start_is_kept():
    started = []
    loader = SimpleNamespace(worker_init_fn=functools.partial(started.append), num_workers=1)
    worker_start.in_workers(loader)
    loader.worker_init_fn(3)
    assert started == [3]


def test_a_c_library_without_the_call_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    assert worker_start.keep_freed_memory() is False


def test_an_older_glibc_gets_the_largest_block_that_it_takes(monkeypatch):
    asked = []

    def mallopt(parameter, value):
        asked.append((parameter, value))
        return int(parameter != -3 or value <= 32 << 20)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert worker_start.keep_freed_memory() is True
    assert (-3, 32 << 20) in asked
