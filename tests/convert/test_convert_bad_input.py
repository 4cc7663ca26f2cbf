"""Bad input ends as one line of rejects.jsonl with key and reason, or as one sentence; the rest goes through."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from energon_reading import read_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from source_files import count_checks, openai, rejects, run, sharegpt, write_image, write_json, write_lines, write_video

from energon_packing.cli.main import cli
from energon_packing.convert import media_files as media_checks
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.layout import read_report
from energon_packing.convert.media_files import MediaChecker, resolve_media
from energon_packing.errors import ConfigError, SampleRejected, UserError


def with_image(key: str, path: Any) -> dict[str, Any]:
    return sharegpt(key, "<image>What?", images=[path])


def test_every_kind_of_bad_media_is_rejected_by_reason_and_the_good_sample_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "data"
    good = write_image(root / "good.jpg", 200, 150).read_bytes()
    write_image(tmp_path / "secret.jpg")
    (root / "cut.jpg").write_bytes(good[: len(good) // 2])
    (root / "empty.jpg").touch()
    (root / "text.jpg").write_text("hello")
    (root / "dir.jpg").mkdir()
    os.mkfifo(root / "pipe.jpg")
    (root / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (root / "dirlink").symlink_to(tmp_path)
    (root / "loop.jpg").symlink_to(root / "loop.jpg")
    (root / "inside.jpg").symlink_to(root / "good.jpg")
    for name, values in (("counts.tiff", [[0, 90_000]]), ("metres.tiff", [[0.5, 12.25]])):
        Image.fromarray(np.array(values, np.int32 if name == "counts.tiff" else np.float32)).save(root / name)
    video = write_video(root / "clip.mp4").read_bytes()
    (root / "cut.mp4").write_bytes(video[: len(video) // 2])
    expected = {
        "../secret.jpg": "media_outside_root",
        str(tmp_path / "secret.jpg"): "media_outside_root",
        "/etc/passwd": "media_outside_root",
        "link.jpg": "media_outside_root",
        "dirlink/secret.jpg": "media_outside_root",
        "dirlink/missing.jpg": "media_outside_root",
        "missing.jpg": "missing_media",
        "": "placeholder_mismatch",
        "a\0b.jpg": "missing_media",
        "x" * 5000: "missing_media",
        "dir.jpg": "missing_media",
        "pipe.jpg": "missing_media",
        "loop.jpg": "missing_media",
        "cut.jpg": "corrupt_media",
        "empty.jpg": "corrupt_media",
        "text.jpg": "corrupt_media",
        "counts.tiff": "unsupported_depth",
        "metres.tiff": "unsupported_depth",
        "clip.mp4": "corrupt_media",  # named as an image
        "http://example.org/a.jpg": "remote_media",
        "https://example.org/a.jpg": "remote_media",
        "s3://bucket/a.jpg": "remote_media",
        "data:image/png;base64,AAAA": "corrupt_media",
        "data:image/png;base64,A*AA": "corrupt_media",
        "data:image/png": "corrupt_media",
    }
    records = [with_image(f"bad{number}", path) for number, path in enumerate(expected)]
    records[list(expected).index("")]["images"] = []
    good_ones = ["good.jpg", str(root / "good.jpg"), "inside.jpg", "./sub/../good.jpg"]
    (root / "sub").mkdir()
    for number, path in enumerate(good_ones):  # copies would share a split
        records.append(sharegpt(f"good{number}", f"<image>What is {number}?", images=[path]))
    records.append(sharegpt("badvideo", "<video>?", videos=["cut.mp4"]))
    records.append(sharegpt("stillvideo", "<video>?", videos=["good.jpg"]))
    report = run(write_json(root / "a.json", records), tmp_path / "out", max_rejects=1.0)
    found = {line["key"]: line["reason"] for line in rejects(tmp_path / "out")}
    wanted = {f"bad{number}": reason for number, reason in enumerate(expected.values())}
    assert found == {**wanted, "badvideo": "corrupt_media", "stillvideo": "corrupt_media"}
    assert report.rejected == dict(Counter(found.values()))
    assert report.read == report.written + sum(report.rejected.values())
    samples = {**read_dataset(report.entry), **read_dataset(report.entry, "val")}
    assert set(samples) == {f"good{number}" for number in range(4)}
    assert all(sample.media == [good] for sample in samples.values())


def talk(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns]}


def nested(kind: str, depth: int) -> dict[str, Any]:
    """A record with a call and a definition, of which one is that deep."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    call = json.dumps({"name": "look", "arguments": value if kind == "arguments" else {}})
    turns = [("human", "Hi"), ("function_call", call), ("observation", "1"), ("gpt", "Yes")]
    return {**talk(*turns), "tools": [{"name": "look", "parameters": value if kind == "tools" else {}}]}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("placeholder_mismatch", sharegpt(question="<image><image>?", image="a.jpg")),
    ("placeholder_mismatch", sharegpt(question="<image>?", images=["a.jpg", "a.jpg"])),
    ("placeholder_mismatch", sharegpt(question="?", image="a.jpg")),
    ("unknown_role", talk(("human", "Hi"), ("x" * 1_000_000, "Once."), ("gpt", "Yes."))),
    ("empty_turn", talk(("human", "Hi"), ("gpt", " \n"))),
    ("empty_conversation", talk()),
    *(("non_string_value", talk(("human", "Hi"), ("gpt", value))) for value in (7, 1.5, True, None, {"text": "x"})),
    ("non_string_value", {"conversations": [{"from": "human", "value": "Hi"}, "and then?"]}),
    ("non_string_value", talk(("human", "Hi"), ("function_call", None), ("observation", "1"), ("gpt", "Yes."))),
    ("unknown_part", openai(question=[{"type": "audio", "audio": "a.wav"}])),
    *(("too_deep", nested(kind, depth)) for kind in ("arguments", "tools") for depth in (101, 400, 700)),
    ("bad_text", openai(question="\ud800")),
    *(("missing_media", sharegpt(question="<image>?", image=name)) for name in ("\ud800.jpg", "\ud800/a.jpg")),
    *(("corrupt_media", sharegpt(question="<image>?", image=f"data:{kind},\ud800")) for kind in ("", "x/y;base64")),
]


