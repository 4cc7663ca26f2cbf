"""Training runs of Bridge in several processes over gloo, each described by a plain mapping (`Run`).

As a program it imports everything once and forks the ranks of one run after the other: ``bridge_ranks.py RUNS.json
FOLDER``. Each rank leaves ``FOLDER/NAME-RANK.json``: losses, what it was handed at every micro-batch, and its error.
"""

import contextlib
import functools
import hashlib
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import ranks

SEQ_LENGTH = 256
DEFAULTS: dict[str, Any] = {
    "world": 1,
    "tensor": 1,
    "context": 1,
    "pipeline": 1,
    "virtual": None,
    "family": "qwen3_vl",
    "layers": 2,
    "steps": 20,
    "global_batch": 2,
    "micro_batch": 1,
    "dataset": {},  # fields of PackedEnergonDatasetConfig, those of its sections with their name in front
    "weights": None,  # directory of a checkpoint to start from
    "save": None,  # directory of checkpoints; continues from the last one there
    "save_interval": 6,
    "kill_after": None,  # step after which the ranks are killed
    "end_after": None,  # step after which all processes of the run get SIGTERM, on which Bridge saves and ends
    "validate_every": None,
    "replay": None,  # name of an earlier run whose packs are used, in its order
    "tensorboard": None,  # directory of TensorBoard's events, to which the metrics of packs go too
    "broken_decoder": None,  # rank whose image decoder fails from the second image on
    "broken_reader": None,  # (rank, pack): its reading raises there
}


# --- Inside the ranks ------------------------------------------------------------------------------------------------


def record_packs(folder: Path, name: str) -> tuple[list[dict[str, Any]], Callable[[], None]]:
    """Notes each batch that the data set hands out on this rank; the function keeps those of a reader for a replay."""
    from energon_packing.bridge import provider as pack_iterator

    seen: list[dict[str, Any]] = []
    kept: list[Any] = []
    replica: list[int] = []
    original = pack_iterator.BridgePackIterator.__next__

    def take(self: Any) -> Any:
        batch = original(self)
        visual = batch["visual_inputs"]
        digest = hashlib.sha256()
        for key in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "cu_seqlens_q"):
            digest.update(batch[key].numpy().tobytes())
        if getattr(visual, "image_grid_thw", None) is not None:
            digest.update(visual.image_grid_thw.numpy().tobytes())
        pixels = getattr(visual, "pixel_values", None)
        seen.append(
            {
                "digest": digest.hexdigest(),
                "boundaries": batch["cu_seqlens_q"].tolist(),
                "pixels": None if pixels is None else hashlib.sha256(pixels.numpy().tobytes()).hexdigest(),
                "images": getattr(visual, "image_grid_thw", None) is not None,
                "validation": getattr(self, "is_validation", False),
                "reads": self._reader._source is not None,
            }
        )
        if self._reader._replica.is_reader and not seen[-1]["validation"]:
            kept.append(batch)
            replica[:] = [self._reader._replica.rank]
        return batch

    def keep() -> None:
        if kept:
            (folder / f"{name}-packs-{replica[0]}.pt").write_bytes(pickle.dumps(kept))  # views of one buffer

    pack_iterator.BridgePackIterator.__next__ = take  # type: ignore[method-assign]
    return seen, keep


def record_attention(seen: list[list[int] | None]) -> None:
    """Notes the boundaries that causal attention of this rank's first layer gets."""
    from support.bridge_cpu import attention as cpu_attention

    original: Any = cpu_attention.SegmentAttention.forward
    first: list[Any] = []

    def forward(self: Any, *arguments: Any, packed_seq_params: Any = None, **keywords: Any) -> Any:
        if self.attn_mask_type in cpu_attention.CAUSAL:
            first[:] = first or [self]
            if first[0] is self:
                seen.append(None if packed_seq_params is None else packed_seq_params.cu_seqlens_q.tolist())
        return original(self, *arguments, packed_seq_params=packed_seq_params, **keywords)

    cpu_attention.SegmentAttention.forward = forward  # type: ignore[method-assign]


