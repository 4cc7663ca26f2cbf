"""Benchmark of handing packs to the ranks of a replica: how long a training step waits for its pack.

Processes of one host read packs through `OneReader`, and work on each for a while. Four ways take turns:

* ``serialised``: the pack is written into one buffer and broadcast over gloo when it is asked for, as this package did
  before it shared memory;
* ``broadcast-N``: the same, N packs ahead of use, by a thread of each rank that has a group of its own;
* ``ahead-0``: memory is shared, but each pack is read and handed over when it is asked for;
* ``ahead-N``: the same, N packs ahead of use.
"""

import argparse
import json
import multiprocessing
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from bench.loader_run import worker_memory
from energon_packing import thd
from energon_packing.energon.pack_bytes import field_digests, pack_from_bytes, pack_to_bytes
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import OneReader
from energon_packing.thd.batch import PackedBatch

WARM_UP = 3
"""Steps before the clock starts: the worker starts, and the packs ahead are made."""
PATCH = 1176
"""Values of a patch of Qwen2.5-VL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoverJob:
    """One run.

    Attributes:
        ranks: processes of one tensor-parallel group.
        depth: packs ahead; None serialises and broadcasts.
        broadcast: whether packs ahead are serialised and broadcast too, the control of shared memory.
        steps: steps that are measured.
        work: seconds of a step.
        megabytes: pixels of a pack.
        memory: whether to look at memory instead of at time.
    """

    ranks: int
    depth: int | None
    steps: int
    work: float
    megabytes: int
    memory: bool = False
    broadcast: bool = False

    @property
    def name(self) -> str:
        """Of the way that packs take."""
        way = "broadcast" if self.broadcast else "ahead"
        return "serialised" if self.depth is None else f"{way}-{self.depth}"


class _Packs(torch.utils.data.IterableDataset[PackedBatch]):
    """Packs of one large image, each with other pixels, as a loader's worker assembles them."""

    def __init__(self, job: HandoverJob) -> None:
        self._job = job

    def __iter__(self) -> Iterator[PackedBatch]:
        length, patches = 8192, self._job.megabytes * 10**6 // (4 * PATCH)
        ids = torch.arange(length)
        labels = torch.cat([ids[1:], torch.tensor([-100])])
        row: dict[str, Any] = {"input_ids": ids, "labels": labels, "loss_mask": (labels >= 0).float()}
        pixels = torch.rand(patches, PATCH)
        for number in range(WARM_UP + self._job.steps):
            pixels[:, 0] = number
            visual = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, patches // 2]])}
            yield thd.assemble([row | {"position_ids": ids, "key": str(number), "visual_inputs": visual}])


class _Source:
    """The packs of one worker."""

    def __init__(self, job: HandoverJob) -> None:
        loader = torch.utils.data.DataLoader(_Packs(job), batch_size=None, num_workers=1, prefetch_factor=2)
        self._packs = iter(loader)

    def __next__(self) -> PackedBatch:
        return next(self._packs)

    def save_state(self) -> None:
        """Nothing is saved here."""

    def state_later(self) -> Callable[[], Any]:
        return self.save_state

    def restore_state(self, state: Any) -> None:
        """Nothing is restored here."""


def _serialised(
    source: _Source | None, replica: Replica, count: list[int], group: distributed.ProcessGroup | None = None
) -> Iterator[PackedBatch]:
    """Packs as one buffer that is broadcast; ``count`` sums its bytes."""
    while True:
        size = torch.empty(3, dtype=torch.int64)
        payload = None
        if source is not None:
            payload = pack_to_bytes(batch := next(source))
            size[2] = payload.numel()
            count[0] += payload.numel()
        distributed.broadcast(size, replica.reader, group=group)
        payload = torch.empty(int(size[2]), dtype=torch.uint8) if payload is None else payload
        distributed.broadcast(payload, replica.reader, group=group)
        yield batch if source is not None else pack_from_bytes(payload)


def _ahead(packs: Iterator[PackedBatch], job: HandoverJob) -> Iterator[PackedBatch]:
    """The same packs, taken by a thread up to ``job.depth`` before they are asked for."""
    ready: queue.Queue[PackedBatch] = queue.Queue(job.depth or 1)

    def take() -> None:
        for _ in range(WARM_UP + job.steps):
            ready.put(next(packs))

    threading.Thread(target=take, daemon=True).start()
    while True:
        yield ready.get()


