"""``bench.py tables``: a Parquet file of a million records, converted: records a second, and memory over time.

The file has row groups of 1,000 rows, as Hugging Face's `datasets` writes them, or with ``--group`` larger ones. The
conversion runs in a process of its own, whose memory and whose workers' is read ten times a second: resident memory
without the pages of files, which the kernel takes back. ``--plot FILE`` draws it and needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_CODE = """
import sys
sys.path[:] = {path!r}
from energon_packing.convert import ConvertConfig, convert
report = convert(ConvertConfig(sources=({source!r},), out={out!r}, workers={workers}))
print(report.read, report.written, report.seconds)
"""
_SECONDS = 0.1
Sample = tuple[float, float, float]
"""Seconds since the start, MB of the calling process, MB of its largest worker."""


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; returns 1 if a record was lost."""
    parser = argparse.ArgumentParser(prog="bench.py tables", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--group", type=int, nargs="+", default=[1000, 1_000_000], help="rows per row group")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work", type=Path, help="directory for the data; default: a temporary one")
    parser.add_argument("--plot", type=Path, help="SVG file to draw memory over time into")
    options = parser.parse_args(arguments)
    lines: dict[str, list[Sample]] = {}
    lost = False
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        for group in options.group:
            source = Path(name) / f"rows-{group}.parquet"
            write_rows(source, options.records, group)
            for workers in options.workers:
                row, samples = measured(source, Path(name) / f"out-{group}-{workers}", workers)
                lines[f"{group:,} rows per group, {workers} worker{'s' if workers > 1 else ''}"] = samples
                print(
                    json.dumps({"benchmark": "tables", "rows_per_group": group, "workers": workers, **row}), flush=True
                )
                lost = lost or row["records"] != options.records
            source.unlink()
    if options.plot is not None:
        draw(options.plot, lines)
    return 1 if lost else 0


def write_rows(path: Path, records: int, group: int) -> None:
    """Writes conversations of two turns, distinct ones, about 700 bytes each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    turn = pa.struct({"role": pa.string(), "content": pa.string()})
    schema = pa.schema({"id": pa.string(), "messages": pa.list_(turn)})
    text = "What a table of records holds, and how it is read row by row. " * 5
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, records, 50_000):
            rows = [
                {
                    "id": f"r{number}",
                    "messages": [
                        {"role": "user", "content": f"{number * 7919 % 1000003} {text}"},
                        {"role": "assistant", "content": f"{text} {number * 104729 % 1000003}"},
                    ],
                }
                for number in range(first, min(first + 50_000, records))
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=group)


def measured(source: Path, out: Path, workers: int) -> tuple[dict[str, Any], list[Sample]]:
    """Converts a file in a process of its own; returns the figures, and memory over time."""
    code = _CODE.format(path=sys.path, source=str(source), out=str(out), workers=workers)
    began = time.monotonic()
    samples: list[Sample] = []
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            own = _resident(process.pid)
            children = [_resident(child) for child in _children(process.pid)]
            samples.append((time.monotonic() - began, own, max(children, default=0.0)))
            time.sleep(_SECONDS)
        assert process.stdout is not None
        said = process.stdout.read().split()
    if process.returncode != 0:
        raise RuntimeError(f"the conversion ended with exit code {process.returncode}")
    seconds = float(said[2])
    reading = [max(own, worker) for _, own, worker in samples]
    third = len(reading) // 3
    row = {
        "records": int(said[1]),
        "seconds": round(seconds, 1),
        "records_per_second": round(int(said[0]) / seconds),
        "source_mb": round(source.stat().st_size / 1e6),
        "peak_mb": round(max(own for _, own, _ in samples)),
        "worker_peak_mb": round(max(worker for _, _, worker in samples)),
        "peak_mb_of_first_third": round(max(reading[:third], default=0.0)),
        "peak_mb_of_last_third": round(max(reading[-third:], default=0.0)),
    }
    return row, samples


def _resident(process: int) -> float:
    """MB of a process that are not pages of files; 0 if it has ended."""
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1e3
    except OSError:
        pass
    return 0.0


def _children(process: int) -> Iterator[int]:
    try:
        for task in os.listdir(f"/proc/{process}/task"):
            yield from map(int, Path(f"/proc/{process}/task/{task}/children").read_text().split())
    except OSError:
        return


def draw(path: Path, lines: dict[str, list[Sample]]) -> None:
    """Draws the memory of the largest process over time."""
    from bench.plots import draw_lines

    figures = {name: [(seconds, max(own, worker)) for seconds, own, worker in found] for name, found in lines.items()}
    draw_lines(path, figures, "seconds", "MB of the largest process")