def break_decoder() -> None:
    from energon_packing.encoders import decoding
    from energon_packing.errors import SampleRejected

    original, calls = decoding.decode_image, [0]

    def fail(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:
            raise SampleRejected("decode", "broken for this test")
        return original(*arguments, **keywords)

    decoding.decode_image = fail


def break_reader(pack: int) -> None:
    from energon_packing.errors import UserError
    from energon_packing.offline import open_loader

    original, calls = open_loader.EndlessPacks.__next__, [0]

    def fail(self: Any) -> Any:
        calls[0] += 1
        if calls[0] > pack:
            raise UserError("the disk of this rank is full of ducks")
        return original(self)

    open_loader.EndlessPacks.__next__ = fail  # type: ignore[method-assign]


def replayed(folder: Path, name: str, micro_batches: int) -> Any:
    """A data set of one process with the packs of all replicas of an earlier run, step for step."""
    from dataclasses import dataclass

    from megatron.bridge.data.base import DatasetProvider

    files = sorted(folder.glob(f"{name}-packs-*.pt"))
    replicas = [pickle.loads(file.read_bytes()) for file in files]
    each = micro_batches // len(replicas)
    packs = [
        pack
        for step in range(len(replicas[0]) // each)
        for replica in replicas
        for pack in replica[step * each : (step + 1) * each]
    ]

    @dataclass
    class Replayed(DatasetProvider):
        dataloader_type: str = "external"
        num_workers: int = 0

        def build_datasets(self, context: Any) -> Any:
            return iter(packs), None, None

    return Replayed()


def train(run: dict[str, Any], folder: Path, data: str, rank: int, report: dict[str, Any]) -> None:
    """One rank of one run; fills ``report``."""
    from energon_packing.bridge import PackedEnergonDatasetConfig
    from energon_packing.bridge.metrics import PackingMetrics
    from energon_packing.bridge.step import forward_step
    from energon_packing.demo import processor_path
    from support.bridge_cpu import tiny_models, training_run

    family = run["family"]
    provider = tiny_models.shipped_provider(family, seq_length=SEQ_LENGTH, layers=run["layers"])
    provider.tensor_model_parallel_size = run["tensor"]
    provider.context_parallel_size = run["context"]
    provider.pipeline_model_parallel_size = run["pipeline"]
    provider.virtual_pipeline_model_parallel_size = run["virtual"]
    if run["virtual"]:  # else two stages would take each other's activations for gradients, see Megatron-LM's arguments
        provider.overlap_p2p_comm, provider.batch_p2p_comm = True, False

    report["packs"], keep_packs = record_packs(folder, run["name"])
    report["attention"] = []
    record_attention(report["attention"])
    if run["broken_decoder"] == rank:
        break_decoder()
    if run["broken_reader"] and run["broken_reader"][0] == rank:
        break_reader(run["broken_reader"][1])
    if run["replay"]:
        dataset = replayed(folder, run["replay"], run["global_batch"] // run["micro_batch"])
    else:
        dataset = PackedEnergonDatasetConfig(
            path=data, processor=str(processor_path(family)), seq_length=SEQ_LENGTH, num_workers=0
        )
        dataset.encoder.min_pixels = dataset.encoder.video_min_pixels = 32 * 32
        dataset.encoder.max_pixels = dataset.encoder.video_max_pixels = 64 * 64
        dataset.packing.drop_budget = 1.0
        if run["micro_batch"] == 1:  # else Bridge packs what came together, and nothing is chosen
            dataset.packing.window = 16
        dataset.micro_batch_size = run["micro_batch"]
        for name, value in run["dataset"].items():
            *section, field = name.split(".")
            setattr(getattr(dataset, section[0]) if section else dataset, field, value)
        build = type(dataset).build_datasets

        def mark(self: Any, context: Any) -> Any:
            training, validation, _ = build(self, context)
            if validation is not None:
                validation.is_validation = True
            return training, validation, None

        type(dataset).build_datasets = mark  # type: ignore[method-assign]

    config = training_run.make_config(
        provider, dataset, steps=run["steps"], global_batch_size=run["global_batch"], learning_rate=2e-3
    )
    config.train.micro_batch_size = run["micro_batch"]
    if run["validate_every"]:
        config.validation.eval_iters, config.validation.eval_interval = 2, run["validate_every"]
    config.logger.tensorboard_dir = run["tensorboard"]
    config.checkpoint.pretrained_checkpoint = run["weights"]
    if run["save"]:
        config.checkpoint.save = config.checkpoint.load = run["save"]
        config.checkpoint.save_interval, config.checkpoint.async_save = run["save_interval"], False
        config.checkpoint.load_rng = False  # Bridge asks for the states of CUDA generators, and nothing is random here

    def after(step: Any) -> None:
        report["losses"].append(step.loss)
        report["norms"].append(step.grad_norm)
        if len(report["losses"]) == run["kill_after"]:
            write(folder, run, rank, report)
            os.kill(os.getpid(), signal.SIGKILL)
        if len(report["losses"]) == run["end_after"] and rank == 0:
            ranks.terminate(ranks.processes_below(os.getppid()))

    config.train.exit_signal_handler = run["end_after"] is not None
    with contextlib.suppress(*[SystemExit] if run["end_after"] else []):
        training_run.run(config, forward_step=forward_step, on_step=after, callbacks=[PackingMetrics()])
    keep_packs()  # a run that is killed is never replayed


def write(folder: Path, run: dict[str, Any], rank: int, report: dict[str, Any]) -> None:
    (folder / f"{run['name']}-{rank}.json").write_text(json.dumps(report))


def be_rank(run: dict[str, Any], folder: Path, data: str, port: int, rank: int) -> None:
    """In a fork."""
    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from support.bridge_cpu import training_run

    report: dict[str, Any] = {"losses": [], "norms": [], "error": None}
    try:
        torch.set_num_threads(1)
        if run["save"]:  # the writers' queue is made once a process, and a fork is quicker than a new interpreter
            kept = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which its process would end, not ours
            filesystem_async.get_write_results_queue("fork")
            signal.signal(signal.SIGTERM, kept)
        ranks.torchrun(rank, run["world"], port)
        with training_run.process_groups():
            train(run, folder, data, rank, report)
    except BaseException as error:
        report["error"] = [type(error).__name__, str(error), traceback.format_exc()]
        raise
    finally:
        write(folder, run, rank, report)


def main(file: str, folder: str) -> None:
    """Imports what the ranks need, then runs them."""
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    import transformers  # noqa: F401

    import support.bridge_cpu.training_run  # noqa: F401
    from energon_packing.demo import processor_path
    from support.bridge_cpu import tiny_models

    plan = json.loads(Path(file).read_text())
    for family in {run["family"] for run in plan["runs"]}:
        tiny_models.vocabulary_of(str(processor_path(family)))
    ranks.ready()
    for run in plan["runs"]:
        started = functools.partial(be_rank, run, Path(folder), plan["data"], ranks.free_port())
        ranks.fork(run["world"], started, grace=20)


# --- Outside ---------------------------------------------------------------------------------------------------------


def launch(runs: list[dict[str, Any]], folder: Path, data: Path, timeout: float) -> None:
    """All runs, one after the other; each has a ``name`` and differs from `DEFAULTS` where it says so.

    Raises:
        RuntimeError: the program itself failed.
    """
    for run in runs:
        assert set(run) - {"name"} <= set(DEFAULTS), run
    file = folder / "runs.json"
    file.write_text(json.dumps({"data": str(data), "runs": [DEFAULTS | run for run in runs]}))
    ranks.launch(__file__, file, folder, folder=folder, timeout=timeout, TOKENIZERS_PARALLELISM="false")


def reports(folder: Path, name: str, world: int) -> list[dict[str, Any]]:
    """What the ranks of a run left.

    Raises:
        RuntimeError: a rank left nothing.
    """
    files = [folder / f"{name}-{rank}.json" for rank in range(world)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise RuntimeError(f"no report from {', '.join(missing)}")
    return [json.loads(file.read_text()) for file in files]


if __name__ == "__main__":
    main(*sys.argv[1:])
