"""Four processes over gloo: one step of Megatron-Core's ``dev`` branch with a context-parallel size per micro-batch.

Run as a program, with a checkout of that branch first on ``PYTHONPATH``, it imports Core once and forks the ranks of
each case: ``dynamic_ranks.py FOLDER``. `dynamic_training` runs the whole training loop.

Real are ``wrap_data_iterator`` with our scheduler in its map, ``get_batch_on_this_rank_for_sequence_packing``,
``finalize_packed_seq_params``, ``PackedSeqParams``, the process groups of `parallel_state`, ``GPTModel`` of the local
layer specification (its rotary positions of rows that are cut, too), the schedule, the data-parallel wrapper and
``finalize_model_grads``. The loss function is that of ``pretrain_gpt.py``.

What stands in for CUDA and Transformer Engine, all of it in `stand_in` except for the attention:

* ``torch.cuda.current_device``: names the CPU; ``torch.cuda.synchronize``: nothing;
* ``torch.distributed.barrier``: without ``device_ids``, which gloo refuses;
* ``torch.Tensor.cuda``, ``torch.nn.Module.cuda``, and ``torch.cuda``'s streams: the data-parallel wrapper is built on
  a side stream, and the count of tokens is moved;
* ``torch.zeros(device="cuda")``: on the CPU; the schedule counts its tokens there;
* ``get_thd_partitioned_indices``, Transformer Engine's kernel: our indices, which are equal (tests/te);
* ``is_te_min_version`` of the configuration: a scheduler of packed rows demands Transformer Engine 2.9;
* `GroupAttention` for ``TEDotProductAttention``: keys and values of all ranks of the row's group are gathered.
"""

import contextlib
import json
import os
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from support import ranks

WORLD, VOCABULARY, LONGEST, MULTIPLE = 4, 64, 256, 8  # a multiple of 8 fits context parallelism up to 4

# Lengths of the samples of each pack. Uneven on purpose: below two pieces a rank, with and without padding.
PACKS = ((90, 23), (5, 40), (3,), (17, 8), (31,), (2, 9), (64,), (12, 33), (7, 7, 7), (16,), (25,), (41, 3))
# By the ranks of data and context parallelism: micro-batches of one step, each its groups, each its ranks and its pack.
# Groups of several sizes are beside each other.
PLANS: dict[int, list[list[tuple[list[int], int]]]] = {
    4: [
        [([0, 1, 2, 3], 0)],
        [([0, 1], 1), ([2], 2), ([3], 3)],
        [([0], 4), ([1], 5), ([2, 3], 6)],
        [([0, 1], 7), ([2, 3], 8)],
        [([0], 9), ([1], 10), ([2, 3], 11)],
    ],
    2: [
        [([0, 1], 0)],
        [([0], 1), ([1], 2)],
        [([0, 1], 3)],
        [([0], 4), ([1], 5)],
        [([0, 1], 6)],
        [([0], 7), ([1], 8)],
        [([0], 9), ([1], 10)],
        [([0, 1], 11)],
    ],
}


