"""A pipeline of processes over gloo: Megatron-Core's schedules and messages, a model that sleeps.

Each stage is a module with a real backward pass; a micro-batch sleeps in it for as long as the case says. Run as a
program it imports once and forks the ranks of each case: ``pipeline_ranks.py FOLDER``.
"""

import json
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from support import ranks

WIDTH, REPEATS = 64, 3  # large enough that a message is not sent along with its announcement


class Sleep(torch.autograd.Function):
    """Adds nothing; the forward and the backward pass take their seconds, and are noted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: Any, micro_batch: int) -> torch.Tensor:
        ctx.of = stage, micro_batch
        stage.run(False, micro_batch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        stage, micro_batch = ctx.of
        stage.run(True, micro_batch)
        return gradient, None, None


class Stage(torch.nn.Module):
    """Times of each micro-batch in one stage; what Core asks a chunk of a model for."""

    def __init__(self, config: Any, number: int, times: list[list[float]], ran: list[Any]) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.number, self.times, self.ran, self.input = config, number, times, ran, None
        self.model_type = ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, 1, WIDTH))

    def set_input_tensor(self, tensors: list[Any]) -> None:
        """The output of the stage before, None in the first."""
        self.input = tensors[0]

    def forward(self, micro_batch: int) -> torch.Tensor:
        x = self.weight * 1.0 if self.input is None else self.input
        return Sleep.apply(x, self, micro_batch)

    def run(self, backward: bool, micro_batch: int) -> None:
        self.ran.append([backward, micro_batch, self.number])
        time.sleep(self.times[backward][micro_batch])


def forward_step(iterator: Any, stage: Stage) -> Any:
    """As Bridge's: the output, and what makes a loss of it in the last stage."""
    return stage(next(iterator)), lambda output: (output.sum(), {})


def core_config(pipeline: int, chunks: int, group: int, **more: Any) -> Any:
    """A configuration as Bridge makes it: interleaved stages overlap their messages."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=pipeline * chunks,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        microbatch_group_size_per_vp_stage=group or pipeline,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        deallocate_pipeline_outputs=True,
        **more,
    )


def run_case(case: dict[str, Any]) -> tuple[float, list[Any]]:
    """Seconds of a step from its first start to its last end, the least of some repeats; and what this rank ran in it:
    whether backward, micro-batch, stage."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    pipeline, chunks = case["pipeline"], case["chunks"]
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        create_gloo_process_groups=False,
    )
    rank, config = torch.distributed.get_rank(), core_config(pipeline, chunks, case["group"])
    columns = [list(zip(*case[way], strict=True)) for way in ("forward", "backward")]
    ran: list[Any] = []
    numbers = [chunk * pipeline + rank for chunk in range(chunks)]
    stages = [Stage(config, number, [way[number] for way in columns], ran) for number in numbers]
    count, taken = len(case["forward"]), []
    for _ in range(REPEATS + 1):  # the first one connects the ranks
        ran.clear()
        torch.distributed.barrier()
        start = time.time()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(range(count)) for _ in stages],
            model=stages,
            num_microbatches=count,
            seq_length=WIDTH,
            micro_batch_size=1,
        )
        times = torch.tensor([-start, time.time()], dtype=torch.float64)
        torch.distributed.all_reduce(times, torch.distributed.ReduceOp.MAX)
        taken.append(float(times.sum()))
    parallel_state.destroy_model_parallel()
    return min(taken[1:]), ran


def be_rank(world: int, cases: list[dict[str, Any]], folder: Path, rank: int) -> None:
    """In a fork: the cases of one number of ranks; each writes what it found."""
    from support.bridge_cpu import stand_ins

    torch.set_num_threads(1)
    stand_ins.install()
    store = torch.distributed.FileStore(str(folder / f"store{world}"), world)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    with stand_ins.without_warnings():
        found = [run_case(case) for case in cases]
    (folder / f"found{world}-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def run(cases: list[dict[str, Any]]) -> list[list[tuple[float, list[Any]]]]:
    """What `run_case` returns on each rank, of each case: ``pipeline``, ``chunks``, ``group``, and ``forward`` and
    ``backward``, seconds of each micro-batch in each stage.

    Raises:
        RuntimeError: with the output of the ranks.
    """
    with tempfile.TemporaryDirectory(prefix="pipeline-ranks-") as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps(cases))
        ranks.launch(__file__, folder, folder=folder, timeout=300)
        found: dict[int, list[Any]] = {world: [] for world in range(1 + max(case["pipeline"] for case in cases))}
        for world, of in found.items():
            of += [json.loads(file.read_text()) for file in sorted(folder.glob(f"found{world}-*.json"))]
        return [[each.pop(0) for each in found[case["pipeline"]]] for case in cases]


def main(name: str) -> None:
    """Imports what the ranks need, then forks them."""
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    stand_ins.uninstall()
    ranks.ready()
    folder = Path(name)
    cases = json.loads((folder / "cases.json").read_text())
    for world in sorted({case["pipeline"] for case in cases}):
        own = [case for case in cases if case["pipeline"] == world]
        if not ranks.fork(world, partial(be_rank, world, own, folder)):
            raise SystemExit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
