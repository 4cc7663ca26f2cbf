"""A dry run says what a conversion would do, and leaves nothing anywhere; limits of rejects as share and as number."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from source_files import run, sharegpt, write_image, write_json

from energon_packing.cli.main import cli
from energon_packing.convert import ConvertConfig, convert
from energon_packing.errors import ConfigError, UserError

SAME = ("read", "written", "rejected", "warnings", "layouts", "splits", "images", "media_files", "media_bytes")
MORE = ("record_bytes", "ignored_columns", "first_rejects", "fingerprint", "entry", "videos")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_image(tmp_path / "src/a.png")
    records = [sharegpt(f"k{n}", "<image>", image="a.png", source="web") for n in range(6)]
    bad = [sharegpt(f"bad{n}", "<image>", image="no.png") for n in range(3)]
    return write_json(tmp_path / "src/a.json", [*records, *bad, {"instruction": "a", "output": "b"}])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dry_run_has_the_numbers_of_the_conversion_and_writes_nothing(
    source: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    before = sorted(tmp_path.rglob("*"))
    dry = run(source, tmp_path / "out", workers=workers, dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    real = run(source, tmp_path / "out")
    assert dry.dry_run
    assert not real.dry_run
    assert {name: getattr(dry, name) for name in (*SAME, *MORE)} == {
        name: getattr(real, name) for name in (*SAME, *MORE)
    }
    assert dry.shards == 0
    assert "no.png" in dry.first_rejects["missing_media"]


def test_a_dry_run_needs_no_place_to_write_to(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert run(source, tmp_path / "file/out", dry_run=True).written == 7
    run(source, tmp_path / "out")
    assert run(source, tmp_path / "out", dry_run=True).written == 7


def test_a_dry_run_of_nothing_usable_is_the_same_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no usable record"):
        run(write_json(tmp_path / "a.json", [{"x": 1}]), tmp_path / "out", dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def call(source: Path, out: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["convert", str(source), "--out", str(out), "--workers", "1", *options])


def test_the_command_prints_why_records_would_be_rejected(source: Path, tmp_path: Path) -> None:
    result = call(source, tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert "Dry run (nothing was written)" in result.stdout
    assert "first missing_media: a.json[6]" in result.stdout
    assert "layout alpaca" in result.stdout
    assert "ignored_column 'source' in 6 samples" in result.stdout
    assert "data set:" not in result.stdout
    report = json.loads(call(source, tmp_path / "out", "--dry-run", "--json").stdout)
    assert report["dry_run"]


@pytest.mark.parametrize(("limit", "code"), [("0.3", 0), ("0.29", 1), ("3", 0), ("2", 1), ("1", 0), ("0", 1)])
def test_more_rejects_than_a_share_or_a_number_exit_with_1(source: Path, tmp_path: Path, limit: str, code: int) -> None:
    for options in ((), ("--dry-run",)):
        result = call(source, tmp_path / f"out{len(options)}", "--max-rejects", limit, *options)
        assert result.exit_code == code
        assert ("more than --max-rejects" in result.stderr) == bool(code)


def test_a_dry_run_may_leave_out_where_to_write_to_and_nothing_else_may(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)  # the sources lie below the directory that a missing --out could be taken for
    result = CliRunner().invoke(cli, ["convert", ".", "--dry-run", "--workers", "1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["written"], report["out"], report["entry"]) == (7, "", "")
    for options in ([], ["--overwrite"], ["--resume"]):
        result = CliRunner().invoke(cli, ["convert", "a.json", *options])
        assert result.exit_code == 2
        assert "Missing option '--out'" in result.stderr
    with pytest.raises(UserError, match="no name of its own"):
        convert(ConvertConfig(sources=(Path("a.json"),)))
    assert sorted(path.name for path in source.parent.iterdir()) == ["a.json", "a.png"]


def test_many_ignored_columns_of_a_dry_run_are_listed_where_they_are(tmp_path: Path) -> None:
    record = sharegpt("k", **{f"column{number}": "x" for number in range(30)})
    source = write_json(tmp_path / "a.json", [record])
    result = CliRunner().invoke(cli, ["convert", str(source), "--dry-run", "--workers", "1"])
    assert "10 more ignored columns are listed by --json" in result.stdout


def test_a_broken_number_of_rejects_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_rejects"):
        run(source, tmp_path / "out", max_rejects=2.5)
    with pytest.raises(ConfigError, match="max_rejects"):
        run(source, tmp_path / "out", max_rejects=float("nan"))
