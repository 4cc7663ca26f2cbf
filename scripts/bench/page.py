"""The page of many packs (``preview --html``): how large it is, and how long it takes to write and to open."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from energon_packing.report.previewed_packs import Wanted, drawn_packs
from headless import Browser, chromium

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.report.page import write_page
from energon_packing.report.preview_page import preview_page

DRAWN = """new Promise((done) => {
  const look = () => document.querySelector(".row button") ? done(performance.now()) : requestAnimationFrame(look);
  look();
})"""
"""Milliseconds since the page's start when its first row is there."""


def main(arguments: Sequence[str]) -> int:
    """Prints one JSON line; returns 0."""
    parser = argparse.ArgumentParser(prog="bench.py page", description=__doc__)
    parser.add_argument("--packs", type=int, default=1000)
    parser.add_argument("--conversations", type=int, default=2000, help="of the demo's data set, read in epochs")
    parser.add_argument("--seq-length", type=int, default=4096)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = make_data(folder / "demo", conversations=given.conversations, seed=5, defects=False)
        convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 1.0}, workers=1))
        config = RunConfig(
            data=DataConfig(path=str(folder / "data"), workers=0),
            encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl"))),
            packing=PackingConfig(seq_length=given.seq_length, window=64, drop_budget=1.0),
        )
        began = time.process_time()
        packs, facts = drawn_packs(config, Wanted(packs=given.packs))
        built = time.process_time()
        write_page(folder / "packs.html", preview_page(packs, facts))
        written = time.process_time()
        samples = [segment for pack in packs for segment in pack["segments"] if segment["kind"] == "sample"]
        result = {
            "packs": len(packs),
            "samples": len(samples),
            "pictures": len({each for segment in samples for media in segment["media"] for each in media["pictures"]}),
            "page_mb": round((folder / "packs.html").stat().st_size / 1e6, 2),
            "json_mb": round(len(json.dumps(packs, ensure_ascii=False, separators=(",", ":")).encode()) / 1e6, 2),
            "build_cpu_seconds": round(built - began, 1),
            "write_cpu_seconds": round(written - built, 2),
            "open_seconds": round(opened(folder / "packs.html"), 2) if chromium() else None,
        }
    print(json.dumps(result))
    return 0


def opened(page: Path) -> float:
    """Seconds from the page's start until its first packs are drawn and it takes input, in Chromium."""
    with Browser() as browser:
        browser.open(page)
        return float(browser.evaluate(DRAWN)) / 1000
