"""Benchmark of the loader: ours compared with Megatron-Bridge's packing, on the same data, in the same run.

Every path runs in a fresh process with one worker over one epoch of the same conversations, the same media, the same
processor and the same ``seq_length``. Each result is one JSON object; the last one says on which figures we are ahead.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bridge_in_batch import write_bridge_dataset
from bench.loader_data import BenchData, prepare_data, read_conversations, read_media
from bench.loader_lengths import Expected, check_lengths, expected_lengths
from bench.loader_run import MEGABYTE, LoaderJob, run_config
from energon_packing.demo import processor_path
from energon_packing.errors import PackingError, UserError

PUBLISHED_PIXELS = (200_704, 1_003_520)
"""Pixel limits that Bridge's Qwen-VL recipes set, and the default of its task encoder."""

_ON_BRIDGE = Path(__file__).resolve().parents[1] / "on_bridge.sh"

FIGURES = {
    "cpu_seconds_per_1000": min,
    "tokens_per_second": max,
    "fill": max,
    "first_row_seconds": min,
    "worker_uss_mb": min,
    "worker_pss_mb": min,
    "worker_rss_mb": min,
    "lost_good": min,
    "rows_over": min,
}
"""The figures that are compared, and which end of each is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderBench:
    """What is measured; see `parser`. Without micro-batches of Bridge's path, ours runs alone."""

    conversations: int = 500
    defects: int = 0
    realistic: bool = False
    seq_length: int = 8192
    window: int = 256
    micro_batches: tuple[int, ...] = (4, 8)
    repeat: int = 1
    seed: int = 0
    processor: str | None = None
    keep_memory: bool = True
    bridge: Path | None = None
    buffer: int = 64

    def __post_init__(self) -> None:
        low = {"conversations": 1, "defects": 0, "seq_length": 1, "window": 1, "repeat": 1, "buffer": 1}
        for name, smallest in low.items():
            if getattr(self, name) < smallest:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")
        if any(size < 1 for size in self.micro_batches):
            raise UserError(f"micro-batches {self.micro_batches} must all be at least 1")


def run(bench: LoaderBench, work: Path) -> Iterator[dict[str, Any]]:
    """Makes the data and measures every path.

    Args:
        bench: what is measured.
        work: directory for the data and the logs of the measured processes.

    Yields:
        One dict per path (see `figures`), then one ``{"benchmark": "loader.verdict", "ahead": {figure: bool}}``.

    Raises:
        UserError: Bridge is not installed, although micro-batches of its path were asked for.
        PackingError: a measured process failed; the message names its log. Or a path emitted other tokens for a sample.
    """
    processor = bench.processor or str(processor_path("qwen2_5_vl"))
    data = prepare_data(
        work,
        conversations=bench.conversations,
        seed=bench.seed,
        defects=bench.defects,
        camera_images=bench.realistic,
    )
    pixels = PUBLISHED_PIXELS if bench.realistic else None
    ours = LoaderJob(
        path="ours",
        data=str(data.root),
        processor=processor,
        seq_length=bench.seq_length,
        window=bench.window,
        pixels=pixels,
        keep_memory=bench.keep_memory,
    )
    jobs = [ours]
    expected: dict[str, Expected] = {}
    if bench.micro_batches or bench.bridge:
        jobs += _bridge_jobs(bench, ours, data, work / "bridge")
        expected = expected_lengths(read_conversations(data.root), run_config(ours, workers=1).encoder)
    found: dict[str, list[dict[str, Any]]] = {}
    for turn in range(bench.repeat):
        for job in jobs:
            measured = start(job, work / f"{path_name(job)}-{turn}.log")
            lengths = dict(zip(measured["keys"], measured["lengths"], strict=True))
            check_lengths(path_name(job), lengths, expected, exact=job.path == "ours")
            found.setdefault(path_name(job), []).append(figures(job, measured, data))
    results = [median(entries) for entries in found.values()]
    yield from results
    if len(results) > 1:
        yield verdict(results)


