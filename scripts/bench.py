"""Benchmarks: ``scripts/bench.py NAME [options]``, with one of these names:
loader|memory|convert|measure|plan|pack|store|packing|handover|balance|dynamic|train|gpu|advice

Every result is one JSON line on standard output; on a terminal, a table of all results follows on standard error.
``scripts/bench.py --repeat 3 NAME ...`` runs it three times; a line then has the median of each number, and under
``spread`` the smallest and the largest, of what differs.
``scripts/bench.py NAME --help`` lists the options of one benchmark.

``packing`` prints a Markdown table instead (``--json`` prints the lines). By default it reads the lists in
``../shared/data/lengths``; if there are none, it draws lists of the same distributions from a seed. It installs other
projects' packers from PyPI into an environment of their own, ``~/.cache/energon-packing/bench``.
"""

from __future__ import annotations

import importlib
import io
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the package, if it is not installed, and `support`

NAMES = (
    "loader",
    "memory",
    "convert",
    "measure",
    "plan",
    "pack",
    "store",
    "packing",
    "handover",
    "balance",
    "dynamic",
    "train",
    "gpu",
    "advice",
)


class Results(io.TextIOBase):
    """Passes everything on to `stream` and keeps the lines for a table."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._text: list[str] = []

    def write(self, text: str) -> int:
        """Passes `text` on and keeps it; returns the number of characters."""
        self._text.append(text)
        return int(self._stream.write(text))

    def flush(self) -> None:
        """Flushes the stream."""
        self._stream.flush()

    def rows(self) -> list[dict[str, Any]]:
        """Returns the results that were printed."""
        lines = "".join(self._text).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Prints one table on standard error per group of results with the same figures; each column is a result."""
    from rich.console import Console
    from rich.table import Table

    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    console = Console(stderr=True)
    for names, group in groups.items():
        wide = len(group) <= 6
        table = Table(*(["figure", *[""] * len(group)] if wide else names), show_header=not wide)
        lines = [[name, *(row[name] for row in group)] for name in names] if wide else [row.values() for row in group]
        for line in lines:
            table.add_row(*(str(value) for value in line))
        console.print(table)


def _defaults(name: str) -> list[str]:
    """Returns options to put before the given ones, so that the given ones win."""
    if name != "packing":
        return []
    lists = Path(__file__).resolve().parents[2] / "shared" / "data" / "lengths"
    options = ["--peers-env", str(Path.home() / ".cache" / "energon-packing" / "bench")]
    return [*options, "--lists", str(lists)] if lists.is_dir() else options


def merged(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of several runs with the same results, the median of each number, and its spread where they differ.

    Raises:
        ValueError: a run has another number of results than the first.
    """
    lines = []
    for rows in zip(*runs, strict=True):
        found = {name: [row.get(name) for row in rows] for name in rows[0]}
        numbers = {
            name: sorted(values)
            for name, values in found.items()
            if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        }
        spread = {name: [values[0], values[-1]] for name, values in numbers.items() if values[0] != values[-1]}
        lines.append(rows[0] | {name: statistics.median(numbers[name]) for name in spread} | {"spread": spread})
    return lines


def main(arguments: Sequence[str]) -> int:
    """Runs one benchmark; returns its exit code, 2 if it cannot run."""
    if len(arguments) > 2 and arguments[0] == "--repeat" and arguments[1].isdecimal() and arguments[1] != "0":
        runs = []
        for _ in range(int(arguments[1])):  # each in a process of its own
            done = subprocess.run(
                [sys.executable, __file__, *arguments[2:]], stdout=subprocess.PIPE, text=True, check=False
            )
            if done.returncode:
                return done.returncode
            runs.append([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])
        if not any(runs):
            print(f"{arguments[2]} printed no lines of JSON to compare; add --json.", file=sys.stderr)
            return 2
        rows = merged(runs)
        print(*map(json.dumps, rows), sep="\n")
        if sys.stderr.isatty():
            print_tables(rows)
        return 0
    if not arguments or arguments[0] in ("-h", "--help") or arguments[0] not in NAMES:
        print(__doc__, file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    module = importlib.import_module(f"bench.{arguments[0]}")
    results = Results(sys.stdout)
    with redirect_stdout(results):
        code = module.main(_defaults(arguments[0]) + list(arguments[1:]))
    if sys.stderr.isatty():
        print_tables(results.rows())
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
