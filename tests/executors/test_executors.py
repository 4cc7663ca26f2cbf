"""What every executor promises: each task once, a lost worker costs its task once, and mistakes are sentences."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from forking_python import quick_python
from squares import ApartSquares, Squares
from support.ranks import ranks_environment

from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo.generate import make_data
from energon_packing.errors import ConfigError, SampleRejected, UserError
from energon_packing.executors import local, on_ray
from energon_packing.executors import work as working
from energon_packing.executors.local import LocalProcesses
from energon_packing.executors.work import EXECUTORS, CallingProcess, ExecutorConfig, GivenUp, in_order

NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"
)
HERE = Path(__file__).parent
THIS = os.pathsep.join((str(HERE), str(HERE.parent), ranks_environment()["PYTHONPATH"]))
"""A ``PYTHONPATH`` with the module `squares` on it."""
KINDS = [pytest.param(name, marks=NEEDS_RAY) if name == "ray" else name for name in EXECUTORS.names()]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    """A kind of executor; pytest runs all tests of one before those of the next, and no test forks beside Ray.

    With a fork between two of its calls, a program has lost Ray's word that its actors live, and waited for ever.
    """
    if request.param != "ray":
        yield request.param
        return
    yield from cluster()


def cluster():
    """A Ray of the calling program with two CPUs, which executors use and leave running."""
    ray = pytest.importorskip("ray")
    from energon_packing.executors.on_ray import RayWorkers

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", THIS)
        for _ in range(3):  # Ray gives its own processes thirty seconds to start, which a busy machine exceeds
            with contextlib.suppress(UserError):
                RayWorkers(2, None)._connect()
                break
            ray.shutdown()
    yield "ray"
    assert ray.is_initialized(), "an executor ended the cluster of its caller, or it never began"
    ray.shutdown()


@pytest.fixture
def executor(kind):
    return ExecutorConfig(kind=kind, workers=2).executor(100)


def ended(process: int) -> bool:
    """Waits until a process is gone."""
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{process}/cmdline").exists()


def attempts(notes: Path) -> dict[int, int]:
    return {int(note.name): len(note.read_text()) for note in notes.iterdir()}


def test_each_task_is_done_once_in_the_order_of_completion_but_for_those_whose_worker_died(executor, kind, tmp_path):
    dying = (5,) if kind == "ray" else (1, 5, 6, 9)
    tasks = [(number, "dies once" if number in dying else "" if number else "slowest") for number in range(10)]
    found = list(executor.results(tasks, Squares(tmp_path)))
    assert sorted((task[0], value) for task, (value, _) in found) == [(n, n * n) for n in range(10)]
    assert attempts(tmp_path) == {n: 2 if n in dying else 1 for n in range(10)}
    assert found[0][0] != tasks[0]
    workers = {process for _, (_, process) in found}
    assert len(workers) > 1
    assert os.getpid() not in workers


def test_a_task_at_which_three_workers_died_is_given_up_by_name(executor, kind, tmp_path):
    tasks = [(number, "dies" if number == 7 else "slow" if number > 10 else "") for number in range(20)]
    with pytest.raises(UserError, match="squaring 7 was given up: 3 workers died at it, and the last one "):
        list(executor.results(tasks, Squares(tmp_path)))
    assert attempts(tmp_path) == {n: 3 if n == 7 else 1 for n in range(20)}  # which comes last


def test_a_task_that_stands_alone_is_given_up_while_the_others_are_done(executor, kind, tmp_path):
    tasks = [(number, "dies" if number in (0, 7) else "") for number in range(20)]
    found = dict(executor.results(tasks, ApartSquares(tmp_path)))
    given_up = {task[0]: str(result) for task, result in found.items() if isinstance(result, GivenUp)}
    assert sorted(given_up) == [0, 7]
    assert all(f"squaring {number} was given up: 3 workers died" in why for number, why in given_up.items())
    assert all(found[task][0] == task[0] ** 2 for task in tasks if task[1] == "")
    assert attempts(tmp_path) == {n: 3 if n in (0, 7) else 1 for n in range(20)}


def test_a_slow_task_is_done_by_a_second_worker_and_the_first_result_counts(executor, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(working, "SLOW_SECONDS", 0.5)
    tasks = [(number, "stalls" if number in (0, 9) else "slow" if number > 20 else "") for number in range(41)]
    tasks = [tasks[0], *tasks[10:]]
    both = [(50, "meets"), (51, "meets")]  # they need the worker that stalled, or another one in its place
    found = []

    def given():
        yield from tasks
        while tasks[0] not in dict(found):
            yield working.NOT_YET
        yield from both

    for each in executor.results(given(), ApartSquares(tmp_path)):
        found.append(each)
    assert sorted((task, value) for task, (value, _) in found) == [(it, it[0] ** 2) for it in tasks + both]
    (tmp_path / "90").unlink()
    assert attempts(tmp_path) == {task[0]: 1 if task[0] else 2 for task in tasks + both}


@pytest.mark.parametrize("word", ["is beaten", "fails late"])
def test_what_the_slower_of_two_workers_returns_or_raises_is_nobodys(tmp_path, monkeypatch, word):
    wait = local.wait

    def both_are_read_at_once(connections, patience):
        while True:
            ready = wait(connections, patience)
            if not (tmp_path / "90").exists() or len(ready) == len(connections):
                return [each for each in connections if each in ready]
            time.sleep(0.02)

    monkeypatch.setattr(working, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(local, "wait", both_are_read_at_once)
    tasks = [(9, "slow"), (0, word), *((number, "") for number in range(1, 6))]
    found = list(LocalProcesses(2).results(tasks, ApartSquares(tmp_path)))
    assert sorted((task, value) for task, (value, _) in found) == sorted((it, it[0] ** 2) for it in tasks)


def test_a_worker_that_dies_while_it_is_idle_is_no_death_at_the_next_task(tmp_path, monkeypatch):
    monkeypatch.setattr(working, "MOST_DEATHS", 1)
    killed = []

    def given():
        yield 1, ""
        while not killed:
            yield working.NOT_YET
        yield 2, ""

    results = LocalProcesses(1).results(given(), Squares(tmp_path))
    _, (_, process) = next(results)
    os.kill(process, signal.SIGKILL)
    while ") Z " not in Path(f"/proc/{process}/stat").read_text():
        time.sleep(0.01)
    killed.append(process)
    assert [(task, value) for task, (value, _) in results] == [((2, ""), 4)]


def test_a_task_that_is_taken_back_has_had_no_death_and_one_whose_nodes_vanish_is_given_up_late(tmp_path):
    account = working.Attempts([(1, ""), (2, "")], ApartSquares(tmp_path))
    first = account.take()
    for _ in range(5):
        account.give_back(first)
        assert account.take() is first
    for losses in range(1, 10):
        assert account.died(first, "ended", lost=True) is None
        if losses == 3:
            second = account.take()
            assert (second.task[0], account.take()) == (2, None)  # it is alone from now on
            account.done(second)
        assert account.take() is first
    assert "squaring 1 was given up: 10 nodes vanished" in str(account.died(first, "ended", lost=True))


def test_a_task_is_given_up_at_its_third_death(tmp_path):
    account = working.Attempts([(1, "")], ApartSquares(tmp_path))
    assert [account.died(account.take(), "ended") for _ in range(2)] == [None, None]
    assert isinstance(account.died(account.take(), "ended"), GivenUp)
    assert (account.take(), account.running) == (None, set())


def test_a_task_at_which_a_worker_died_is_tried_by_one_at_a_time_and_a_second_one_that_never_began_costs_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(working, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(working, "SLOW", 0.0)
    account = working.Attempts([(number, "") for number in range(5)], ApartSquares(tmp_path))
    first, second, *others = [account.take() for _ in range(5)]
    for each in (first, second, *others):
        account.sent(each)
    assert all(account.done(each) for each in others)
    assert account.take_slow() is first
    account.give_back(first)
    assert account.take_slow() is first  # it is the only one still
    monkeypatch.setattr(working, "_ONE_IN", 1)
    assert [account.died(first, "ended"), account.died(first, "ended")] == [None, None]
    assert (account.take(), account.take_slow()) == (None, second)
    assert [account.died(second, "ended"), account.take_slow()] == [None, None]
    account.done(second)
    assert account.take() is first
    assert (account.take_slow(), account.patience()) == (None, None)
    assert isinstance(account.died(first, "ended"), GivenUp)


@pytest.mark.parametrize("tasks", [1, 10, 1000])
def test_workers_that_all_die_are_no_matter_of_the_tasks(tmp_path, tasks):
    class Breaks(ApartSquares):
        def begin(self):
            os._exit(7)

    results = LocalProcesses(2).results(((number, "") for number in range(tasks)), Breaks(tmp_path))
    if tasks < 1000:
        assert [isinstance(why, GivenUp) for _, why in results] == [True] * tasks
        return
    with pytest.raises(
        GivenUp, match="100 workers died before anything was done, and the last one ended with exit code 7"
    ):
        next(results)


def test_one_task_in_twenty_at_most_is_done_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(working, "SLOW_SECONDS", 0.1)
    tasks = [(number, "waits" if number < 3 else "") for number in range(30)]
    results = LocalProcesses(5).results(tasks, ApartSquares(tmp_path))
    found = [next(results) for _ in range(28)]  # all but the other two that wait
    time.sleep(0.5)
    (tmp_path / "go").touch()
    found += results
    (tmp_path / "go").unlink()
    assert sorted((task[0], value) for task, (value, _) in found) == [(n, n * n) for n in range(30)]
    assert sum(attempts(tmp_path).values()) == 31


@pytest.mark.parametrize("kind", [pytest.param("ray", marks=NEEDS_RAY)], indirect=True)
def test_an_actor_that_cannot_be_reached_for_a_while_is_no_death_and_keeps_no_processor(
    executor, tmp_path, monkeypatch
):
    import ray

    get, lost = ray.get, []

    def unavailable(answer):
        result = get(answer)
        if isinstance(result, tuple) and len(lost) < 4:  # twice as many as there are processors
            lost.append(result)
            raise ray.exceptions.ActorUnavailableError("the network has failed", None)
        return result

    monkeypatch.setattr(working, "MOST_DEATHS", 1)
    monkeypatch.setattr(ray, "get", unavailable)
    found = dict(executor.results([(number, "") for number in range(6)], ApartSquares(tmp_path)))
    assert {task[0]: value for task, (value, _) in found.items()} == {number: number**2 for number in range(6)}
    assert sum(attempts(tmp_path).values()) == 10


@pytest.mark.parametrize("kind", [pytest.param("ray", marks=NEEDS_RAY)], indirect=True)
def test_starts_that_fail_as_a_node_vanishes_are_not_counted(executor, tmp_path, monkeypatch):
    import ray

    get, nodes, lost = ray.get, ray.nodes, []

    def died(answer):
        result = get(answer)
        if isinstance(result, str) and len(lost) < 2:  # the name of the actor's node; both began at once
            lost.append(result)
            raise ray.exceptions.ActorDiedError
        return result

    monkeypatch.setattr(on_ray, "MOST_DEATHS", 1)
    monkeypatch.setattr(ray, "get", died)
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes(), {"NodeID": "another", "Alive": not lost}])
    found = dict(executor.results([(number, "") for number in range(6)], ApartSquares(tmp_path)))
    assert (len(found), len(lost)) == (6, 2)


@pytest.mark.parametrize("kind", [pytest.param("ray", marks=NEEDS_RAY)], indirect=True)
def test_starts_that_are_all_lost_end_the_command(executor, tmp_path, monkeypatch):
    import ray

    get, lost = ray.get, []

    def unavailable(answer):
        lost.append(get(answer))
        assert len(lost) < 20, "for ever"
        raise ray.exceptions.ActorUnavailableError("the network has failed", None)

    monkeypatch.setattr(on_ray, "MOST_LOSSES", 3)
    monkeypatch.setattr(ray, "get", unavailable)
    with pytest.raises(UserError, match=r"Ray cannot start workers for this command .*the network has failed"):
        next(executor.results([(number, "") for number in range(6)], ApartSquares(tmp_path)))
    assert len(lost) >= 3


@pytest.mark.parametrize("kind", [pytest.param("ray", marks=NEEDS_RAY)], indirect=True)
def test_an_actor_that_died_while_it_was_idle_is_no_further_death_of_a_task(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(working, "MOST_DEATHS", 2)
    idle = []

    def given():
        yield from ((50, "meets"), (51, "meets"))
        while len(idle) < 2:
            yield working.NOT_YET
        for process in idle:
            os.kill(process, signal.SIGKILL)
        assert all(ended(process) for process in idle)
        yield 2, ""

    found = []
    for task, (value, process) in ExecutorConfig(kind=kind, workers=2).executor(3).results(given(), Squares(tmp_path)):
        found.append((task[0], value))
        idle.append(process)
    assert (2, 4) in found  # the first of both is a death, as nothing had happened at the task before


@pytest.mark.parametrize("kind", [pytest.param("ray", marks=NEEDS_RAY)], indirect=True)
def test_a_cluster_has_no_more_workers_than_there_are_tasks(kind, tmp_path, monkeypatch):
    import ray

    wait, awaited = ray.wait, []
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 6.0})
    monkeypatch.setattr(ray, "wait", lambda answers, **how: awaited.append(len(answers)) or wait(answers, **how))
    results = ExecutorConfig(kind=kind, workers=None).executor(2).results([(1, ""), (2, "")], Squares(tmp_path))
    assert sorted(value for _, (value, _) in results) == [1, 4]
    assert max(awaited) == 2


@NEEDS_RAY
def test_sigterm_ends_a_command_on_ray_as_any_other(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: signal.signal(signal.SIGTERM, lambda *_: sys.exit(15)))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with working.ended_by_sigterm():
            on_ray.RayWorkers(1, None)._connect()
            with pytest.raises(SystemExit) as caught:
                signal.raise_signal(signal.SIGTERM)
        assert (caught.value.code, signal.getsignal(signal.SIGTERM)) == (128 + signal.SIGTERM, signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_a_task_raises_is_raised(executor, kind, tmp_path):
    with pytest.raises(SampleRejected, match="number 3") as caught:
        list(executor.results([(3, "fails")], Squares(tmp_path)))
    assert (caught.value.reason, caught.value.detail) == ("bad", "number 3")


def test_an_error_that_a_closed_pipe_raises_too_is_not_taken_for_one(executor, kind, tmp_path):
    with pytest.raises(EOFError, match="the file ended"):
        list(executor.results([(3, "ends early")], Squares(tmp_path)))
    assert attempts(tmp_path) == {3: 1}


def test_tasks_are_taken_when_workers_are_free_and_a_closed_iterator_ends_them(executor, kind, tmp_path):
    taken = []

    def tasks():
        for number in range(1000):
            taken.append(number)
            yield number, ""

    results = executor.results(tasks(), Squares(tmp_path))
    _, (_, process) = next(results)
    threading.Event().wait(0.3)  # time in which workers could run ahead
    assert len(taken) <= 6
    results.close()
    assert ended(process)


def test_a_task_that_waits_behind_another_is_done_once_whatever_happens_to_its_worker(tmp_path):
    words = {1: "slow", 2: "dies once", 5: "dies once", 6: "large" * 100_000, 7: "large" * 100_000, 9: "dies once"}
    work = Squares(tmp_path)
    work.queued = 2
    found = list(LocalProcesses(2).results([(number, words.get(number, "")) for number in range(12)], work))
    assert sorted((task[0], value) for task, (value, _) in found) == [(n, n * n) for n in range(12)]
    assert attempts(tmp_path) == {n: 2 if words.get(n) == "dies once" else 1 for n in range(12)}


class Spawned(LocalProcesses):
    method = "spawn"


def test_processes_may_begin_anew_instead_of_as_forks_and_do_each_task_once(tmp_path):
    commands = {}
    for (number, _), (value, process) in Spawned(2).results([(2, ""), (3, "dies once"), (4, "")], Squares(tmp_path)):
        commands[number, value] = Path(f"/proc/{process}/cmdline").read_text()
    assert set(commands) == {(2, 4), (3, 9), (4, 16)}
    assert attempts(tmp_path) == {2: 1, 3: 2, 4: 1}
    assert all("multiprocessing.spawn" in command for command in commands.values())


def test_results_in_order_wait_for_a_slow_first_task_with_a_bounded_number_of_others(tmp_path):
    words = {0: "slow", 4: "dies once", 11: "slow"}
    taken = []

    def tasks():
        for number in range(20):
            taken.append(number)
            yield number, words.get(number, "")

    found = []
    for task, (value, _) in in_order(LocalProcesses(2), tasks(), Squares(tmp_path), ahead=5):
        found.append((task[0], value))
        assert len(taken) <= len(found) + 5
    assert found == [(n, n * n) for n in range(20)]
    assert attempts(tmp_path) == {n: 2 if n == 4 else 1 for n in range(20)}


@pytest.mark.full
@pytest.mark.parametrize("kind", [pytest.param("ray", marks=NEEDS_RAY)], indirect=True)
def test_ray_converts_what_one_process_converts_although_its_workers_are_killed(kind, tmp_path):
    source, out = make_data(tmp_path / "demo", conversations=20), tmp_path / "out"
    killed = []

    def kill(stage: str, done: int, total: int) -> None:
        if done and stage == "read" and not killed:  # other tasks are being done
            killed.append(stage)
            os.kill(users_of(tmp_path / "out.partial")[0], signal.SIGKILL)

    def converted(**options):
        asked = {"samples_per_shard": 7, "media_shard_bytes": 100_000, "max_rejects": 1.0, **options}
        report = convert(ConvertConfig(sources=(source,), out=out, **asked), kill if "executor" in options else None)
        found = {file.relative_to(out): file.read_bytes() for file in out.rglob("*") if file.is_file()}
        shutil.rmtree(out)
        return report, found

    report, alone = converted(workers=0)
    assert report.rejected
    assert report.media_files > 10
    assert converted(executor="ray", workers=2)[1] == alone
    assert killed == ["read"]


def users_of(directory: Path) -> list[int]:
    """Other processes that have a file of a directory open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(f"{directory}/records-"):
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})


