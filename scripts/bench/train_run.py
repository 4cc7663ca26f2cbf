"""One measured training of one kind of row, in its own process: passes over all samples, one JSON object.

All micro-batches are made before the clock starts, so only the model is measured: forward, backward, and one optimiser
step per pass. Every pass reads the same samples in the same order, whatever rows they are in, and the loss is divided
by the trained tokens of the pass; so all kinds of row must report the same loss.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from support.bridge_cpu import stand_ins
from support.bridge_cpu.tiny_models import special_tokens, vocabulary_of

from bench.loader_run import cpu_seconds
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, PlanConfig, RunConfig
from energon_packing.config.run import MetricsConfig, Padding
from energon_packing.energon.metrics import watched
from energon_packing.validate.memory import memory_of

Rows = Literal["packs", "in_batch", "padded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """What one process measures.

    Attributes:
        rows: as ``mode`` of `PackedEnergonDatasetConfig`.
        data: directory of the data set; its split ``train`` is one pass.
        processor: directory of a Hugging Face processor.
        family: tiny vision model, one of `bench.train.FAMILIES`.
        seq_length: tokens of a pack, and the longest sample.
        window: measured samples that packs are chosen from.
        micro_batch_size: samples of a micro-batch that is not a pack.
        passes: measured passes; one more comes first.
        pixels: smallest and largest area of images and frames.
        whole: measure the whole job, with no pass before it: the passes read the data while they train.
        offline: directory for packs that are made before a whole job; None packs while it trains.
        small: train `tiny_models.SMALL` in bfloat16.
        padding: None, or what the padding is that aligns samples to 16 tokens, as for 8 context-parallel ranks.
        metrics: directory of the metrics of a run with a step per pack, with its model's ``config.json``; for `costs`.
        mixes: data and `seq_length` of the packs of such a run.
    """

    rows: Rows
    data: str
    processor: str
    family: str
    seq_length: int
    window: int
    micro_batch_size: int
    passes: int
    pixels: tuple[int, int]
    whole: bool = False
    offline: str | None = None
    small: bool = False
    padding: Padding | None = None
    metrics: str | None = None
    mixes: Sequence[tuple[str, int]] = ()


@dataclass(kw_only=True)
class MicroBatches:
    """All micro-batches of a pass and their contents.

    Attributes:
        batches: mappings that Bridge's steps read.
        samples, tokens: of all batches, without padding.
        dropped: samples that the encoder dropped.
    """

    batches: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    dropped: int = 0


def run_config(job: TrainJob, *, workers: int = 0, repeat: bool = False) -> RunConfig:
    """Returns the configuration of a job."""
    low, high = job.pixels
    packs: dict[str, Any] = {"window": job.window} if job.rows == "packs" else {}  # the others refuse it
    if job.padding:
        packs["padding"] = job.padding
    if job.metrics:
        packs["cost_model"] = job.metrics
    return RunConfig(
        data=DataConfig(path=job.data, workers=workers, repeat=repeat),
        encoder=EncoderConfig(
            processor=job.processor, min_pixels=low, max_pixels=high, video_min_pixels=low, video_max_pixels=high
        ),
        packing=PackingConfig(seq_length=job.seq_length, drop_budget=1.0, **packs),
        parallel=ParallelConfig(context_parallel=8 if job.padding else 1),
        plan=PlanConfig(max_data_parallel=1),
    )


def pack_offline(job: TrainJob, place: Path) -> TrainJob:
    """Measures, plans and packs the data of a job in this process; returns the job that reads the packs."""
    from energon_packing.offline.measure import MeasureConfig
    from energon_packing.offline.measure import measure as measure_samples
    from energon_packing.offline.pack import PackConfig, pack
    from energon_packing.offline.planner import make_plan

    config = run_config(job)
    measure_samples(MeasureConfig(paths=(Path(job.data),), out=place / "index", workers=0), config)
    make_plan([place / "index"], config, place / "plan.parquet")
    pack(PackConfig(plan=place / "plan.parquet", out=place / "packed", workers=0))
    return dataclasses.replace(job, data=str(place / "packed"))


Form = Callable[[Any], dict[str, Any]]


def open_packs(job: TrainJob, **data: Any) -> tuple[Any, Form]:
    """Returns the loader of a job, and what makes a mapping for Bridge of the batch of each of its packs."""
    from energon_packing.bridge.dataset import MicroBatchForm
    from energon_packing.energon.loader import build_loader
    from energon_packing.energon.sample_task_encoder import MicroBatchTaskEncoder
    from energon_packing.offline.open_loader import open_loader
    from energon_packing.thd.batch import PackedBatch

    config = run_config(job, **data)
    if job.rows == "packs":
        return open_loader(config), PackedBatch.to_bridge
    size = job.micro_batch_size
    encoder = MicroBatchTaskEncoder(config.encoder, config.packing, ParallelConfig(), micro_batch_size=size)
    form = MicroBatchForm(packed=job.rows == "in_batch", samples=size, seq_length=job.seq_length)
    return build_loader(config, task_encoder=encoder), form


def micro_batches(job: TrainJob) -> MicroBatches:
    """Makes all micro-batches of a job; nothing of the loader remains in memory."""
    loader, form = open_packs(job)
    found = MicroBatches()
    for pack in loader:
        found.batches.append(form(pack.batch))
        found.samples += pack.batch.num_samples
        found.tokens += pack.batch.real_tokens
        found.dropped += len(pack.dropped)
    return found


def _to_step(batch: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch for one step. Bridge's ``vlm_step`` writes what it copies to the GPU into the container of the
    visual inputs; without a container of its own, every pass but the first would find its pixels there."""
    return {**batch, "visual_inputs": copy.copy(batch["visual_inputs"])}


