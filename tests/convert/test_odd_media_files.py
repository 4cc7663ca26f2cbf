"""Media files that do something to their decoder that nobody foresaw: each costs its record, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from source_files import openai, rejects, run, sharegpt, write_image, write_json, write_lines

from energon_packing.convert import media_checks
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.media_checks import MediaChecker
from energon_packing.demo import make_data
from energon_packing.errors import SampleRejected


@pytest.mark.parametrize("error", [AttributeError("codec_context"), MemoryError(), RecursionError("deep"), TypeError()])
def test_an_error_that_nobody_foresaw_costs_the_file_and_names_it(tmp_path, monkeypatch, error):
    for name in ("a.png", "odd.png", "z.png"):
        write_image(tmp_path / name, seed=len(name) + ord(name[0]))
    opened = media_checks.open_regular

    def failing(path: str) -> Any:
        if path.endswith("odd.png"):
            raise error
        return opened(path)

    monkeypatch.setattr(media_checks, "open_regular", failing)
    records = [sharegpt(name[:-4], "<image>?", image=name) for name in ("a.png", "odd.png", "z.png")]
    report = run(write_json(tmp_path / "chats.json", records), tmp_path / "out", max_rejects=1.0)
    assert (report.written, report.rejected) == (2, {"corrupt_media": 1})
    (line,) = rejects(tmp_path / "out")
    assert "odd.png cannot be checked" in line["detail"]
    assert type(error).__name__ in line["detail"]


@pytest.mark.parametrize("check", ["full", "header"])
def test_records_with_transparent_images_are_counted(tmp_path, check):
    Image.new("RGBA", (40, 30), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("RGBA", (40, 30), (0, 0, 0, 255)).save(tmp_path / "solid.png")
    Image.new("L", (40, 30), 7).save(tmp_path / "keyed.png", transparency=7)
    write_image(tmp_path / "plain.jpg")
    names = ("clear.png", "solid.png", "keyed.png", "plain.jpg", "clear.png")
    records = [openai(f"k{at}", "<image>?", images=[name]) for at, name in enumerate(names)]
    report = run(write_lines(tmp_path / "a.jsonl", records), tmp_path / "out", check_media=check)
    warned = [json.loads(line)["key"] for line in (tmp_path / "out/warnings.jsonl").read_text().splitlines()]
    # A header says that there is an alpha channel, and not what is in it.
    assert warned == (["k0", "k2", "k4"] if check == "full" else ["k0", "k1", "k2", "k4"])
    assert report.warnings == {"transparent_image": len(warned)}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = make_data(tmp_path_factory.mktemp("clips"), conversations=30, defects=False)
    return [path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.suffix in (".mp4", ".webm")][:4]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_video_with_any_bytes_changed_is_measured_or_rejected(tmp_path, clips, data):
    content = bytearray(data.draw(st.sampled_from(clips)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    checker = MediaChecker(ConvertConfig(sources=(tmp_path,), out=tmp_path / "out"))
    try:
        found: Any = checker.check(str(path), "video")
    except SampleRejected as error:
        found = error.reason
    assert found