def test_each_bad_record_is_one_short_line_and_its_neighbours_are_kept(tmp_path: Path) -> None:
    write_image(tmp_path / "a.jpg")
    records = [{**record, "id": f"bad{number}"} for number, (_, record) in enumerate(BAD)]
    records = [sharegpt("before"), *records, sharegpt("after", "<image>?", image="a.jpg")]
    report = run(write_lines(tmp_path / "a.jsonl", records), tmp_path / "out", max_rejects=1.0, split={"train": 1.0})
    assert set(read_dataset(report.entry)) == {"before", "after"}
    lines = rejects(tmp_path / "out")
    assert [(line["key"], line["reason"]) for line in lines] == [(f"bad{n}", why) for n, (why, _) in enumerate(BAD)]
    assert all(0 < len(line["detail"]) <= 600 for line in lines)


def test_odd_but_accepted_records_are_counted_and_listed(tmp_path: Path) -> None:
    """A tar member is split at its first dot: with one in the key, the sample would be another one, or none."""
    twice = sharegpt("same", "Hello?")
    twice["conversations"].insert(0, {"from": "human", "value": "Hi"})
    records = [sharegpt("same", "First?"), twice, sharegpt("a.b/c"), sharegpt("a.b.c")]
    report = run(write_json(tmp_path / "a.json", records), tmp_path / "out", split={"train": 1.0})
    assert report.warnings == {"consecutive_user_turns": 1, "duplicate_id": 2, "sanitised_id": 2}
    listed = [json.loads(line) for line in (tmp_path / "out/warnings.jsonl").read_text().splitlines()]
    assert [(line["key"], line["warnings"]) for line in listed] == [
        ("same-2", ["duplicate_id", "consecutive_user_turns"]),
        ("a_b_c", ["sanitised_id"]),
        ("a_b_c-2", ["sanitised_id", "duplicate_id"]),
    ]
    assert not (tmp_path / "out/media").exists()
    turns = {key: sample.record["turns"] for key, sample in read_dataset(report.entry).items()}
    assert turns.keys() == {"same", "same-2", "a_b_c", "a_b_c-2"}
    said = [(turn["role"], turn["parts"]) for turn in turns["same-2"]]
    assert said == [("user", ["Hi"]), ("user", ["Hello?"]), ("assistant", ["Yes."])]


