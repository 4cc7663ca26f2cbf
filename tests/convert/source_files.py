"""Small sources for the conversion tests: records, images and videos."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from energon_packing.convert import ConversionReport, ConvertConfig, convert
from energon_packing.convert import media_files as media_checks
from energon_packing.convert.chunks import Chunk, RawRecord, SourceFile
from energon_packing.convert.records import parse_record
from energon_packing.convert.sources import find_chunks, read_chunk
from energon_packing.errors import SampleRejected


def sharegpt(key: str | None = None, question: str = "Hi?", answer: str = "Yes.", **columns: Any) -> dict[str, Any]:
    record: dict[str, Any] = {} if key is None else {"id": key}
    record["conversations"] = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {**record, **columns}


def openai(key: str | None = None, question: Any = "Hi?", answer: Any = "Yes.", **columns: Any) -> dict[str, Any]:
    record: dict[str, Any] = {} if key is None else {"id": key}
    record["messages"] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {**record, **columns}


def write_json(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    return path


def write_lines(path: Path, records: list[Any]) -> Path:
    """Records as JSON Lines; a string is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_image(path: Path, width: int = 40, height: int = 30, seed: int = 0, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def write_video(path: Path, frames: int = 6, width: int = 64, height: int = 48) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(frames)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for _ in range(frames):
            pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode(None))
    return path


def run(source: Path | tuple[Path, ...], out: Path, **options: Any) -> ConversionReport:
    sources = source if isinstance(source, tuple) else (source,)
    return convert(ConvertConfig(sources=sources, out=out, **{"workers": 1, **options}))


def rejects(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]


def refused(record: Any, layout: str = "auto", **options: Any) -> tuple[str, str]:
    """Reason and detail of a record that cannot be parsed."""
    with pytest.raises(SampleRejected) as caught:
        parse_record(record, layout, **options)
    return caught.value.reason, caught.value.detail


def chunks_of(source: SourceFile, scratch: Path, size: Any, limit: int = 1 << 20) -> Iterator[Chunk]:
    """Yields the chunks of a file; ``size`` gives the bytes of each."""
    return find_chunks(source, max_record_bytes=limit, chunk_bytes=size, digests={}, scratch=scratch)


def read_records(source: SourceFile, *, max_record_bytes: int, chunk_bytes: int = 1 << 18) -> Iterator[RawRecord]:
    """Yields every record of a file in order."""
    with tempfile.TemporaryDirectory() as scratch:
        for chunk in chunks_of(source, Path(scratch), lambda: chunk_bytes, max_record_bytes):
            yield from read_chunk(chunk, max_record_bytes=max_record_bytes)


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are checked in this process from now on."""
    checked: list[str] = []
    opened = media_checks.open_regular

    def counting(path: str) -> Any:
        checked.append(Path(path).name)
        return opened(path)

    monkeypatch.setattr(media_checks, "open_regular", counting)
    return checked