def run_rank(job: HandoverJob, rank: int, folder: str) -> None:
    """One rank, in a process of its own; leaves its figures in ``folder``."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", job.ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks, timeout=timedelta(seconds=120))
    replica = Replica.of(SimpleNamespace(tp=distributed.group.WORLD))
    source = _Source(job) if replica.is_reader else None
    broadcast = [0]
    packs: Iterator[PackedBatch]
    reader = None
    if job.depth is not None and not job.broadcast:
        packs = reader = OneReader(source, replica, depth=job.depth)
    elif job.broadcast:
        packs = _ahead(_serialised(source, replica, broadcast, distributed.new_group(backend="gloo")), job)
    else:
        packs = _serialised(source, replica, broadcast)
    waits, releases, start, batch = [], [], 0.0, None
    for step in range(WARM_UP + job.steps):
        distributed.barrier()  # ranks of a tensor-parallel group do each step together
        now = time.perf_counter()
        start = now if step == WARM_UP else start
        fresh = next(packs)
        ready = time.perf_counter()
        batch = fresh  # lets go of the pack before it
        waits.append(ready - now)
        releases.append(time.perf_counter() - ready)
        assert batch.visual_inputs is not None
        assert float(batch.visual_inputs["pixel_values"][-1, 0]) == step
        time.sleep(job.work)
    figures = {
        "seconds": time.perf_counter() - start,
        "waits": waits[WARM_UP:],
        "releases": releases[WARM_UP:],
        "shared": 0 if reader is None else reader.sent["shared"],
        "collective": broadcast[0] if reader is None else reader.sent["collective"],
        "digests": field_digests(batch) if batch is not None else {},
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(figures))
    distributed.barrier()
    if reader is not None:
        reader.close()
    distributed.destroy_process_group()


def run(job: HandoverJob) -> tuple[list[dict[str, Any]], int]:
    """The figures of each rank, and the peak of the memory of all ranks and their worker, bytes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="handover-") as folder:
        ranks = [context.Process(target=run_rank, args=(job, rank, folder)) for rank in range(job.ranks)]
        for rank in ranks:
            rank.start()
        watch = _Watch([rank.pid for rank in ranks] if job.memory else [])
        for rank in ranks:
            rank.join()
        watch.stop()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"a rank of {job.name} failed")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(job.ranks)], watch.peak


class _Watch:
    """Peak of the memory of processes and their children, each shared page counted once."""

    def __init__(self, pids: Sequence[int | None]) -> None:
        self.peak = 0
        self._pids = pids
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._pids and not self._done.wait(0.1):
            found = [pid for each in self._pids for pid in (each, *_children(each))]
            self.peak = max(self.peak, sum(worker_memory(pid).get("pss", 0) for pid in found))

    def stop(self) -> None:
        """Ends the watch."""
        self._done.set()
        self._thread.join()


def _children(pid: int | None) -> list[int]:
    file = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(word) for word in file.read_text().split()]
    except OSError:
        return []


def result_of(job: HandoverJob, ranks: Sequence[dict[str, Any]], peak: int) -> dict[str, Any]:
    """The result of one way, the worst rank counting."""
    assert all(rank["digests"] == ranks[0]["digests"] for rank in ranks), "ranks got different packs"
    milliseconds = [[1e3 * wait for wait in rank["waits"]] for rank in ranks]
    packs = WARM_UP + job.steps
    return {
        "benchmark": f"handover.tp{job.ranks}",
        "way": job.name,
        "step_ms": round(1e3 * max(rank["seconds"] for rank in ranks) / job.steps, 2),
        "waiting_percent": round(max(100 * sum(rank["waits"]) / rank["seconds"] for rank in ranks), 3),
        "next_ms_median": round(max(map(statistics.median, milliseconds)), 3),
        "next_ms_longest": round(max(map(max, milliseconds)), 3),
        "release_ms_median": round(max(1e3 * statistics.median(rank["releases"]) for rank in ranks), 3),
        "shared_mb_per_pack": round(ranks[0]["shared"] / packs / 1e6, 1),
        "collective_mb_per_pack": round(ranks[0]["collective"] / packs / 1e6, 1),
        "peak_mb": peak >> 20,
    }


def main(arguments: Sequence[str]) -> int:
    """Measures every way with every number of ranks."""
    parser = argparse.ArgumentParser(prog="bench.py handover", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes that share their packs")
    parser.add_argument("--depth", type=int, default=2, help="packs ahead (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="steps that are measured (default: %(default)s)")
    parser.add_argument("--work", type=float, default=0.2, help="seconds of a step (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=126, help="pixels of a pack (default: %(default)s)")
    options = parser.parse_args(list(arguments))
    for ranks in options.ranks:
        ways = [(depth, False) for depth in dict.fromkeys((None, 0, options.depth))]
        for depth, ahead in (*ways, (options.depth, True)):
            job = HandoverJob(
                ranks=ranks,
                depth=depth,
                steps=options.steps,
                work=options.work,
                megabytes=options.megabytes,
                broadcast=ahead,
            )
            figures, _ = run(job)
            looked = replace(job, steps=8, memory=True)
            print(json.dumps(result_of(job, figures, run(looked)[1])), flush=True)
    return 0
