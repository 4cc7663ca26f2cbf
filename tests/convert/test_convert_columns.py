"""No column and no field vanishes without a word: it is read, refused by name, or counted in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from source_files import openai, refused, rejects, run, sharegpt, write_image, write_json, write_lines

from energon_packing.cli.main import cli
from energon_packing.convert.fields import near_name
from energon_packing.convert.records import parse_record
from energon_packing.errors import SampleRejected, UserError
from energon_packing.wan.layouts.text_to_video import parse_text_to_video

PAIR = {"messages": [{"role": "user", "content": "Hi?"}], "chosen": "Yes.", "rejected": "No."}


def with_field(name: str, value: Any, turn: int = 1) -> dict[str, Any]:
    record = openai()
    record["messages"][turn][name] = value
    return record


@pytest.mark.parametrize("label", [True, False, 0, 1, -1, "false", "Undesirable", [True, False], [-100, -100, 7]])
@pytest.mark.parametrize("column", ["label", "labels", "kto_tag"])
def test_an_answer_that_is_labelled_good_or_bad_is_refused_and_no_target(column: str, label: Any) -> None:
    reason, detail = refused(openai(**{column: label}))
    assert (reason, repr(column) in detail) == ("unsupported_column", True)


def test_half_good_and_half_bad_answers_as_llama_factory_labels_them_give_no_target(tmp_path: Path) -> None:
    records = [openai(f"k{number}", label=number % 2 == 0) for number in range(6)]
    with pytest.raises(UserError, match="'label' is True"):
        run(write_json(tmp_path / "kto.json", records), tmp_path / "out")
    report = run(write_json(tmp_path / "kto.json", [*records, openai("plain")]), tmp_path / "out", max_rejects=1.0)
    assert (report.written, report.rejected) == (1, {"unsupported_column": 6})


@pytest.mark.parametrize("column", ["audio", "audios", "audio_path", "sound", "speech"])
def test_sound_that_the_answer_is_about_is_refused(column: str) -> None:
    for question in ("<audio>What is it?", "What is it?"):
        assert refused(openai(question=question, **{column: ["a.wav"]})) == (
            "unsupported_column",
            f"the column {column!r} holds audio, which is not supported",
        )
    reason, detail = refused(openai(question="<audio>What is it?", audios=[]))
    assert (reason, "<audio>" in detail) == ("placeholder_mismatch", True)
    assert parse_record(openai(question="What does <audio> do in HTML?")).turns[0].text.count("<audio>") == 1


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("weight", 0.5, "weighs"),
        ("sample_weight", 0, "weighs"),
        ("loss_mask", [0, 0, 1], "masks"),
        ("loss", False, "weighs"),
        ("loss", 0.5, "weighs"),
        ("weight", "0", "weighs"),
        ("mask", "[0, 1]", "masks"),
        ("train", False, "weighs"),
        ("functions", [{"name": "f", "parameters": {}}], "rename it to 'tools'"),
        ("system_prompt", "Be brief.", "rename it to 'system'"),
        ("history", [["Hi", "Yes."]], "earlier turns"),
        ("documents", [{"text": "x"}], "chat template"),
        ("chat_template_kwargs", {"enable_thinking": False}, "chat template"),
        ("rejected_tools", [1], "pair"),
        ("chosen_messages", [{"role": "assistant", "content": "x"}], "pair"),
        ("negative_messages", [[1]], "pair"),
        ("objects", {"bbox": [[1, 2, 3, 4]]}, "<bbox>"),
    ],
)
def test_a_column_that_changes_the_meaning_is_refused_by_name(column: str, value: Any, words: str) -> None:
    question = "Where is <ref-object>?" if column == "objects" else "Hi?"
    reason, detail = refused(openai(question=question, **{column: value}))
    assert (reason, repr(column) in detail, words in detail) == ("unsupported_column", True, True)


@pytest.mark.parametrize(
    "columns",
    [
        {"weight": 1, "train": True, "mask": "a/mask.png", "sample_weight": "1.0"},
        {"system_prompt": "Be brief.", "system": "Be brief."},
        {"functions": [{"name": "f"}], "tools": [{"name": "f"}]},
        {"history": "long", "documents": "3"},
        {"objects": {"bbox": [[1, 2, 3, 4]]}},
        *({"label": label} for label in ("dog", 7, 0.5, ["dog", "cat"], {"class": 3})),
    ],
)
def test_the_same_names_are_counted_where_they_change_nothing(columns: dict[str, Any]) -> None:
    assert set(parse_record(openai(**columns)).ignored) == set(columns) - {"system", "tools"}


def test_a_part_of_a_video_is_refused_where_the_whole_would_be_shown() -> None:
    cut = {"start": 0, "end": 4.5}
    assert refused(openai(question="<video>?", video="a.mp4", **cut))[0] == "unsupported_column"
    assert refused(openai(question="<video>?", videos=[{"path": "a.mp4", **cut}]))[0] == "unsupported_field"
    part = {"type": "video", "video": "a.mp4", "video_end": 4.5}
    assert refused(openai(question=[part]))[0] == "unsupported_field"
    with pytest.raises(SampleRejected, match=r"unsupported_column.*'end'"):
        parse_text_to_video({"caption": "a ball", "video": "a.mp4", **cut})
    # Without a video, and with frames that are the part, they change nothing.
    assert parse_record(openai(**cut)).ignored == ("end", "start")
    assert parse_record(openai(question="<video>?", videos=[["a.png", "b.png"]], **cut)).ignored == ("end", "start")


SIZES = [{"resized_height": 280, "resized_width": 420}, {"min_pixels": 2_000_000}, {"max_pixels": 90_000}]
CHOICES = [{"nframes": 4}, {"fps": 0.5}, {"min_frames": 40}, {"max_frames": 8}]


@pytest.mark.parametrize("own", SIZES, ids=lambda own: next(iter(own)))
def test_an_image_that_asks_for_a_size_of_its_own_is_refused(tmp_path: Path, own: dict[str, int]) -> None:
    """Oracle: Qwen's own reader, which shows it in that size, so that boxes in the answer count in it."""
    reader = pytest.importorskip("qwen_vl_utils.vision_process")
    path = str(write_image(tmp_path / "a.png", 640, 480))
    part = {"type": "image", "image": path}
    assert reader.fetch_image({**part, **own}).size != reader.fetch_image(part).size
    for record, expected in (
        (openai(question=[{**part, **own}, {"type": "text", "text": "Where?"}]), "unsupported_field"),
        (
            openai(question=[{"type": "image", **own}, {"type": "text", "text": "?"}], images=[path]),
            "unsupported_field",
        ),
        (openai(question=[{"type": "video", "video": [path] * 4, **own}]), "unsupported_field"),
        (openai(question=[{"type": "video", "video": "a.mp4", **own}]), "unsupported_field"),
        (openai(question="<image>?", images=[{"path": path, **own}]), "unsupported_field"),
        (openai(question="<image>?", image=path, **own), "unsupported_column"),
    ):
        reason, detail = refused(record)
        assert (reason, repr(next(iter(own))) in detail) == (expected, True)
    assert parse_record(openai(**own)).ignored == tuple(sorted(own))
    unset = openai(question=[{**part, **dict.fromkeys(own)}, {"type": "text", "text": "Where?"}])
    assert parse_record(unset).ignored == ()


