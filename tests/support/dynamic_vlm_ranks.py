"""One step of a tiny Qwen3-VL on four ranks, in which each row has a context-parallel size of its own: 1, 2 or 4.

Samples, Bridge's model and ``vlm_step``, Megatron-Core's schedule, data-parallel wrapper and ``finalize_model_grads``
are the same for static and for dynamic context parallelism; only who shares which row differs. Dynamic cases need a
Bridge with ``tests/conformance/patches``. As a program it runs all cases of a folder: ``dynamic_vlm_ranks.py FOLDER``.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from support import ranks

WORLD = 4
WIDTH = 512
VOCABULARY = 512
LOCAL_SIZES = (4, 2, 1, 1, 1, 1, 2, 4)
"""Context-parallel size of each row under dynamic context parallelism."""
ROUNDS = ((0, 0, 0, 0), (1, 1, 2, 3), (4, 5, 6, 6), (7, 7, 7, 7))
"""Row of each rank at each micro-batch under dynamic context parallelism; sizes differ within a micro-batch, too."""


# --- Inside the ranks ------------------------------------------------------------------------------------------------


def samples(number: int) -> list[dict[str, Any]]:
    """The samples of row ``number``; images are longer than a rank's piece, and some ranks and rows have none.

    Images and videos are together in one sample of one rank alone: of a row that was cut before the step, Bridge cannot
    tell which comes first (``reorganize_inputs`` counts them in the tokens of the rank), with static sizes neither.
    """
    from support.bridge_cpu.samples import Samples

    source = Samples("qwen3_vl", number)
    return [
        lambda: [source.draw("text", 37), source.draw("image", (1, 8, 12), (1, 4, 6)), source.draw("text", 9)],
        lambda: [source.draw("image", (1, 6, 8), text=21), source.draw("text", 14)],
        lambda: [source.draw("image", (1, 4, 4)), source.draw("image", (1, 2, 6))],
        lambda: [source.draw("text", 26), source.draw("text", 11)],
        lambda: [source.draw("text", 7), source.mixed([("image", (1, 4, 8)), ("video", (2, 2, 4))], text=5)],
        lambda: [source.draw("video", (2, 4, 4), text=8), source.draw("text", 13)],
        lambda: [source.draw("text", 33), source.draw("text", 18)],
        lambda: [source.draw("video", (2, 8, 6), text=17), source.draw("video", (1, 6, 6))],
    ][number]()


def with_positions(row: dict[str, Any], axes: str, model: Any) -> dict[str, Any]:
    """The sample with three-axis positions ``[3, L]``: Bridge's own (``three``), or one axis three times (``one``)."""
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import get_rope_index

    visual = row.get("visual_inputs", {})
    positions, _ = get_rope_index(
        model.config.spatial_merge_size,
        model.image_token_id,
        model.video_token_id,
        model.vision_start_token_id,
        row["input_ids"][None],
        image_grid_thw=visual.get("image_grid_thw"),
        video_grid_thw=visual.get("video_grid_thw"),
    )
    three = positions[:, 0] if axes == "three" else row["position_ids"].expand(3, -1)
    return row | {"position_ids": three.contiguous()}


def batch_of(number: int, size: int, case: dict[str, Any], model: Any) -> dict[str, Any]:
    """Row ``number`` as Bridge's step takes it, aligned for the ``size`` ranks that share it."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    from energon_packing import thd
    from energon_packing.thd.batch import Shared

    rows = samples(number)
    if case["positions"] != "model":
        rows = [with_positions(row, case["positions"], model) for row in rows]
    row = thd.assemble(rows, multiple=thd.alignment_multiple(1, size, False))
    if not case["dynamic"]:
        return row.to_bridge()
    batch = replace(row, shared=Shared(size, 0, 0, 0)).to_bridge()
    if case["cut"] == "core":  # as Megatron-Core's own training loop does before the step
        keys = ("tokens", "labels", "loss_mask", "position_ids")
        boundaries = batch.get("cu_seqlens_q_padded", batch["cu_seqlens_q"])[None]
        whole = {key: batch[key] for key in keys} | {"cu_seqlens": boundaries, "cu_seqlens_padded": boundaries}
        part = get_batch_on_this_cp_rank(
            whole | {"local_cp_size": batch["local_cp_size"]},
            is_hybrid_cp=True,
            hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
        )
        batch |= {key: part[key] for key in keys} | {"input_ids": part["tokens"]}
    return batch


class Quiet:
    """A timer that does nothing."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self

    start = stop = __enter__ = __call__

    def __exit__(self, *_error: Any) -> None: ...