def test_workers_end_with_a_calling_process_that_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from squares import Squares\n"
        "from energon_packing.executors.local import LocalProcesses\n"
        "tasks, work = ((n, 'slow') for n in range(1000)), Squares(Path(sys.argv[1]))\n"
        "for _, (_, process) in LocalProcesses(2).results(tasks, work):\n"
        "    print(process, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = ranks_environment(PYTHONPATH=THIS)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        worker = int(running.stdout.readline())
        assert Path(f"/proc/{worker}").exists()
        running.kill()
    assert ended(worker)


def test_ctrl_c_while_a_worker_starts_leaves_no_process(tmp_path, monkeypatch):
    start = BaseProcess.start
    monkeypatch.setattr(BaseProcess, "start", lambda self: (start(self), os.kill(os.getpid(), signal.SIGINT)))
    others = set(multiprocessing.active_children())  # of other tests
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background lacks
    try:
        with pytest.raises(KeyboardInterrupt):
            list(LocalProcesses(2).results([(0, ""), (1, "")], Squares(tmp_path)))
        assert set(multiprocessing.active_children()) <= others
    finally:
        signal.signal(signal.SIGINT, before)


THREADED = """
import sys, torch
from energon_packing.executors.work import ExecutorConfig

class Sums:
    def begin(self): pass
    def do(self, task): return float(torch.ones(1 << 22).mul(2.0).sum())
    def name(self, task): return str(task)

torch.set_num_threads(2)
assert Sums().do(0) == 2.0 ** 23  # this process has OpenMP's threads now
print(sorted(value for _, value in ExecutorConfig(kind="local", workers=2).executor(4).results(range(4), Sums())))
"""