class _Passes:
    """Repeats the micro-batches forever, as an external data loader of Bridge."""

    def __init__(self, batches: Sequence[dict[str, Any]]) -> None:
        self._batches, self._read = batches, 0

    def __iter__(self) -> _Passes:
        return self

    def __next__(self) -> dict[str, Any]:
        self._read += 1
        return _to_step(self._batches[(self._read - 1) % len(self._batches)])


def _clocks() -> tuple[float, float]:
    """Seconds of the clock, and CPU seconds of this process and its workers."""
    return time.perf_counter(), cpu_seconds()


class _Read:
    """Reads the data again and again with one worker, as a run does.

    Attributes:
        began: `_clocks` when the first micro-batch was asked for.
        tokens: of the micro-batches so far, without padding.
    """

    def __init__(self, job: TrainJob) -> None:
        self._job, self.began, self.tokens = job, (0.0, 0.0), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.began = _clocks()
        loader, form = open_packs(self._job, workers=1, repeat=True)
        for pack in loader:
            self.tokens += pack.batch.real_tokens
            yield form(pack.batch)


def _data_set(batches: Iterable[dict[str, Any]], rows: Rows, seq_length: int) -> Any:
    from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider

    class Ready(DatasetProvider):
        """Hands out ready micro-batches."""

        enable_in_batch_packing = rows == "in_batch"

        def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, None, None]:
            return iter(batches), None, None

    made = Ready(num_workers=0, dataloader_type="external")
    made.seq_length = seq_length
    return made


def measure(job: TrainJob) -> dict[str, Any]:
    """Trains one pass that is not measured and ``job.passes`` that are, or a whole job.

    Returns:
        ``seconds`` and ``cpu_seconds`` of each measured pass, ``losses`` of all passes, ``peak_bytes`` that training
        took beyond what the process held before the model was built, and counts of the micro-batches. Of a whole job,
        ``prepare`` is what packing took and ``train`` what it took from opening the data to the last step, each in
        seconds and in CPU seconds with those of the worker; ``tokens`` are those of all passes.
    """
    on_cpu = stand_ins.needed()
    stand_ins.install()
    from support.bridge_cpu import training_run

    started = _clocks()
    if job.offline is not None:
        job = pack_offline(job, Path(job.offline))
    prepared = _clocks()
    made = micro_batches(job)
    rows = [int(batch["tokens"].numel()) for batch in made.batches]
    clocks: list[tuple[float, float]] = []

    def stop(_report: Any) -> None:
        if not on_cpu:
            torch.cuda.synchronize()
        clocks.append(_clocks() if job.whole else (time.perf_counter(), time.process_time()))

    with training_run.process_groups():
        size = 1 if job.rows == "packs" else job.micro_batch_size
        read = _Read(job)
        data = _data_set(read if job.whole else _Passes(made.batches), job.rows, job.seq_length)
        config = _training(job, data, max(job.seq_length, *rows), steps=job.passes + (not job.whole), size=size)
        config.train.global_batch_size = size * len(made.batches)
        before = _reset_peak(on_gpu=not on_cpu)
        result = training_run.run(config, forward_step="vlm", on_step=stop)
        peak = _peak(on_gpu=not on_cpu) - before
        data.packing = SimpleNamespace(max_patches_per_pack=max(map(_patches, made.batches)))
        estimate = memory_of(config, config.model, vocabulary=_model(job)["vocab_size"], world_size=1)
    passes = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(clocks)]
    return {
        "prepare": [end - begin for begin, end in zip(started, prepared, strict=True)],
        "train": [end - begin for begin, end in zip(read.began, clocks[-1], strict=True)],
        "seconds": [seconds for seconds, _ in passes],
        "cpu_seconds": [seconds for _, seconds in passes],
        "losses": result.losses,
        "peak_bytes": peak,
        "estimated_bytes": estimate and estimate.parts,
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(),
        "tf32": not on_cpu and uses_tf32(),
        "samples": made.samples,
        "dropped": made.dropped,
        "tokens": read.tokens if job.whole else made.tokens,
        "rows": rows,
    }