def put_back(bug: str | None) -> Any:
    """A bug in the patched Bridge for the duration of a block."""
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model
    from megatron.bridge.training.utils import packed_seq_utils
    from megatron.core import parallel_state

    def for_two(group_size: int) -> Any:
        return parallel_state.get_hybrid_data_context_parallel_groups(group_size=min(group_size, 2))

    def from_the_first(mask: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.arange(int(mask.sum()))

    if bug is None:
        return contextlib.nullcontext()
    if bug == "rows of four ranks are cut for two":
        return mock.patch.object(packed_seq_utils, "_get_dynamic_cp_group", for_two)
    assert bug == "each rank takes the first embeddings"
    return mock.patch.object(model, "_get_cp_local_vision_embed_indices", from_the_first)


@contextlib.contextmanager
def gathers_of_any_sizes() -> Iterator[None]:
    """``all_gather`` of tensors of different lengths, which NCCL can and gloo cannot; Bridge gathers images with it."""
    original = torch.distributed.all_gather

    def gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        if len({part.shape for part in parts}) == 1:
            original(parts, own, group=group)
            return
        parts[group.rank()].copy_(own)
        for source, part in enumerate(parts):
            torch.distributed.broadcast(part, group=group, group_src=source)

    with mock.patch.object(torch.distributed, "all_gather", gather):
        yield


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Loss, whole gradient and number of trained tokens of one optimiser step.

    Keys of a case: ``dynamic``; ``context``, the static size; ``positions`` (``model``: it computes them; ``three``:
    given; ``one``: given, and wrong); ``cut`` (``model``, or ``core`` before the step); ``spread``: the images of a row
    are encoded by its ranks in turn (Bridge's ``vision_dp_when_cp``); ``bug``: None, or one of `put_back`; ``step``:
    ``bridge``, or ``ours`` around it.
    """
    from megatron.bridge.training import vlm_step
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from energon_packing.bridge import step
    from support.bridge_cpu import tiny_models, training_run
    from support.bridge_cpu.samples import Samples
    from support.whole_weights import draw_weights, whole_gradient

    context, dynamic = case["context"], case["dynamic"]
    parallel_state.initialize_model_parallel(
        context_parallel_size=context, hybrid_context_parallel=dynamic, create_gloo_process_groups=False
    )
    names = {"vision_start": Samples.start, "vision_end": Samples.end, "image": Samples.image, "video": Samples.video}
    tokens = tiny_models.SpecialTokens(**names)
    made = tiny_models.provider("qwen3_vl", vocab_size=VOCABULARY, tokens=tokens, seq_length=WIDTH)
    made.context_parallel_size, made.vision_dp_when_cp = context, case["spread"]
    for part in ("language_model", "vision_model", "vision_projection"):
        setattr(made, f"freeze_{part}", False)
    model = training_run.build_model(made)
    model.train()
    draw_weights(model)
    config = model.config
    config.finalize_model_grads_func = finalize_model_grads

    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    own = (
        [row[torch.distributed.get_rank()] for row in ROUNDS] if dynamic else range(replica, len(LOCAL_SIZES), replicas)
    )
    batches = [batch_of(number, LOCAL_SIZES[number] if dynamic else context, case, model) for number in own]

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    model.model_type = ModelType.encoder_or_decoder
    wrapped = DistributedDataParallel(config, settings, model)
    wrapped.zero_grad_buffer()
    rerun = SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False)
    run = SimpleNamespace(dataset=SimpleNamespace(), rerun_state_machine=rerun, model=config)
    state = SimpleNamespace(timers=Quiet(), straggler_timer=Quiet(), cfg=run)
    with gathers_of_any_sizes(), put_back(case["bug"]):
        reports = get_forward_backward_func()(
            forward_step_func=partial((step if case["step"] == "ours" else vlm_step).forward_step, state),
            data_iterator=iter(batches),
            model=[wrapped],
            num_microbatches=len(batches),
            seq_length=WIDTH,
            micro_batch_size=1,
        )
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    result = {"loss": float(total[0] / total[1]), "tokens": int(total[1]), "gradient": whole_gradient(model)}
    parallel_state.destroy_model_parallel()
    return result


def be_rank(cases: list[dict[str, Any]], folder: Path, rank: int) -> None:
    """In a fork: all cases in turn; rank 0 writes the results."""
    from support.bridge_cpu import stand_ins

    torch.set_num_threads(1)
    stand_ins.install()
    store = torch.distributed.FileStore(str(folder / "store"), WORLD)
    timeout = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    with stand_ins.without_warnings():
        results = [run_case(case) for case in cases]
    if rank == 0:
        imported = [sys.modules[f"megatron.{name}"].__file__ for name in ("bridge", "core")]
        torch.save({"imported": imported, "results": results}, folder / "results.pt")
    torch.distributed.destroy_process_group()


def be_batch_rank(tensor: int, folder: Path, rank: int) -> None:
    """In a fork: rows of Megatron-Core's dev branch, cut by it, are our slices; rank 0 writes their shapes.

    Bridge is not imported: its main branch does not run on that one.
    """
    from megatron.core import parallel_state
    from megatron.core.datasets import data_schedule, data_schedule_utils

    from energon_packing import thd

    # No CUDA device, and no Transformer Engine, whose indices ours equal.
    torch.cuda.current_device = int
    torch.cuda.synchronize = lambda *_: None
    data_schedule_utils.get_thd_partitioned_indices = lambda boundaries, _total, size, own: (
        thd.context_parallel_indices(boundaries, size, own)
    )
    store = torch.distributed.FileStore(str(folder / "store"), WORLD)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, dynamic_context_parallel=True, create_gloo_process_groups=False
    )
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    shapes = []
    for number, size in enumerate(LOCAL_SIZES):
        size = min(size, WORLD // tensor)
        rows = samples(number)
        for row in rows:
            row["position_ids"] = row["position_ids"] * torch.tensor([[1], [2], [3]])
        whole = thd.assemble(rows, multiple=thd.alignment_multiple(1, size, False))
        row = {"position_ids": whole.position_ids[:, 0], "loss_mask": whole.loss_mask[0]}
        row |= {"tokens": whole.tokens[0], "labels": whole.labels[0], "max_seqlen": whole.max_seqlen}
        row |= {"cu_seqlens": whole.cu_seqlens, "cu_seqlens_padded": whole.boundaries, "local_cp_size": size}
        own = data_schedule.get_batch_on_this_rank_for_sequence_packing(
            iter([row]) if parallel_state.get_tensor_model_parallel_rank() == 0 else None,
            dynamic_cp=True,
            config=SimpleNamespace(mrope_section=[4, 2, 2]),
        )
        tokens, labels, loss_mask, _, position_ids, params, _ = own
        group = params.cp_group
        assert (params.local_cp_size, group.size()) == (size, size)
        part = thd.slice_for_context_parallel(whole, size, group.rank())
        real = ~part.padding_mask[0]  # Megatron-Core writes values of its own into padding
        for ours, theirs in (
            (part.tokens, tokens),
            (part.labels, labels),
            (part.loss_mask, loss_mask),
            (part.position_ids, position_ids),
        ):
            assert ours.shape == theirs.shape
            assert torch.equal(ours[..., real], theirs[..., real])
        shapes.append(list(position_ids.shape))
    torch.distributed.barrier()
    if rank == 0:
        (folder / "shapes.json").write_text(json.dumps(shapes))
    torch.distributed.destroy_process_group()


def main(name: str, tensor: str | None = None) -> None:
    """Imports what the ranks need, then forks them: for the cases of a folder, or for Megatron-Core's batches."""
    if tensor is not None:
        ranks.fork(WORLD, partial(be_batch_rank, int(tensor), Path(name)))
        return
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    stand_ins.uninstall()
    ranks.ready()
    folder = Path(name)
    ranks.fork(WORLD, partial(be_rank, json.loads((folder / "cases.json").read_text()), folder))


# --- Outside ---------------------------------------------------------------------------------------------------------


def batch_shapes(tensor: int, folder: Path, path: Sequence[Path]) -> list[list[int]]:
    """Shapes of the positions of each row on rank 0, with the Megatron-Core of a path, after `be_batch_rank`.

    Raises:
        RuntimeError: with the traceback of the rank that failed first.
    """
    folder.mkdir(parents=True)
    words = ":".join([*map(str, path), ranks.ranks_environment()["PYTHONPATH"]])
    ranks.launch(__file__, folder, tensor, folder=folder, python=sys.executable, PYTHONPATH=words)
    if not (folder / "shapes.json").exists():
        raise RuntimeError((folder / "output.txt").read_text()[-20_000:])
    shapes: list[list[int]] = json.loads((folder / "shapes.json").read_text())
    return shapes


def run_cases(cases: list[dict[str, Any]], folder: Path, path: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Results of the cases, with the installed Bridge or with the one and the Megatron-Core of a ``path``.

    Raises:
        RuntimeError: with the traceback of the rank that failed first.
    """
    folder.mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    if path:  # a real interpreter: the quick one has Bridge in memory
        words = ":".join([*map(str, path), ranks.ranks_environment()["PYTHONPATH"]])
        ranks.launch(__file__, folder, folder=folder, python=sys.executable, PYTHONPATH=words)
    else:
        ranks.launch(__file__, folder, folder=folder)
    if not (folder / "results.pt").exists():
        raise RuntimeError((folder / "output.txt").read_text()[-20_000:])
    found = torch.load(folder / "results.pt", weights_only=True)
    for file in found["imported"] if path else ():
        assert any(Path(file).is_relative_to(each) for each in path), file
    results: list[dict[str, Any]] = found["results"]
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
