"""A Ray cluster of several nodes: those that vanish, those that join, and a calling process that is killed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from squares import ApartSquares
from support.ranks import ranks_environment
from test_executors import THIS, attempts, ended

from energon_packing.executors import work as working

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")


@pytest.fixture
def nodes(monkeypatch):
    """A cluster on this machine whose head does no tasks; give it nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    from energon_packing.executors.on_ray import RayWorkers

    RayWorkers(1, None)  # sets what Ray reads from the environment
    # A node without an answer for so long is lost; else half a minute.
    for name, value in {"period_ms": 500, "timeout_ms": 2000, "failure_threshold": 3}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    monkeypatch.setenv("PYTHONPATH", THIS)
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    cluster.add = lambda: cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def begun(notes, count):
    """Waits until workers have begun tasks so many times."""
    deadline = time.monotonic() + 120
    while (found := sum(attempts(notes).values())) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found >= count


def test_a_node_that_vanishes_costs_its_tasks_but_no_death_and_one_that_joins_works(nodes, tmp_path, monkeypatch):
    from energon_packing.executors.on_ray import RayWorkers

    first, _ = nodes.add(), nodes.add()
    monkeypatch.setattr(working, "MOST_DEATHS", 1)  # a task would be given up
    tasks = [(number, "waits" if number else "") for number in range(8)]

    ray.init(nodes.address, log_to_driver=False)
    found = []
    results = RayWorkers(None, nodes.address).results(tasks, ApartSquares(tmp_path))
    meanwhile = threading.Thread(target=lambda: found.extend(results))
    meanwhile.start()
    begun(tmp_path, 3)
    nodes.remove_node(first, allow_graceful=False)
    nodes.add()
    nodes.add()
    begun(tmp_path, 5)  # a lost one again, and one more
    (tmp_path / "go").touch()
    meanwhile.join(120)
    assert sorted((task[0], value) for task, (value, _) in found) == [(n, n * n) for n in range(8)]
    (tmp_path / "go").unlink()
    assert sorted(attempts(tmp_path).values()) == [1] * 7 + [2]
    assert len({process for _, (_, process) in found}) >= 3


SLOW_START = """
import os, sys, time
from importlib.machinery import PathFinder
from pathlib import Path

def node(self):
    Path({notes!r}, str(os.getpid())).touch()
    time.sleep(1000)

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "energon_packing.executors.on_ray":
            spec = PathFinder.find_spec(name, path)
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), setattr(module._Worker, "node", node))
            return spec

if any("default_worker" in word for word in sys.orig_argv):  # not in this process, nor in Ray's own
    sys.meta_path.insert(0, Slow)
"""


def test_a_node_that_vanishes_while_its_workers_start_is_no_failed_start(nodes, tmp_path, monkeypatch):
    from energon_packing.executors.on_ray import RayWorkers

    (notes := tmp_path / "notes").mkdir()
    (tmp_path / "sitecustomize.py").write_text(SLOW_START.format(notes=str(tmp_path / "notes")))
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{THIS}")
        first = nodes.add_node(num_cpus=4, object_store_memory=80 << 20)
    ray.init(nodes.address, log_to_driver=False)
    found = []
    results = RayWorkers(None, nodes.address).results([(number, "") for number in range(8)], ApartSquares(tmp_path))
    meanwhile = threading.Thread(target=lambda: found.extend(results))
    meanwhile.start()
    deadline = time.monotonic() + 120
    while len([*notes.iterdir()]) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len([*notes.iterdir()]) >= 3
    nodes.remove_node(first, allow_graceful=False)
    nodes.add()
    meanwhile.join(120)
    assert sorted((task[0], value) for task, (value, _) in found) == [(n, n * n) for n in range(8)]


def test_a_worker_that_dies_by_itself_on_a_node_that_lives_is_a_death(nodes, tmp_path):
    from energon_packing.executors.on_ray import RayWorkers

    nodes.add()
    found = dict(RayWorkers(None, nodes.address).results([(1, "dies"), (2, "")], ApartSquares(tmp_path)))
    assert isinstance(found[1, "dies"], working.GivenUp)
    assert attempts(tmp_path) == {1: 3, 2: 1}


def test_workers_on_other_nodes_end_with_a_calling_process_that_is_killed(nodes, tmp_path):
    nodes.add()
    code = (
        "import sys; from pathlib import Path; from squares import Squares\n"
        "from energon_packing.executors.on_ray import RayWorkers\n"
        "tasks, work = ((n, 'slow') for n in range(1000)), Squares(Path(sys.argv[1]))\n"
        "for _, (_, process) in RayWorkers(None, sys.argv[2]).results(tasks, work):\n"
        "    print(process, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), nodes.address]
    environment = ranks_environment(PYTHONPATH=THIS)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        worker = int(running.stdout.readline())
        os.kill(running.pid, signal.SIGKILL)
    assert ended(worker)
