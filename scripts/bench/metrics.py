"""What metrics cost a training run: CPU time per pack and line, and of reading the lines of many ranks."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from energon_packing import thd
from energon_packing.config import MetricsConfig
from energon_packing.energon.pack_metrics import PackMetrics
from energon_packing.energon.samples import Pack
from energon_packing.metrics_report import RunLines, figures

CAPACITY = 4096


def main(arguments: Sequence[str]) -> int:
    """Prints one JSON line; returns 0."""
    parser = argparse.ArgumentParser(prog="bench.py metrics", description=__doc__)
    parser.add_argument("--packs", type=int, default=5000, help="packs of a rank")
    parser.add_argument("--segments", type=int, default=16, help="samples of a pack")
    parser.add_argument("--ranks", type=int, default=512, help="data-parallel ranks whose files are read")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack = made_pack(given.segments)
        every_step = per_pack(pack, given.packs, folder / "each", interval=1)
        without_lines = per_pack(pack, given.packs, folder / "none", interval=given.packs + 1)
        every_ten = per_pack(pack, given.packs, folder / "ten", interval=10)
        lines = (folder / "ten" / "rank0.jsonl").read_bytes().splitlines()
        gather, look = reading(json.loads(lines[-1]), folder / "all", given.ranks)
    result = {
        "segments": given.segments,
        "pack_us": round(1e6 * without_lines, 1),
        "pack_with_a_line_every_10_steps_us": round(1e6 * every_ten, 1),
        "line_us": round(1e6 * (every_step - without_lines), 1),
        "line_bytes": len(lines[-1]),
        "ranks": given.ranks,
        "new_lines_of_all_ranks_ms": round(1e3 * gather, 1),
        "first_look_ms": round(1e3 * look, 1),
    }
    print(json.dumps(result))
    return 0


def made_pack(segments: int) -> Pack[Any]:
    """A pack of samples of equal length."""
    length = CAPACITY // segments
    ids = torch.arange(1, length + 1)
    nothing = torch.full((length,), -100)
    row = {"input_ids": ids, "labels": nothing, "loss_mask": torch.zeros(length), "position_ids": ids - 1}
    return Pack(
        **{"__key__": "", "__restore_key__": (), "__subflavors__": {}, "__sources__": ()},
        batch=thd.assemble([row] * segments),
        keys=("key",) * segments,
        delays=(200,) * segments,
        cost=segments * length**2,
        occupied=segments * length,
    )


class _Reader:
    """A reader whose batches are there at once."""

    packs = 0

    def __next__(self) -> None:
        self.packs += 1


def per_pack(pack: Pack[Any], packs: int, folder: Path, *, interval: int) -> float:
    """CPU seconds of the training process per pack."""
    metrics = PackMetrics(MetricsConfig(directory=str(folder), interval=interval), capacity=CAPACITY)
    reader = _Reader()

    def count() -> None:
        for _ in range(packs):
            metrics.made(pack)
            metrics.take(reader)

    return cpu_seconds(count) / packs


def reading(line: dict[str, Any], folder: Path, ranks: int) -> tuple[float, float]:
    """CPU seconds of the rank with the loggers for a new line of each rank, and of the first look of ``watch``."""
    folder.mkdir()
    for rank in range(ranks):
        text = json.dumps({**line, "rank": rank, "ranks": ranks}) + "\n"
        (folder / f"rank{rank}.jsonl").write_text(100 * text)
    followed = RunLines(folder, last=0)
    followed.read()
    for rank in range(ranks):
        with (folder / f"rank{rank}.jsonl").open("a") as stream:
            stream.write(json.dumps({**line, "rank": rank, "ranks": ranks}) + "\n")
    gather = cpu_seconds(lambda: (followed.read(), figures(followed.present())))
    anew = RunLines(folder)
    look = cpu_seconds(lambda: (anew.read(), figures(anew.present())))
    return gather, look


def cpu_seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began