def test_half_a_character_in_the_name_of_a_column_is_reported(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [sharegpt("good", **{"\ud800": 3})])
    done = CliRunner().invoke(cli, ["convert", str(source), "--out", str(tmp_path / "out"), "--json"])
    for report in (json.loads(done.stdout), read_report(tmp_path / "out")):
        assert report["ignored_columns"] == {"\ud800": {"records": 1}}


def test_a_source_whose_name_is_not_utf_8_is_converted(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a\udcff.jsonl", [sharegpt()])
    report = run(source, tmp_path / "out", split={"train": 1.0})
    assert report.layouts == {"a\\udcff.jsonl": {"sharegpt": 1}}
    assert run(source, tmp_path / "out", split={"train": 1.0}, resume=True).skipped


def test_each_distinct_file_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = count_checks(monkeypatch)
    write_image(tmp_path / "a.jpg")
    write_image(tmp_path / "b.jpg", seed=1)
    (tmp_path / "bad.jpg").touch()
    (tmp_path / "link.jpg").symlink_to(tmp_path / "a.jpg")
    names = ["a.jpg", "bad.jpg", "b.jpg", "./a.jpg", "link.jpg", "bad.jpg", "a.jpg"] * 3
    records = [with_image(f"k{number}", name) for number, name in enumerate(names)]
    run(write_json(tmp_path / "a.json", records), tmp_path / "out")
    assert sorted(checked) == ["a.jpg", "b.jpg", "bad.jpg"]


def test_limits_of_bytes_and_pixels_reject_before_decoding(tmp_path: Path) -> None:
    write_image(tmp_path / "wide.png", 300, 20)
    write_image(tmp_path / "small.png", 10, 10)
    records = [with_image("wide", "wide.png"), with_image("small", "small.png")]
    path = write_json(tmp_path / "a.json", records)
    for options in ({"max_pixels": 5999}, {"max_media_bytes": 1000}):
        run(path, tmp_path / "out", overwrite=True, **options)
        assert [(line["key"], line["reason"]) for line in rejects(tmp_path / "out")] == [("wide", "media_too_large")]


def test_an_image_above_pillows_own_limit_passes_where_ours_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    write_image(tmp_path / "a.png", 30, 30)
    report = run(write_json(tmp_path / "a.json", [with_image("a", "a.png")]), tmp_path / "out", max_pixels=900)
    assert report.written == 1
    assert Image.MAX_IMAGE_PIXELS == 100


def test_header_checks_accept_what_only_decoding_finds(tmp_path: Path) -> None:
    data = write_image(tmp_path / "a.jpg", 200, 200).read_bytes()
    (tmp_path / "a.jpg").write_bytes(data[: len(data) // 2])
    path = write_json(tmp_path / "a.json", [with_image("a", "a.jpg"), sharegpt("b")])
    assert run(path, tmp_path / "out1", check_media="header").rejected == {}
    assert run(path, tmp_path / "out2", check_media="full").rejected == {"corrupt_media": 1}


def test_the_media_root_is_the_directory_of_each_file_unless_named(tmp_path: Path) -> None:
    write_image(tmp_path / "src/one/i.png")
    write_image(tmp_path / "src/two/i.png", seed=5)
    write_json(tmp_path / "src/one/a.json", [with_image("a", "i.png")])
    write_json(tmp_path / "src/two/b.json", [with_image("b", "i.png"), with_image("c", "two/i.png")])
    report = run(tmp_path / "src", tmp_path / "out1")
    assert (report.written, report.media_files, report.rejected) == (2, 2, {"missing_media": 1})
    report = run(tmp_path / "src", tmp_path / "out2", media_root=tmp_path / "src", max_rejects=1.0)
    assert (report.written, report.rejected) == (1, {"missing_media": 2})


def test_a_colon_in_a_file_name_is_no_address(tmp_path: Path) -> None:
    write_image(tmp_path / "a:b.png")
    assert Path(resolve_media("a:b.png", tmp_path.resolve())).name == "a:b.png"
    with pytest.raises(SampleRejected, match="remote_media"):
        resolve_media("ftp://etc/passwd", tmp_path.resolve())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"texts": "a"}, {"texts": "b"}]', r"unknown_layout.*keys are: texts"),
        ("this is no JSON", "bad_json"),
        ("[]", "empty list"),
        ("[1, 2", "unknown_layout"),
        ("\ufeff  \n", "empty_file"),
    ],
)
def test_a_source_without_a_usable_record_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=words) as caught:
        run(path, tmp_path / "out")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_one_unusable_file_beside_a_good_one_is_an_error_only_where_it_was_named(tmp_path: Path) -> None:
    write_json(tmp_path / "src/good.json", [sharegpt("a")])
    write_json(tmp_path / "src/info.json", [{"dataset": "x"}])
    (tmp_path / "src/empty.json").touch()
    report = run(tmp_path / "src", tmp_path / "out", max_rejects=1.0)
    assert report.rejected == {"empty_file": 1, "unknown_layout": 1}
    with pytest.raises(UserError, match=r"info\.json"):
        run((tmp_path / "src/good.json", tmp_path / "src/info.json"), tmp_path / "out2")