def make_sample(length: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    labels[: length // 3] = -100
    mask = (labels >= 0).float()
    return {"input_ids": ids, "labels": labels, "loss_mask": mask, "position_ids": torch.arange(length)}


def make_packs() -> list[list[dict[str, Any]]]:
    """Samples of each pack."""
    return [[make_sample(n, 10 * place + number) for number, n in enumerate(pack)] for place, pack in enumerate(PACKS)]


def row_of(samples: list[dict[str, Any]], local_cp_size: int | None) -> dict[str, torch.Tensor]:
    """What a scheduler of Core's hands on: a whole row, uncut."""
    from energon_packing import thd

    batch = thd.assemble(samples, multiple=MULTIPLE)
    row = {name: getattr(batch, name)[0] for name in ("tokens", "labels", "position_ids", "loss_mask")}
    row |= {"cu_seqlens": batch.cu_seqlens, "cu_seqlens_padded": batch.boundaries}
    row["max_seqlen"] = torch.tensor(batch.max_seqlen, dtype=torch.int32)
    return row if local_cp_size is None else row | {"local_cp_size": torch.tensor(local_cp_size, dtype=torch.int32)}


class PlannedRows:
    """This rank's rows of the next step, as our reader will give them."""

    def __init__(self, steps: list[list[dict[str, torch.Tensor]]]) -> None:
        self._steps = iter(steps)

    def step(self) -> list[dict[str, torch.Tensor]]:
        return next(self._steps)

    __next__ = step


def rows_of_rank(case: dict[str, Any], rank: int) -> list[dict[str, torch.Tensor]]:
    """Of a position in the domain of data and context parallelism: by the plan, or its share of all packs."""
    packs, cp, domain = make_packs(), case["cp"], case["domain"]
    if not case["dynamic"]:
        return [row_of(samples, None) for samples in packs[rank // cp :: domain // cp]]
    rows = []
    for groups in PLANS[domain]:
        for members, pack in groups:
            size = len(members) // (2 if case.get("fault") == "size" and len(members) == WORLD else 1)
            rows += [row_of(packs[pack], size)] if rank in members else []
    return rows


# --- Inside the ranks ------------------------------------------------------------------------------------------------


def stand_in(fault: str | None) -> None:
    """Replaces what Core asks of CUDA and of Transformer Engine; with ``fault`` ``"slice"`` cuts rows wrongly."""
    from megatron.core.datasets import data_schedule, data_schedule_utils
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer import transformer_config

    from support.bridge_cpu.attention import PartitionedIndices

    indices = PartitionedIndices.thd_get_partitioned_indices

    def cut_for_four(boundaries: torch.Tensor, total: int, size: int, rank: int) -> torch.Tensor:
        """A pair of ranks shares the pieces of four: as many tokens each, but others."""
        if size != 2:
            return indices(boundaries, total, size, rank)
        return torch.cat([indices(boundaries, total, 4, part) for part in (2 * rank, 2 * rank + 1)])

    chosen = cut_for_four if fault == "slice" else indices
    if hasattr(data_schedule_utils, "get_thd_partitioned_indices"):
        data_schedule_utils.get_thd_partitioned_indices = chosen
    else:  # Core's `main`
        data_schedule.tex = type("Extension", (), {"thd_get_partitioned_indices": staticmethod(chosen)})
    barrier, zeros, attention = torch.distributed.barrier, torch.zeros, group_attention()
    replaced: list[tuple[Any, str, Any]] = [
        (torch.distributed, "barrier", lambda group=None, **_keywords: barrier(group=group)),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_arguments: None),
        (torch.cuda, "Stream", lambda *_arguments, **_keywords: _Stream()),
        (torch.cuda, "current_stream", lambda *_arguments, **_keywords: _Stream()),
        (torch.cuda, "stream", lambda _stream: contextlib.nullcontext()),
        (torch.Tensor, "cuda", lambda self, *_arguments, **_keywords: self),
        (torch.nn.Module, "cuda", lambda self, *_arguments: self),
        (torch, "zeros", lambda *sizes, **how: zeros(*sizes, **{k: v for k, v in how.items() if v != "cuda"})),
        (LocalSpecProvider, "core_attention", lambda _self: attention),
        (transformer_config, "is_te_min_version", lambda *_arguments, **_keywords: True),
    ]
    for owner, name, other in replaced:
        setattr(owner, name, other)


class _Stream:
    def wait_stream(self, _other: Any) -> None:
        """Work on a CPU is done in order."""


def group_attention() -> Any:
    """The class, which exists only after Core is imported."""
    from support.bridge_cpu.attention import SegmentAttention, attend_over_ranks, physical_segments

    class GroupAttention(SegmentAttention):
        """Over the ranks of the row's own group, as ``TEDotProductAttention`` of the branch `dev` sets it for a row."""

        def forward(self, query: Any, key: Any, value: Any, *arguments: Any, **keywords: Any) -> Any:
            packed = keywords.get("packed_seq_params")
            if packed is None:
                return super().forward(query, key, value, *arguments, **keywords)
            group = self.cp_group if getattr(packed, "local_cp_size", None) is None else packed.cp_group
            repeat = query.size(1) // key.size(1)
            key, value = (tensor.repeat_interleave(repeat, dim=1) for tensor in (key, value))
            boundaries = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            segments = physical_segments(packed)
            return attend_over_ranks(query, key, value, segments, boundaries, group, causal=True).flatten(1)

    return GroupAttention


def new_model(config: Any, positions: str) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from support.whole_weights import draw_weights

    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LONGEST,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=False,
    )
    draw_weights(model, scale=0.1)
    return model


def new_config(case: dict[str, Any]) -> Any:
    from megatron.core.transformer import TransformerConfig

    planned = {
        "dynamic_context_parallel": case["dynamic"],
        "sequence_packing_scheduler": "default_dynamic_cp" if case["dynamic"] else "dp_balanced",
        "max_seqlen_per_dp_cp_rank": LONGEST,
    }
    known = {name: value for name, value in planned.items() if name in TransformerConfig.__dataclass_fields__}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        context_parallel_size=case["cp"],
        tensor_model_parallel_size=WORLD // case["domain"],
        calculate_per_token_loss=True,
        **known,
    )
    for name, value in planned.items():  # Core's `main` has the scheduler, but no option for it
        setattr(config, name, value)
    return config


def token_losses(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """``loss_func`` of ``pretrain_gpt.py``, without its checks."""
    mask = mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    count = mask.sum().clone().detach().to(torch.int)
    return loss, count, {"lm loss": torch.cat([loss.clone().detach().view(1), count.view(1)])}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """One step's loss and gradients, in a world that exists already."""
    from megatron.core import parallel_state
    from megatron.core.datasets import data_schedule
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator

    from energon_packing.megatron_lm import dataloader
    from support.whole_weights import whole_gradient

    sizes = {"dynamic_context_parallel": True} if case["dynamic"] else {}
    parallel_state.initialize_model_parallel(
        WORLD // case["domain"], context_parallel_size=case["cp"], create_gloo_process_groups=False, **sizes
    )
    config = new_config(case)
    config.finalize_model_grads_func = finalize_model_grads
    dataloader.install(config.sequence_packing_scheduler)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    model = DistributedDataParallel(config, settings, new_model(config, case["positions"]))
    model.zero_grad_buffer()

    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    own = None
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        own = RerunDataIterator(PlannedRows([rows_of_rank(case, rank)]))
    iterator, count, tokens, squares = data_schedule.wrap_data_iterator(own, config, num_microbatches=1)
    cp_sizes = []

    def forward_step(data_iterator: Any, wrapped: Any) -> Any:
        how = {"dynamic_cp": True, "config": config} if case["dynamic"] else {}
        batch = data_schedule.get_batch_on_this_rank_for_sequence_packing(data_iterator, **how)
        ids, labels, mask, attention_mask, position_ids, packed, padding = batch
        with contextlib.suppress(ImportError):  # `dev`
            from megatron.core.context_parallel_layout import finalize_packed_seq_params

            finalize_packed_seq_params(packed)
        cp_sizes.append((getattr(packed, "local_cp_size", None) or case["cp"], ids.size(1)))
        losses = wrapped(
            ids, position_ids, attention_mask, labels=labels, packed_seq_params=packed, padding_mask=padding
        )
        return losses, partial(token_losses, mask)

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=[model],
        num_microbatches=count,
        seq_length=LONGEST,
        micro_batch_size=1,
    )
    # As train_step reports it: both sums over all micro-batches and ranks.
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    every: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(every, (cp_sizes, count, tokens, squares))
    gradients = whole_gradient(model.module)
    parallel_state.destroy_model_parallel()
    return {"loss": float(total[0] / total[1]), "gradients": gradients, "tokens": int(total[1]), "ranks": every}


def run_reference(case: dict[str, Any]) -> dict[str, Any]:
    """Each sample alone and unpacked, in one process: no row, no slice, no scheduler, no wrapper."""
    from megatron.core import parallel_state

    from support.whole_weights import whole_gradient

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = new_config(case)
    model = new_model(config, case["positions"])
    loss, count = torch.zeros(()), 0.0
    for samples in make_packs():
        for sample in samples:
            ids, labels, positions = (sample[name][None] for name in ("input_ids", "labels", "position_ids"))
            losses = model(ids, positions, None, labels=labels)
            loss = loss + (losses[0] * sample["loss_mask"]).sum()
            count += float(sample["loss_mask"].sum())
    loss = loss / count
    loss.backward()
    for parameter in model.parameters():
        parameter.main_grad = parameter.grad
    gradients = whole_gradient(model)
    parallel_state.destroy_model_parallel()
    return {"loss": float(loss.detach()), "gradients": gradients, "tokens": int(count), "ranks": []}


def be_rank(case: dict[str, Any], folder: Path, rank: int) -> None:
    """In a fork: the last rank writes the result; of pipeline stages it has the loss."""
    torch.set_num_threads(1)
    stand_in(case.get("fault"))
    if "arguments" in case:
        from support import dynamic_training

        result = dynamic_training.run_case(case, rank)
    else:
        store = torch.distributed.FileStore(str(folder / f"{case['name']}.store"), WORLD)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
        )
        result = run_reference(case) if case.get("alone") else run_case(case)
        torch.distributed.destroy_process_group()
    if rank == WORLD - 1:
        torch.save(result, folder / f"{case['name']}.pt")


