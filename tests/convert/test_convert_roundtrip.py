"""What goes in comes out of Energon: both layouts are read back through its loader and compared record by record."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from energon_reading import read_dataset
from PIL import Image
from source_files import openai, run, sharegpt, write_image, write_json, write_lines, write_video

from energon_packing.conversation import Conversation, MediaPart
from energon_packing.convert import dataset_entry
from energon_packing.errors import UserError

LAYOUTS = ["polylithic", "monolithic"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    write_image(root / "img/a.v1.jpg", 40, 30, seed=1)
    turned = Image.Exif()
    turned[0x0112] = 6
    write_image(root / "img/b.jpg", 31, 17, seed=2, exif=turned)
    write_image(root / "img/copy of a.jpg", 40, 30, seed=1)
    write_video(root / "clip.mp4", frames=7)
    write_json(
        root / "a.json",
        [
            sharegpt("text", "Grüße\u2028<3", "Ja."),
            sharegpt("twice.in/one", "<image>x<image>", images=["img/a.v1.jpg", "img/a.v1.jpg"]),
            sharegpt("mixed", "See <video> and <image>\n?", images=["img/b.jpg"], videos=["clip.mp4"]),
        ],
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tool_use = {
        "id": "tools",
        "tools": [{"name": "f", "parameters": {}}],
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": "A", "weight": 1},
        ],
    }
    same_content = openai("copy", [{"type": "image", "image": "img/copy of a.jpg"}, {"type": "text", "text": "?"}])
    write_lines(root / "b.jsonl", [tool_use, same_content])
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_record_comes_back_with_its_text_media_bytes_and_sizes(source: Path, tmp_path: Path, layout: str) -> None:
    report = run(source, tmp_path / "out", layout=layout, split={"train": 0.6, "val": 0.4})
    assert (report.read, report.written, report.rejected) == (5, 5, {})
    assert report.entry == dataset_entry(tmp_path / "out")
    assert sum(report.splits.values()) == 5
    assert min(report.splits.values()) >= 1
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    entry = dataset_entry(tmp_path / "elsewhere")
    samples = {**read_dataset(entry, "train"), **read_dataset(entry, "val")}
    assert set(samples) == {"text", "twice_in_one", "mixed", "tools", "copy"}
    talks = {key: Conversation.from_record(key, sample.record) for key, sample in samples.items()}

    assert [turn.parts for turn in talks["text"].turns] == [("Grüße\u2028<3",), ("Ja.",)]
    assert talks["twice_in_one"].turns[0].parts == (MediaPart(index=0), "x", MediaPart(index=1))
    a, b, clip = (source / name for name in ("img/a.v1.jpg", "img/b.jpg", "clip.mp4"))
    assert samples["twice_in_one"].media == [a.read_bytes()] * 2
    assert samples["copy"].media == [a.read_bytes()]
    assert samples["mixed"].media == [clip.read_bytes(), b.read_bytes()]
    assert talks["mixed"].turns[0].parts == ("See ", MediaPart(index=0), " and ", MediaPart(index=1), "\n?")
    video, image = talks["mixed"].media
    assert (video.kind, video.width, video.height, video.frames) == ("video", 64, 48, 7)
    assert video.fps == pytest.approx(10.0)
    assert video.duration == pytest.approx(0.7)
    assert (image.kind, image.width, image.height, image.frames) == ("image", 17, 31, None)
    assert [turn.role for turn in talks["tools"].turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert talks["tools"].turns[2].tool_calls[0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert talks["tools"].turns[4].loss_weight == 1.0
    assert talks["tools"].tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    of_video, of_image = samples["mixed"].metadata  # which have the stored sizes
    assert (of_video.video_num_frames, of_video.video_width, of_video.video_height) == (7, 64, 48)
    assert (of_image.width, of_image.height) == (31, 17)
    names = members(tmp_path / "elsewhere")
    if layout == "polylithic":
        stored = [name for name in names if name.startswith("media/")]
        assert len(stored) == report.media_files == 3  # the copy has the same content
        assert all(name.count(".") == 1 for name in stored)
    else:
        files = [name.partition("/")[2] for name in names]
        assert [name for name in files if name.startswith("twice_in_one")] == [
            "twice_in_one.json",
            "twice_in_one.0.jpg",
        ]
    assert (report.images, report.videos) == (4, 1)


def members(out: Path) -> list[str]:
    names: list[str] = []
    for path in sorted(out.rglob("*.tar")):
        with tarfile.open(path) as tar:
            names += [f"{path.parent.name}/{name}" for name in tar.getnames()]
    return names


def test_an_entry_that_is_no_data_set_is_told_in_one_sentence(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    assert dataset_entry(tmp_path / "out/dataset.yaml") == str(tmp_path / "out/dataset.yaml")
    assert dataset_entry(tmp_path / "out/text") == str(tmp_path / "out/text")
    (tmp_path / "half/.nv-meta").mkdir(parents=True)
    for path, words in (
        (tmp_path / "nowhere", "does not exist"),
        (source, "is not a data set"),
        (source / "a.json", "is a file"),
        (tmp_path / "half", "energon prepare"),
    ):
        with pytest.raises(UserError, match=words):
            dataset_entry(path)
