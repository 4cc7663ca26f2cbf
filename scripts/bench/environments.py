"""``bench.py environments``: which commands work in fresh environments, and what ``--help`` costs.

Builds the wheel and installs it with pip into a new environment for each Python and each set of extras. In each, every
command runs with its smallest real input; where it has none, it must get as far as noticing that its input is missing.
Prints a Markdown table; ``--json`` prints a line per environment and command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = {"instruction": "Name a tree.", "output": "Oak."}
USES: dict[str, tuple[str, ...]] = {
    "convert": ("convert", "a.jsonl", "--out", "out", "--overwrite", "--workers", "2"),
    "convert, Parquet": ("convert", "a.parquet", "--out", "table", "--overwrite"),
    "convert, zstd": ("convert", "a.jsonl.zst", "--out", "packed", "--overwrite"),
    "explain": ("explain", "key", "nothing", "--config", "run.yaml"),
    "fill": ("fill", "lengths.txt", "--capacity", "100"),
    "init": ("init", "out", "--processor", "nothing", "--out", "made.yaml", "--force"),
    "ledger": ("ledger", "nothing"),
    "measure": ("measure", "nothing", "--config", "run.yaml", "--out", "index"),
    "pack": ("pack", "nothing.parquet", "--out", "packed"),
    "plan": ("plan", "nothing", "--config", "run.yaml", "--out", "plan.parquet"),
    "preview": ("preview", "nothing", "--config", "run.yaml"),
    "preview, HTML": ("preview", "nothing", "--config", "run.yaml", "--html", "packs.html"),
    "profile": ("profile", "nothing", "--config", "run.yaml"),
    "size": ("size", "nothing", "--config", "run.yaml", "--samples", "100"),
    "state convert": (
        *("state", "convert", "nothing", "--index", "nothing"),
        *("--config", "run.yaml", "--out", "plan.parquet"),
    ),
    "stats": ("stats", "nothing"),
    "validate": ("validate", "run.yaml", "--no-bridge"),
    "verify": ("verify", "nothing"),
    "watch": ("watch", "nothing", "--once"),
}


def main(arguments: Sequence[str]) -> int:
    """Makes the environments and prints the table; returns 1 if a command breaks in any of them."""
    parser = argparse.ArgumentParser(prog="bench.py environments", description=__doc__)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to make environments of")
    parser.add_argument(
        "--extras", nargs="+", default=["", "convert", "offline"], help="such as '' convert offline,vlm"
    )
    parser.add_argument("--repeat", type=int, default=5, help="runs of --help; the median is reported")
    parser.add_argument("--work", type=Path, help="directory for the environments; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print a JSON line per environment and command")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        work = Path(name)
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(work / "dist")]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = (work / "dist").glob("*.whl")
        for number, (python, extras) in enumerate(itertools.product(options.python, options.extras)):
            folder = work / str(number)
            interpreter = install(python, wheel, extras, folder)
            write_inputs(folder)
            rows += [{"environment": environment(interpreter, extras), **row} for row in tried(folder, options.repeat)]
    if options.json:
        for row in rows:
            print(json.dumps(row))
    else:
        print("\n".join(table(rows)))
    return 1 if any(row["result"] == "breaks" for row in rows) else 0


def install(python: str, wheel: Path, extras: str, folder: Path) -> Path:
    """Makes an environment and returns its interpreter."""
    subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
    interpreter = folder / "env" / "bin" / "python"
    target = f"{wheel}[{extras}]" if extras else str(wheel)
    quiet = ["-q", "--disable-pip-version-check"]
    subprocess.run([interpreter, "-m", "pip", "install", *quiet, target], check=True, stderr=subprocess.DEVNULL)
    return interpreter


def environment(interpreter: Path, extras: str) -> str:
    """What the table calls it: the version of Python and the extras."""
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    version = subprocess.run([interpreter, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    return f"{version}, {f'`[{extras}]`' if extras else 'base'}"


def write_inputs(folder: Path) -> None:
    """Writes what the commands read."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    line = json.dumps(RECORD).encode() + b"\n"
    (folder / "a.jsonl").write_bytes(line * 3)
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(line * 3))
    pq.write_table(pa.Table.from_pylist([RECORD] * 3), folder / "a.parquet")
    (folder / "lengths.txt").write_text("10\n20\n30\n")
    (folder / "run.yaml").write_text("data: {path: out}\nencoder: {processor: nothing}\npacking: {seq_length: 4096}\n")


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tried(folder: Path, repeat: int) -> list[dict[str, Any]]:
    """Runs every command in an environment."""
    program = str(folder / "env" / "bin" / "energon-packing")
    found = []
    for name, words in USES.items():
        seconds = []
        for _ in range(repeat):
            before = _cpu()
            subprocess.run([program, words[0], "--help"], check=True, capture_output=True)
            seconds.append(_cpu() - before)
        done = subprocess.run([program, *words], cwd=folder, capture_output=True, text=True)
        said = done.stderr.strip().split("\n")[-1]
        if "energon-packing[" in said and done.returncode == 2:
            result = "needs `[" + said.partition("energon-packing[")[2].partition("]")[0] + "]`"
        elif "Unexpected" in said or "Traceback" in done.stderr or done.returncode not in (0, 1, 2):
            result = "breaks"
        else:
            result = "works" if done.returncode in (0, 1) else "begins"
        median = round(statistics.median(seconds), 2)
        found.append({"command": name, "result": result, "help_cpu_seconds": median, "says": said})
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The Markdown table: a line per command, a column per environment, and the CPU seconds of ``--help``."""
    names = list(dict.fromkeys(row["environment"] for row in rows))
    found = {(row["command"], row["environment"]): row for row in rows}
    lines = [f"| command | {' | '.join(names)} | `--help`, CPU s |", f"| --- |{' --- |' * (len(names) + 1)}"]
    for command in USES:
        cells = [found[command, name]["result"] for name in names]
        seconds = [found[command, name]["help_cpu_seconds"] for name in names]
        lines.append(f"| `{command}` | {' | '.join(cells)} | {min(seconds):.2f} to {max(seconds):.2f} |")
    return lines
