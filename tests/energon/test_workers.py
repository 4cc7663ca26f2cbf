"""Workers of a loader: what they start with, and what their end says."""

import contextlib
import ctypes
import functools
import gc
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.ranks import processes_below, terminate

from energon_packing.config import MetricsConfig
from energon_packing.energon import pack_bytes
from energon_packing.energon import workers as worker_start
from energon_packing.energon.loader import build_loader
from energon_packing.energon.metrics import RankLine, figures, watched
from energon_packing.energon.workers import in_sentences
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline.open_loader import evaluation_loader

FAULTS = """
import json, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from energon_packing.energon.workers import keep_freed_memory
import numpy
seen = []
for number in range(12):
    if number == 6:
        assert keep_freed_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    images = [numpy.ones(12 << 20, dtype=numpy.uint8) for _ in range(3)]
    del images
    seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps(seen))
"""

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")


def faults() -> list[int]:
    """Page faults of each of twelve rounds of three images; from the seventh on freed memory is kept."""
    root = str(Path(worker_start.__file__).resolve().parents[2])
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, root], env=own, capture_output=True, text=True, timeout=240, check=True
    )
    return list(json.loads(done.stdout))


def loader_of(kind, config):
    return build_loader(config) if kind == "online" else evaluation_loader(config, 2)


@needs_glibc
def test_images_after_the_first_ones_take_no_new_memory():
    """Three images of 12 MiB are 9,216 pages of 4 KiB; larger pages would be fewer faults, with and without."""
    found = faults()
    assert sum(found[7:]) * 4 < sum(found[1:6])


@pytest.mark.parametrize(
    ("kind", "workers", "keep"),
    [("online", 1, True), ("online", 1, False), ("online", 0, True), ("evaluation", 1, True)],
)
def test_loader_processes_keep_memory_where_so_configured_and_the_training_process_never_does(
    run_config, monkeypatch, tmp_path, kind, workers, keep
):
    called = tmp_path / "called"
    monkeypatch.setattr(worker_start, "keep_freed_memory", lambda: called.open("a").write("once\n"))
    config = run_config(data={"workers": workers, "keep_memory": keep}, seq_length=1024, drop_budget=1.0)
    assert next(iter(loader_of(kind, config)))
    assert (called.read_text().split() if called.exists() else []) == ["once"] * (workers if keep else 0)


def entries():
    """Objects that hold others, and what is in them, in this process."""
    gc.collect()
    found = gc.get_objects()
    return len(found) + sum(len(each) for each in found if isinstance(each, list | dict | set | deque))


def test_nothing_that_a_loader_holds_grows_with_the_samples_that_it_has_read(child_config, tmp_path):
    config = child_config(drop_budget=1.0, seq_length=2048, ledger=str(tmp_path / "ledger"))
    loader, held = build_loader(config), []

    def epochs():
        for _ in range(4):
            yield from loader
            held.append(entries())

    metrics = MetricsConfig(directory=str(tmp_path), interval=2)
    with pytest.warns(UserWarning, match="oversize"):
        read = sum(len(pack.keys) for pack in watched(epochs(), metrics, capacity=2048))
    assert held[3] - held[1] < read / 4  # half as many as the samples that two epochs read