# --- Outside ---------------------------------------------------------------------------------------------------------


def run_cases(checkout: Path, cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results by the cases' names; of a case whose ranks failed ``{"error": what they printed}``."""
    with tempfile.TemporaryDirectory(prefix="dynamic-ranks-") as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps(cases))
        path = os.pathsep.join((str(checkout), ranks.ranks_environment()["PYTHONPATH"]))
        environment: Any = {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        # Not the Python whose imports are done: it has the installed Core.
        ranks.launch(__file__, folder, folder=folder, python=sys.executable, **environment)
        output = (folder / "output.txt").read_text()[-20_000:]
        files = {case["name"]: folder / f"{case['name']}.pt" for case in cases}
        return {
            each: torch.load(file, weights_only=True) if file.exists() else {"error": output}
            for each, file in files.items()
        }


def main(name: str) -> None:
    """Imports what the ranks need, then forks them, case after case."""
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.pipeline_parallel.schedules  # noqa: F401

    import energon_packing.megatron_lm.dataloader
    import energon_packing.thd  # noqa: F401

    if any("arguments" in case for case in json.loads((Path(name) / "cases.json").read_text())):
        from support import dynamic_training

        dynamic_training.prepare()
    ranks.ready()
    for case in json.loads((Path(name) / "cases.json").read_text()):
        print(f"--- {case['name']}", flush=True)
        case["port"] = ranks.free_port()
        ranks.fork(WORLD, partial(be_rank, case, Path(name)))


if __name__ == "__main__":
    main(*sys.argv[1:])