def test_workers_compute_although_the_calling_process_has_threads_of_openmp():
    done = subprocess.run([quick_python(), "-c", THREADED], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == f"{[2.0**23] * 4}\n", done.stderr


def test_few_tasks_or_no_workers_need_no_processes():
    assert isinstance(ExecutorConfig(workers=4).executor(1), CallingProcess)
    assert isinstance(ExecutorConfig(workers=0).executor(9), CallingProcess)
    assert isinstance(ExecutorConfig(workers=4).executor(2), LocalProcesses)


def test_there_are_no_more_processes_by_default_than_processors_that_this_one_may_use(monkeypatch):
    monkeypatch.setattr(local, "LocalProcesses", int)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert ExecutorConfig().executor(100) == 3


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kind": "slurm"}, r"--executor is 'slurm', an unknown executor; known: .*\blocal\b"),
        ({"workers": -1}, "--workers is -1"),
        ({"address": "10.0.0.1:6379"}, "add --executor ray"),
        ({"kind": "ray", "workers": 0}, "with --executor ray, --workers must be at least 1"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ExecutorConfig(**fields)


def test_a_machine_without_ray_is_told_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"--executor ray needs Ray .*pip install '\.\[ray\]'"):
        ExecutorConfig(kind="ray").executor(3)


def test_an_exception_that_cannot_be_read_back_is_told_in_its_words(tmp_path):
    with pytest.raises(RuntimeError, match=r"Particular: 1: a matter of its own"):
        list(LocalProcesses(2).results([(0, ""), (1, "fails in its own way")], Squares(tmp_path)))
