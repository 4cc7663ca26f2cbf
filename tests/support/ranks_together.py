"""Two data-parallel ranks of Bridge's set-up, without a model: ``ranks_together.py FOLDER`` runs the jobs in it.

A job builds the iterators of each rank as ``setup`` does, lets Bridge's own ``maybe_load_dataloader_state`` restore
them, and reads packs. What each rank saw is written to ``FOLDER/NAME-RANK.json``.
"""

import faulthandler
import hashlib
import json
import pickle
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from support import ranks

RANKS, STEP = 2, 4


@dataclass
class Job:
    """One start of a run.

    Attributes:
        name: of its results.
        datasets: of each rank.
        folder: of the states to go on from, at step `STEP`; a run that begins if None.
        packs: taken on each rank.
        saved: number of packs -> folder of the states after so many.
        validation: whether the iterator of the validation is read instead.
    """

    name: str
    datasets: list[Any]
    folder: Path | None = None
    packs: int = 1
    saved: dict[int, Path] = field(default_factory=dict)
    validation: bool = False


def state_file(folder: Path, rank: int) -> Path:
    return folder / f"iter_{STEP:07d}" / f"train_dataloader_dprank{rank:03d}.pt"


def setup(job: Job, rank: int, groups: Any) -> Any:
    """Calls as Bridge does, with its variables."""
    from megatron.bridge.data.base import DatasetBuildContext
    from megatron.bridge.training.checkpointing import maybe_load_dataloader_state

    folder = None if job.folder is None else str(job.folder)
    checkpoint_manager = SimpleNamespace(checkpointing_context={"dataloader_state_dir": folder}, save=None)
    assert checkpoint_manager is not None

    def setup_data_iterators(train_state: Any) -> Any:
        assert train_state is not None
        counts = (0, 100) if job.validation else (100, 0)
        context = DatasetBuildContext(
            train_samples=counts[0], valid_samples=counts[1], test_samples=0, pg_collection=groups
        )
        return next(made for made in job.datasets[rank].build_datasets(context) if made is not None)

    step = STEP if job.folder else 0
    iterator = setup_data_iterators(SimpleNamespace(step=step))
    if step:
        maybe_load_dataloader_state(SimpleNamespace(iterable=iterator), step, folder, pg_collection=groups)
    return iterator


def run_job(job: Job, rank: int, groups: Any) -> dict[str, Any]:
    iterator = setup(job, rank, groups)
    digests = []
    for number in range(1, job.packs + 1):
        batch = next(iterator)
        tensors = [value for _, value in sorted(batch.items()) if torch.is_tensor(value)]
        digests.append(hashlib.sha256(b"".join(each.float().numpy().tobytes() for each in tensors)).hexdigest()[:16])
        if number in job.saved:
            file = state_file(job.saved[number], rank)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"dataloader_state_dict": iterator.save_state()}, file)
    state = iterator.save_state()
    return {"digests": digests, "packs": state["packs"], "position": state["source"].get("position")}


def be_rank(folder: Path, rank: int) -> None:
    """In a fork: all jobs in turn."""
    torch.set_num_threads(1)
    from support.bridge_cpu import stand_ins

    if stand_ins.needed():
        stand_ins.install()
    jobs = pickle.loads((folder / "jobs.pickle").read_bytes())
    store = distributed.FileStore(str(folder / "store"), RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    alone = [distributed.new_group([each]) for each in range(RANKS)][rank]
    groups = SimpleNamespace(dp=distributed.group.WORLD, tp=alone, cp=alone, pp=alone)
    for job in jobs:
        faulthandler.dump_traceback_later(50)  # what a rank waits for, before the other one gives up
        try:
            found = run_job(job, rank, groups)
        except Exception as error:
            found = {"error": [type(error).__name__, str(error)]}
        (folder / f"{job.name}-{rank}.json").write_text(json.dumps(found))
        distributed.barrier()


def run(folder: Path, jobs: list[Job]) -> dict[str, list[dict[str, Any]]]:
    """Job -> what each rank saw."""
    (folder / "store").unlink(missing_ok=True)
    (folder / "jobs.pickle").write_bytes(pickle.dumps(jobs))
    ranks.launch(__file__, folder, folder=folder)
    seen = [[json.loads((folder / f"{job.name}-{rank}.json").read_text()) for rank in range(RANKS)] for job in jobs]
    return {job.name: each for job, each in zip(jobs, seen, strict=True)}


if __name__ == "__main__":
    sys.exit(not ranks.fork(RANKS, partial(be_rank, Path(sys.argv[1])), grace=60))
