"""Benchmark of packing: how fast compressed media are copied, compared with a plain copy of the same bytes.

The media are random bytes in place of photographs, since nothing decodes them: a conversation with one image of a
typical size each. Both copies end with an fsync, and are made in turn on the same disk; the quickest of each counts.
"""

import argparse
import dataclasses
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.loader_run import LoaderJob, run_config
from energon_packing.config import PlanConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path

REACH = 0.5
"""Share of the plain copy's rate."""
SHARD_PACKS = 8
"""So that there are shards for every worker."""
_CHUNK = 16 << 20


def prepare(place: Path, images: int, kilobytes: int) -> Path:
    """Makes a data set with `images` images of about `kilobytes` each, and its plan; returns the plan.

    Each file is a small JPEG with random bytes after its end, which no decoder reads.
    """
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.planner import make_plan

    (place / "images").mkdir()
    random = np.random.default_rng(0)
    small = io.BytesIO()
    Image.new("RGB", (448, 448), (90, 120, 30)).save(small, "JPEG")
    records = []
    for number in range(images):
        size = int(random.integers(kilobytes // 2, 3 * kilobytes // 2)) << 10
        (place / "images" / f"{number}.jpg").write_bytes(small.getvalue() + random.bytes(size))
        turns = [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "Grass. " * 20}]
        records.append({"id": f"image-{number:05}", "conversations": turns, "images": [f"{number}.jpg"]})
    (place / "chats.json").write_text(json.dumps(records), encoding="utf-8")
    convert(
        ConvertConfig(
            sources=(place / "chats.json",),
            media_root=place / "images",
            out=place / "data",
            split={"train": 1.0},
            workers=1,
            check_media="header",
        )
    )
    job = LoaderJob(path="ours", data=str(place / "data"), processor=str(processor_path("qwen2_5_vl")), seq_length=8192)
    run = dataclasses.replace(run_config(job, workers=0), plan=PlanConfig(max_data_parallel=8))
    measure(MeasureConfig(paths=(place / "data",), out=place / "index", workers=0), run)
    make_plan([place / "index"], run, place / "plan.parquet")
    return place / "plan.parquet"


def plain_copy(sources: Sequence[Path], out: Path) -> float:
    """Copies the files into one with plain reads and writes, and an fsync; returns seconds."""
    start = time.perf_counter()
    with out.open("wb", buffering=0) as target:
        for source in sources:
            with source.open("rb", buffering=0) as file:
                while chunk := file.read(_CHUNK):
                    target.write(chunk)
        os.fsync(target.fileno())
    seconds = time.perf_counter() - start
    out.unlink()
    return seconds


def run(images: int, kilobytes: int, repeat: int, workers: int, directory: Path | None) -> Iterator[dict[str, Any]]:
    """Packs with copied media and copies the shards of the media plainly, in turn, after one round that is not counted.

    Yields:
        ``mebibytes`` of media; seconds of packing without and with them, and of the plain copy; ``share`` of the plain
        copy's rate, and the share that counts only what the media add.
    """
    import shutil

    from energon_packing.offline.pack import PackConfig, pack

    with tempfile.TemporaryDirectory(dir=directory) as folder:
        place = Path(folder)
        plan = prepare(place, images, kilobytes)
        tars = sorted((place / "data").rglob("media/*.tar")) or sorted((place / "data").rglob("*.tar"))
        found: dict[str, list[float]] = {"copy": [], "reference": [], "plain": []}
        media = 0
        for turn in range(repeat + 1):
            seconds = {}
            for way in ("reference", "copy"):
                start = time.perf_counter()
                report = pack(
                    PackConfig(plan=plan, out=place / way, media=way, workers=workers, shard_packs=SHARD_PACKS)
                )
                seconds[way] = time.perf_counter() - start
                assert report.facts is not None
                media = sum(shard.media_bytes for shard in report.facts.shards)
                shutil.rmtree(place / way)
            seconds["plain"] = plain_copy(tars, place / "plain") * media / sum(tar.stat().st_size for tar in tars)
            for way, value in seconds.items():
                if turn:
                    found[way].append(value)
        whole, tokens, plain = (min(found[way]) for way in ("copy", "reference", "plain"))
        yield {
            "images": images,
            "mebibytes": round(media / 2**20),
            "workers": workers,
            "seconds": {"tokens": round(tokens, 2), "tokens and media": round(whole, 2), "plain copy": round(plain, 2)},
            "share": round(plain / whole, 2),
            "share_of_media_alone": round(plain / (whole - tokens), 2),
            "reach": REACH,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--kilobytes", type=int, default=300, help="of an image, on average")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--directory", type=Path, help="where everything is made; a temporary directory by default")
    given = parser.parse_args(arguments)
    for result in run(given.images, given.kilobytes, given.repeat, given.workers, given.directory):
        print(json.dumps(result), flush=True)
    return 0
