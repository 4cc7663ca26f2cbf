"""The price of decoding in a child process: CPU seconds of measuring and rendering with it, over those without.

Both sides run in one process and take turns, sample by sample; the CPU time of the child counts. ``wall_ratio`` is the
same of the wall clock, on which the child's start adds to each sample. The rows of both are compared, tensor by tensor.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import encoder_samples
from bench.encoder_samples import BenchSample
from bench.encoders import PIXELS, SHARES
from energon_packing.encoders.decoding import MediaToDecode
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.workers import keep_freed_memory
from energon_packing.errors import PackingError

TARGET = 1.03
FAMILIES = ("qwen2_5_vl", "internvl")


def compare(family: str, samples: Sequence[BenchSample], sizes: str, repeat: int, kinds: str | None) -> dict[str, Any]:
    """Measures one family; of samples with ``kinds`` only, if they are given.

    Raises:
        PackingError: the rows differ.
    """
    child = encoder_samples.build_encoder(family, PIXELS.get(family), in_child=True)
    samples = [entry for entry in encoder_samples.shown_by(child, samples) if kinds is None or _has(entry, kinds)]
    own = ConversationEncoder(dataclasses.replace(child.config, decode_in_child=False), processor=child.processor)
    measured = [(child.measure(sample.conversation), sample) for sample in samples]
    for sample in samples:
        _same(*(each.render(each.measure(sample.conversation), sample.read) for each in (own, child)))
    process = child._decoding._child
    if process is None:
        raise PackingError("no sample was decoded in a child")

    def used() -> float:
        return time.process_time() + time.clock_gettime((~process.pid << 3) | 2)

    seconds: dict[str, list[float]] = {"own": [], "child": []}
    walls: list[float] = []
    for turn in range(repeat + 1):
        spent, wall = {"own": 0.0, "child": 0.0}, {"own": 0.0, "child": 0.0}
        for number, sample in enumerate(samples):  # sample by sample, so that other work disturbs both sides alike
            for name in ("own", "child") if (turn + number) % 2 else ("child", "own"):
                encoder = own if name == "own" else child
                start, clock = used(), time.perf_counter()
                encoder.render(encoder.measure(sample.conversation), sample.read)
                wall[name] += time.perf_counter() - clock
                spent[name] += used() - start
        if turn:
            walls.append(wall["child"] / wall["own"])
            for name, figures in seconds.items():
                figures.append(spent[name])
    ratios = [with_child / without for with_child, without in zip(seconds["child"], seconds["own"], strict=True)]
    return {
        "benchmark": "supervised",
        "family": family,
        "sizes": sizes,
        "samples": len(samples),
        "own_ms": round(statistics.median(seconds["own"]) * 1e3 / len(samples), 3),
        "child_ms": round(statistics.median(seconds["child"]) * 1e3 / len(samples), 3),
        "ratio": round(statistics.median(ratios), 3),
        "wall_ratio": round(statistics.median(walls), 3),
        "supervised": sum(not MediaToDecode.of(each).is_plain(s.read) for each, s in measured),
        "ratios": [round(each, 3) for each in sorted(ratios)],
        "target": TARGET,
    }


def _has(sample: BenchSample, kind: str) -> bool:
    return any(media.kind == kind for media in sample.conversation.media)


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one["visual_inputs"].items():
        if not torch.equal(value, other["visual_inputs"][name]):
            raise PackingError(f"{one['key']}: {name} differs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line per family and choice of sizes."""
    parser = argparse.ArgumentParser(prog="scripts/bench.py supervised", description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--sizes", nargs="+", choices=("camera", "demo"), default=["camera", "demo"])
    parser.add_argument("--only", choices=("image", "video"), help="samples with such media; default: the mix")
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=9)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do
    with tempfile.TemporaryDirectory() as work:
        for sizes in chosen.sizes:
            samples = encoder_samples.make(Path(work) / sizes, chosen.samples, SHARES, camera=sizes == "camera", seed=0)
            for family in chosen.families:
                print(json.dumps(compare(family, samples, sizes, chosen.repeat, chosen.only)), flush=True)
    return 0
