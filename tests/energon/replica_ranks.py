"""Small replicas over gloo, without Megatron: ``replica_ranks.py FOLDER DEPTH`` runs all cases in forks of itself.

Readers make DEPTH packs ahead. A case is a function of its replica and a source of packs; what it returns on each rank
is written to ``FOLDER/CASE-RANK.json``.
"""

import dataclasses
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from energon_packing import thd
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_channel import SharedBlock
from energon_packing.energon.replica_reader import EveryReader, OneReader
from energon_packing.errors import ConfigError
from energon_packing.thd.batch import PackedBatch

DEPTH = [0]


def pack(number: int, *, key: str = "", pixel: float = 0.0, patches: int = 4) -> PackedBatch:
    """The pack of a number; two samples, the second one with an image. 1 MB of pixels are 87,382 patches."""
    rows = []
    for part, length in enumerate((5, 7)):
        ids = torch.arange(length) + 100 * number + 10 * part
        labels = torch.roll(ids, -1)
        labels[-1] = -100
        row = {
            "input_ids": ids,
            "labels": labels,
            "loss_mask": (labels >= 0).float(),
            "position_ids": torch.arange(length),
            "key": key if part and key else f"sample-{number}-{part}",
        }
        if part:
            row["visual_inputs"] = {
                "pixel_values": torch.full((patches, 3), float(number) + pixel),
                "image_grid_thw": torch.tensor([[1, 2, patches // 2]]),
            }
        rows.append(row)
    return thd.assemble(rows, multiple=4)


class Source:
    """Packs 0, 1, 2, ... up to ``end``; ``change`` makes other ones."""

    def __init__(self, end: int = 100, change: Callable[[int], PackedBatch] = pack) -> None:
        self.next, self.end, self.change = 0, end, change

    def __next__(self) -> PackedBatch:
        if self.next == self.end:
            raise StopIteration
        self.next += 1
        return self.change(self.next - 1)

    def save_state(self) -> Any:
        return {"next": self.next}

    def state_later(self) -> Callable[[], Any]:
        state = self.save_state()
        return lambda: state

    def restore_state(self, state: Any) -> None:
        self.next = state["next"]


def told(reader: Any, count: int) -> list[Any]:
    """What up to ``count`` reads give: the first token and whether there are pixels, or the error."""
    found: list[Any] = []
    for _ in range(count):
        try:
            batch = next(reader)
        except StopIteration:
            return [*found, "end"]
        except Exception as error:
            return [*found, [type(error).__name__, str(error)]]
        found.append([int(batch.tokens[0, 0]), "pixel_values" in (batch.visual_inputs or {})])
    return found


def one(replica: Replica, source: Source | None = None) -> OneReader:
    return OneReader((source or Source()) if replica.is_reader else None, replica, depth=DEPTH[0])


# --- Cases: layout as (tensor, context, data, pipeline), and what each rank does -------------------------------------


def a_late_stage(replica: Replica) -> Any:
    """The reader is done before the second stage asks for the first time."""
    reader = one(replica)
    if replica.stage == 0:
        found = told(reader, 20)
        distributed.barrier()
        time.sleep(0.5)  # the thread of the sender goes on
        distributed.barrier()
        return found
    distributed.barrier()
    found = told(reader, 20)
    distributed.barrier()
    return found


def a_mistake(replica: Replica) -> Any:
    def change(number: int) -> PackedBatch:
        if number == 2:
            raise ConfigError("no such prompt.")
        return pack(number)

    return told(one(replica, Source(change=change)), 5)


def a_crash(replica: Replica) -> Any:
    def change(number: int) -> PackedBatch:
        return pack(number // (2 - number))

    return told(one(replica, Source(change=change)), 5)


def two_restored(replica: Replica) -> Any:
    """Every rank goes on from one state, but the last one forgets to."""
    reader = one(replica)
    first = told(reader, 3)
    state = {"packs": 3, "source": {"next": 3}}
    if replica.is_reader:
        assert reader.save_state() == state
    again = one(replica)
    if replica.global_rank != 2:
        again.restore_state(state)
    return [first, told(again, 1)]


def two_readers(replica: Replica) -> Any:
    """Training and validation packs on one replica, asked for in turn; the first stage runs ahead of the second."""
    readers = [one(replica, Source(change=lambda number, first=first: pack(first + number))) for first in (0, 50)]
    found: list[list[Any]] = [[], []]
    for number in range(40):
        found[number % 2] += told(readers[number % 2], 1)
    distributed.barrier()
    return found


def whole(replica: Replica) -> Any:
    """The pack that arrives is the pack that was read, in every field."""
    return same_fields(replica, next(one(replica)), pack(0))


def large(number: int) -> PackedBatch:
    """The pack of a number with pixels that are shared, 2.4 MB."""
    return pack(number, patches=200_000)


def large_whole(replica: Replica) -> Any:
    """The same for pixels that get memory of their own."""
    reader = one(replica, Source(change=large))
    return [same_fields(replica, next(reader), large(number)) for number in range(4)]


class InWorker(torch.utils.data.IterableDataset):
    """Large packs as a loader's worker sends them."""

    def __iter__(self) -> Any:
        return map(large, range(1000))


class Workers(Source):
    """What a worker sends."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: Any = None

    def __next__(self) -> PackedBatch:
        if self.batches is None:  # the worker is forked when the links to other ranks exist, as in a run
            self.batches = iter(torch.utils.data.DataLoader(InWorker(), batch_size=None, num_workers=1))
        return next(self.batches)


def from_a_worker(replica: Replica) -> Any:
    """The same for pixels in the memory that a worker allocated; and whether that memory itself was shared."""

    sizes: list[int] = []
    original = SharedBlock.new.__func__  # type: ignore[attr-defined]
    SharedBlock.new = lambda size: sizes.append(size) or original(SharedBlock, size)  # type: ignore[method-assign]
    try:
        reader = one(replica, Workers() if replica.is_reader else None)
        return [*(same_fields(replica, next(reader), large(number)) for number in range(6)), [not sizes]]
    finally:
        SharedBlock.new = classmethod(original)  # type: ignore[method-assign, assignment]


def written_to(replica: Replica) -> Any:
    """A rank that changes its pack changes nobody else's."""
    reader = one(replica, Source(change=large))
    batch = next(reader)
    distributed.barrier()
    if replica.global_rank == 0:
        batch.visual_inputs["pixel_values"].fill_(7.0)
        batch.tokens.fill_(7)
    distributed.barrier()
    return [float(batch.visual_inputs["pixel_values"].sum()), int(batch.tokens[0, 0])]


def on_two_hosts(replica: Replica) -> Any:
    """Ranks 0 and 1 on one host, 2 and 3 on another; then what went which way on this rank, in packs of pixels."""
    replica = dataclasses.replace(replica, hosts=((0, 1), (2, 3)))
    reader = one(replica, Source(change=large, end=4))
    found = [same_fields(replica, next(reader), large(number)) for number in range(4)]
    ends = told(reader, 1)
    pixels = 200_000 * 3 * 4
    return [*found, ends, [reader.sent["shared"] / pixels, reader.sent["collective"] // pixels]]


def same_fields(replica: Replica, batch: PackedBatch, expected: PackedBatch) -> list[bool]:
    """Whether each field of a pack is as expected on this rank."""
    same = []
    for spec in dataclasses.fields(batch):
        ours, theirs = getattr(batch, spec.name), getattr(expected, spec.name)
        if isinstance(theirs, torch.Tensor):
            same.append(torch.equal(ours, theirs) and ours.dtype == theirs.dtype)
        elif spec.name == "visual_inputs":
            kept = set(theirs) if replica.stage == 0 else set(theirs) - {"pixel_values"}
            same.append(set(ours) == kept and all(torch.equal(ours[name], theirs[name]) for name in kept))
        else:
            same.append(ours == theirs)
    return same


def every(replica: Replica, change: Callable[[int], PackedBatch] = pack, **options: Any) -> Any:
    own = replica.global_rank == 2
    return told(EveryReader(Source(change=change if own else pack), replica, depth=DEPTH[0], **options), 5)


def another_sample(replica: Replica) -> Any:
    return every(replica, lambda number: pack(number, key="stranger" if number == 2 else ""))


def brighter(number: int) -> PackedBatch:
    return pack(number, pixel=1.0 if number == 2 else 0.0)


STAGE, PIPELINE = (2, 2, 1, 1), (1, 2, 1, 2)
CASES: dict[str, tuple[tuple[int, int, int, int], Callable[[Replica], Any]]] = {
    "the_end": (STAGE, lambda replica: told(one(replica, Source(end=3)), 5)),
    "a_late_stage": (PIPELINE, a_late_stage),
    "a_mistake": (STAGE, a_mistake),
    "a_mistake_in_a_pipeline": (PIPELINE, a_mistake),
    "a_crash": (STAGE, a_crash),
    "two_restored": (STAGE, two_restored),
    "two_restored_in_a_pipeline": (PIPELINE, two_restored),
    "two_readers": (STAGE, two_readers),
    "two_readers_in_a_pipeline": (PIPELINE, two_readers),
    "whole": (STAGE, whole),
    "whole_in_a_pipeline": (PIPELINE, whole),
    "large_whole": (STAGE, large_whole),
    "large_whole_in_a_pipeline": (PIPELINE, large_whole),
    "from_a_worker": (STAGE, from_a_worker),
    "written_to": (STAGE, written_to),
    "on_two_hosts": (STAGE, on_two_hosts),
    "another_sample": (STAGE, another_sample),
    "another_sample_in_a_pipeline": (PIPELINE, another_sample),
    "another_pixel": (STAGE, lambda replica: every(replica, brighter)),
    "another_pixel_between_comparisons": (STAGE, lambda replica: every(replica, brighter, compare_every=3)),
    "one_ends_early": (
        STAGE,
        lambda replica: told(EveryReader(Source(end=2 if replica.global_rank == 2 else 9), replica, depth=DEPTH[0]), 5),
    ),
    "one_crashes": (STAGE, lambda replica: every(replica, lambda number: pack(number // (2 - number)))),
    "all_alike": (STAGE, every),
    "all_alike_in_a_pipeline": (PIPELINE, every),
    "who_is_who": (
        (1, 1, 2, 2),
        lambda of: [of.rank, of.world_size, of.stage, of.reader, of.members, of.leaders],
    ),
}


# --- The world -------------------------------------------------------------------------------------------------------


def process_groups(layout: tuple[int, int, int, int]) -> Any:
    """The groups of this rank; tensor ranks are numbered first, then context, data and pipeline ranks."""
    sizes = dict(zip(("tp", "cp", "dp", "pp"), layout, strict=True))
    grid = torch.arange(4).view(*reversed(layout))  # axes: pipeline, data, context, tensor
    found = {}
    for axis, name in enumerate(reversed(sizes)):
        for ranks in grid.movedim(axis, -1).reshape(-1, sizes[name]).tolist():
            group = distributed.new_group(ranks, backend="gloo")
            if distributed.get_rank() in ranks:
                found[name] = group
    return SimpleNamespace(**found)


def run_rank(folder: Path, rank: int) -> None:
    """All cases in turn; never returns."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 4)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=120))
    for name, (layout, case) in CASES.items():
        began = time.monotonic()
        try:
            replica = Replica.of(process_groups(layout))
            result = case(replica)
            (folder / f"{name}-{rank}.json").write_text(json.dumps(result))
            # A group that one rank drops while another still connects to it fails there, so it is kept until here.
            distributed.barrier()
            del replica
            gc.collect()  # a worker that is forked must not be the one to end a group: its threads are not there
        except BaseException as error:
            error.add_note(f"rank {rank}, case {name}, {time.monotonic() - began:.0f} s after its start")
            faulthandler.dump_traceback()  # what the other threads of this rank wait for
            raise
    os._exit(0)


def kill_one(folder: Path, killed: int) -> None:
    """Two ranks read packs of a worker until one of them is killed; the other writes what it saw."""
    # The killed one is the child: what a program leaves when it ends, `forking_python` kills.
    rank = 1 - killed if (other := os.fork()) else killed
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    replica = Replica.of(SimpleNamespace(tp=distributed.group.WORLD))
    reader = one(replica, Workers() if replica.is_reader else None)
    found = told(reader, 2)
    if rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    found += told(reader, 50)
    (folder / "said.json").write_text(json.dumps(found))
    (folder / "said.json").rename(folder / "survivor.json")
    os.waitpid(other, 0)
    os._exit(0)


def leave(folder: Path) -> None:
    """Four ranks in two stages, then on two hosts, read some packs and end as programs do, with packs made ahead."""
    children: list[int] = []
    rank = 3
    for number in range(3):
        child = os.fork()
        if child == 0:
            rank, children = number, []
            break
        children.append(child)
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 4)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    replica = Replica.of(process_groups(PIPELINE))
    stages = one(replica, Source(change=large) if replica.is_reader else None)
    replica = dataclasses.replace(Replica.of(process_groups(STAGE)), hosts=((0, 1), (2, 3)))
    hosts = one(replica, Source(change=large) if replica.is_reader else None)
    found = [told(stages, 3), told(hosts, 3)]
    assert [len(each) for each in found] == [3, 3]
    assert all(isinstance(each[-1][0], int) for each in found)
    if rank == 2:
        stages.close()  # nobody has to close, and anybody may
    distributed.barrier()
    distributed.destroy_process_group()
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    sys.exit(f"{failed} failed" if failed else 0)


def main(folder: str, depth: str, killed: str | None = None) -> None:
    DEPTH[0] = int(depth)
    if killed == "nobody":
        leave(Path(folder))
    if killed is not None:
        kill_one(Path(folder), int(killed))
    ranks = []
    for rank in range(4):
        child = os.fork()
        if child == 0:
            try:
                run_rank(Path(folder), rank)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        ranks.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in ranks))


def run(folder: Path, depth: int) -> dict[str, list[Any]]:
    """Case -> what each of the four ranks said.

    Raises:
        RuntimeError: a rank failed.
    """
    from forking_python import quick_python
    from support.ranks import ranks_environment

    command = [quick_python(), "-W", "ignore", str(Path(__file__).resolve()), str(folder), str(depth)]
    ended = subprocess.run(command, env=ranks_environment(), capture_output=True, text=True, timeout=240, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-20_000:])
    return {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(4)] for name in CASES}


if __name__ == "__main__":
    main(*sys.argv[1:])