@pytest.mark.parametrize("own", CHOICES, ids=lambda own: next(iter(own)))
def test_a_video_that_asks_for_frames_of_its_own_is_refused(own: dict[str, float]) -> None:
    """Oracle: Qwen's own reader, which takes another number of frames."""
    reader = pytest.importorskip("qwen_vl_utils.vision_process")
    assert reader.smart_nframes(own, 300, 30.0) != reader.smart_nframes({}, 300, 30.0)
    name = next(iter(own))
    reason, detail = refused(openai(question=[{"type": "video", "video": "a.mp4", **own}]))
    assert (reason, repr(name) in detail) == ("unsupported_field", True)
    entry = openai(question="<video>?", videos=[{"path": "a.mp4", **own}])
    if name in ("fps", "nframes"):  # beside a path, what the file has
        assert parse_record(entry).ignored == (f"videos[].{name}",)
    else:
        assert refused(entry)[0] == "unsupported_field"


@pytest.mark.parametrize(
    ("name", "value", "turn"),
    [
        ("images", ["a.png"], 0),
        ("audio", {"id": "x"}, 1),
        ("tools", [{"name": "f"}], 0),
        ("tool_calls", [{"function": {"name": "f", "arguments": {}}}], 0),
        ("train_detail", [{"begin_offset": 0, "end_offset": 3, "train": False}], 1),
        ("mask", True, 1),
        ("training", False, 1),
        ("label", False, 1),
        ("channel", "analysis", 1),
        ("tool_plan", "I will add.", 1),
        ("reasoning_details", [{"text": "Hm."}], 1),
    ],
)
def test_a_field_that_changes_the_meaning_is_refused_by_name(name: str, value: Any, turn: int) -> None:
    reason, detail = refused(with_field(name, value, turn))
    assert (reason, repr(name) in detail, f"turn {turn}" in detail) == ("unsupported_field", True, True)