class Holes(torch.utils.data.IterableDataset):
    """Private memory of its process in MiB, by the kernel's account: at the start, with 64 MiB of blocks, and once
    these are freed and returned, or have not been for so many seconds."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __iter__(self):
        own = psutil.Process()
        yield (start := own.memory_full_info().uss / 2**20)
        blocks = [b"\1" * size for _ in range(64) for size in (1 << 20, 1000)]
        yield own.memory_full_info().uss / 2**20
        del blocks[::2]  # what lives on is between them
        until = time.monotonic() + self.seconds
        while (now := own.memory_full_info().uss / 2**20) > start + 32 and time.monotonic() < until:
            time.sleep(0.02)
        yield now


@needs_glibc
@pytest.mark.parametrize(("every", "seconds", "returned"), [(0.1, 20.0, True), (3600.0, 0.5, False)])
def test_a_worker_that_keeps_freed_memory_returns_it_at_times(monkeypatch, every, seconds, returned):
    monkeypatch.setattr(worker_start, "TRIM_SECONDS", every)
    loader = torch.utils.data.DataLoader(Holes(seconds), batch_size=None, num_workers=1)
    worker_start.in_workers(loader)
    start, full, freed = loader
    assert full - start > 60
    assert (freed - start < 32) is returned


def test_a_worker_tokenizes_without_threads_unless_the_user_says_otherwise(monkeypatch):
    loader = SimpleNamespace(worker_init_fn=None, num_workers=1)
    worker_start.in_workers(loader, keep_memory=False)
    for before, after in ((None, "false"), ("true", "true")):
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        if before is not None:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        loader.worker_init_fn(0)
        assert os.environ["TOKENIZERS_PARALLELISM"] == after


@pytest.mark.parametrize("kind", ["online", "evaluation"])
def test_workers_hand_over_the_packs_that_torch_would_with_large_tensors_in_shared_memory(
    run_config, monkeypatch, kind
):
    config = run_config(data={"workers": 1}, seq_length=1024, drop_budget=1.0)

    def packs(large):
        monkeypatch.setattr(pack_bytes, "LARGE", large)
        made = list(itertools.islice(loader_of(kind, config), 12))
        shared = [tensor.is_shared() for pack in made for tensor in pack_bytes.tensors_of(pack.batch).values()]
        return [pack_bytes.field_digests(pack.batch) for pack in made], shared

    some, mixed = packs(1 << 15)
    assert any(mixed)
    assert not all(mixed)
    monkeypatch.setattr(worker_start, "_together", lambda pack: pack.__reduce_ex__(4))
    torchs, _ = packs(1 << 15)
    assert some == torchs


class Ended:
    """Part of a cycle, as a model is with its hooks; tells which process collects it."""

    def __init__(self, told):
        self.self, self.told = self, told

    def __del__(self):
        with self.told.open("a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.mark.parametrize("kind", ["online"])
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


@pytest.fixture
def no_signal_of_children():
    """Torch raises in whatever runs when a worker ends, pytest included; without the signal, where a pack is taken."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    gc.collect()  # torch's handler forgets the workers of a loader that is gone
    signal.signal(signal.SIGCHLD, before)


