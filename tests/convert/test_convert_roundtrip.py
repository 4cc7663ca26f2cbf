"""What goes in comes out of Energon: both layouts are read back through its loader and compared record by record."""

from __future__ import annotations

import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import pytest
from energon_reading import read_dataset
from megatron.energon.media import deserialize_media_metadata
from megatron.energon.media.extractor import MediaFilterConfig
from source_files import openai, run, sharegpt, write_image, write_json, write_lines, write_video

from energon_packing.conversation import Conversation, MediaPart
from energon_packing.convert import dataset_entry
from energon_packing.errors import UserError

SHARED = Path(__file__).parents[3] / "shared/data/llamafactory_demo"
LAYOUTS = ["polylithic", "monolithic"]
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="shared data are not there")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    write_image(root / "img/a.v1.jpg", 40, 30, seed=1)
    write_image(root / "img/b.png", 31, 17, seed=2)
    write_image(root / "img/copy of a.jpg", 40, 30, seed=1)
    write_video(root / "clip.mp4", frames=7)
    write_json(
        root / "a.json",
        [
            sharegpt("text", "Grüße\u2028<3", "Ja."),
            sharegpt("twice.in/one", "<image>x<image>", images=["img/a.v1.jpg", "img/a.v1.jpg"]),
            sharegpt("mixed", "See <video> and <image>\n?", images=["img/b.png"], videos=["clip.mp4"]),
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


def all_samples(entry: str) -> dict[str, Any]:
    return {**read_dataset(entry, "train"), **read_dataset(entry, "val")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_record_comes_back_with_its_text_media_bytes_and_sizes(source: Path, tmp_path: Path, layout: str) -> None:
    report = run(source, tmp_path / "out", layout=layout, split={"train": 0.6, "val": 0.4})
    assert (report.read, report.written, report.rejected) == (5, 5, {})
    assert report.entry == dataset_entry(tmp_path / "out")
    assert sum(report.splits.values()) == 5
    assert min(report.splits.values()) >= 1
    samples = all_samples(report.entry)
    assert set(samples) == {"text", "twice_in_one", "mixed", "tools", "copy"}
    talks = {key: Conversation.from_record(key, sample.record) for key, sample in samples.items()}

    assert [turn.parts for turn in talks["text"].turns] == [("Grüße\u2028<3",), ("Ja.",)]
    assert talks["twice_in_one"].turns[0].parts == (MediaPart(index=0), "x", MediaPart(index=1))
    a, b, clip = (source / name for name in ("img/a.v1.jpg", "img/b.png", "clip.mp4"))
    assert samples["twice_in_one"].media == [a.read_bytes()] * 2
    assert samples["copy"].media == [a.read_bytes()]
    assert samples["mixed"].media == [clip.read_bytes(), b.read_bytes()]
    assert talks["mixed"].turns[0].parts == ("See ", MediaPart(index=0), " and ", MediaPart(index=1), "\n?")
    video, image = talks["mixed"].media
    assert (video.kind, video.width, video.height, video.frames) == ("video", 64, 48, 7)
    assert video.fps == pytest.approx(10.0)
    assert video.duration == pytest.approx(0.7)
    assert (image.kind, image.width, image.height, image.frames) == ("image", 31, 17, None)
    assert [turn.role for turn in talks["tools"].turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert talks["tools"].turns[2].tool_calls[0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert talks["tools"].turns[4].loss_weight == 1.0
    assert talks["tools"].tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    assert [entry.video_num_frames for entry in samples["mixed"].metadata if hasattr(entry, "video_fps")] == [7]


def members(out: Path) -> list[str]:
    names: list[str] = []
    for path in sorted(out.rglob("*.tar")):
        with tarfile.open(path) as tar:
            names += [f"{path.parent.name}/{name}" for name in tar.getnames()]
    return names


def test_each_distinct_file_is_stored_once_in_a_polylithic_data_set(source: Path, tmp_path: Path) -> None:
    report = run(source, tmp_path / "out")
    stored = [name for name in members(tmp_path / "out") if name.startswith("media/")]
    assert len(stored) == report.media_files == 3  # the copy has the same content
    assert all(name.count(".") == 1 for name in stored)
    assert (report.images, report.videos) == (4, 1)


def test_a_monolithic_record_stores_a_file_that_it_names_twice_once(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", layout="monolithic")
    names = [name.split("/")[1] for name in members(tmp_path / "out")]
    assert [name for name in names if name.startswith("twice_in_one")] == ["twice_in_one.json", "twice_in_one.0.jpg"]
    assert [name for name in names if name.startswith("mixed")] == ["mixed.json", "mixed.0.mp4", "mixed.1.png"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_media_table_says_what_energons_own_extraction_says(tmp_path: Path, layout: str) -> None:
    exif_source = tmp_path / "src"
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    write_image(exif_source / "turned.jpg", 40, 30, exif=exif)
    write_image(exif_source / "plain.webp", 21, 22)
    write_video(exif_source / "clip.mkv", frames=9)
    record = sharegpt("r", "<image><image><video>", images=["turned.jpg", "plain.webp"], videos=["clip.mkv"])
    report = run(write_json(exif_source / "a.json", [record]), tmp_path / "out", layout=layout, split={"train": 1.0})
    (sample,) = read_dataset(report.entry).values()
    extract = MediaFilterConfig.parse(None, False, True).extract_metadata
    names = [entry["name"] for entry in sample.record["media"]]
    for name, data, ours in zip(names, sample.media, sample.metadata, strict=True):
        theirs = extract(data, filename="x" + name[name.rindex(".") :])
        if name.endswith(".mkv"):
            assert (ours.video_num_frames, ours.video_width, ours.video_height) == (
                theirs.video_num_frames,
                theirs.video_width,
                theirs.video_height,
            )
        else:
            assert ours == theirs
    # The record has the displayed size, the table the stored one.
    assert [(entry["width"], entry["height"]) for entry in sample.record["media"]][:2] == [(30, 40), (21, 22)]
    folder = tmp_path / "out" / ("media" if layout == "polylithic" else "")
    with sqlite3.connect(folder / ".nv-meta/index.sqlite") as index:
        rows = index.execute("SELECT metadata_type, metadata_json FROM media_metadata").fetchall()
    assert len([deserialize_media_metadata(*row) for row in rows]) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_cut_by_the_number_of_samples(tmp_path: Path, layout: str) -> None:
    path = write_json(tmp_path / "a.json", [sharegpt(f"k{number}") for number in range(25)])
    report = run(path, tmp_path / "out", layout=layout, samples_per_shard=4, split={"train": 1.0})
    assert report.shards == 7
    assert set(read_dataset(report.entry)) == {f"k{number}" for number in range(25)}


def test_media_shards_are_cut_by_bytes(tmp_path: Path) -> None:
    for seed in range(5):
        write_image(tmp_path / f"{seed}.png", 30, 30, seed=seed)
    records = [sharegpt(f"k{seed}", "<image>", image=f"{seed}.png") for seed in range(5)]
    report = run(write_json(tmp_path / "a.json", records), tmp_path / "out", media_shard_bytes=4000)
    assert len(list((tmp_path / "out/media").glob("*.tar"))) == 3
    samples = all_samples(report.entry)
    assert {key: sample.media[0] for key, sample in samples.items()} == {
        f"k{seed}": (tmp_path / f"{seed}.png").read_bytes() for seed in range(5)
    }


def test_text_alone_has_no_media_store(tmp_path: Path) -> None:
    report = run(write_json(tmp_path / "a.json", [sharegpt("a"), sharegpt("b")]), tmp_path / "out")
    assert not (tmp_path / "out/media").exists()
    assert len(all_samples(report.entry)) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_data_set_can_be_moved(source: Path, tmp_path: Path, layout: str) -> None:
    run(source, tmp_path / "out", layout=layout)
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    assert len(all_samples(dataset_entry(tmp_path / "elsewhere"))) == 5


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
