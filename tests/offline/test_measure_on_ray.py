"""``measure --executor ray`` writes the files that one process writes, whatever happens to its workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from forking_python import quick_python
from ranks_environment import ranks_environment

from energon_packing.cli.main import cli
from energon_packing.config import to_mapping
from energon_packing.convert import ConvertConfig, convert
from energon_packing.offline.measure import MeasureConfig, measure

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("ray", reason="Ray is not installed: pip install 'energon-packing[ray]'")


@pytest.fixture(scope="module")
def many_shards(sources, tmp_path_factory):
    """A data set with a shard for every sample, so that something is always being measured."""
    data = tmp_path_factory.mktemp("many") / "data"
    convert(ConvertConfig(sources=sources, out=data, split={"train": 1.0}, samples_per_shard=1, workers=0))
    return data


@pytest.fixture(scope="module")
def whole(many_shards, run_of, tmp_path_factory):
    """What one process measures."""
    out = tmp_path_factory.mktemp("whole") / "index"
    measure(MeasureConfig(paths=(many_shards,), out=out, workers=0), run_of(many_shards))
    return {file.relative_to(out): file.read_bytes() for file in out.rglob("*.*") if file.is_file()}


@pytest.fixture
def command(many_shards, run_of, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(to_mapping(run_of(many_shards))))
    words = ["measure", str(many_shards), "--config", str(config), "--out", str(tmp_path / "index")]
    return [*words, "--executor", "ray", "--workers", "2"]


def started(command):
    """The program, in a process group of its own as in a terminal."""
    words = [quick_python(), "-m", "energon_packing.cli.main", *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=ranks_environment(), stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def a_worker(out: Path) -> int:
    """Process id of one that is writing a shard."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        for written in out.rglob(".*.parquet.*"):
            return int(written.name.rpartition(".")[2])
        time.sleep(0.003)
    raise AssertionError("nobody measures")


def files_of(out: Path) -> dict[Path, bytes]:
    return {file.relative_to(out): file.read_bytes() for file in out.rglob("*.*") if file.is_file()}


@pytest.mark.full  # half a minute of imports in the workers
def test_ray_writes_the_same_files_although_a_worker_is_killed_and_standard_output_is_the_report(
    command, whole, tmp_path
):
    running = started([*command, "--json"])
    os.kill(a_worker(tmp_path / "index"), signal.SIGKILL)
    stdout, stderr = running.communicate(timeout=200)
    assert running.returncode == 0, stderr
    assert json.loads(stdout)["shards"] == {"measured": 43, "reused": 0, "missing": 0}
    assert stdout.count("\n") == 1  # what Ray says about the death is on standard error
    found = files_of(tmp_path / "index")
    assert {name: found[name] for name in whole} == whole
    # A killed process leaves the file that it was writing; the next command removes it.
    assert all(name.name[0] == "." for name in found.keys() - whole.keys())


def test_an_address_without_a_cluster_is_a_sentence(command):
    done = CliRunner().invoke(cli, [*command, "--address", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert "--address 127.0.0.1:1: there is no Ray cluster that this machine can join" in done.stderr
    assert len(done.stderr.splitlines()) <= 2
