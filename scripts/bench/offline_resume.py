"""Elastic resume of a plan: saved at one size, continued at many; every line compares packs with a run that never
stopped.

A plan is made for the largest alignment of the matrix. It is read on 4 ranks with 2 workers each until a state is
saved. Runs of other sizes restore it and read on past the end of the plan; their packs, put back into global order,
must be those of one process that never stopped: the same samples in the same order, and under the same alignment the
same bytes of every field.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, PlanConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_task_encoder
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.plan import Plan
from energon_packing.offline.planner import make_plan

SAVED = (4, 2)
"""Ranks and workers of the run that saves."""
RANKS, WORKERS = (1, 2, 8), (0, 1, 3)
SIZES = tuple(itertools.product((1, 2), (1, 2)))
"""Tensor and context parallel sizes of the runs that go on."""
WIDEST = ParallelConfig(tensor_parallel=2, context_parallel=2, sequence_parallel=True)


def planned_run(folder: Path, *, conversations: int = 60, seq_length: int = 1024) -> RunConfig:
    """A run on a plan of generated conversations with images and videos, aligned for the widest sizes."""
    source = make_data(folder / "source", conversations=conversations, seed=5, defects=False)
    data, index, plan = folder / "data", folder / "index", folder / "plan.parquet"
    convert(ConvertConfig(sources=(source,), out=data, split={"train": 1.0}, samples_per_shard=12, workers=0))
    run = RunConfig(
        data=DataConfig(path=str(data)),
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl"))),
        packing=PackingConfig(seq_length=seq_length, drop_budget=1.0),
        parallel=WIDEST,
        plan=PlanConfig(max_data_parallel=8),
    )
    measure(MeasureConfig(paths=(data,), out=index, workers=0), run)
    make_plan([index], run, plan)
    return dataclasses.replace(run, data=DataConfig(path=str(plan)))


def sized(run: RunConfig, tensor: int, context: int) -> RunConfig:
    """The run with other parallel sizes."""
    sizes = ParallelConfig(tensor_parallel=tensor, context_parallel=context, sequence_parallel=tensor > 1)
    return dataclasses.replace(run, parallel=sizes)


def identities(packs: Any) -> list[tuple[Any, ...]]:
    """Global position, samples in order, and a digest of every field."""
    return [(pack.index, pack.keys, field_digests(pack.batch)) for pack in packs]


def matrix(
    run: RunConfig,
    *,
    after: int = 16,
    sizes: Sequence[tuple[int, int]] = SIZES,
    readers: Sequence[tuple[int, int]] = tuple(itertools.product(RANKS, WORKERS)),
) -> Iterator[dict[str, Any]]:
    """One row per size and readers (ranks, workers): whether the `after` packs that follow the state are those of a run
    that never stopped.
    """
    ranks, workers = SAVED
    steps = (len(Plan.open(run.data.path)) - after // 2) // ranks  # so that the plan ends within them
    before = open_loader(run, rank=ranks - 1, world_size=ranks, workers=workers)
    for _ in itertools.islice(before, steps):
        pass
    state = before.save_state()
    first = steps * ranks
    for tensor, context in sizes:
        own = sized(run, tensor, context)
        encoder = build_task_encoder(own)
        whole = identities(itertools.islice(open_loader(own, task_encoder=encoder), first + after))[first:]
        for count, processes in readers:
            parts = []
            started = time.perf_counter()
            for rank in range(count):
                given: dict[str, Any] = {"rank": rank, "world_size": count, "workers": processes}
                loader = open_loader(own, task_encoder=encoder, **given)
                loader.restore_state(state)
                parts.append(identities(itertools.islice(loader, after // count)))
            merged = [pack for step in zip(*parts, strict=True) for pack in step]
            yield {
                "saved": f"{ranks} ranks x {workers} workers",
                "tensor_parallel": tensor,
                "context_parallel": context,
                "multiple": encoder.multiple,
                "ranks": count,
                "workers": processes,
                "position": first,
                "packs": len(merged),
                "same_samples": [pack[:2] for pack in merged] == [pack[:2] for pack in whole],
                "same_bytes": merged == whole,
                "seconds": round(time.perf_counter() - started, 2),
            }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line per size; 1 if a run went on with other packs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=60, help="of the generated data set")
    parser.add_argument("--packs", type=int, default=16, help="that are compared after the state; a multiple of 8")
    given = parser.parse_args(arguments)
    same = True
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than this machine's cores
    with tempfile.TemporaryDirectory() as folder:
        for row in matrix(planned_run(Path(folder), conversations=given.conversations), after=given.packs):
            print(json.dumps({"bench": "offline resume", **row}), flush=True)
            same = same and row["same_samples"] and row["same_bytes"]
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
