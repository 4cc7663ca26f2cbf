"""The base install converts: it needs neither torch nor Energon nor any extra, and Energon reads the result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from energon_reading import read_dataset
from source_files import run, sharegpt, write_image, write_json, write_video

EXTRAS = ("torch", "torchvision", "transformers", "megatron", "webdataset", "pyarrow", "zstandard", "jinja2")
CODE = f"""
import importlib.metadata, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
of = importlib.metadata.version
def version(name):
    if name == "megatron-energon":
        raise importlib.metadata.PackageNotFoundError(name)
    return of(name)
importlib.metadata.version = version
from energon_packing.cli.main import main
main()
"""


def test_the_base_install_converts_to_what_energon_reads(tmp_path: Path) -> None:
    image = write_image(tmp_path / "src/a.png").read_bytes()
    video = write_video(tmp_path / "src/a.mp4").read_bytes()
    record = sharegpt("k", "<image><video>?", images=["a.png"], videos=["a.mp4"])
    source = write_json(tmp_path / "src/a.json", [record, {"id": "t", "instruction": "a", "output": "b"}])
    arguments = ["convert", str(source), "--out", str(tmp_path / "out"), "--workers", "1", "--split", "train=1"]
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read = read_dataset(str(tmp_path / "out/dataset.yaml"))
    assert read["k"].media == [image, video]
    assert set(read) == {"k", "t"}
    run(source, tmp_path / "full", split={"train": 1.0})
    for path in sorted((tmp_path / "full").rglob("*")):
        other = tmp_path / "out" / path.relative_to(tmp_path / "full")
        if path.suffix in (".tar", ".yaml"):
            assert path.read_bytes() == other.read_bytes()
        if path.name == ".info.json":
            here, there = (json.loads(file.read_text()) for file in (path, other))
            assert here["shard_counts"] == there["shard_counts"]


def test_a_source_that_needs_an_extra_says_which(tmp_path: Path) -> None:
    for name, extra in (("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")):
        (tmp_path / name).write_bytes(b"PAR1")
        arguments = ["convert", str(tmp_path / name), "--out", str(tmp_path / "out"), "--workers", "1"]
        done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert extra in done.stderr
        assert "energon-packing[convert]" in done.stderr
        assert done.stderr.count("\n") == 1
