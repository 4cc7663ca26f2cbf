"""What only a GPU can show: compiled kernels on our boundaries, and the speed of a packed step; one GPU is enough.

The parts, each at most 8 minutes (``--limit``):

* indices: our context-parallel indices compared with Transformer Engine's compiled ``thd_get_partitioned_indices``;
* attention: Megatron-Core's attention on packed rows, kernel by kernel, forward and backward, compared with each sample
  alone, in memory that held NaN (`bench.gpu_kernels`);
* speed: the same layer timed with padding between the samples, with padding that is part of them, and with none;
* router, rotary, losses: Core's fused and plain functions under padding and masked labels;
* handover: packs on the device compared with those on the host, how often the host waits; and ours beside Bridge's:
  milliseconds and bytes of a pack, and the share of its copy that the computation hides;
* pixels: the device makes the processor's numbers of bytes, within one unit in the last place, for every family;
* parity: packed compared with alone on tiny Hugging Face models (flash attention if installed), with a control;
* step: a training step of a model of 0.15 billion weights in bfloat16 on packs compared with padded rows and rows
  packed in the batch: tokens per second, peak memory beside the estimate of ``validate``;
* cost: `energon_packing.packing.model_cost` fitted to the seconds of that model's steps on packs of text and of images,
  short and long. The metrics of the run stay in ``gpu-DEVICE-metrics``, for ``energon-packing stats --fit``.

Prints one JSON line per result and stores each at once in ``gpu-DEVICE.json`` in ``--out``, with ``gpu-DEVICE.md``
beside it, a report to paste. A part that has had its time stops before its next row. The same command again goes on
with the rows that are not stored, those that failed last (``--again`` runs all anew). Rows of other releases or
``NVTE_`` variables are not kept. A part or row whose package is not installed is not run; one that cannot be imported
for another reason has failed. Where the device itself fails, the command ends, since nothing runs there until it starts
again. ``--device cpu`` runs what a CPU can, in a tiny form. Exit codes: 0 all that ran is equal, or there is no device;
1 something differs or failed; 2 unusable input.

The functions take the kernel or the device as an argument, so the code around a kernel can be tested without a GPU.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import energon_packing
from bench import gpu_kernels
from energon_packing import thd

Row = Mapping[str, Any]
Units = Iterator[tuple[str, Callable[[], Row | Iterable[Row]]]]
"""Names of the rows of a part, and what runs each; a row may have several results."""
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 480
"""Seconds of a part."""
ROWS = 200
OURS = ("ours", "ours, in Bridge")
FLASH_TOLERANCE = 5e-2
"""Largest difference of a logit in bfloat16; in float32 `support.parity.hugging_face_parity` has it."""


def partition_check(compiled: Any, device: str = "cuda") -> dict[str, Any]:
    """Compares our context-parallel indices with ``thd_get_partitioned_indices``, for 1, 2, 4 and 8 ranks.

    Args:
        compiled: ``(cu_seqlens, total, cp_size, rank) -> indices``.
        device: of the boundaries.
    """
    random = np.random.default_rng(0)
    compared = 0
    different: dict[str, Any] | None = None
    for _ in range(ROWS):
        for cp_size in (1, 2, 4, 8):
            pieces = random.integers(1, 40, random.integers(1, 40))
            ends = np.concatenate([[0], np.cumsum(pieces * 2 * cp_size)]).astype(np.int32)
            boundaries = torch.from_numpy(ends).to(device)
            for rank in range(cp_size):
                theirs = compiled(boundaries, int(ends[-1]), cp_size, rank)
                ours = thd.context_parallel_indices(boundaries, cp_size, rank)
                compared += 1
                if different is None and not torch.equal(ours, theirs.to(ours)):
                    different = {"cu_seqlens": ends.tolist(), "cp": cp_size, "rank": rank}
    return {
        "check": "thd_get_partitioned_indices",
        "compared": compared,
        "different": different,
        "equal": different is None,
    }


def pixels_check(device: str = "cuda") -> dict[str, Any]:
    """Compares pixels that the device makes of bytes with the processor's, which a CPU makes, for each family.

    Args:
        device: makes the numbers.

    Returns:
        ``families`` compared, ``bit_equal`` of them, and ``largest``: the largest difference of any value, in units in
        the last place of the processor's. ``equal`` allows one.
    """
    from support.offline_processors import PROCESSORS

    from energon_packing.config import EncoderConfig
    from energon_packing.conversation import Media
    from energon_packing.families.registry import build_family
    from energon_packing.thd.pixels import finish

    largest, bit_equal = 0.0, 0
    for name, make in PROCESSORS.items():
        family = build_family(make(), EncoderConfig(family=name))
        plans = family.plans([Media(kind="image", name="a", width=300, height=200)])
        image = torch.randint(256, (3, 200, 300), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        expected = family.pixels(plans, [image])["pixel_values"]
        carried = {key: value.to(device) for key, value in family.pixels(plans, [image], raw=True).items()}
        made = finish(carried, family.pixel_forms)["pixel_values"].cpu()
        one = torch.nextafter(expected.abs(), torch.tensor(torch.inf)) - expected.abs()
        apart = float(((made - expected).abs() / one).max())
        bit_equal += apart == 0
        largest = max(largest, apart)
    return {
        "check": "pixels",
        "families": len(PROCESSORS),
        "bit_equal": bit_equal,
        "largest": largest,
        "equal": largest <= 1,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a part is told: its device, a folder for metrics that stay, the rows of the part that are done, and names of
    those that failed before and of those that do not run now."""

    device: str
    metrics: Path
    stored: list[dict[str, Any]] = field(default_factory=list)
    failed: Set[str] = frozenset()
    later: Set[str] = frozenset()

    @property
    def tiny(self) -> bool:
        """Whether it runs on a CPU, in a form that takes seconds."""
        return self.device == "cpu"


