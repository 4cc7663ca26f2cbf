"""Benchmark of training: packs compared with padded rows and Bridge's in-batch packing, same samples, same model.

Every kind of row runs in a fresh process on one thread: a tiny model of Megatron-Bridge, its own training loop and
forward step, the same conversations, all micro-batches made before the clock starts. Figures are for whole passes over
the data; each result is one JSON object, and the last one compares them.

``--whole`` measures whole jobs: padded rows, packs that are made while they train, and packs that are made before.
Reading and packing are part of the time, and every job reads with one worker.

``--ranks 2`` measures how long data-parallel ranks wait for each other with packs in random order and in a plan's.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from bench.loader import start
from bench.loader_data import BenchData, prepare_data
from bench.loader_run import MEGABYTE
from bench.train_run import Rows, TrainJob
from energon_packing.config.run import Padding
from energon_packing.demo import processor_path
from energon_packing.errors import PackingError, UserError

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
PIXELS = (32 * 32, 160 * 160)
"""Pixel limits of images and frames: a tiny vision tower is slow per patch, and images must not dwarf the text."""
SMALL_PIXELS = (128 * 128, 512 * 512)
"""The same for a small model on a GPU."""
SAME_LOSS = 2e-5
"""Losses of the first pass differ by less: the rows contain the same samples, and no sample sees another. They differ
by 1e-6 in fp32; if pack boundaries are ignored, by 4e-4, since a model with random weights hardly uses context."""
SAME_LOSS_IN_BF16 = 4e-3
"""Losses of a small model in bfloat16, 8 bits of mantissa."""
SAME_LOSS_IN_TF32 = 2e-4
"""The same on a GPU whose products round to TF32, 10 bits of mantissa: half of what ignored boundaries change.
Rounding the factors of every product on a CPU alone, they differ by 1e-6; no GPU has been asked."""


PUBLISHED = {"tokens_per_second": 2.0, "total_seconds": (0.17, 0.2)}
"""What Baidu publishes for AIAK's offline packing, as multiples of training without packing: tokens per second, and the
duration of fine-tuning (5 to 6 times shorter)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBench:
    """What is measured; see `parser`."""

    conversations: int = 60
    family: str = "qwen3_vl"
    seq_length: int = 4096
    window: int = 256
    micro_batches: tuple[int, ...] = (4, 8)
    passes: int = 2
    seed: int = 0
    small: bool = False

    def __post_init__(self) -> None:
        for name in ("conversations", "seq_length", "window", "passes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.family not in FAMILIES:
            raise UserError(f"there is no tiny model for {self.family!r}; known: {', '.join(FAMILIES)}")
        if not self.micro_batches or min(self.micro_batches) < 2:
            raise UserError(f"micro-batches {self.micro_batches} must all be at least 2, or nothing is joined")


def run(bench: TrainBench, work: Path) -> Iterator[dict[str, Any]]:
    """Makes the data and measures every kind of row.

    Args:
        bench: what is measured.
        work: directory for the data and the logs of the measured processes.

    Yields:
        One dict for each kind (see `figures`), then one ``train.verdict`` (see `verdict`).

    Raises:
        UserError: Bridge is not installed.
        PackingError: a measured process failed; the message names its log.
    """
    if importlib.util.find_spec("megatron.bridge") is None:
        raise UserError("megatron.bridge, which trains the model, is not installed; install the extra 'bridge'")
    data = prepare_data(work, conversations=bench.conversations, seed=bench.seed)
    results = []
    for kind in kinds(bench):
        results.append(measure_kind(bench, data, work, *kind))
        yield results[-1]
    yield verdict(results)


def measure_kind(
    bench: TrainBench, data: BenchData, work: Path, rows: Rows, size: int, padding: Padding | None
) -> dict[str, Any]:
    """Returns the `figures` of one of the `kinds`."""
    name = kind_name(rows, size, padding)
    return figures(name, bench, measured(bench, data, work, rows, size, name=name, padding=padding))


def kind_name(rows: Rows, size: int, padding: Padding | None) -> str:
    """Returns the name of one of the `kinds`."""
    return f"{rows}-{padding}" if padding else rows if rows == "packs" else f"{rows}-mb{size}"


def measured(
    bench: TrainBench, data: BenchData, work: Path, rows: Rows, size: int, *, name: str, **more: Any
) -> dict[str, Any]:
    """Returns what `bench.train_run.measure` says of one kind of row, in a process of its own."""
    return start(_job(bench, data, rows, size, **more), work / f"train-{name}.log", module="train_run", name=name)


def _job(bench: TrainBench, data: BenchData, rows: Rows, size: int, **more: Any) -> TrainJob:
    return TrainJob(
        rows=rows,
        data=str(data.root),
        processor=str(processor_path(bench.family)),
        family=bench.family,
        seq_length=bench.seq_length,
        window=bench.window,
        micro_batch_size=size,
        passes=bench.passes,
        pixels=SMALL_PIXELS if bench.small else PIXELS,
        small=bench.small,
        **more,
    )


def run_whole(bench: TrainBench, work: Path) -> Iterator[dict[str, Any]]:
    """Measures whole jobs; arguments and errors as for `run`.

    Yields:
        One dict for each job: seconds and CPU seconds in all, those of packing before it, and real tokens per CPU
        second of the training that reads the data. Then one ``train.whole.verdict``: each as a multiple of padded rows,
        beside what is published.
    """
    if importlib.util.find_spec("megatron.bridge") is None:
        raise UserError("megatron.bridge, which trains the model, is not installed; install the extra 'bridge'")
    data = prepare_data(work, conversations=bench.conversations, seed=bench.seed)
    jobs: list[tuple[str, Rows, int, str | None]] = [
        *((f"padded-mb{size}", "padded", size, None) for size in bench.micro_batches),
        ("packs", "packs", 1, None),
        ("packs made before", "packs", 1, str(work / "offline")),
    ]
    results = []
    for name, rows, size, offline in jobs:
        told = measured(bench, data, work, rows, size, name=name.replace(" ", "-"), whole=True, offline=offline)
        prepare = told["prepare"] if offline else [0.0, 0.0]
        total, total_cpu = (before + train for before, train in zip(prepare, told["train"], strict=True))
        results.append(
            {
                "benchmark": "train.whole",
                "rows": name,
                "device": told["device"],
                "passes": bench.passes,
                "total_seconds": round(total, 2),
                "total_cpu_seconds": round(total_cpu, 2),
                "packing_cpu_seconds": round(prepare[1], 2),
                "tokens_per_cpu_second": round(told["tokens"] / told["train"][1]),
                "micro_batches": len(told["rows"]),
            }
        )
        yield results[-1]
    first = results[0]
    yield {
        "benchmark": "train.whole.verdict",
        "compared_with": first["rows"],
        **{
            figure: {row["rows"]: round(row[figure] / first[figure], 2) for row in results[1:]}
            for figure in ("tokens_per_cpu_second", "total_cpu_seconds", "total_seconds")
        },
        "published": PUBLISHED,
    }


def run_ranks(bench: TrainBench, work: Path, *, ranks: int) -> Iterator[dict[str, Any]]:
    """See `bench.train_ranks.run`; other arguments and errors as for `run`."""
    from bench import train_ranks

    if importlib.util.find_spec("megatron.bridge") is None:
        raise UserError("megatron.bridge, which trains the model, is not installed; install the extra 'bridge'")
    data = prepare_data(work, conversations=bench.conversations, seed=bench.seed)
    return train_ranks.run(_job(bench, data, "packs", 1), data, work, ranks=ranks)


def kinds(bench: TrainBench) -> list[tuple[Rows, int, Padding | None]]:
    """Returns packs first, then the other kinds for each size of a micro-batch; of a small model, aligned packs too."""
    others: list[Rows] = [rows for rows in get_args(Rows) if rows != "packs"]
    aligned: list[tuple[Rows, int, Padding | None]] = [("packs", 1, "between"), ("packs", 1, "real")]
    unaligned: list[tuple[Rows, int, Padding | None]] = [
        (r, size, None) for size in bench.micro_batches for r in others
    ]
    return [("packs", 1, None), *(aligned if bench.small else []), *unaligned]


def figures(name: str, bench: TrainBench, measured: dict[str, Any]) -> dict[str, Any]:
    """Computes the figures of one kind of row.

    Returns:
        ``tf32``: whether products of float32 were rounded to it; ``tokens_per_second`` and ``tokens_per_cpu_second``,
        real tokens over the median pass; ``peak_mb`` that training took beyond the data; ``padding``, the share of
        computed tokens that are padding; ``widest``, tokens of the largest micro-batch; ``loss`` of the pass before any
        step.
    """
    computed = sum(measured["rows"])
    tokens = measured["tokens"]
    return {
        "benchmark": "train",
        "rows": name,
        "family": bench.family,
        "device": measured["device"],
        "tf32": measured["tf32"],
        "small": bench.small,
        "seq_length": bench.seq_length,
        "tokens_per_second": round(tokens / statistics.median(measured["seconds"])),
        "tokens_per_cpu_second": round(tokens / statistics.median(measured["cpu_seconds"])),
        "peak_mb": round(measured["peak_bytes"] / MEGABYTE),
        "estimated_mb": {name: round(size / MEGABYTE) for name, size in (measured["estimated_bytes"] or {}).items()},
        "padding": round(1 - tokens / computed, 4),
        "widest": max(measured["rows"]),
        "micro_batches": len(measured["rows"]),
        "samples": measured["samples"],
        "dropped": measured["dropped"],
        "tokens": tokens,
        "seconds_a_pass": round(statistics.median(measured["seconds"]), 2),
        "passes": len(measured["seconds"]),
        "loss": round(measured["losses"][0], 6),
    }


def verdict(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compares packs with the others, in any order.

    Returns:
        ``times_faster`` and ``memory`` (theirs over ours) per kind of row, from CPU seconds, of a small model on a GPU
        from seconds, and peaks; ``same_samples`` and ``same_loss``, without which the rest means nothing.

    Raises:
        PackingError: there is nothing to compare with.
    """
    packs = [row for row in results if row["rows"] == "packs"]
    others = [row for row in results if row["rows"] != "packs"]
    if not packs or not others:
        raise PackingError("a verdict needs packs and at least one other kind of rows")
    ours = packs[0]
    losses = [row["loss"] for row in results]
    speed = "tokens_per_second" if ours["small"] else "tokens_per_cpu_second"
    return {
        "benchmark": "train.verdict",
        "times_faster": {row["rows"]: round(ours[speed] / row[speed], 2) for row in others},
        "memory": {row["rows"]: round(row["peak_mb"] / max(1, ours["peak_mb"]), 2) for row in others},
        "same_samples": len({(row["samples"], row["tokens"]) for row in results}) == 1,
        "same_loss": max(losses) - min(losses)
        < (SAME_LOSS_IN_BF16 if ours["small"] else SAME_LOSS_IN_TF32 if ours["tf32"] else SAME_LOSS),
    }


def parser() -> argparse.ArgumentParser:
    """Returns the options of ``scripts/bench.py train``."""
    default = TrainBench()
    options = argparse.ArgumentParser(prog="bench.py train", description=__doc__)
    options.add_argument("--conversations", type=int, default=default.conversations)
    options.add_argument("--family", choices=FAMILIES, default=default.family, help="family of the tiny model")
    options.add_argument("--seq-length", type=int, default=default.seq_length)
    options.add_argument("--window", type=int, default=default.window)
    options.add_argument(
        "--micro-batch", type=int, action="append", help="samples per micro-batch; may be repeated (4, 8)"
    )
    options.add_argument("--passes", type=int, default=default.passes, help="passes over the data; figures are medians")
    options.add_argument("--seed", type=int, default=default.seed)
    options.add_argument("--small", action="store_true", help="a model of 0.15 billion weights in bfloat16, for a GPU")
    options.add_argument("--whole", action="store_true", help="measure whole jobs, reading and packing included")
    options.add_argument("--ranks", type=int, help="measure how long so many ranks wait for each other")
    options.add_argument("--work", type=Path, help="keep data and logs here; a temporary directory by default")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line per result; 1 if the rows did not train the same, 2 on unusable input."""
    options = vars(parser().parse_args(argv))
    ranks, whole = options.pop("ranks"), options.pop("whole")
    measures = partial(run_ranks, ranks=ranks) if ranks else run_whole if whole else run
    given_work, sizes = options.pop("work"), options.pop("micro_batch") or TrainBench().micro_batches
    same = True
    try:
        bench = TrainBench(**options, micro_batches=tuple(sizes))
        with tempfile.TemporaryDirectory(prefix="bench-train-") as temporary:
            work = given_work or Path(temporary)
            work.mkdir(parents=True, exist_ok=True)
            for result in measures(bench, work):
                print(json.dumps(result), flush=True)
                same = result.get("same_loss", True) and result.get("same_samples", True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
