"""Benchmark of the loaders: packs a second from a data set online, from its plan, and from packed tokens and pixels.

Each way reads one epoch of the same samples with one worker, in a process of its own, several times in turn; figures
are medians. Ratios are of packs a second of CPU time, of the worker and of the process that consumes its packs, so that
other work on the machine counts little; those of the clock are given too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from bench.loader_data import prepare_data
from bench.loader_run import LoaderJob, cpu_seconds, run_config
from energon_packing.config import RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.demo.conversations import story

PIXELS = (200_704, 1_003_520)
WAYS: dict[str, tuple[str, ...]] = {
    "text": ("online", "planned", "tokens"),
    "media": ("online", "planned", "tokens", "copied", "pixels"),
}
STORED: dict[str, dict[str, Any]] = {"tokens": {}, "copied": {"media": "copy"}, "pixels": {"store": "pixels"}}
REACH = {
    "text": {"planned": 1.0, "tokens": 5.0},
    "media": {"planned": 1.0, "tokens": 1.0, "copied": 1.0, "pixels": 6.0},
}
"""How many times as many packs as online each way should make."""


def prepare(place: Path, kind: str, samples: int, seq_length: int) -> None:
    """Makes the data, measures, plans, and packs in every way; leaves ``online``, ``planned`` and so on in `place`."""
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.pack import PackConfig, pack
    from energon_packing.offline.planner import make_plan

    data = place / "data"
    if kind == "text":
        source = place / "texts.jsonl"
        source.write_text("".join(json.dumps(record) + "\n" for record in _texts(samples)), encoding="utf-8")
        convert(ConvertConfig(sources=(source,), out=data, split={"train": 1.0}, workers=1))
    else:
        made = prepare_data(place / "made", conversations=samples, camera_images=True, images_only=True)
        made.root.rename(data)
    run = config_of(place, "online", seq_length)
    measure(MeasureConfig(paths=(data,), out=place / "index", workers=0), run)
    make_plan([place / "index"], run, place / "planned.parquet")
    for way in WAYS[kind]:
        if way in STORED:
            pack(PackConfig(plan=place / "planned.parquet", out=place / way, workers=0, **STORED[way]))


def _texts(samples: int) -> Iterator[dict[str, Any]]:
    """Stories of log-normal length, median 900 characters (sigma 1.1), some 220 tokens."""
    rng = Random(0)
    for number in range(samples):
        question, answer = story(rng, max(40, int(rng.lognormvariate(6.8, 1.1))))
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        yield {"id": f"text-{number:06}", "conversations": turns}


def config_of(place: Path, way: str, seq_length: int) -> RunConfig:
    """The run that reads one of the ways."""
    path = place / {"online": "data", "planned": "planned.parquet"}.get(way, way)
    job = LoaderJob(
        path="ours",
        data=str(path),
        processor=str(processor_path("qwen2_5_vl")),
        seq_length=seq_length,
        pixels=PIXELS,
    )
    return run_config(job, workers=1)


def measured(place: Path, way: str, seq_length: int) -> dict[str, Any]:
    """Reads one epoch; then continues in the middle of the next one, if the way can."""
    from energon_packing.energon.loader import build_task_encoder
    from energon_packing.offline.open_loader import open_loader

    run = config_of(place, way, seq_length)
    encoder = build_task_encoder(run)
    loader = open_loader(run, task_encoder=encoder)
    cpu, start = cpu_seconds(), time.perf_counter()
    packs = tokens = samples = 0
    for made in loader:
        packs += 1
        tokens += made.batch.real_tokens
        samples += len(made.keys)
    seconds, used = time.perf_counter() - start, cpu_seconds() - cpu
    found = {"way": way, "packs": packs, "samples": samples, "tokens": tokens, "seconds": seconds, "cpu_seconds": used}
    if way != "online":
        state = loader.save_state() | {"position": packs // 2}
        endless = dataclasses.replace(run, data=dataclasses.replace(run.data, repeat=True))
        start = time.perf_counter()
        again = open_loader(endless, task_encoder=encoder)
        again.restore_state(state)
        for made in itertools.islice(again, 1):
            assert made.index == packs // 2
            found["restart_seconds"] = round(time.perf_counter() - start, 3)
    return found


def run(kinds: Sequence[str], samples: dict[str, int], seq_length: int, repeat: int) -> Iterator[dict[str, Any]]:
    """Measures every way of each kind of data.

    Yields:
        For each: packs a second of the clock and of CPU time, megabytes on disk, seconds of a restart, and how many
        times as many packs as online.
    """
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            prepare(place, kind, samples[kind], seq_length)
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS[kind]}
            for _, way in itertools.product(range(repeat), WAYS[kind]):
                command = [sys.executable, "-m", "bench.offline_loader", folder, way, str(seq_length)]
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    check=False,
                    cwd=Path(__file__).parents[1],
                    env=environment,
                )
                if done.returncode:
                    raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
            seconds, cpu = (
                {way: statistics.median(each["packs"] / each[name] for each in runs) for way, runs in found.items()}
                for name in ("seconds", "cpu_seconds")
            )
            for way, runs in found.items():
                size = sum(file.stat().st_size for file in (place / way).glob("*.bin")) if way in STORED else 0
                yield {
                    "data": kind,
                    "way": way,
                    "packs": runs[0]["packs"],
                    "samples": runs[0]["samples"],
                    "tokens": runs[0]["tokens"],
                    "packs_per_second": round(seconds[way], 1),
                    "packs_per_cpu_second": round(cpu[way], 1),
                    "bytes_per_token": round(size / runs[0]["tokens"], 2),
                    "restart_seconds": max((each["restart_seconds"] for each in runs), default=None)
                    if way != "online"
                    else None,
                    "of_online": round(cpu[way] / cpu["online"], 2),
                    "of_online_by_clock": round(seconds[way] / seconds["online"], 2),
                    "reach": REACH[kind].get(way),
                }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line per way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=sorted(WAYS), action="append", help="kind of data; both by default")
    parser.add_argument("--texts", type=int, default=20_000, help="conversations of text")
    parser.add_argument("--images", type=int, default=150, help="conversations with camera images, before filtering")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args(arguments)
    samples = {"text": given.texts, "media": given.images}
    for result in run(given.data or list(WAYS), samples, given.seq_length, given.repeat):
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    print(json.dumps(measured(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