def test_a_worker_that_the_kernel_kills_ends_the_run_with_a_sentence(run_config, no_signal_of_children):
    packs = iter(build_loader(run_config(data={"workers": 1, "repeat": True}, drop_budget=1.0, seq_length=2048)))
    next(packs)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(
        UserError, match=rf"worker (\(pid {worker.pid}\) )?was killed.*memory runs out.*last checkpoint"
    ):
        for _ in packs:
            pass
    del packs


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "memory runs out"), (signal.SIGSEGV, "defect"), (signal.SIGABRT, "defect")]
)
def test_memory_is_blamed_for_no_other_signal_than_the_kernels(number, cause):
    def packs():
        raise RuntimeError(f"DataLoader worker (pid 7) is killed by signal: {signal.strsignal(number)}. ")  # torch's
        yield

    with pytest.raises(UserError, match=rf"pid 7\).*\({signal.strsignal(number)}\).*{cause}"):
        next(in_sentences(packs()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("signals", "later"), [(True, False), (False, True)])
def test_a_state_that_a_killed_worker_would_have_to_give_is_refused_within_seconds(run_config, request, later, signals):
    if not signals:
        request.getfixturevalue("no_signal_of_children")
    loader = build_loader(run_config(data={"workers": 2, "repeat": True}, drop_budget=1.0, seq_length=2048))
    packs = iter(loader)
    next(packs)
    save = loader.state_later() if later else loader.save_state
    pid = loader._loader._iterator._workers[-1].pid
    os.kill(pid, signal.SIGSTOP)  # it may not answer before its end
    began = time.monotonic()
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(UserError, match=rf"worker \(pid {pid}\) was killed.*continue from the last checkpoint"):
        save()
    assert time.monotonic() - began < 10
    with pytest.raises(UserError, match="was killed"):
        save()
    del packs


@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_to_all_processes_of_a_job_is_left_to_the_rank_and_costs_no_pack(run_config, workers):
    """As a scheduler sends it before it takes the machines; the rank goes on to its checkpoint."""
    config = run_config(data={"workers": workers}, in_child=True, drop_budget=1.0, seq_length=2048, window=8)

    def packs(signalled):
        before = set(processes_below(os.getpid(), served=False))
        loader = build_loader(config)
        taken = []
        for number, pack in enumerate(loader):
            taken.append((pack.keys, pack.dropped))
            if signalled and number == 2:
                started = set(processes_below(os.getpid(), served=False)) - before
                assert len(started) >= max(2 * workers, 1)  # each worker has a child that decodes
                terminate(started)
                time.sleep(0.5)
                assert started <= set(processes_below(os.getpid(), served=False))
                assert loader.save_state()
        return taken

    expected = packs(signalled=False)
    assert len(expected) > 6
    assert packs(signalled=True) == expected


def private_sizes() -> dict[str, int]:
    """By psutil: of the largest worker and decoder below this process, those of other tests too."""
    sizes: dict[str, int] = {}
    for pid in processes_below(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            name, size = psutil.Process(pid).name(), psutil.Process(pid).memory_full_info().uss
            if kind := {"packing-decoder": "decoder", "pt_data_worker": "worker"}.get(name):
                sizes[kind] = max(sizes.get(kind, 0), size)
    return sizes


@pytest.mark.parametrize("workers", [0, 1])
def test_metrics_tell_the_memory_of_the_largest_worker_and_decoding_process(run_config, tmp_path, workers):
    config = run_config(data={"workers": workers, "repeat": True}, in_child=True, drop_budget=1.0, seq_length=2048)
    metrics = MetricsConfig(directory=str(tmp_path), interval=1)
    kinds = {"worker", "decoder"} if workers else {"decoder"}
    deadline = time.monotonic() + 200
    for _ in watched(build_loader(config), metrics, capacity=2048):
        line = json.loads((tmp_path / "rank0.jsonl").read_text().splitlines()[-1])
        sizes = private_sizes()
        # A pack that waits for its reader is its worker's own memory, so the two looks differ now and then. After a
        # look that was slow, on a busy machine, the next one is a hundred times as long away.
        if sizes.keys() >= kinds and line.get("memory") == {k: pytest.approx(v, rel=0.3) for k, v in sizes.items()}:
            break
        assert time.monotonic() < deadline, f"{line.get('memory')} were never near {sizes}"
        time.sleep(0.05)
    figures_of = figures([RankLine.of(line)])
    assert {name for name in figures_of if name.endswith("_mib_max")} == {f"{kind}_mib_max" for kind in sizes}
    assert figures_of["decoder_mib_max"] == line["memory"]["decoder"] / 2**20


@pytest.mark.timeout(60)
def test_a_worker_still_ends_when_its_own_rank_ends_it(run_config, no_signal_of_children):
    loader = build_loader(run_config(data={"workers": 1, "repeat": True}, drop_budget=1.0, seq_length=2048))
    packs = iter(loader)
    next(packs)
    (worker,) = loader._loader._iterator._workers
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
    del packs


def raising(error):
    yield 1
    raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [  # torch's and multiprocessing's own words
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"),
            "Shared memory is f",
        ),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), r"pid 7\) was killed \(Killed\), as"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. "), r"pid 7\) was ended by SIGTERM"),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), r"pid 7, 8\) was killed, as"),
        (ConnectionResetError(104, "Connection reset by peer"), "worker was killed while it handed over a pack"),
        (EOFError(), "worker was killed while it handed over a pack"),
        (FileNotFoundError(2, "No such file or directory"), "worker was killed while it handed over a pack"),
        (RuntimeError("received 0 items of ancdata"), "too many open files"),
        (OSError(24, "Too many open files"), "too many open files"),
        (OSError(28, "No space left on device"), "Shared memory is full"),
        (
            FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 1.\nOriginal\n  x\ntext/1.tar\n"),
            "cannot be read any more: text/1.tar. See whether",
        ),
        (RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)"), "Shared memory is full"),
    ],
)
def test_errors_of_torch_say_what_to_do(error, told):
    packs = in_sentences(raising(error))
    assert next(packs) == 1
    with pytest.raises(UserError, match=told) as caught:
        next(packs)
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are_and_lose_only_a_workers_traceback():
    other = RuntimeError("another")
    with pytest.raises(RuntimeError) as caught:
        list(in_sentences(raising(other)))
    assert caught.value is other
    text = "Caught ConfigError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  x\n"
    with pytest.raises(ConfigError) as told:
        list(in_sentences(raising(ConfigError(f"{text}energon_packing.errors.ConfigError: no such prompt.\n"))))
    assert str(told.value) == "no such prompt."
