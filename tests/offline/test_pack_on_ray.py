"""``pack`` and ``verify`` on Ray: the files that one process writes, although a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from forking_python import quick_python
from ranks_environment import ranks_environment
from test_pack_command import contents, invoke
from test_planned_loader import planned

from energon_packing.offline.pack import PackConfig, pack

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("ray", reason="Ray is not installed: pip install 'energon-packing[ray]'")


@pytest.mark.full  # half a minute of imports in the workers
def test_ray_packs_what_one_process_packs_although_a_worker_is_killed_and_verifies_it(dataset, run_of, tmp_path):
    run = planned(run_of(dataset, seq_length=1024), dataset, tmp_path)
    plan, whole, out = Path(run.data.path), tmp_path / "whole", tmp_path / "packed"
    pack(PackConfig(plan=plan, out=whole, workers=0, shard_packs=1, store="pixels"))
    words = ["-m", "energon_packing.cli.main", "pack", str(plan), "--out", str(out), "--store", "pixels", "--json"]
    running = subprocess.Popen(
        [quick_python(), *words, "--shard-packs", "1", "--executor", "ray", "--workers", "2"],
        env=ranks_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    written = None
    while written is None and running.poll() is None and time.monotonic() < deadline:
        written = next(iter(out.glob(".shard-*")), None)
        time.sleep(0.01)
    worker = int(written.name.rpartition(".")[2])
    priorities = [os.getpriority(os.PRIO_PROCESS, process) for process in (worker, running.pid)]
    os.kill(worker, signal.SIGKILL)
    stdout, stderr = running.communicate(timeout=200)
    assert running.returncode == 0, stderr
    assert stdout.count("\n") == 1  # what Ray says about the death is on standard error
    assert "worker died" in stderr
    assert priorities[0] == priorities[1]  # lower ones get next to nothing of a busy machine
    assert json.loads(stdout)["shards"]["packed"] == len(list(whole.glob("shard-*")))
    found = contents(out)
    assert {name: found[name] for name in contents(whole)} == contents(whole)
    done = invoke("verify", out, "--share", "0.2", "--executor", "ray", "--workers", "1", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["remade"] > 2