class NotYet(Exception):
    """A row compares others that are not stored."""


def handover(run: Run) -> Units:
    """See `same_packs` and `hand_over`."""
    with tempfile.TemporaryDirectory(prefix="gpu-handover-") as work:

        @cache
        def job() -> Any:
            from support.bridge_cpu import stand_ins

            from bench.loader_data import prepare_data
            from bench.train_run import TrainJob
            from energon_packing.demo import processor_path
            from energon_packing.validate.verdict import import_bridge

            if run.tiny:
                stand_ins.install()
            else:
                import_bridge(placeholders=not _installed("transformer_engine"))
            torch.zeros(1, device=run.device)
            data = prepare_data(Path(work), conversations=24 if run.tiny else 120)
            return TrainJob(rows="packs", data=str(data.root), processor=str(processor_path("qwen3_vl")),
                            family="qwen3_vl", seq_length=2048 if run.tiny else 8192, window=256, micro_batch_size=1,
                            passes=1, pixels=(128 * 128, 512 * 512))  # fmt: skip

        @cache
        def packs(_reading: int = 0) -> list[Any]:
            from bench.train_run import open_packs

            return [pack.batch for pack in open_packs(job(), workers=2)[0]]

        yield "packs on the device and on the host", lambda: same_packs(packs(), packs(1), run.device)
        for way in (*OURS, *(("Bridge",) if run.tiny else ("Bridge, pinned", "Bridge, not pinned"))):
            yield way, partial(lambda way: hand_over(way, packs(), run.device), way)


