"""One bad record between two good ones: the good ones are converted, the bad one is named with its reason.

Each way in which a record goes wrong has a test of its own name, from the source file to the samples that come out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from energon_reading import read_dataset
from source_files import openai, rejects, run, sharegpt, write_image, write_json, write_lines

from energon_packing.cli.main import cli
from energon_packing.convert.report import read_report


@pytest.fixture
def between(tmp_path: Path):
    """A function from a bad record to its line in ``rejects.jsonl``; it fails where a good record is lost."""
    (tmp_path / "root").mkdir()
    write_image(tmp_path / "root/a.jpg")

    def convert(record: Any) -> dict[str, Any]:
        records = [sharegpt("before"), record, sharegpt("after", "<image>?", image="a.jpg")]
        report = run(
            write_json(tmp_path / "root/a.json", records), tmp_path / "out", max_rejects=1.0, split={"train": 1.0}
        )
        assert set(read_dataset(report.entry)) == {"before", "after"}
        (line,) = rejects(tmp_path / "out")
        assert report.rejected == {line["reason"]: 1}
        assert line["detail"]
        return line

    return convert


def talk(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"id": "bad", "conversations": [{"from": role, "value": value} for role, value in turns]}


def test_more_placeholders_than_media_are_rejected(between) -> None:
    line = between(sharegpt("bad", "<image><image>?", image="a.jpg"))
    assert (line["key"], line["reason"]) == ("bad", "placeholder_mismatch")


def test_more_media_than_placeholders_are_rejected(between) -> None:
    assert between(sharegpt("bad", "<image>?", images=["a.jpg", "a.jpg"]))["reason"] == "placeholder_mismatch"


def test_media_without_any_placeholder_are_rejected(between) -> None:
    assert between(sharegpt("bad", "?", image="a.jpg"))["reason"] == "placeholder_mismatch"


def test_an_unknown_role_is_rejected(between) -> None:
    line = between(talk(("human", "Hi"), ("narrator", "Once."), ("gpt", "Yes.")))
    assert line["reason"] == "unknown_role"
    assert "narrator" in line["detail"]


def test_an_empty_turn_is_rejected(between) -> None:
    assert between(talk(("human", "Hi"), ("gpt", " \n")))["reason"] == "empty_turn"


def test_an_empty_conversation_is_rejected(between) -> None:
    assert between(talk())["reason"] == "empty_conversation"


@pytest.mark.parametrize("value", [7, 1.5, True, None, {"text": "x"}])
def test_content_that_is_no_text_is_rejected(between, value: Any) -> None:
    assert between(talk(("human", "Hi"), ("gpt", value)))["reason"] == "non_string_value"


def test_a_turn_that_is_no_object_is_rejected(between) -> None:
    record = sharegpt("bad")
    record["conversations"].insert(1, "and then?")
    assert between(record)["reason"] == "non_string_value"


def test_a_part_of_an_unknown_type_is_rejected(between) -> None:
    assert between(openai("bad", [{"type": "audio", "audio": "a.wav"}]))["reason"] == "unknown_part"


@pytest.mark.parametrize("path", ["../secret.jpg", "sub/../../secret.jpg"])
def test_a_media_path_that_climbs_out_of_the_root_is_rejected(between, tmp_path: Path, path: str) -> None:
    write_image(tmp_path / "secret.jpg")
    assert between(sharegpt("bad", "<image>?", image=path))["reason"] == "media_outside_root"


def test_an_absolute_media_path_outside_of_the_root_is_rejected(between, tmp_path: Path) -> None:
    secret = write_image(tmp_path / "secret.jpg")
    assert between(sharegpt("bad", "<image>?", image=str(secret)))["reason"] == "media_outside_root"


def test_a_symlink_out_of_the_root_is_rejected(between, tmp_path: Path) -> None:
    (tmp_path / "root/link.jpg").symlink_to(write_image(tmp_path / "secret.jpg"))
    assert between(sharegpt("bad", "<image>?", image="link.jpg"))["reason"] == "media_outside_root"


def test_a_symlinked_directory_out_of_the_root_is_rejected(between, tmp_path: Path) -> None:
    write_image(tmp_path / "elsewhere/secret.jpg")
    (tmp_path / "root/sub").symlink_to(tmp_path / "elsewhere")
    assert between(sharegpt("bad", "<image>?", image="sub/secret.jpg"))["reason"] == "media_outside_root"


def converted(tmp_path: Path, *records: Any) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Samples by key, and warnings by key."""
    report = run(write_json(tmp_path / "a.json", list(records)), tmp_path / "out", split={"train": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "out/warnings.jsonl").read_text().splitlines()]
    return read_dataset(report.entry), {line["key"]: line["warnings"] for line in lines}


