"""One measured training of one kind of row, in its own process: passes over all samples, one JSON object.

All micro-batches are made before the clock starts, so only the model is measured: forward, backward, and one optimiser
step per pass. Every pass reads the same samples in the same order, whatever rows they are in, and the loss is divided
by the trained tokens of the pass; so all kinds of row must report the same loss.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from support.bridge_cpu import stand_ins
from support.bridge_cpu.tiny_models import special_tokens

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, RunConfig
from energon_packing.encoders.encoder import ConversationEncoder

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


@dataclass(kw_only=True)
class MicroBatches:
    """All micro-batches of a pass and their contents.

    Attributes:
        batches: mappings that Bridge's steps read.
        samples, tokens: of all batches, without padding.
        dropped: samples that the encoder dropped.
        vocab_size, special_tokens: what a tiny model of the encoder's family needs.
    """

    batches: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    dropped: int = 0
    vocab_size: int = 0
    special_tokens: Any = None


def micro_batches(job: TrainJob) -> MicroBatches:
    """Makes all micro-batches of a job; nothing of the loader remains in memory."""
    from energon_packing.bridge.dataset import MicroBatchForm
    from energon_packing.energon.loader import build_loader, build_task_encoder
    from energon_packing.energon.sample_task_encoder import MicroBatchTaskEncoder
    from energon_packing.energon.task_encoder import PackingTaskEncoder
    from energon_packing.thd.batch import PackedBatch

    low, high = job.pixels
    config = RunConfig(
        data=DataConfig(path=job.data, workers=0, repeat=False),
        encoder=EncoderConfig(
            processor=job.processor, min_pixels=low, max_pixels=high, video_min_pixels=low, video_max_pixels=high
        ),
        packing=PackingConfig(seq_length=job.seq_length, drop_budget=1.0),
    )
    encoder: PackingTaskEncoder
    form: Callable[[PackedBatch], dict[str, Any]]
    if job.rows == "packs":
        packing = dataclasses.replace(config.packing, window=job.window)
        encoder, form = build_task_encoder(dataclasses.replace(config, packing=packing)), PackedBatch.to_bridge
    else:
        size = job.micro_batch_size
        encoder = MicroBatchTaskEncoder(config.encoder, config.packing, ParallelConfig(), micro_batch_size=size)
        form = MicroBatchForm(packed=job.rows == "in_batch", samples=size, seq_length=job.seq_length)
    found = MicroBatches()
    for pack in build_loader(config, task_encoder=encoder):
        found.batches.append(form(pack.batch))
        found.samples += pack.batch.num_samples
        found.tokens += pack.batch.real_tokens
        found.dropped += len(pack.dropped)
    assert isinstance(encoder.encoder, ConversationEncoder)  # of an EncoderConfig
    found.vocab_size = max(encoder.encoder.tokenizer.get_vocab().values()) + 1
    found.special_tokens = special_tokens(encoder.encoder.tokenizer.get_vocab())
    return found


class _Passes:
    """Repeats the micro-batches forever, as an external data loader of Bridge."""

    def __init__(self, batches: Sequence[dict[str, Any]]) -> None:
        self._batches, self._read = batches, 0

    def __iter__(self) -> _Passes:
        return self

    def __next__(self) -> dict[str, Any]:
        self._read += 1
        return dict(self._batches[(self._read - 1) % len(self._batches)])


def _data_set(batches: Sequence[dict[str, Any]], rows: Rows, seq_length: int) -> Any:
    from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider

    class Ready(DatasetProvider):
        """Hands out ready micro-batches."""

        enable_in_batch_packing = rows == "in_batch"

        def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, None, None]:
            return _Passes(batches), None, None

    made = Ready(num_workers=0, dataloader_type="external")
    made.seq_length = seq_length
    return made


def measure(job: TrainJob) -> dict[str, Any]:
    """Trains one pass that is not measured and ``job.passes`` that are.

    Returns:
        ``seconds`` and ``cpu_seconds`` of each measured pass, ``losses`` of all passes, ``peak_bytes`` that training
        took beyond what the process held before the model was built, and counts of the micro-batches.
    """
    on_cpu = stand_ins.needed()
    stand_ins.install()
    from support.bridge_cpu import tiny_models, training_run

    made = micro_batches(job)
    rows = [int(batch["tokens"].numel()) for batch in made.batches]
    clocks: list[tuple[float, float]] = []

    def stop(_report: Any) -> None:
        if not on_cpu:
            torch.cuda.synchronize()
        clocks.append((time.perf_counter(), time.process_time()))

    with training_run.process_groups():
        model = tiny_models.provider(
            job.family,
            vocab_size=made.vocab_size,
            tokens=made.special_tokens,
            seq_length=max(job.seq_length, *rows),
        )
        size = 1 if job.rows == "packs" else job.micro_batch_size
        data = _data_set(made.batches, job.rows, job.seq_length)
        config = training_run.make_config(model, data, steps=job.passes + 1, global_batch_size=size * len(made.batches))
        config.train.micro_batch_size = size
        before = _reset_peak(on_gpu=not on_cpu)
        result = training_run.run(config, forward_step="vlm", on_step=stop)
        peak = _peak(on_gpu=not on_cpu) - before
    passes = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(clocks)]
    return {
        "seconds": [seconds for seconds, _ in passes],
        "cpu_seconds": [seconds for _, seconds in passes],
        "losses": result.losses,
        "peak_bytes": peak,
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(),
        "tf32": not on_cpu and uses_tf32(),
        "samples": made.samples,
        "dropped": made.dropped,
        "tokens": made.tokens,
        "rows": rows,
    }


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
    Path(sys.argv[2]).write_text(json.dumps(measure(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