@pytest.mark.parametrize(
    "options",
    [
        {"format": "vicuna"},
        {"layout": "flat"},
        {"check_media": "no"},
        {"workers": -1},
        {"samples_per_shard": 0},
        {"max_rejects": 1.5},
        {"missing_placeholder": "guess"},
        {"kto_label": "messages"},
        {"split": {"a b": 1.0}},
        {"max_media_bytes": 9 << 30},
        {"frame_fps": 0.0},
        {"max_rejects": float("nan")},
        *({"extra_columns": names} for names in (("",), ("a", "a"), ("extras",), ("preference",), ("images",))),
    ],
)
def test_an_impossible_option_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        run(write_json(tmp_path / "a.json", [sharegpt()]), tmp_path / "out", **options)


@pytest.mark.parametrize("error", [AttributeError("codec_context"), ZeroDivisionError()])
def test_an_error_that_nobody_foresaw_costs_the_file_and_names_it(tmp_path, monkeypatch, error):
    for name in ("a.png", "odd.png", "z.png"):
        write_image(tmp_path / name, seed=ord(name[0]))
    opened = media_checks.open_regular

    def failing(path: str) -> Any:
        if path.endswith("odd.png"):
            raise error
        return opened(path)

    monkeypatch.setattr(media_checks, "open_regular", failing)
    records = [with_image(name[:-4], name) for name in ("a.png", "odd.png", "z.png")]
    report = run(write_json(tmp_path / "chats.json", records), tmp_path / "out", max_rejects=1.0)
    assert (report.written, report.rejected) == (2, {"corrupt_media": 1})
    (line,) = rejects(tmp_path / "out")
    assert f"odd.png cannot be checked: {type(error).__name__}" in line["detail"]


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


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 8), st.binary(max_size=8)), min_size=1, max_size=6)
)
def test_a_video_with_any_bytes_changed_is_measured_or_rejected(tmp_path_factory, edits):
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    if not path.exists():
        write_video(path / "clip.mp4")
    content = bytearray((path / "clip.mp4").read_bytes())
    for at, gone, put in edits:
        content[at : at + gone] = put
    number = next(_NUMBERS)
    (path / f"{number}.mp4").write_bytes(content)
    checker = MediaChecker(ConvertConfig(sources=("x",)), path / "journal", path / f"index-{number}")
    with suppress(SampleRejected):
        assert checker.check(str(path / f"{number}.mp4"), "video", "clip")
    checker.close()


_NUMBERS = itertools.count()
