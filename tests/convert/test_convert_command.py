"""The command: exit codes, one sentence for a mistake, pure JSON where asked for, the demo's planted defects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from source_files import rejects, sharegpt, write_image, write_json

from energon_packing.cli.main import cli


def call(*arguments: object) -> Result:
    return CliRunner().invoke(
        cli, ["convert", *map(str, arguments), *([] if "--help" in arguments else ["--workers", "1"])]
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_image(tmp_path / "src/a.png")
    records = [sharegpt(f"k{n}", "<image>", image="a.png") for n in range(3)]
    return write_json(tmp_path / "src/a.json", [*records, sharegpt("bad", "<image>", image="no.png")])


def test_a_good_conversion_prints_a_table_and_exits_with_0(source: Path, tmp_path: Path) -> None:
    result = call(source, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "samples written" in result.stdout
    assert "missing_media" in result.stdout
    assert str(tmp_path / "out" / "rejects.jsonl") in result.stdout.replace("\n", "")
    assert result.stdout.endswith(f"\nNext: energon-packing init {tmp_path / 'out'} --processor NAME\n")
    assert [line for line in result.stderr.splitlines() if "%" in line] == [
        "reading and checking: 100 %",
        "writing shards: 100 %",
        "indexing: 100 %",
    ]


def test_json_is_the_report_and_nothing_else(source: Path, tmp_path: Path) -> None:
    script = [sys.executable, "-m", "energon_packing.cli.main", "convert", str(source), "--out", str(tmp_path / "out")]
    done = subprocess.run([*script, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "out/conversion.json").read_text())
    assert (report["read"], report["written"], report["rejected"]) == (4, 3, {"missing_media": 1})


@pytest.mark.parametrize("address", ["https://example.org/a.json", "az://bucket/data"])
@pytest.mark.parametrize("what", ["SRC", "--out", "--media-root"])
def test_a_remote_address_is_one_sentence_and_no_directory_of_that_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    given = {"SRC": str(source), "--out": "out", "--media-root": str(source.parent), what: address}
    result = call(given.pop("SRC"), *(word for pair in given.items() for word in pair))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {what} {address} is a remote address")
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_too_many_rejects_exit_with_1_and_keep_the_data_set(source: Path, tmp_path: Path) -> None:
    result = call(source, "--out", tmp_path / "out", "--max-rejects", "0.2")
    assert result.exit_code == 1
    assert "25.0% of the records were rejected" in result.stderr
    assert (tmp_path / "out/dataset.yaml").exists()
    assert call(source, "--out", tmp_path / "out", "--resume", "--max-rejects", "0.2").exit_code == 1
    assert call(source, "--out", tmp_path / "out", "--resume", "--max-rejects", "0.25").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere.json", "--out", "{tmp}/out"],
        ["{src}", "--out", "{tmp}/out", "--split", "train"],
        ["{src}", "--out", "{tmp}/out", "--media-root", "{tmp}/nowhere"],
        ["{src}", "--out", "{src}"],
        ["{src}", "--out", "{tmp}/src"],
        ["{src}", "--out", "{tmp}/out", "--format", "openai"],
        ["{src}", "--out", "{tmp}/out", "--layout", "flat"],
        ["{src}"],
        [],
    ],
)
def test_a_mistake_is_one_sentence_and_exits_with_2(source: Path, tmp_path: Path, arguments: list[str]) -> None:
    result = call(*(argument.format(tmp=tmp_path, src=source) for argument in arguments))
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "Error" in result.stderr
    assert not (tmp_path / "out").exists()


def test_help_shows_examples_and_exit_codes() -> None:
    result = call("--help")
    assert result.exit_code == 0
    assert "--media-root images" in result.stdout
    assert "Exit code 0" in result.stdout


def test_every_planted_defect_of_the_demo_data_is_found_and_nothing_else(tmp_path: Path) -> None:
    generate = pytest.importorskip("energon_packing.demo.generate")
    folder = generate.make_data(tmp_path / "demo", conversations=60)
    result = call(folder, "--out", tmp_path / "out")
    assert result.exit_code == 0
    expected = json.loads((tmp_path / "demo/expected_defects.json").read_text())
    wanted = {
        (defect["source"], defect["id"], defect["reason"])
        for defect in expected
        if defect["stage"] == "convert" and defect["outcome"] == "rejected"
    }
    broken = {entry for entry in wanted if entry[1] is None}
    found = {
        (line["source"], None if line["reason"] == "bad_json" else line["key"], line["reason"])
        for line in rejects(tmp_path / "out")
    }
    assert found == wanted
    assert len(broken) == 1
    report = json.loads((tmp_path / "out/conversion.json").read_text())
    assert report["read"] == 60 + len(expected)
    assert report["written"] == report["read"] - len(wanted)
    assert report["warnings"]["duplicate_id"] == 1


def test_an_array_that_breaks_off_exits_with_1_unless_it_is_allowed(tmp_path: Path) -> None:
    records = [sharegpt(f"r{number}") for number in range(9)]
    text = json.dumps(records)
    (tmp_path / "chats.json").write_text(text[: len(text) // 2])
    result = call(tmp_path / "chats.json", "--out", tmp_path / "one")
    assert result.exit_code == 1
    assert "damaged or break off at 1 place, and what follows was not read" in result.output
    (line,) = rejects(tmp_path / "one")
    assert line["reason"] == "truncated_array"
    assert "bytes, about" in line["detail"]
    assert call(tmp_path / "chats.json", "--out", tmp_path / "two", "--allow-truncated").exit_code == 0
