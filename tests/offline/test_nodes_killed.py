"""Three nodes of ten are killed while `measure` and `pack` work: nothing is lost, and little is done twice."""

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import logged_work
import pytest
from forking_python import quick_python
from support.ranks import ranks_environment
from test_planned_loader import planned
from test_shards_set_aside import digests

from energon_packing.config import to_mapping
from energon_packing.convert import ConvertConfig, convert
from energon_packing.offline import measure as measuring
from energon_packing.offline import pack as packing
from energon_packing.offline.measure import MeasureConfig
from energon_packing.offline.pack import PackConfig

HERE = str(Path(__file__).parent)
SAMPLES = 300
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def one(run_of, tmp_path_factory):
    """A folder with 300 conversations in as many shards (``data``), and what one process makes of them."""
    folder = tmp_path_factory.mktemp("one")
    turns = [
        [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So. " * at}] for at in range(1, SAMPLES + 1)
    ]
    (folder / "texts.json").write_text(json.dumps([{"conversations": each} for each in turns]))
    split = {"train": 1.0}
    convert(
        ConvertConfig(
            sources=(folder / "texts.json",), out=folder / "data", split=split, workers=0, samples_per_shard=1
        )
    )
    run = run_of(folder / "data", family="text", seq_length=512)
    (folder / "run.yaml").write_text(json.dumps(to_mapping(run)))
    planned(run, folder / "data", folder)
    packing.pack(PackConfig(plan=folder / "plan.parquet", out=folder / "packed", workers=0, shard_packs=1))
    return folder, run


def check(notes, shards, one, out, name):
    """No shard is missing or other than that of one process, and at most 5 % of them were begun again."""
    begun = Counter(notes.read_text().splitlines())
    twice = sum(begun.values()) - len(begun)
    print(f"{name}: {shards} shards, {len(begun)} begun, {twice} of them twice")
    assert len(begun) == shards
    assert twice <= 0.05 * shards
    assert digests(out) == digests(one[0] / name)


def commands(one, out, **who):
    """Each command as a function, with its shards."""
    folder, run = one
    index, packed = out / "index", out / "packed"
    count = len([*(folder / "packed").glob("shard-*.bin")])
    asked = PackConfig(plan=folder / "plan.parquet", out=packed, shard_packs=1, **who)
    return {
        "index": (SAMPLES, lambda: measuring.measure(MeasureConfig(paths=(folder / "data",), out=index, **who), run)),
        "packed": (count, lambda: packing.pack(asked)),
    }


def lines(notes):
    return len(notes.read_text().splitlines()) if notes.exists() else 0


@pytest.fixture
def cluster(monkeypatch):
    """A Ray cluster on this machine whose head does no tasks; ``add`` gives it a node of one CPU."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    from ray.cluster_utils import Cluster

    from energon_packing.executors.on_ray import RayWorkers

    RayWorkers(1, None)  # sets what Ray reads from the environment
    for name, value in {"period_ms": 500, "timeout_ms": 5000, "failure_threshold": 3}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, ranks_environment()["PYTHONPATH"]]))
    small = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    cluster.add = lambda: cluster.add_node(num_cpus=1, **small)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_nodes_of_a_ray_cluster(cluster, one, tmp_path, monkeypatch):
    import ray

    for module in (measuring, packing):
        monkeypatch.setattr(module, "work_shared", module.work_shared)
    logged_work.log_work()
    count = int(os.environ.get("ENERGON_PACKING_NODES", "4"))
    killed = max(1, round(0.3 * count))
    ray.init(cluster.address, log_to_driver=False)
    for name, (shards, command) in commands(
        one, tmp_path, executor="ray", address=cluster.address, workers=None
    ).items():
        nodes = [cluster.add() for _ in range(count - len(cluster.worker_nodes))]
        notes = tmp_path / f"{name}.txt"
        monkeypatch.setenv("NOTES", str(notes))
        reports = []
        meanwhile = threading.Thread(target=lambda command=command, reports=reports: reports.append(command()))
        meanwhile.start()
        for number in range(killed):
            while meanwhile.is_alive() and lines(notes) < shards * (number + 1) // (killed + 2):
                time.sleep(0.02)
            assert meanwhile.is_alive()
            cluster.remove_node(nodes[number], allow_graceful=False)
        meanwhile.join()
        assert reports[0].missing == 0
        assert reports[0].set_aside == ()
        check(notes, shards, one, tmp_path / name, name)


def test_the_calling_process_on_a_ray_cluster(cluster, one, tmp_path):
    folder, _ = one
    cluster.add(), cluster.add()
    notes, out = tmp_path / "index.txt", tmp_path / "index"
    words = ["measure", str(folder / "data"), f"--config={folder}/run.yaml", f"--out={out}", "--executor=ray"]
    command = [quick_python(), f"{HERE}/logged_work.py", *words, f"--address={cluster.address}"]
    environment = ranks_environment(NOTES=str(notes), PYTHONPATH=os.environ["PYTHONPATH"])
    with subprocess.Popen(command, env=environment) as first:
        while first.poll() is None and lines(notes) < SAMPLES // 3:
            time.sleep(0.02)
        first.kill()
    assert first.returncode == -signal.SIGKILL
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    check(notes, SAMPLES, one, out, "index")


def test_processes_that_slurm_starts(one, tmp_path, monkeypatch):
    folder, _ = one
    (programs := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    program = programs / "energon-packing"
    program.write_text(f'#!/bin/bash\nexec {quick_python()} {HERE}/logged_work.py "$@"\n')
    program.chmod(0o755)
    for name, words in {
        "index": ["measure", f"--config={folder}/run.yaml", f"--out={tmp_path}/index", str(folder / "data")],
        "packed": ["pack", "--shard-packs=1", f"--out={tmp_path}/packed", str(folder / "plan.parquet")],
    }.items():
        shards = SAMPLES if name == "index" else len([*(folder / "packed").glob("shard-*.bin")])
        job, notes = tmp_path / f"job of {name}", tmp_path / f"{name}.txt"
        environment = ranks_environment(NOTES=str(notes))
        command = [str(program), *words[:1], f"--slurm={job}", "--workers=1", f"--shards-per-task={-(-shards // 10)}"]
        subprocess.run([*command, *words[1:]], env=environment, check=True)
        for killed in (3, 0):
            script, lists = ["bash", str(job / "job.sh")], sorted((job / f"lists-{2 - bool(killed)}").iterdir())
            tasks = [
                subprocess.Popen(
                    [*script, "--task"], env=environment | {"SLURM_ARRAY_TASK_ID": each.name}, start_new_session=True
                )
                for each in lists
            ]
            for number in range(killed):
                while lines(notes) < shards * (number + 1) // 5:
                    time.sleep(0.02)
                working = next(task for task in tasks if task.poll() is None)
                os.killpg(working.pid, signal.SIGKILL)
            codes = [task.wait() for task in tasks]
            assert Counter(codes) == Counter(
                {0: len(codes) - killed, -signal.SIGKILL: killed} if killed else {0: len(codes)}
            )
            assert subprocess.run([*script, "--complete"], env=environment, check=False).returncode == bool(killed)
        check(notes, shards, one, tmp_path / name, name)