def test_what_nothing_reads_is_named_with_its_place() -> None:
    record = openai("k", [{"type": "image", "image": "a.png", "caption": "a"}, {"type": "text", "text": "?"}])
    record["messages"][0]["name"] = "ann"
    record["messages"][1].update(channel="final", tool_call_id="c")
    parsed = parse_record({**record, "source": "web"})
    assert parsed.ignored == (
        "messages[].channel",
        "messages[].content[].caption",
        "messages[].name",
        "messages[].tool_call_id",
        "source",
    )
    call = {"index": 3, "id": "c", "type": "function", "function": {"name": "f", "arguments": {}, "strict": True}}
    assert parse_record(with_field("tool_calls", [call])).ignored == (
        "messages[].tool_calls[].index",
        "messages[].tool_calls[].strict",
    )
    entry = {"path": "a.png", "bytes": "x", "width": None}
    assert parse_record(sharegpt(question="<image>", images=[entry])).ignored == ("images[].bytes",)
    answers = {"chosen": {"role": "assistant", "content": "Yes.", "score": 9}, "score_chosen": 9.0}
    assert parse_record({**PAIR, **answers}).ignored == ("chosen[].score", "score_chosen")
    assert parse_text_to_video({"caption": "a ball", "video": "a.mp4", "aspect": "16:9"}).ignored == ("aspect",)


def test_columns_that_are_read_and_empty_ones_are_not_named() -> None:
    record = openai("k", tools=[], audios=[], label=None, functions=None, comment="", meta={}, advantages=0.5)
    record["messages"][0].update(tool_calls=None, name=None, images=[])
    assert parse_record(record, extra_columns=("advantages",)).ignored == ()
    assert parse_record(openai(weight=0.5), extra_columns=("weight",)).extras == {"weight": 0.5}
    pair = {**PAIR, "score_chosen": 9.0, "rejected_margin": 1.0, "chosen_margin": 2.0}
    assert parse_record(pair, extra_columns=("margin",)).ignored == ("score_chosen",)


_NAMES = st.sampled_from(
    ["id", "source", "imagess", "label", "audios", "weight", "system", "tools", "score_chosen", "Images", "videos"]
) | st.text(min_size=1, max_size=6)
_VALUES = st.sampled_from([True, False, 1, 0.5, "x", ["x"], {"x": 1}, None, "", []])


@given(st.dictionaries(_NAMES, _VALUES, max_size=4))
def test_every_filled_column_is_read_refused_or_named(columns: dict[str, Any]) -> None:
    read = {"id", "system", "tools", "extras", "image", "images", "video", "videos", "video_fps", "video_timestamps"}
    try:
        parsed = parse_record({**openai(), **columns})
    except SampleRejected:
        return
    filled = {name for name, value in columns.items() if value not in (None, "", [], {})}
    assert set(parsed.ignored) == filled - read


