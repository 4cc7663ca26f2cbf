"""Videos as lists of images: how a record may give them, what is stored, and every reason to reject."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from energon_reading import read_dataset
from source_files import openai, rejects, run, sharegpt, write_image, write_json, write_video

from energon_packing.conversation import Conversation, Media
from energon_packing.convert.records import parse_record
from energon_packing.errors import SampleRejected

FRAMES = ["f0.jpg", "f1.jpg", "f2.jpg"]


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    for number in range(3):
        write_image(tmp_path / f"f{number}.jpg", seed=number)
    return tmp_path


@pytest.mark.parametrize(
    ("columns", "fps", "times"),
    [
        ({"videos": [FRAMES]}, 2.0, ()),
        ({"video": [FRAMES], "video_fps": 5}, 5.0, ()),
        ({"videos": [FRAMES], "video_fps": [0.5]}, 0.5, ()),
        ({"videos": [{"frames": FRAMES}]}, 2.0, ()),
        ({"videos": {"frames": FRAMES, "fps": "4"}, "video_fps": 9}, 4.0, ()),
        ({"videos": [FRAMES], "video_timestamps": [[0, 1, 4.5]]}, 2.0, (0.0, 1.0, 4.5)),
        ({"videos": [{"frames": FRAMES, "timestamps": [1, 2, 3]}]}, 2.0, (1.0, 2.0, 3.0)),
    ],
)
def test_a_column_may_hold_lists_of_frames_with_their_time(columns: Any, fps: float, times: Any) -> None:
    parsed = parse_record(sharegpt(question="<video>?", **columns))
    (reference,) = parsed.references
    assert (reference.kind, reference.is_frames) == ("video", True)
    assert (reference.fps, reference.times) == (fps, times)
    assert [(file.kind, file.path) for file in parsed.media] == [("image", name) for name in FRAMES]


@pytest.mark.parametrize("rate", [{"fps": 4}, {"sample_fps": "4"}, {"sample_fps": 4.0, "fps": 9}])
def test_a_content_part_may_hold_a_list_of_frames_as_qwen_writes_it(rate: dict[str, Any]) -> None:
    (reference,) = parse_record(openai(question=[{"type": "video", "video": FRAMES, **rate}])).references
    assert (reference.paths, reference.fps) == (tuple(FRAMES), 4.0)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"videos": [[]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": 0}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": True}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": "fast"}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": "nan"}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": 10**400}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": [1, 2]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": [[0, 1]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": [[0, 1, 1]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": [[-1, 1, 2]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": [[0, 1, "2"]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": [[0, 1, 10**400]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": 3}, "bad_frames"),
        ({"videos": [["f0.jpg", 3]]}, "non_string_value"),
        ({"videos": FRAMES}, "placeholder_mismatch"),
        ({"images": [FRAMES]}, "non_string_value"),
    ],
)
def test_what_is_no_list_of_frames_is_rejected(columns: Any, reason: str) -> None:
    with pytest.raises(SampleRejected) as caught:
        parse_record(sharegpt(question="<video>?", **columns))
    assert caught.value.reason == reason


@pytest.mark.parametrize("layout", ["polylithic", "monolithic"])
def test_lists_of_frames_are_stored_beside_files_and_read_back(frames: Path, layout: str) -> None:
    write_video(frames / "clip.mp4", frames=7)
    write_image(frames / "i.png", 20, 10)
    record = sharegpt(
        "mixed",
        "<video><image><video>and<video>",
        videos=[FRAMES, "clip.mp4", {"frames": ["f2.jpg", "f0.jpg", "f0.jpg", "f1.jpg"], "timestamps": [0, 1, 2, 4.5]}],
        images=["i.png"],
    )
    report = run(write_json(frames / "a.json", [record]), frames / "out", layout=layout, split={"train": 1.0})
    assert (report.written, report.images, report.videos, report.media_files) == (1, 1, 3, 5)
    (sample,) = read_dataset(report.entry).values()
    media = Conversation.from_record("mixed", sample.record).media
    assert [medium.kind for medium in media] == ["video", "image", "video", "video"]
    first, _, clip, last = media
    assert (first.frames, first.fps, first.duration, first.width, first.height) == (3, 2.0, 1.5, 40, 30)
    assert (clip.frames, clip.frame_names) == (7, ())
    assert (last.frames, last.frame_times) == (4, (0.0, 1.0, 2.0, 4.5))
    assert last.fps == pytest.approx(3 / 4.5)
    assert first.frame_names == (last.frame_names[1], last.frame_names[3], last.frame_names[0])
    stored: dict[str, bytes] = {}
    for shard in (frames / "out").rglob("*.tar"):
        with tarfile.open(shard) as tar:
            stored |= {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    prefix = "mixed" if layout == "monolithic" else ""
    assert [stored[prefix + name] for name in first.frame_names] == [(frames / name).read_bytes() for name in FRAMES]


def test_the_default_rate_is_an_option_and_part_of_the_fingerprint(frames: Path) -> None:
    source = write_json(frames / "a.json", [sharegpt("a", "<video>", videos=[FRAMES])])
    report = run(source, frames / "out", frame_fps=8.0, split={"train": 1.0})
    (sample,) = read_dataset(report.entry).values()
    assert sample.record["media"][0]["fps"] == 8.0
    assert report.fingerprint["options"]["frame_fps"] == 8.0


def test_bad_frames_reject_their_record_alone(frames: Path) -> None:
    write_image(frames / "other.jpg", 31, 30)
    (frames / "cut.jpg").write_bytes((frames / "f0.jpg").read_bytes()[:200])
    write_video(frames / "clip.mp4")
    lists = {
        "good": FRAMES,
        "unequal": ["f0.jpg", "other.jpg"],
        "missing": ["f0.jpg", "nowhere.jpg"],
        "outside": ["f0.jpg", "../secret.jpg"],
        "cut": ["f0.jpg", "cut.jpg"],
        "video": ["f0.jpg", "clip.mp4"],
        "remote": ["https://example.org/f.jpg"],
    }
    records = [sharegpt(key, "<video>", videos=[paths]) for key, paths in lists.items()]
    run(write_json(frames / "a.json", records), frames / "out", max_rejects=1.0)
    assert {line["key"]: line["reason"] for line in rejects(frames / "out")} == {
        "unequal": "unequal_frames",
        "missing": "missing_media",
        "outside": "media_outside_root",
        "cut": "corrupt_media",
        "video": "corrupt_media",
        "remote": "remote_media",
    }


def test_a_frame_name_that_leaves_the_data_set_is_refused_when_cooking() -> None:
    from energon_packing.energon.cookers import complete

    media = Media(kind="video", name="0.jpg", width=8, height=8, frames=2, fps=2.0, frame_names=("0.jpg", "../x.jpg"))
    record = {"version": 1, "turns": [{"role": "user", "parts": [{"media": 0}]}], "media": [media.to_record()]}
    with pytest.raises(SampleRejected, match="media_outside_root"):
        Conversation.from_record("k", record)
    safe = {**media.to_record(), "frame_names": ["0.jpg", "1.jpg"]}
    conversation = Conversation.from_record("k", {**record, "media": [safe]})
    object.__setattr__(conversation, "media", (media,))  # as a cooker of somebody else's might make it
    with pytest.raises(SampleRejected, match="media_outside_root"):
        complete(conversation, None)  # type: ignore[arg-type]