def _bridge_jobs(bench: LoaderBench, ours: LoaderJob, data: BenchData, out: Path) -> list[LoaderJob]:
    for module in ("megatron.bridge", "qwen_vl_utils"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{module} is not installed, which Bridge's path needs; measure ours alone with --no-peer")
    shutil.rmtree(out, ignore_errors=True)
    conversations, media = list(read_conversations(data.root)), read_media(data.root)
    write_bridge_dataset(conversations, media, out, run_config(ours, workers=1).encoder)
    jobs = [
        dataclasses.replace(ours, path="bridge", data=str(out), micro_batch_size=size) for size in bench.micro_batches
    ]
    if bench.bridge is not None:
        jobs.append(
            dataclasses.replace(
                ours,
                path="native",
                data=str(out),
                micro_batch_size=1,
                buffer=bench.buffer,
                checkout=str(bench.bridge),
            )
        )
    return jobs


def path_name(job: LoaderJob) -> str:
    """Returns, for example, ``ours-window256``, ``ours-window256-give-back``, ``bridge-mb4`` or ``native-buffer64``."""
    if job.path == "native":
        return f"native-buffer{job.buffer}"
    if job.path != "ours":
        return f"bridge-mb{job.micro_batch_size}"
    return f"ours-window{job.window}" + ("" if job.keep_memory else "-give-back")


def start(job: Any, log: Path, *, module: str = "loader_run", name: str | None = None) -> dict[str, Any]:
    """Runs a module of this package for a job in a fresh process, whose output goes to `log`.

    Args:
        job: a dataclass that the module reads as JSON.
        log: of the process; its result is written next to it.
        module: of this package.
        name: of the job, for the message; None takes that of a `LoaderJob`.

    Raises:
        PackingError: the process failed.
    """
    out = log.with_suffix(".json")
    out.unlink(missing_ok=True)
    checkout = getattr(job, "checkout", None)
    on_checkout = [] if checkout is None else ["bash", str(_ON_BRIDGE), checkout]
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(
            [
                *on_checkout,
                sys.executable,
                "-m",
                f"{__package__}.{module}",
                json.dumps(dataclasses.asdict(job)),
                str(out),
            ],
            stdout=stream,
            stderr=subprocess.STDOUT,
            # One thread per process for either path, as in a training job whose cores are shared by many workers.
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHON": sys.executable},
        )
    if done.returncode or not out.is_file():
        end = " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
        log = Path(shutil.copy(log, tempfile.mkdtemp(prefix="bench-log-")))  # the folder of a benchmark is deleted
        raise PackingError(
            f"the measured process of {name or path_name(job)} ended with {done.returncode}: {end} (see {log})"
        )
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def figures(job: LoaderJob, measured: dict[str, Any], data: BenchData) -> dict[str, Any]:
    """Computes the figures of one run.

    Returns:
        ``cpu_seconds_per_1000`` source samples; ``tokens_per_second`` real tokens over the wall time of the epoch;
        ``fill`` mean over rows of real tokens / ``seq_length``, a longer row counted as full; ``first_row_seconds``;
        peaks of the worker's memory; ``rows_over`` rows longer than ``seq_length`` and the ``longest_row``;
        ``lost_good`` sound samples that were never emitted, ``lost_defective`` and ``defective_emitted``; ``dropped``
        what the path itself reports as dropped.

    Raises:
        PackingError: a sample was emitted twice, or none at all.
    """
    keys, tokens = measured["keys"], measured["tokens"]
    if len(keys) != len(set(keys)):
        raise PackingError(f"{path_name(job)} emitted {len(keys) - len(set(keys))} samples twice in one epoch")
    if not keys:
        raise PackingError(f"{path_name(job)} emitted no samples; its reasons: {measured['dropped']}")
    lost = data.samples - len(keys)
    lost_defective = len(data.defective - set(keys))
    row_fills = [min(row, job.seq_length) / job.seq_length for row in tokens]
    steady = row_fills[: len(row_fills) - measured["flush"]]
    return {
        "benchmark": "loader",
        "path": path_name(job),
        "seq_length": job.seq_length,
        "samples": data.samples,
        "defective": len(data.defective),
        "cpu_seconds_per_1000": round(measured["cpu_seconds"] / data.samples * 1000, 2),
        "tokens_per_second": round(sum(tokens) / measured["seconds"]),
        "fill": round(statistics.mean(row_fills), 4),
        "fill_before_flush": round(statistics.mean(steady), 4) if steady else None,
        "first_row_seconds": round(measured["first_row_seconds"], 2),
        **{f"worker_{name}_mb": round(value / MEGABYTE) for name, value in measured["memory"].items()},
        "seconds": round(measured["seconds"], 2),
        "tokens": sum(tokens),
        "rows": len(tokens),
        "rows_over": sum(row > job.seq_length for row in tokens),
        "longest_row": max(tokens),
        "lost_good": lost - lost_defective,
        "lost_defective": lost_defective,
        "defective_emitted": len(data.defective) - lost_defective,
        "dropped": measured["dropped"],
    }


def median(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the entries of one path: medians of the figures that vary, the rest from the first entry."""
    varying = [name for name in (*FIGURES, "seconds") if isinstance(entries[0][name], int | float)]
    medians = {name: statistics.median(entry[name] for entry in entries) for name in varying}
    return entries[0] | medians | {"runs": len(entries)}


def verdict(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns for each figure whether ours (the first result) is at least as good as the best of the others."""
    ours, peers = results[0], results[1:]
    ahead = {
        name: better(ours[name], better(peer[name] for peer in peers)) == ours[name] for name, better in FIGURES.items()
    }
    return {"benchmark": "loader.verdict", "ahead": ahead, "ahead_on_all": all(ahead.values())}


def parser() -> argparse.ArgumentParser:
    """Returns the options of ``scripts/bench.py loader``."""
    options = argparse.ArgumentParser(prog="bench.py loader", description=__doc__)
    options.add_argument("--conversations", type=int, default=500)
    options.add_argument(
        "--defects", type=int, default=0, help="samples to break: a JPEG cut short, or an answer longer than a row"
    )
    options.add_argument("--realistic", action="store_true", help="camera-size images and Bridge's pixel limits")
    options.add_argument("--seq-length", type=int, default=8192)
    options.add_argument("--window", type=int, default=256)
    options.add_argument(
        "--micro-batch", type=int, action="append", help="micro-batch size of Bridge's path; may be repeated (4, 8)"
    )
    options.add_argument("--bridge", type=Path, help="checkout of a newer Bridge: its native Energon packing as a peer")
    options.add_argument("--buffer", type=int, default=64, help="samples in the packing buffer of that peer")
    options.add_argument("--no-peer", action="store_true", help="measure our loader only")
    options.add_argument("--give-back", action="store_false", dest="keep_memory", help="ours gives freed memory back")
    options.add_argument("--repeat", type=int, default=1, help="runs per path; figures are medians")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--processor", help="directory of a Qwen2.5-VL processor; the demo's by default")
    options.add_argument("--work", type=Path, help="keep data and logs here; a temporary directory by default")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line per result; 2 on unusable input."""
    options = vars(parser().parse_args(argv))
    given_work, sizes = options.pop("work"), tuple(options.pop("micro_batch") or (4, 8))
    if options.pop("no_peer"):
        options["bridge"], sizes = None, ()
    try:
        bench = LoaderBench(**options, micro_batches=sizes)
        with tempfile.TemporaryDirectory(prefix="bench-loader-") as temporary:
            work = given_work or Path(temporary)
            work.mkdir(parents=True, exist_ok=True)
            for result in run(bench, work):
                print(json.dumps(result), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
