"""Two data-parallel ranks that train: how long they wait for each other's gradients, with packs in random order and in
that of a plan, and what the costs of the packs say.

The ranks are processes over gloo with one thread each: a tiny model of Megatron-Bridge with a vision tower, Bridge's
own training loop and forward step, packs that are made before the clock starts. Both orders have the same packs.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.loader_data import BenchData
from bench.peers import SEARCH_PATH
from bench.train_run import TrainJob, run_config
from energon_packing.packing.balance import step_efficiency

ORDERS = ("random", "plan")
REPEATS = 2
FIRST = 2
"""Steps that are not measured."""


def run(job: TrainJob, data: BenchData, work: Path, *, ranks: int = 2) -> Iterator[dict[str, Any]]:
    """Trains in each order, twice.

    Args:
        job: of rows ``packs``; see `bench.train_run.TrainJob`.
        data: what is packed.
        work: directory for plan, packs and logs.

    Yields:
        For each order: ``waiting``, the share of the steps in which a rank waits for the gradients of the others, as
        measured; ``predicted`` by the operations of the model, and ``fitted``, by the seconds that a unit of each cost
        and a step take, fitted to the steps in random order; and real tokens per second.

    Raises:
        RuntimeError: a rank failed; with its output.
    """
    from support import ranks as processes

    batches, costs, size = _packs(job, data, work, ranks)
    steps = len(batches) // ranks
    orders = {"random": np.random.default_rng(job.window).permutation(len(batches)), "plan": np.arange(len(batches))}
    packs = work / "packs.pickle"
    packs.write_bytes(pickle.dumps([batch.to_bridge() for batch in batches]))
    case = {"family": job.family, "seq_length": job.seq_length, "packs": str(packs), "ranks": ranks, "steps": steps}
    case |= {"vocab_size": size, "processor": job.processor}
    (work / "case.json").write_text(json.dumps(case | {"orders": {name: of.tolist() for name, of in orders.items()}}))
    processes.launch(__file__, str(work), folder=work, timeout=3000, PYTHONPATH=SEARCH_PATH)
    placed = {name: of[: steps * ranks].reshape(steps, ranks)[1 + FIRST :] for name, of in orders.items()}
    taken, tokens = {}, {}
    for name in ORDERS:
        times = np.array(
            [
                [json.loads((work / f"{name}{at}-{rank}.json").read_text()) for rank in range(ranks)]
                for at in range(REPEATS)
            ]
        )  # [repeat, rank, step, entered | left]
        computed = times[:, :, 1:, 0] - times[:, :, :-1, 1]  # since the step before had all gradients
        taken[name] = computed[:, :, FIRST:].min(axis=0).T  # [step, rank]
        spent = (times[:, :, -1, 1] - times[:, :, FIRST, 1]).max(axis=1).min()
        tokens[name] = sum(batches[at].real_tokens for at in placed[name].ravel()) / spent
    cost_of = {name: costs[placed[name]] for name in ORDERS}
    columns = np.append(cost_of["random"].reshape(-1, 2), np.ones((placed["random"].size, 1)), axis=1)
    slope, *_ = np.linalg.lstsq(columns, taken["random"].ravel(), rcond=None)
    for name in ORDERS:
        fitted = cost_of[name] @ slope[:2] + slope[2]
        yield {
            "benchmark": "train.ranks",
            "order": name,
            "ranks": ranks,
            "family": job.family,
            "steps": len(taken[name]),
            "waiting": round(1 - step_efficiency(taken[name].T), 4),
            "predicted": round(1 - step_efficiency(cost_of[name].sum(axis=2).T), 4),
            "fitted": round(1 - step_efficiency(fitted.T), 4),
            "tokens_per_second": round(tokens[name]),
        }


def _packs(job: TrainJob, data: BenchData, work: Path, ranks: int) -> tuple[list[Any], np.ndarray, int]:
    """Packs of a plan for so many ranks that knows the model, in order; their costs ``[P, 2]``; and the vocabulary's
    size."""
    from support.bridge_cpu import stand_ins
    from support.bridge_cpu.tiny_models import hugging_face_config, special_tokens, vocabulary_of

    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.open_loader import open_loader
    from energon_packing.offline.plan import Plan
    from energon_packing.offline.planner import make_plan

    stand_ins.install()
    vocabulary = vocabulary_of(job.processor)
    size = max(vocabulary.values()) + 1
    model = hugging_face_config(job.family, vocab_size=size, tokens=special_tokens(vocabulary))
    model.save_pretrained(work / "model")
    config = run_config(job)
    config = replace(
        config,
        packing=replace(config.packing, cost_model=str(work / "model")),
        plan=replace(config.plan, max_data_parallel=ranks),
    )
    measure(MeasureConfig(paths=(data.root,), out=work / "index", workers=0), config)
    make_plan([work / "index"], config, work / "plan.parquet")
    config = replace(config, data=replace(config.data, path=str(work / "plan.parquet")))
    packs = [pack.batch for pack in open_loader(config)]
    return packs, Plan.open(work / "plan.parquet").costs(0, len(packs)).astype(np.float64), size


def be_rank(folder: Path, case: dict[str, Any], name: str, number: int, port: int, rank: int) -> None:
    """In a fork: trains one order; writes when this rank entered and left the reduction of each step's gradients."""
    import torch
    from megatron.core.distributed import DistributedDataParallel
    from support import ranks as processes
    from support.bridge_cpu import tiny_models, training_run

    from bench.train_run import _data_set

    torch.set_num_threads(1)
    processes.torchrun(rank, case["ranks"], port)
    packs, order, times = pickle.loads(Path(case["packs"]).read_bytes()), case["orders"][name], []
    synchronise: Any = DistributedDataParallel.finish_grad_sync

    def timed(self: Any, *arguments: Any, **keywords: Any) -> None:
        entered = time.perf_counter()
        synchronise(self, *arguments, **keywords)
        times.append((entered, time.perf_counter()))

    DistributedDataParallel.finish_grad_sync = timed
    with training_run.process_groups():
        tokens = tiny_models.special_tokens(tiny_models.vocabulary_of(case["processor"]))
        model = tiny_models.provider(
            case["family"], vocab_size=case["vocab_size"], tokens=tokens, seq_length=case["seq_length"]
        )
        own = (dict(packs[at]) for at in order[rank : case["steps"] * case["ranks"] : case["ranks"]])
        config = training_run.make_config(
            model, _data_set(own, "packs", case["seq_length"]), steps=case["steps"], global_batch_size=case["ranks"]
        )
        training_run.run(config, forward_step="vlm")
    (folder / f"{name}{number}-{rank}.json").write_text(json.dumps(times))


def main(place: str) -> None:
    """Imports what the ranks need, then forks those of each order, in turn."""
    from support import ranks as processes
    from support.bridge_cpu import stand_ins

    stand_ins.install()

    processes.ready()
    folder = Path(place)
    case = json.loads((folder / "case.json").read_text())
    for number in range(REPEATS):
        for name in ORDERS:
            started = partial(be_rank, folder, case, name, number, processes.free_port())
            if not processes.fork(case["ranks"], started, grace=20):
                raise SystemExit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
