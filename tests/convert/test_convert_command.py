"""The command: exit codes, one sentence for a mistake, pure JSON where asked for; dry runs; the base install."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from energon_reading import read_dataset
from source_files import rejects, run, sharegpt, write_image, write_json, write_video

from energon_packing.cli.main import cli
from energon_packing.convert import ConvertConfig, convert
from energon_packing.errors import UserError


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["convert", *map(str, arguments), "--workers", "1"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_image(tmp_path / "src/a.png")
    records = [sharegpt(f"k{n}", "<image>", image="a.png", source="web") for n in range(6)]
    bad = [sharegpt(f"bad{n}", "<image>", image="no.png") for n in range(3)]
    return write_json(tmp_path / "src/a.json", [*records, *bad, {"instruction": "a", "output": "b"}])


def test_json_is_the_report_and_nothing_else(source: Path, tmp_path: Path) -> None:
    done = call(source, "--out", tmp_path / "out", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "out/conversion.json").read_text())
    assert (report["read"], report["written"], report["rejected"]) == (10, 7, {"missing_media": 3})


@pytest.mark.parametrize(
    ("what", "address"),
    [("SRC", "https://example.org/a.json"), ("--out", "az://bucket/data"), ("--media-root", "az://bucket/data")],
)
def test_a_remote_address_is_one_sentence_and_no_directory_of_that_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    given = {"SRC": str(source), "--out": "out", "--media-root": str(source.parent), what: address}
    result = call(given.pop("SRC"), *(word for pair in given.items() for word in pair))
    assert result.exit_code == 2
    said, error = result.stderr.splitlines()
    assert said == f"Converting {address if what == 'SRC' else source} ..."
    assert error.startswith(f"Error: {what} {address} is a remote address")
    assert sorted(tmp_path.rglob("*")) == before


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


@pytest.mark.parametrize("name", ["chats.json", "chats.jsonl.gz"])
def test_a_source_that_breaks_off_exits_with_1_unless_it_is_allowed(tmp_path: Path, name: str) -> None:
    records = [json.dumps(sharegpt(f"r{number}", random.Random(number).randbytes(99).hex())) for number in range(99)]
    whole = gzip.compress("\n".join(records).encode()) if name.endswith(".gz") else f"[{','.join(records)}]".encode()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    for options in ([], ["--dry-run"]):
        result = call(tmp_path / name, "--out", tmp_path / "one", *options)
        assert result.exit_code == 1
        assert "damaged or break off at 1 place, and what follows was not read" in result.stderr
        assert ("the report" if options else "rejects.jsonl") in result.stderr
    line = rejects(tmp_path / "one")[-1]
    assert line["reason"] == ("corrupt_source" if name.endswith(".gz") else "truncated_array")
    allowed = call(tmp_path / name, "--out", tmp_path / "two", "--allow-truncated")
    assert (allowed.exit_code, "--allow-truncated" in allowed.stderr) == (0, False)


def test_every_planted_defect_of_the_demo_data_is_found_and_nothing_else(tmp_path: Path) -> None:
    generate = pytest.importorskip("energon_packing.demo.generate")
    folder = generate.make_data(tmp_path / "demo", conversations=30)
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
    assert report["read"] == 30 + len(expected)
    assert report["written"] == report["read"] - len(wanted)
    assert report["warnings"]["duplicate_id"] == 1


SAME = ("read", "written", "rejected", "warnings", "layouts", "splits", "images", "media_files", "media_bytes")
MORE = ("record_bytes", "ignored_columns", "first_rejects", "fingerprint", "entry", "videos")


@pytest.mark.parametrize(("layout", "workers"), [("polylithic", 1), ("monolithic", 2)])
def test_a_dry_run_has_the_numbers_of_the_conversion_and_writes_nothing(
    source: Path, tmp_path: Path, layout: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    before = sorted(tmp_path.rglob("*"))
    dry = run(source, tmp_path / "out", layout=layout, workers=workers, dry_run=True)
    assert run(source, tmp_path / "file/out", dry_run=True).written == 7  # needs no place to write to
    assert sorted(tmp_path.rglob("*")) == before
    told: list[tuple[int, int]] = []
    config = ConvertConfig(sources=(source,), out=tmp_path / "out", layout=layout, workers=1)
    real = convert(config, lambda stage, done, total: told.append((done, total)) if stage == "write" else None)
    total = real.record_bytes + real.media_bytes
    assert (told[0], told[-1]) == ((0, total), (total, total))
    assert 0 < told[1][0] < total
    assert dry.dry_run
    assert not real.dry_run
    assert {name: getattr(dry, name) for name in (*SAME, *MORE)} == {
        name: getattr(real, name) for name in (*SAME, *MORE)
    }
    assert dry.shards == 0
    assert "no.png" in dry.first_rejects["missing_media"]


@pytest.mark.parametrize(("limit", "code"), [("0.3", 0), ("0.29", 1), ("3", 0), ("2", 1)])
def test_more_rejects_than_a_share_or_a_number_exit_with_1(source: Path, tmp_path: Path, limit: str, code: int) -> None:
    for options in ((), ("--dry-run",)):
        result = call(source, "--out", tmp_path / f"out{len(options)}", "--max-rejects", limit, *options)
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


EXTRAS = ("torch", "torchvision", "transformers", "megatron", "webdataset", "pyarrow", "zstandard", "jinja2")
INSTALLED = f"""
import importlib.metadata, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
of = importlib.metadata.version
def version(name):
    if name == "megatron-energon":
        raise importlib.metadata.PackageNotFoundError(name)
    return of(name)
importlib.metadata.version = version
from energon_packing.cli.main import main
main()
"""


def test_the_base_install_converts_to_what_energon_reads(tmp_path: Path) -> None:
    image = write_image(tmp_path / "src/a.png").read_bytes()
    video = write_video(tmp_path / "src/a.mp4").read_bytes()
    record = sharegpt("k", "<image><video>?", images=["a.png"], videos=["a.mp4"])
    source = write_json(tmp_path / "src/a.json", [record, {"id": "t", "instruction": "a", "output": "b"}])
    arguments = ["convert", str(source), "--out", str(tmp_path / "out"), "--workers", "1", "--split", "train=1"]
    command = [sys.executable, "-c", INSTALLED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read = read_dataset(str(tmp_path / "out/dataset.yaml"))
    assert read["k"].media == [image, video]
    assert set(read) == {"k", "t"}
    run(source, tmp_path / "full", split={"train": 1.0})
    for path in sorted((tmp_path / "full").rglob("*")):
        other = tmp_path / "out" / path.relative_to(tmp_path / "full")
        if path.suffix in (".tar", ".yaml"):
            assert path.read_bytes() == other.read_bytes()
        if path.name == ".info.json":
            here, there = (json.loads(file.read_text()) for file in (path, other))
            assert here["shard_counts"] == there["shard_counts"]


def test_a_source_that_needs_an_extra_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, extra in (("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")):
        (tmp_path / name).write_bytes(b"PAR1")
        monkeypatch.setitem(sys.modules, extra, None)
        done = call(tmp_path / name, "--out", tmp_path / "out")
        assert (done.exit_code, done.stderr.count("\n")) == (2, 2)  # what is done, and why not
        assert extra in done.stderr
        assert ".[convert]" in done.stderr