def _on_device(copy: Any, batch: Any, device: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A pack on the device as a step has it, and its visual inputs as the model takes them."""
    from energon_packing.thd.pixels import finish

    on = copy.take(*copy.start(batch)).to(device, non_blocking=True)
    thd.packed_seq_params(on)
    return on, finish(on.visual_inputs or {}, on.pixel_forms)


def same_packs(packs: Sequence[Any], plain: Sequence[Any], device: str) -> dict[str, Any]:
    """Compares packs on the device with the same packs on the host: read by workers that are forked after CUDA is up,
    copied on a stream of their own, into memory that held NaN.

    Returns ``bytes`` of pixels, ``different``: names of fields that differ, and ``waits``: how often the host waits for
    the device between the copy and what the step gives to the model.
    """
    from energon_packing.energon.replica_reader import DeviceCopy

    copy = DeviceCopy(pixels=True)
    different, total, waited = set(), 0, 0
    for mine, theirs in zip(packs, plain, strict=True):
        gpu_kernels.poison(device)
        on, visual = _on_device(copy, mine, device)
        expected = theirs.finished()
        values = expected.visual_inputs or {}
        different |= {name for name, value in values.items() if not _alike(visual[name].cpu(), value)}
        different |= {
            name for name, value in theirs.token_tensors.items() if not torch.equal(on.token_tensors[name].cpu(), value)
        }
        total += sum(value.nbytes for value in values.values())
        waited = max(waited, gpu_kernels.waits(partial(_on_device, copy, mine, device)))
    return {
        "check": "handover", "packs": len(plain), "bytes": total, "different": sorted(different), "waits": waited,
        "equal": not different,
    }  # fmt: skip


def hand_over(way: str, packs: Sequence[Any], device: str, repeats: int = 3) -> dict[str, Any]:
    """Times handing packs of the host to a step, each alone and behind a computation on the main stream that takes
    twice as long.

    Args:
        way: ``ours``: bytes of pixels on a stream of their own, finished on the device. ``ours, in Bridge``: the same
            through Bridge's ``vlm_step``, as a run with our data set has it. ``Bridge``: ``vlm_step`` copies the
            processor's numbers on the main stream, from memory that is pinned or not.

    Returns:
        Means per pack: ``megabytes`` that are copied; ``pin_ms`` of pinning them, for which training has a thread, and
        which the others leave out (on a GPU); ``ms`` of the hand-over, ``compute_ms`` of the computation, ``both_ms``;
        and ``overlap``, the share of the hand-over that the computation hides (on a GPU).
    """
    from megatron.bridge.training.vlm_step import get_batch_from_iterator

    from energon_packing.energon.replica_reader import DeviceCopy

    ours = way in OURS
    copy = DeviceCopy(pixels=True) if ours else None

    def bridge(batch: Any) -> Any:
        batch = batch if copy is None else copy.take(*copy.start(batch))
        form = iter([batch.to_bridge()])  # which the step changes
        return get_batch_from_iterator(form, is_first_pp_stage=True, is_last_pp_stage=True)

    hand: Callable[[Any], Any] = partial(_on_device, copy, device=device) if way == "ours" else bridge
    given = list(packs) if ours else [batch.finished() for batch in packs]
    pinning: list[float] = []
    if device != "cpu" and way != "Bridge, not pinned":
        for _ in range(1 + repeats):  # the first allocates
            pinned, pinning = [], []
            for batch in given:
                began = time.perf_counter()
                pinned.append(batch.pin_memory())
                pinning.append(1e3 * (time.perf_counter() - began))
        given = pinned
    side = 64 if device == "cpu" else 4096
    factor = torch.randn(side, side, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)

    def milliseconds(times: int, batch: Any) -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            torch.mm(factor, factor)
        kept = None if batch is None else hand(batch)
        if device != "cpu":
            torch.cuda.synchronize()
        del kept
        return 1e3 * (time.perf_counter() - began)

    for batch in given:  # the first copies allocate
        milliseconds(1, batch)
    alone = statistics.median(milliseconds(0, batch) for batch in given)
    times = max(1, math.ceil(20 * alone / milliseconds(10, None)))
    copied, both = (
        statistics.mean(statistics.median(milliseconds(many, batch) for _ in range(repeats)) for batch in given)
        for many in (0, times)
    )
    computed = statistics.median(milliseconds(times, None) for _ in range(repeats))
    forms = [{spec.name: getattr(each, spec.name) for spec in fields(each)} for each in given]
    moved = [_bytes(form if ours else bridge(each)) for form, each in zip(forms, given, strict=True)]
    told = {"megabytes": statistics.mean(moved) / 1e6, "ms": copied, "compute_ms": computed, "both_ms": both}
    told |= {"pin_ms": statistics.mean(pinning)} if pinning else {}
    told |= {} if device == "cpu" else {"overlap": min(1.0, max(0.0, (copied + computed - both) / copied))}
    return {"check": "handover", "way": way, **{name: round(value, 3) for name, value in told.items()}}


def _bytes(value: Any) -> int:
    """Bytes of all tensors of a tensor, a mapping or an object."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    values = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return sum(map(_bytes, values.values()))


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and bool(((one.double() - two.double()).abs() <= 1e-6).all())


def indices(_run: Run) -> Units:
    """See `partition_check`."""

    def compared() -> dict[str, Any]:
        import transformer_engine.pytorch  # noqa: F401  (loads the compiled module)
        import transformer_engine_torch  # type: ignore[import-not-found]

        return partition_check(transformer_engine_torch.thd_get_partitioned_indices)

    yield "indices", compared


def parity(run: Run) -> Units:
    """`support.parity.families` on the device: with a written-out mask, then with the model's own segments.

    The second uses flash attention's variable-length kernels (bfloat16) if the package is installed.
    """
    from support.parity import families
    from support.parity.run import has_flash_attention

    with tempfile.TemporaryDirectory(prefix="gpu-parity-") as work:

        def compare(attention: Any, family: str) -> dict[str, Any]:
            flash = attention == "positions" and not run.tiny and has_flash_attention()
            how = {"attention": attention, "tolerance": FLASH_TOLERANCE if flash else None}
            (row,) = families.run((family,), Path(work), device=run.device, **how)
            equal = row["equal"] and row["control_found"]
            return {"check": "parity", "attention": attention, "flash": flash, **row, "equal": equal}

        for attention in ("mask", "positions"):
            for family in ("qwen3_vl",) if run.tiny else families.FAMILIES:
                yield f"{family}, {attention}", partial(compare, attention, family)


def step(run: Run) -> Units:
    """A training step on packs, rows packed in the batch and padded rows: tokens per second, peak memory."""
    from bench import train
    from bench.loader_data import prepare_data

    bench = train.TrainBench(small=True, conversations=120, seq_length=8192, micro_batches=(4,))
    if run.tiny:
        bench = train.TrainBench(conversations=12, seq_length=1024, micro_batches=(2,), passes=1)
    kinds = train.kinds(bench)

    def measure(work: Path, *kind: Any) -> dict[str, Any]:
        row = train.measure_kind(bench, data(), work, *kind)
        return row | {"estimated_peak_mb": sum(row["estimated_mb"].values())}

    def verdict() -> dict[str, Any]:
        names = [train.kind_name(*kind) for kind in kinds]
        rows = [row for row in run.stored if row["row"] in names]
        if len(rows) < len(kinds):
            raise NotYet
        told = train.verdict(rows)
        return {**told, "check": "step", "equal": told["same_samples"] and told["same_loss"]}

    with tempfile.TemporaryDirectory(prefix="gpu-train-") as work:
        data = cache(lambda: prepare_data(Path(work), conversations=bench.conversations))
        for kind in kinds:
            yield train.kind_name(*kind), partial(measure, Path(work), *kind)
    yield "verdict", verdict


def cost(run: Run) -> Units:
    """The seconds of steps fitted to `energon_packing.packing.model_cost` of the model."""
    yield "fit", partial(fit_cost, run)


def fit_cost(run: Run) -> dict[str, Any]:
    """Trains on packs of text alone and of all, of several lengths, and fits the metrics of this run.

    Returns:
        ``vision``, ``language``: seconds of a unit, which is a million operations; ``constant`` seconds of a step;
        the TFLOP/s that these mean; and what else `energon_packing.report.steps.fit_report` says.
    """
    from bench import train
    from bench.loader import start
    from bench.loader_data import prepare_data
    from bench.train_run import TrainJob
    from energon_packing.convert import ConvertConfig, convert
    from energon_packing.demo import processor_path
    from energon_packing.report.steps import fit_report

    lengths = (256, 512, 1024) if run.tiny else (1024, 2048, 4096, 8192)
    shutil.rmtree(run.metrics, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="gpu-cost-") as folder:
        work = Path(folder)
        every = prepare_data(work, conversations=24 if run.tiny else 200).root
        records = (work / "raw" / "openai.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (work / "text").mkdir()
        (work / "text" / "openai.jsonl").write_text(
            "".join(record for record in records if "image" not in record and "video" not in record), encoding="utf-8"
        )
        text = work / "text-only"
        convert(ConvertConfig(sources=(work / "text",), out=text, split={"train": 1.0}, workers=0))
        job = TrainJob(
            rows="packs", data="", processor=str(processor_path("qwen3_vl")), family="qwen3_vl",
            seq_length=max(lengths), window=256, micro_batch_size=1, passes=1,
            pixels=train.PIXELS if run.tiny else train.SMALL_PIXELS, small=not run.tiny, metrics=str(run.metrics),
            mixes=[(str(data), length) for data in (every, text) for length in lengths],
        )  # fmt: skip
        told = start(job, work / "cost.log", module="train_run", name="cost")
    found = fit_report(run.metrics)
    rates = {f"{name}_tflops": found[name] and float(f"{1e-6 / found[name]:.3g}") for name in ("vision", "language")}
    return {"check": "cost", **told, **found, **rates, "metrics": run.metrics.name}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the command.

    Attributes:
        what: it compares or measures, for the report.
        units: see `Units`.
        needs: packages, on a GPU.
        on_cpu: whether a CPU can run it, with these packages but Transformer Engine.
        columns: of its table in the report.
    """

    what: str
    units: Callable[[Run], Units]
    columns: Sequence[str]
    needs: Sequence[str] = ("megatron.core", "transformer_engine")
    on_cpu: bool = True


def _of_core(name: str) -> Callable[[Run], Units]:
    """The rows of a function of `gpu_kernels` that takes a moment."""
    return lambda run: iter([(name, lambda: getattr(gpu_kernels, name)(run.device))])


TRAINING = ("megatron.bridge", "transformer_engine")
PARTS = {
    "indices": Part(
        what="our context-parallel indices and Transformer Engine's",
        units=indices,
        columns=("compared", "different"),
        needs=("transformer_engine",),
        on_cpu=False,
    ),
    "attention": Part(
        what="attention on packed rows and on each sample alone: largest differences",
        units=lambda run: gpu_kernels.attention(run.device),
        columns=("kernel", "output", "gradient", "unwritten"),
        on_cpu=False,
    ),
    "speed": Part(
        what="milliseconds of a layer",
        units=lambda run: gpu_kernels.speeds(run.device),
        columns=("kernel", "samples", "forward_ms", "backward_ms", "first_ms"),
        on_cpu=False,
    ),
    "router": Part(
        what="Core's routers of experts under a padding mask and without",
        units=_of_core("routers"),
        columns=("fusion", "mask", "repaired", "gradient", "waits"),
    ),
    "rotary": Part(
        what="Core's rotary positions on aligned rows and on each sample alone",
        units=_of_core("rotary"),
        columns=("fused", "largest", "waits"),
    ),
    "losses": Part(
        what="Core's cross entropies of masked labels and torch's",
        units=_of_core("losses"),
        columns=("function", "masked_label", "loss", "gradient", "masked_loss_is_finite"),
    ),
    "handover": Part(
        what="packs on the device and on the host; per pack, megabytes and milliseconds of our hand-over and of "
        "Bridge's, alone and behind a computation, and the share that this hides",
        units=handover,
        columns=("megabytes", "pin_ms", "ms", "compute_ms", "both_ms", "overlap", "packs", "different", "waits"),
        needs=("megatron.bridge",),
    ),
    "pixels": Part(
        what="pixels that the device makes of bytes and the processor's",
        units=lambda run: iter([("all families", partial(pixels_check, run.device))]),
        columns=("families", "bit_equal", "largest"),
        needs=(),
    ),
    "parity": Part(
        what="packs and their samples alone on tiny models; the control ignores boundaries",
        units=parity,
        columns=("flash", "segments", "logits", "loss", "gradient", "control"),
        needs=(),
    ),
    "step": Part(
        what="a training step of one model on the same samples in several kinds of rows; one step per pass",
        units=step,
        columns=(
            *("tokens", "seconds_a_pass", "tokens_per_second", "peak_mb", "estimated_peak_mb", "padding", "loss"),
            *("times_faster", "same_samples", "same_loss"),
        ),
        needs=TRAINING,
    ),
    "cost": Part(
        what="the cost model fitted to steps: seconds of a million operations, and of a step besides",
        units=cost,
        columns=(
            *("vision", "language", "constant", "vision_tflops", "language_tflops", "r_squared", "median_error"),
            *("steps", "left_out", "packs", "text", "metrics"),
        ),
        needs=TRAINING,
    ),
}
clock = time.monotonic


def hindrance(part: Part, device: str) -> str:
    """Returns why a part cannot run on ``cuda``, ``cpu`` or ``none``; nothing if it can."""
    if device == "none" or (device == "cpu" and not part.on_cpu):
        packages = " with Transformer Engine" if "transformer_engine" in part.needs else ""
        return f"needs a CUDA device{packages}"
    missing = [name for name in part.needs if not _installed(name)]
    missing = [name for name in missing if device != "cpu" or name != "transformer_engine"]
    return f"needs a package that is not installed: {missing[0]}" if missing else ""


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):  # of the package around it; of a placeholder
        return False


def _missing(error: Exception) -> str:
    """Returns the package that an error is about, if it is not installed."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return "" if not name or _installed(name) else name


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def broken() -> str:
    """Returns what the GPU says if it failed: after an illegal access, for one, all that a process asks for fails."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the next row or part may start a program of its own
    except Exception as error:
        return _failure(error)
    return ""


Keep = Callable[[str, list[dict[str, Any]]], None]
BROKEN = "the device failed"


def run_part(name: str, run: Run, end: float, keep: Keep) -> dict[str, Any]:
    """Runs the rows of a part that are not stored, until a time of `clock`; ``keep`` gets the name and results of each.

    Returns:
        What became of the part: ``left`` rows, and ``why`` they are left.
    """
    why, left, fault, stored = "", 0, "", {row["row"] for row in run.stored}
    try:
        for unit, work in PARTS[name].units(run):
            if unit in stored or unit in run.later:
                continue
            if why == BROKEN or clock() >= end:
                left, why = left + (unit not in run.failed), why or "stopped"
                continue
            try:
                rows = _results(name, work)
            except NotYet:
                left += unit not in run.failed
                continue
            if run.device == "cuda" and (said := broken()):
                rows, why = [_as_error(row, said) for row in rows], BROKEN
            for row in rows:
                if run.tiny and "refused" in row:
                    row.pop("equal", None)  # a fused function that only a GPU has
            keep(unit, rows)
    except Exception as error:
        if package := _missing(error):
            return {"left": left, "why": f"not run: needs a package that is not installed: {package}"}
        fault = _failure(error)
    if run.device == "cuda" and why != BROKEN and (said := broken()):
        fault, why = fault or said, BROKEN
    if fault:
        keep("", [{"check": name, "equal": False, "error": fault}])
    return {"left": left, "why": why}


def _results(name: str, work: Callable[[], Row | Iterable[Row]]) -> list[dict[str, Any]]:
    """The results of a row; what it raises is one too, like a kernel's own error."""
    try:
        found = work()
        return [dict(found)] if isinstance(found, Mapping) else [dict(row) for row in found]
    except NotYet:
        raise
    except Exception as error:
        if package := _missing(error):
            return [{"check": name, "needs": package}]
        return [{"check": name, "equal": False, "error": _failure(error)}]


def _as_error(row: dict[str, Any], said: str) -> dict[str, Any]:
    """A row after which the device has failed, whatever the row took it for."""
    return {name: value for name, value in row.items() if name != "refused"} | {"error": said, "equal": False}


def _done(row: Mapping[str, Any]) -> bool:
    return not {"error", "needs"} & row.keys()


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="bench.py gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="append", choices=list(PARTS), help="part to run; may be repeated (all)")
    parser.add_argument("--out", type=Path, default=Path(), help="directory for gpu-DEVICE.json and gpu-DEVICE.md")
    parser.add_argument("--again", action="store_true", help="run parts that are stored in --out anew")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what a CPU can run (%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a part (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of all parts together; no row starts after them"
    )
    given = parser.parse_args(argv)
    if not given.out.is_dir():
        print(f"error: --out {given.out} is not a directory", file=sys.stderr)
        return 2
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the programs that parts start, too
    device = given.device if given.device == "cpu" or torch.cuda.is_available() else "none"
    name = {"cuda": torch.cuda.get_device_name, "cpu": lambda: "cpu", "none": lambda: "no device"}[device]()
    file = given.out / f"gpu-{re.sub('[^A-Za-z0-9]+', '-', name).strip('-')}.json"
    told: dict[str, Any] = {"device": name, **environment(device), "parts": {}, "results": []}
    if file.exists():
        try:
            told |= read(file, told)
        except KeyError as error:
            print(f"error: {file} is of an older version (it has no {error}); remove it", file=sys.stderr)
            return 2
        except (ValueError, TypeError, AttributeError) as error:
            print(f"error: {file} cannot be read ({_failure(error)}); remove it", file=sys.stderr)
            return 2
    shown = ("results", "parts")
    print(json.dumps({key: value for key, value in told.items() if key not in shown}), flush=True)
    return run_parts(given.check or list(PARTS), device, told, file, given)


def read(file: Path, told: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the stored ``results`` with the releases and variables of this run, and the ``parts`` that have any.

    Raises:
        KeyError: a version before this stored it.
    """
    stored = json.loads(file.read_text())
    same = ("releases", "variables")
    rows = [row for row in stored["results"] if all(row[name] == told[name] for name in same)]
    kept = {row["part"] for row in rows}
    if others := len(stored["results"]) - len(rows):
        print(f"{file}: {others} rows of other releases or NVTE_ variables are not kept", file=sys.stderr)
    return {"results": rows, "parts": {part: dict(state) for part, state in stored["parts"].items() if part in kept}}


def run_parts(names: Sequence[str], device: str, told: dict[str, Any], file: Path, given: argparse.Namespace) -> int:
    """Runs parts and stores what each row gives; returns the exit code. Rows that failed in a command before come last,
    when all parts have had their turn, since they may end this one too."""
    last = clock() + 60 * given.minutes
    failed = {name: set[str]() if given.again else _failed(name, told) for name in names}
    spent = dict.fromkeys(names, 0.0)
    turns = [(name, False) for name in names] + [(name, True) for name in names if failed[name]]
    for number, (name, second) in enumerate(turns, start=1):
        anew = given.again and not second
        state = {} if anew else told["parts"].get(name, {})
        now = _failed(name, told)
        own = [row for row in told["results"] if row["part"] == name and row["row"] not in {"", *now} and not anew]
        if own and not now and not anew and not state.get("why", "interrupted"):
            print(f"{name}: stored in {file} (--again runs it)", file=sys.stderr)
            continue
        if why := hindrance(PARTS[name], device):
            told["parts"][name] = {**told["parts"].get(name, {}), "why": f"not run: {why}"}
            store(told, file)
            continue
        seconds = min(given.limit - spent[name], last - clock())
        if seconds <= 0:  # not even its set-up
            print(f"{name}: no time is left for it", file=sys.stderr)
            usual = {"seconds": 0, "left": "others" if own else "all", "why": "stopped after 0 s"}
            told["parts"][name] = usual | told["parts"].get(name, {})
            store(told, file)
            continue
        what = f"{name}, what failed before" if second else name
        print(f"{what} (part {number} of {len(turns)}): at most {round(seconds)} s", file=sys.stderr, flush=True)
        gone = {""} if not anew else {row["row"] for row in told["results"]}  # "": of the part, not of one of its rows
        told["results"] = [row for row in told["results"] if row["part"] != name or row["row"] not in gone]
        told["parts"][name] = {**state, "why": "interrupted"}
        run = Run(device=device, metrics=file.with_name(f"{file.stem}-metrics"), stored=own, failed=failed[name],
                  later=now - failed[name] if second else failed[name])  # fmt: skip
        began = clock()

        def keep(unit: str, rows: list[dict[str, Any]], name: str = name, run: Run = run) -> None:
            marks = {"part": name, "row": unit, **{key: told[key] for key in ("releases", "variables", "revision")}}
            rows = [{**marks, **row} for row in rows]
            before = [row for row in told["results"] if (row["part"], row["row"]) != (name, unit)]
            told["results"] = [*before, *rows]
            run.stored.extend(rows if all(map(_done, rows)) else [])
            for row in rows:
                shown = {key: value for key, value in row.items() if key not in marks or key == "row"}
                print(json.dumps(shown), flush=True)
            store(told, file)

        ended = run_part(name, run, began + seconds, keep)
        took = clock() - began
        spent[name] += took
        why = f"stopped after {round(took)} s" if ended["why"] == "stopped" else ended["why"]
        if any("error" in row for row in told["results"] if row["part"] == name):
            why = why or "failed in part"
        took += state.get("seconds", 0)
        told["parts"][name] = {"seconds": round(took, 1), "left": ended["left"], "why": why}
        store(told, file)
        print(f"{name}: {verdict(name, told)}", file=sys.stderr, flush=True)
        if ended["why"] == BROKEN:
            print(f"{BROKEN}; start again: the same command goes on, what failed comes last", file=sys.stderr)
            return 1
    verdicts = {name: verdict(name, told) for name in names}
    left = [name for name in names if told["parts"].get(name, {}).get("left")]
    print(f"stored in {file}; the report is {file.with_suffix('.md')}", file=sys.stderr)
    if left:
        print(f"not done yet: {', '.join(left)}; the same command goes on with them", file=sys.stderr)
    return int(any("**" in each for each in verdicts.values()))


def _failed(name: str, told: Mapping[str, Any]) -> set[str]:
    """Names of the rows of a part that have run and are not done."""
    return {row["row"] for row in told["results"] if row["part"] == name and row["row"] and not _done(row)}


def store(told: Mapping[str, Any], file: Path) -> None:
    """Writes all results and the report."""
    for path, text in ((file, json.dumps(told, indent=2) + "\n"), (file.with_suffix(".md"), report(told))):
        part = path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)


def verdict(name: str, told: Mapping[str, Any]) -> str:
    """Returns in a few words what is known of a part; what is wrong is bold."""
    state, rows = told["parts"].get(name, {}), [row for row in told["results"] if row["part"] == name]
    counts = {
        "equal": sum(row.get("equal") is True for row in rows),
        "measured": sum(not {"equal", "refused", "error", "needs"} & row.keys() for row in rows),
        "refused": sum("refused" in row and row.get("equal") is not False for row in rows),
        "**differ**": sum(row.get("equal") is False and "error" not in row for row in rows),
        "**failed**": sum("error" in row for row in rows),
    }
    words = [f"{count} {what}" for what, count in counts.items() if count]
    if rows and counts["refused"] == len(rows):
        words = ["**refused** by every kernel"]
    if packages := sorted({row["needs"] for row in rows if "needs" in row}):
        words.append(f"{sum('needs' in row for row in rows)} not run (not installed: {', '.join(packages)})")
    if state.get("left"):
        words.append(f"{state['left']} left")
    if why := state.get("why", "" if rows else "not run yet"):
        words.insert(0, why)
    return "; ".join(words)


def report(told: Mapping[str, Any]) -> str:
    """Returns all results as one page of Markdown, to paste."""
    about = {"device": told["device"], **told["machine"], **told["releases"], **told["variables"]}
    revisions = dict.fromkeys([*(row["revision"] for row in told["results"]), told["revision"]])
    about["energon-packing"] = f"{energon_packing.__version__} ({', '.join(revisions)})"
    lines = [f"# `scripts/bench.py gpu` on {told['device']}", "", ", ".join(f"{k} {v}" for k, v in about.items()), ""]
    seconds = {name: told["parts"].get(name, {}).get("seconds", "") for name in PARTS}
    lines += _table(("part", "verdict", "seconds"), [(name, verdict(name, told), seconds[name]) for name in PARTS])
    for name, part in PARTS.items():
        rows = [row for row in told["results"] if row["part"] == name]
        if rows:
            columns = [column for column in part.columns if any(column in row for row in rows)]
            own = sorted({row["revision"] for row in rows})
            also = ("refused", "error", "needs", "equal", *["revision"] * (len(own) > 1))
            columns += [column for column in also if any(column in row for row in rows)]
            shown = [row | ({"equal": "**no**"} if row.get("equal") is False else {}) for row in rows]
            cells = [(row["row"], *(row.get(column, "") for column in columns)) for row in shown]
            lines += ["", f"**{name}**: {part.what} (revision {', '.join(own)})", "", *_table(("row", *columns), cells)]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    return [f"| {' | '.join(map(_cell, each))} |" for each in (head, ["---"] * len(head), *rows)]


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(_cell, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
    return " ".join(text.replace("|", "\\|").split())


def environment(device: str) -> dict[str, Any]:
    """Returns releases, the variables that choose a kernel, the machine, and our revision."""
    releases, machine = {}, {}
    for name in (
        *("torch", "transformer-engine", "flash-attn", "flash-attn-3", "flash-attn-4"),
        *("megatron-core", "megatron-bridge", "megatron-energon", "transformers"),
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            releases[name] = importlib.metadata.version(name)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine = {
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "compute capability": f"{properties.major}.{properties.minor}",
            "CUDA": str(torch.version.cuda),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
        releases["cudnn"] = str(torch.backends.cudnn.version())
        with contextlib.suppress(Exception):  # its own cuDNN, which need not be torch's; FileNotFoundError: no library
            import transformer_engine.pytorch  # noqa: F401
            import transformer_engine_torch

            releases["cudnn"] = str(transformer_engine_torch.get_cudnn_version())
    return {
        "releases": releases,
        "variables": {name: value for name, value in os.environ.items() if "NVTE_" in name},
        "machine": machine,
        "revision": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }


def _output(*command: str) -> str:
    """What a program says on one line; ``unknown`` without it."""
    done = None
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() if done and not done.returncode else []
    return lines[0].strip() if lines else "unknown"
