"""Memory of a worker over many samples: resident memory as a plot, with and without what open tars remember.

A run of texts repeats a small data set, in one process without workers. Energon keeps the tars open, and Python's
reader of tars keeps a `TarInfo` of every read; `energon_packing.energon.samples.forget_members` empties these lists.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.window_memory import anonymous_bytes, give_back

POINTS = 20
"""Measurements over the run; the line is fitted through the later half, when all that is made once exists."""


def measure(data: str, samples: int, keep: bool) -> list[tuple[int, int]]:
    """Reads that many samples.

    Args:
        data: a data set of texts.
        samples: to read, over its epochs.
        keep: whether open tars keep what they read, as without our bound.

    Returns:
        Samples read and bytes of anonymous memory, `POINTS` times.
    """
    from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
    from energon_packing.demo import processor_path
    from energon_packing.energon import cookers
    from energon_packing.energon.loader import build_loader

    if keep:
        cookers.forget_members = lambda reader: None
    config = RunConfig(
        data=DataConfig(path=data, workers=0),
        encoder=EncoderConfig(processor=str(processor_path("text"))),
        packing=PackingConfig(seq_length=8192, window=64, drop_budget=1.0),
    )
    found: list[tuple[int, int]] = []
    read = 0
    for pack in build_loader(config):
        read += len(pack.keys)
        if read >= (len(found) + 1) * samples / POINTS:
            give_back()
            found.append((read, anonymous_bytes()))
        if len(found) == POINTS:
            return found
    raise AssertionError("a loader that repeats does not end")


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Bytes a sample over the later half of the measurements, by least squares."""
    half = points[len(points) // 2 :]
    across = sum(x for x, _ in half) / len(half)
    up = sum(y for _, y in half) / len(half)
    return sum((x - across) * (y - up) for x, y in half) / sum((x - across) ** 2 for x, _ in half)


def plot(series: dict[str, Sequence[tuple[int, int]]], path: Path) -> None:
    """Writes an SVG file with a line per series."""
    width, height, left, bottom = 640, 320, 60, 40
    most = max(x for points in series.values() for x, _ in points)
    low = min(y for points in series.values() for _, y in points) / 2**20
    high = max(y for points in series.values() for _, y in points) / 2**20
    low, high = low - 5, high + 5

    def place(x: float, y: float) -> str:
        across = left + x / most * (width - left - 10)
        return f"{across:.1f},{height - bottom - (y - low) / (high - low) * (height - bottom - 20):.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{left},20V{height - bottom}H{width - 10}" fill="none" stroke="black"/>',
        f'<text x="{width / 2}" y="{height - 8}">samples read (to {most:,})</text>',
        f'<text x="4" y="14">MiB</text><text x="4" y="{height - bottom}">{low:.0f}</text>',
        f'<text x="4" y="30">{high:.0f}</text>',
    ]
    for number, (name, points) in enumerate(series.items()):
        colour = ("#0072b2", "#d55e00")[number]
        path_of = " ".join(place(x, y / 2**20) for x, y in points)
        lines.append(f'<polyline points="{path_of}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{left + 10}" y="{34 + 16 * number}" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def _data(folder: Path, records: int) -> Path:
    from energon_packing.convert import ConvertConfig, convert

    source = folder / "chats.jsonl"
    with source.open("w", encoding="utf-8") as stream:
        for number in range(records):
            turns = [{"role": "user", "content": f"Question {number}"}, {"role": "assistant", "content": f"{number}."}]
            stream.write(json.dumps({"messages": turns}) + "\n")
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 1.0}, workers=0))
    return folder / "data"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line per side and writes the plot."""
    parser = argparse.ArgumentParser(prog="scripts/bench.py memory", description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--records", type=int, default=2000, help="of the data set, which repeats")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    chosen = parser.parse_args(arguments)
    series: dict[str, Sequence[tuple[int, int]]] = {}
    with tempfile.TemporaryDirectory() as work:
        data = _data(Path(work), chosen.records)
        for keep in (False, True):
            # A process each: the second would begin with the memory of the first.
            given = json.dumps([str(data), chosen.samples, keep])
            done = subprocess.run(
                [sys.executable, "-m", "bench.memory", given],
                check=True,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).resolve().parents[1],
            )
            points: list[tuple[int, int]] = [(x, y) for x, y in json.loads(done.stdout.splitlines()[-1])]
            name = "tars remember what they read" if keep else "ours"
            series[name] = points
            row: dict[str, Any] = {
                "benchmark": "memory",
                "side": name,
                "samples": points[-1][0],
                "first_mib": round(points[0][1] / 2**20, 1),
                "half_mib": round(points[len(points) // 2][1] / 2**20, 1),
                "last_mib": round(points[-1][1] / 2**20, 1),
                "bytes_per_sample": round(slope(points), 1),
            }
            print(json.dumps(row), flush=True)
    if chosen.plot is not None:
        plot(series, chosen.plot)
    return 0


if __name__ == "__main__":
    print(json.dumps(measure(*json.loads(sys.argv[1]))))