@given(st.dictionaries(st.text(min_size=1, max_size=6) | st.sampled_from(["Content", "name", "imges"]), _VALUES))
def test_every_filled_field_is_read_refused_or_named(fields: dict[str, Any]) -> None:
    record = openai()
    record["messages"][1] = {**fields, **record["messages"][1]}
    try:
        parsed = parse_record(record)
    except SampleRejected:
        return
    filled = {name for name, value in fields.items() if value not in (None, "", [], {})}
    expected = {f"messages[].{name}" for name in filled - {"role", "content", "weight", "loss", "train"}}
    assert set(parsed.ignored) == expected


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("imagess", "images"),
        ("Images", "images"),
        ("image_paths", "images"),
        ("vidoes", "videos"),
        ("conversation", "conversations"),
        ("messages[].reasoning_contents", "reasoning_content"),
        ("messages[].loss_weights", "loss_weight"),
        ("messages[].thought", "reasoning_content"),
        ("source", None),
        ("image_id", None),
        ("conversations", None),
        ("messages[].name", None),
    ],
)
def test_a_name_near_to_one_that_is_read_is_pointed_out(name: str, meant: str | None) -> None:
    assert near_name(name) == meant


def test_a_missing_image_is_explained_by_the_misspelt_column() -> None:
    reason, detail = refused(openai(question="<image>?", imagess=["a.png"]))
    assert reason == "placeholder_mismatch"
    assert "'imagess' is not read, did you mean 'images'?" in detail


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_image(tmp_path / "src/a.png")
    records: list[Any] = [openai(f"k{number}", source="web", imagess=["a.png"]) for number in range(5)]
    records += [openai("seen", "<image>?", images=["a.png"], comment="[bold]"), openai("bad", source="web", label=True)]
    records[0]["messages"][0]["name"] = "ann"
    return write_lines(tmp_path / "src/a.jsonl", records)


IGNORED = {
    "comment": {"records": 1},
    "imagess": {"records": 5, "did_you_mean": "images"},
    "messages[].name": {"records": 1},
    "source": {"records": 5},
}


def test_the_command_says_what_it_ignored_and_what_was_probably_meant(source: Path, tmp_path: Path) -> None:
    arguments = ["convert", str(source), "--out", str(tmp_path / "out"), "--workers", "1"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    assert (tmp_path / "out/warnings.jsonl").read_text() == ""
    (line,) = rejects(tmp_path / "out")
    assert (line["key"], "'label'" in line["detail"]) == ("bad", True)
    assert [line for line in result.stdout.splitlines() if "ignored_column" in line] == [
        "warning: ignored_column 'imagess' in 5 samples: nothing reads it; did you mean 'images'?",
        "warning: ignored_column 'comment' in 1 sample: nothing reads it",
        "warning: ignored_column 'messages[].name' in 1 sample: nothing reads it",
        "warning: ignored_column 'source' in 5 samples: nothing reads it",
    ]
    as_json = CliRunner().invoke(cli, [*arguments, "--resume", "--json"])
    report = json.loads(as_json.stdout)
    assert (report["written"], report["rejected"]) == (6, {"unsupported_column": 1})
    assert (report["ignored_columns"], list(report["ignored_columns"])) == (IGNORED, sorted(IGNORED))


def test_records_whose_columns_are_data_fill_neither_the_report_nor_the_screen(tmp_path: Path) -> None:
    records = [openai(f"k{number}", **{f"c{number}": 1, "z" * 200: 1}) for number in range(1005)]
    result = CliRunner().invoke(
        cli, ["convert", str(write_lines(tmp_path / "a.jsonl", records)), "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0
    assert result.stdout.count("ignored_column ") == 20
    assert "ignored columns are listed in" in result.stdout
    found = json.loads((tmp_path / "out/conversion.json").read_text())["ignored_columns"]
    assert len(found) == 1001
    assert found["z" * 80] == {"records": 1005}
    assert sum(entry["records"] for entry in found.values()) == 2010