def _model(job: TrainJob) -> dict[str, Any]:
    """What a tiny model of the job's family needs."""
    vocabulary = vocabulary_of(job.processor)
    tokens = special_tokens(vocabulary)
    return {"vocab_size": max(vocabulary.values()) + 1, "tokens": tokens, "small": job.small}


def _training(job: TrainJob, data: Any, seq_length: int, *, steps: int, size: int = 1) -> Any:
    """Bridge's configuration of so many steps of one micro-batch, of rows of up to ``seq_length`` tokens."""
    from support.bridge_cpu import tiny_models, training_run

    model = tiny_models.provider(job.family, seq_length=seq_length, **_model(job))
    config = training_run.make_config(model, data, steps=steps)
    config.train.micro_batch_size = config.train.global_batch_size = size
    if job.small:
        config.mixed_precision = "bf16_mixed"
    return config


def costs(job: TrainJob) -> dict[str, Any]:
    """Trains a step per pack on the packs of all ``mixes``, in random order: once, and then ``job.passes`` times with
    the metrics of a run. Returns the number of ``packs``, of those of ``text`` alone, and the ``device``."""
    on_cpu = stand_ins.needed()
    stand_ins.install()
    from support.bridge_cpu import tiny_models, training_run

    assert job.metrics is not None
    tiny_models.hugging_face_config(job.family, seq_length=job.seq_length, **_model(job)).save_pretrained(job.metrics)
    mixes = [dataclasses.replace(job, data=data, seq_length=length) for data, length in job.mixes]
    packs = [pack for mix in mixes for pack in open_packs(mix)[0]]
    random.Random(0).shuffle(packs)
    batches = {id(pack): pack.batch.to_bridge() for pack in packs}  # before the clock starts
    measured = watched(packs * job.passes, MetricsConfig(directory=job.metrics), capacity=job.seq_length)

    def wait(_report: Any) -> None:
        if not on_cpu:
            torch.cuda.synchronize()  # else the seconds of a step are those of the host

    with training_run.process_groups():
        data = _data_set(
            (_to_step(batches[id(pack)]) for pack in itertools.chain(packs, measured)), "packs", job.seq_length
        )
        config = _training(job, data, job.seq_length, steps=len(packs) * (1 + job.passes))
        config.optimizer.lr = 1e-6  # hundreds of steps with a large one could end in NaN
        training_run.run(config, forward_step="vlm", on_step=wait)
    next(measured, None)  # after the last pack, it writes the last line
    text = sum(not pack.vision_cost for pack in packs)
    return {"packs": len(packs), "text": text, "device": "cpu" if on_cpu else torch.cuda.get_device_name()}


def _patches(batch: dict[str, Any]) -> int:
    pixels = getattr(batch.get("visual_inputs"), "pixel_values", None)
    return 0 if pixels is None else len(pixels)


def uses_tf32() -> bool:
    """Whether float32 products on this GPU may round to TF32: Transformer Engine asks cuBLAS for it on every GPU that
    has it, whatever torch's own setting is, and ``NVIDIA_TF32_OVERRIDE=0`` forbids it."""
    return torch.cuda.get_device_capability() >= (8, 0) and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def _reset_peak(*, on_gpu: bool) -> int:
    """Resets the peak and returns the memory held now in bytes: of the GPU, or of the process (resident)."""
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    with contextlib.suppress(OSError, AttributeError):  # freed memory could be reused without showing in the peak
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(*, on_gpu: bool) -> int:
    return int(torch.cuda.max_memory_allocated()) if on_gpu else _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Runs the `TrainJob` that the first argument holds as JSON; writes the result to the file of the second."""
    torch.set_num_threads(1)
    values = json.loads(sys.argv[1])
    job = TrainJob(**values | {"pixels": tuple(values["pixels"])})
    Path(sys.argv[2]).write_text(json.dumps((costs if job.metrics else measure)(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