def test_two_user_turns_in_a_row_are_kept_as_they_are_and_listed(tmp_path: Path) -> None:
    samples, warnings = converted(tmp_path, talk(("human", "Hi"), ("human", "Hello?"), ("gpt", "Yes.")))
    turns = samples["bad"].record["turns"]
    assert [(turn["role"], turn["parts"]) for turn in turns] == [
        ("user", ["Hi"]),
        ("user", ["Hello?"]),
        ("assistant", ["Yes."]),
    ]
    assert warnings == {"bad": ["consecutive_user_turns"]}


def test_records_of_one_id_are_both_kept_under_keys_of_their_own_and_listed(tmp_path: Path) -> None:
    samples, warnings = converted(tmp_path, sharegpt("same", "First?"), sharegpt("same", "Second?"))
    assert {key: sample.record["turns"][0]["parts"] for key, sample in samples.items()} == {
        "same": ["First?"],
        "same-2": ["Second?"],
    }
    assert warnings == {"same-2": ["duplicate_id"]}


def test_ids_with_dots_and_slashes_become_keys_that_no_shard_splits(tmp_path: Path) -> None:
    """A tar member is split at its first dot: with one in the key, the sample would be another one, or none."""
    samples, warnings = converted(tmp_path, sharegpt("a.b/c", "First?"), sharegpt("a.b.c", "Second?"))
    assert sorted(sample.record["turns"][0]["parts"][0] for sample in samples.values()) == ["First?", "Second?"]
    assert all("." not in key and "/" not in key for key in samples)
    assert {name for names in warnings.values() for name in names} >= {"sanitised_id"}


@pytest.mark.parametrize("depth", [101, 400, 700])
@pytest.mark.parametrize("kind", ["arguments", "tools"])
def test_a_record_nested_beyond_the_limit_is_rejected(between, depth: int, kind: str) -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = {"a": value}
        return value

    def made(levels: int) -> dict[str, Any]:
        tool = {"name": "look", "parameters": nested(levels) if kind == "tools" else {}}
        call = {"name": "look", "arguments": nested(levels) if kind == "arguments" else {}}
        turns = [("human", "Hi"), ("function_call", json.dumps(call)), ("observation", "1"), ("gpt", "Yes")]
        return {**talk(*turns), "tools": [tool]}

    assert between(made(depth))["reason"] == "too_deep"


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("\ud800.jpg", "missing_media"),
        ("\ud800/a.jpg", "missing_media"),
        ("data:,\ud800", "corrupt_media"),
        ("data:image/jpeg;base64,\ud800", "corrupt_media"),
    ],
)
def test_half_a_character_in_the_name_of_an_image_costs_its_record(tmp_path: Path, image: str, reason: str) -> None:
    source = write_lines(tmp_path / "a.jsonl", [sharegpt("bad", "<image>?", image=image), sharegpt("good")])
    report = run(source, tmp_path / "out", max_rejects=1.0, split={"train": 1.0})
    assert (report.written, report.rejected) == (1, {reason: 1})


def test_half_a_character_in_the_name_of_a_column_is_reported(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [sharegpt("good", **{"\ud800": 3})])
    done = CliRunner().invoke(cli, ["convert", str(source), "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ignored_columns"] == {"\ud800": {"records": 1}}
    known = read_report(tmp_path / "out")
    assert known is not None
    assert known["ignored_columns"] == {"\ud800": {"records": 1}}


def test_a_source_whose_name_is_not_utf_8_is_converted(tmp_path: Path) -> None:
    source = tmp_path / "a\udcff.jsonl"
    write_lines(source, [sharegpt()])
    report = run(source, tmp_path / "out", split={"train": 1.0})
    assert report.layouts == {"a\\udcff.jsonl": {"sharegpt": 1}}
    assert run(source, tmp_path / "out", split={"train": 1.0}, resume=True).skipped
