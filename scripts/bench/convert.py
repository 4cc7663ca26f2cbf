"""``bench.py convert``: records a second, JPEG files against Python's ``tarfile``, memory, and equal bytes.

Every measurement runs in a fresh process; numbers of workers take turns. Text records are the demo's conversations
without media (12 turns and 2.7 KB on average), or with ``--short`` two turns of each; JPEG files have camera sizes and
one record each. Files are in the page cache for all.
"""

import argparse
import hashlib
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

_SPEAKERS = {"human", "user", "gpt", "assistant"}
_KINDS = ("chat", "chat", "document", "system", "tools")
_DISTINCT = 2000  # conversations; each comes again under other ids
_JPEG_SIZES = ((640, 480), (1024, 768), (1280, 720), (1600, 1200))
_SCRIPT = "import sys; sys.path[:] = {path!r}; from bench.convert import measured; measured(*{arguments!r})"


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; returns 1 if the data set depends on the number of workers."""
    parser = argparse.ArgumentParser(prog="bench.py convert", description=__doc__)
    parser.add_argument("--records", type=int, default=200_000, help="text records; 0 leaves text out")
    parser.add_argument("--images", type=int, default=2000, help="JPEG files; 0 leaves images out")
    parser.add_argument("--short", action="store_true", help="text records of two turns")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers to compare")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the medians are reported")
    parser.add_argument("--work", type=Path, help="directory for the data; default: a temporary one")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        work = Path(name)
        same = True
        if options.records:
            write_text(work / "text.jsonl", options.records, short=options.short)
            same &= _compare("text", work / "text.jsonl", options, tar=None)
        if options.images:
            write_images(work / "images", options.images)
            same &= _compare("jpeg", work / "images", options, tar=work / "images")
    if not same:
        print("error: the data set depends on the number of workers", file=sys.stderr)
    return 0 if same else 1


def write_text(path: Path, records: int, *, short: bool = False) -> None:
    """Writes conversations without media as JSON Lines, in both layouts by turns."""
    from energon_packing.demo.generate import openai_record, sharegpt_record, write_draft

    found = []
    for number in range(min(_DISTINCT, records)):
        layout = openai_record if number % 2 else sharegpt_record
        record = layout(write_draft(0, number, _KINDS[number % len(_KINDS)]), Random(number))
        if short:
            column = "messages" if "messages" in record else "conversations"
            record[column] = [turn for turn in record[column] if _speaks(turn)][:2]
        found.append(record)
    with path.open("w", encoding="utf-8") as stream:
        for number in range(records):
            record = found[number % len(found)]
            stream.write(json.dumps({**record, "id": f"{record['id']}-{number}"}, ensure_ascii=False) + "\n")


def _speaks(turn: dict[str, Any]) -> bool:
    return len(turn) == 2 and turn.get("from", turn.get("role")) in _SPEAKERS


def write_images(folder: Path, images: int) -> None:
    """Writes distinct JPEG files, an hour old as those of a real data set, and a record for each."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    encoded = []
    for number in range(32):
        width, height = _JPEG_SIZES[number % len(_JPEG_SIZES)]
        small = Image.fromarray(random.integers(0, 255, (height // 16, width // 16, 3), np.uint8))
        stream = io.BytesIO()
        small.resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
        encoded.append(stream.getvalue())
    an_hour_ago = time.time() - 3600
    with (folder / "records.jsonl").open("w", encoding="utf-8") as records:
        for number in range(images):
            path = folder / f"{number:06d}.jpg"
            path.write_bytes(encoded[number % len(encoded)] + number.to_bytes(8, "big"))  # ignored behind the end
            os.utime(path, (an_hour_ago, an_hour_ago))
            turns = [
                {"role": "user", "content": "<image>What is this?"},
                {"role": "assistant", "content": "A picture."},
            ]
            records.write(json.dumps({"id": f"k{number}", "messages": turns, "images": [path.name]}) + "\n")


def _compare(name: str, source: Path, options: argparse.Namespace, tar: Path | None) -> bool:
    runs: dict[int | str, list[dict[str, Any]]] = {workers: [] for workers in options.workers}
    if tar is not None:
        runs["tarfile"] = []
    for _ in range(options.repeat):
        for what in runs:
            runs[what].append(_measure(str(source), str(source.parent / "out"), what))
    medians = {what: statistics.median(run["seconds"] for run in found) for what, found in runs.items()}
    first = options.workers[0]
    for workers in options.workers:
        row: dict[str, Any] = {
            "benchmark": f"convert.{name}",
            "workers": workers,
            "records": runs[workers][0]["records"],
            "seconds": round(medians[workers], 2),
            "records_per_second": round(runs[workers][0]["records"] / medians[workers]),
            "times_faster": round(medians[first] / medians[workers], 2),
            "cpu_us_per_record": _median(runs[workers], "cpu_us_per_record"),
            "peak_mb": max(run["peak_mb"] for run in runs[workers]),
            "worker_peak_mb": max(run["worker_peak_mb"] for run in runs[workers]),
        }
        if tar is not None:
            row["of_tarfile"] = round(medians["tarfile"] / medians[workers], 2)
            row["of_tarfile_cpu"] = round(_median(runs["tarfile"], "cpu_us_per_record") / row["cpu_us_per_record"], 2)
        print(json.dumps(row), flush=True)
    return len({run["digest"] for workers in options.workers for run in runs[workers]}) == 1


def _median(runs: list[dict[str, Any]], name: str) -> float:
    return round(statistics.median(run[name] for run in runs), 1)


def _measure(*arguments: Any) -> dict[str, Any]:
    code = _SCRIPT.format(path=sys.path, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(source: str, out: str, what: int | str) -> None:
    """Converts, or copies with ``tarfile``, and prints what it took; runs in a process of its own."""
    before = _cpu()
    if what == "tarfile":
        began = time.perf_counter()
        records = _copy_with_tarfile(Path(source), Path(out + ".tar"))
        seconds = time.perf_counter() - began
        print(
            json.dumps({"seconds": seconds, "records": records, "cpu_us_per_record": (_cpu() - before) / records * 1e6})
        )
        os.unlink(out + ".tar")
        return
    from energon_packing.convert import ConvertConfig, convert

    config = ConvertConfig(sources=(Path(source),), out=Path(out), workers=int(what), check_media="header")
    before = _cpu()
    began = time.perf_counter()
    report = convert(config)
    seconds = time.perf_counter() - began
    row = {
        "seconds": seconds,
        "records": report.read,
        "cpu_us_per_record": (_cpu() - before) / report.read * 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "worker_peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "digest": _digest(Path(out)),
    }
    print(json.dumps(row))
    shutil.rmtree(out)


def _cpu() -> float:
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _copy_with_tarfile(folder: Path, out: Path) -> int:
    """Copies all JPEG files to a tar, as a converter without any check would."""
    paths = sorted(folder.glob("*.jpg"))
    with tarfile.TarFile(out, "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in paths:
            member = tarfile.TarInfo(path.name)
            member.size = path.stat().st_size
            with path.open("rb") as stream:
                tar.addfile(member, stream)
    return len(paths)


def _digest(out: Path) -> str:
    """One digest over all files and their names."""
    digest = hashlib.sha256()
    for path in _files(out):
        digest.update(str(path.relative_to(out)).encode())
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _files(out: Path) -> Iterator[Path]:
    yield from (path for path in sorted(out.rglob("*")) if path.is_file())
