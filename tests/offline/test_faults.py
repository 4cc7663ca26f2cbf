"""What can go wrong on a machine: a sentence and exit code 2 each, and nothing half written."""

import json
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from energon_packing.cli.main import cli
from energon_packing.config import to_mapping
from energon_packing.errors import UserError
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.plan import Plan


@pytest.fixture(scope="module")
def made(dataset, run_of, tmp_path_factory):
    """A data set of its own, with its configuration, index and plan."""
    root = tmp_path_factory.mktemp("faults")
    data = root / "data"
    shutil.copytree(dataset, data)
    run = run_of(data)
    config = root / "run.yaml"
    config.write_text(json.dumps(to_mapping(run)))
    measure(MeasureConfig(paths=(data,), out=root / "index", workers=0), run)
    done = CliRunner().invoke(
        cli, ["plan", str(root / "index"), "--config", str(config), "--out", str(root / "p.parquet")]
    )
    assert done.exit_code == 0, done.output
    return root


@pytest.fixture
def copy(made, tmp_path):
    """The same, to damage."""
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def planning(made, out, *more):
    return ["plan", str(made / "index"), "--config", str(made / "run.yaml"), "--out", str(out), *more]


def refused(command) -> str:
    """The sentence of a command that must be refused."""
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert line.startswith("Error: ")
    assert "Unexpected" not in line
    return line


@contextmanager
def mounted(place: Path, options: str):
    """A small file system in memory; skips where nobody may mount one."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_keeps_the_plan_that_is_there_with_its_drops(made, tmp_path):
    with mounted(tmp_path / "disk", "size=256k") as disk:
        for name in ("p.parquet", "p.drops.jsonl"):
            shutil.copy(made / name, disk)
        before = {file.name: file.read_bytes() for file in disk.iterdir()}
        filling = disk / "filling"
        with pytest.raises(OSError, match="No space"):
            filling.write_bytes(bytes(1 << 20))
        sentence = refused(planning(made, disk / "p.parquet", "--set", "plan.seed=1", "--force"))
        assert "No space left on device); an existing plan is as it was" in sentence
        filling.unlink()
        assert {file.name: file.read_bytes() for file in disk.iterdir()} == before


def test_a_damaged_index_is_named_and_measured_again(copy):
    (file,) = (copy / "index").rglob("train-000002.parquet")
    whole = file.read_bytes()
    group = pq.ParquetFile(file).metadata.row_group(0)
    (read,) = (group.column(at) for at in range(group.num_columns) if group.column(at).path_in_schema == "length")
    middle = read.data_page_offset + read.total_compressed_size // 2
    for damage in (whole[:-7], b"", whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        file.write_bytes(damage)
        sentence = refused(planning(copy, copy / "new.parquet"))
        assert "train-000002.parquet" in sentence
        assert "run 'energon-packing measure' again" in sentence
        assert not (copy / "new.parquet").exists()
    (copy / "index" / "index.json").write_text("{")
    assert "measure again" in refused(planning(copy, copy / "new.parquet"))


def test_a_damaged_or_foreign_plan_is_refused_before_a_wrong_pack_is_made(made, copy, run_of):
    plan = copy / "p.parquet"
    whole = plan.read_bytes()
    of_index = next((made / "index").rglob("train-000002.parquet"))
    for damage in (whole[:-7], b"", (made / "index" / "index.json").read_bytes(), of_index.read_bytes()):
        plan.write_bytes(damage)
        assert "not a plan of format" in refused(["explain", "demo-00001", str(plan)])
    plan.write_bytes(whole)
    chunks = pq.ParquetFile(plan).metadata.row_group(0)
    for number in range(chunks.num_columns):
        chunk = chunks.column(number)
        first = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        at = first + chunk.total_compressed_size - 2  # in the values of its last page
        plan.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(UserError, match=r"(?s)p\.parquet cannot be read .* make the plan again"):
            Plan.open(plan).packs(0, 1)
