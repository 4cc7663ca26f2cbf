"""``kill -9`` at random moments of `measure` and `pack`: what is continued must be the files of a run nobody killed.

A command begins on an empty directory. At a random moment after it has begun to write, it or one of its workers is
killed; after each kill every finished file must be whole. A killed command is started again and continues, a killed
worker is replaced by the command itself. When a directory is complete, its files are compared with those of one process
that was never killed, and the next directory begins, until there were enough kills.

So that every kill takes seconds, commands are forks of this process, which has done the imports, and on Ray all of them
join one cluster: it is the commands and their workers that are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import torch

from bench.forked_command import ForkedCommand
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, PlanConfig, RunConfig, to_mapping
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.executors.choice import EXECUTORS, ExecutorKind
from energon_packing.executors.on_ray import RayWorkers
from energon_packing.offline.data_paths import PACKED_FILE
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.planner import make_plan

Command = Literal["measure", "pack"]
Victim = Literal["command", "worker"]
GIVEN_UP = "was given up: 2 workers died at it"
"""A worker that does a task again may be the next one to be killed; then the command ends, and is started again."""
LIMIT_SECONDS = 300.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
CLUSTER_CPUS = 4
"""As Ray counts them: room for two workers beside those of a killed command, which Ray has not ended yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is killed.

    Attributes:
        place: directory of everything.
        command, executor, victim: which command, who does its work, and what is killed.
        longest: seconds between the first file that a command writes and the kill, at most.
        workers: of the command.
        python: interpreter of the command; None forks it.
        address: of the Ray cluster that the command joins; None lets it start its own.
    """

    place: Path
    command: Command
    executor: ExecutorKind
    victim: Victim
    longest: float = 1.5
    workers: int = 2
    python: str | None = None
    address: str | None = None

    def words(self, out: Path) -> list[str]:
        """The command line, without ``energon-packing``."""
        given = {
            "measure": [str(self.place / "data"), "--config", str(self.place / "run.json")],
            "pack": [str(self.place / "plan.parquet"), "--store", "pixels", "--shard-packs", "1"],
        }[self.command]
        options = ["--out", str(out), "--executor", self.executor, "--workers", str(self.workers), "--json"]
        options += [] if self.address is None else ["--address", self.address]
        return [self.command, *given, *options]

    def started(self, out: Path) -> subprocess.Popen[str] | ForkedCommand:
        """The running command."""
        if self.python is None:
            return ForkedCommand(self.words(out))
        return subprocess.Popen(
            [self.python, "-m", "energon_packing.cli.main", *self.words(out)],
            env=os.environ | ONE_THREAD,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run_here(self, out: Path) -> None:
        """The same in this process."""
        run = _run(self.place)
        if self.command == "measure":
            measure(MeasureConfig(paths=(self.place / "data",), out=out, workers=0), run)
        else:
            pack(PackConfig(plan=self.place / "plan.parquet", out=out, workers=0, store="pixels", shard_packs=1))


def prepare(place: Path, conversations: int) -> None:
    """A data set with a shard for every sample, and a plan of it."""
    source = make_data(place / "made", conversations=conversations, seed=3, defects=False)
    convert(ConvertConfig(sources=(source,), out=place / "data", split={"train": 1.0}, samples_per_shard=1, workers=0))
    run = _run(place)
    (place / "run.json").write_text(json.dumps(to_mapping(run)))
    measure(MeasureConfig(paths=(place / "data",), out=place / "index", workers=0), run)
    make_plan([place / "index"], run, place / "plan.parquet")


def _run(place: Path) -> RunConfig:
    return RunConfig(
        data=DataConfig(path=str(place / "data")),
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl"))),
        packing=PackingConfig(seq_length=1024, drop_budget=1.0),
        plan=PlanConfig(max_data_parallel=8),
    )


def killed(subject: Subject, points: int, seed: int = 0, seconds: float = math.inf) -> dict[str, Any]:
    """Kills at `points` random moments.

    Args:
        seconds: after which no more commands are killed.

    Returns:
        ``kills``; ``commands`` that were started; ``directories`` that were completed, each compared with the
        uninterrupted run: ``same`` says whether all files were always the same, and ``leftovers`` counts files that one
        more command does not remove.
    """
    drawn = Random(seed)
    whole = subject.place / f"whole-{subject.command}"
    if not whole.exists():
        subject.run_here(whole)
    expected = contents(whole)
    found: dict[str, Any] = {"kills": 0, "commands": 0, "directories": 0, "given_up": 0, "same": True, "leftovers": 0}
    until = time.monotonic() + seconds
    while found["kills"] < points and time.monotonic() < until:
        out = subject.place / f"{subject.command}-{subject.executor}-{subject.victim}-{found['directories']}"
        while True:
            found["commands"] += 1
            most = points if time.monotonic() < until else found["kills"]
            ended = _one_command(subject, out, most, found, drawn, expected)
            if ended:
                break
        found["directories"] += 1
        found["same"] &= contents(out) == expected
        subject.run_here(out)
        found["same"] &= contents(out) == expected
        found["leftovers"] += len(_being_written(out))
    return found


def _one_command(
    subject: Subject, out: Path, points: int, found: dict[str, Any], drawn: Random, expected: dict[str, bytes]
) -> bool:
    """Starts the command once, and kills as long as there are to be kills; returns whether it completed.

    Raises:
        RuntimeError: it failed for another reason than a kill.
    """
    running = subject.started(out)
    before = set(_being_written(out))
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while found["kills"] < points and running.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(subject.words(out))} wrote nothing for {LIMIT_SECONDS:g} s")
            writing = [path for path in _being_written(out) if path not in before]
            if not writing:
                time.sleep(0.002)
                continue
            time.sleep(drawn.uniform(0, subject.longest))
            if subject.victim == "command":
                found["kills"] += running.poll() is None
                running.kill()
                break
            victim = _writer(out, before, running)
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
                found["kills"] += 1
                found["same"] &= _whole(out, expected)
                before |= set(_being_written(out))
                deadline = time.monotonic() + LIMIT_SECONDS
        output, errors = running.communicate(timeout=LIMIT_SECONDS)
    finally:
        running.kill()
    if running.returncode == 0:
        return True
    found["same"] &= _whole(out, expected)
    said = f"{output} {errors}"[-2000:]
    if GIVEN_UP in said:
        found["given_up"] += 1
    elif running.returncode != -signal.SIGKILL:
        raise RuntimeError(f"{' '.join(subject.words(out))} ended with {running.returncode}: {said}")
    return False


def contents(directory: Path) -> dict[str, bytes]:
    """Name -> bytes of every file that is finished."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(files)}


def _whole(out: Path, expected: dict[str, bytes]) -> bool:
    """Whether every finished file is what it should be; the manifest says who is finished, and changes at the end."""
    found = contents(out)
    return all(found[name] == expected[name] for name in found.keys() - {PACKED_FILE})


def _being_written(out: Path) -> list[Path]:
    return [path for path in out.rglob(".*") if path.name != ".lock"]


def _writer(out: Path, before: set[Path], running: subprocess.Popen[str] | ForkedCommand) -> int | None:
    """Process id of a worker that writes; None once the command has ended."""
    while running.poll() is None:
        for path in _being_written(out):
            process = path.name.rpartition(".")[2]
            if path not in before and process.isdigit() and int(process) != running.pid and _lives(int(process)):
                return int(process)
        time.sleep(0.001)
    return None


def _lives(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def results(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per command, executor and victim."""
    _import()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prepare(place, given.conversations)
        for executor in given.executor or EXECUTORS.names():
            with _cluster() if executor == "ray" else contextlib.nullcontext() as address:
                for command in given.command or get_args(Command):
                    for victim in given.victim or get_args(Victim):
                        subject = Subject(
                            place=place,
                            command=command,
                            executor=executor,
                            victim=victim,
                            longest=given.longest,
                            workers=given.workers,
                            address=address,
                        )
                        start = time.perf_counter()
                        found = killed(subject, given.points, given.seed, given.seconds)
                        seconds = round(time.perf_counter() - start, 1)
                        yield {"command": command, "executor": executor, "victim": victim, **found, "seconds": seconds}


@contextlib.contextmanager
def _cluster() -> Iterator[str]:
    """The address of a Ray cluster on this machine, for as long as it is needed.

    It is another process that starts it: a fork of a process that is connected to a cluster could join none.
    """
    ours, theirs = multiprocessing.Pipe()
    keeper = multiprocessing.get_context("fork").Process(target=_keep_cluster, args=(theirs, ours))
    keeper.start()
    theirs.close()
    try:
        yield str(ours.recv())
    finally:
        ours.close()
        keeper.join()


def _keep_cluster(connection: Connection, other: Connection) -> None:
    """Starts a cluster, tells its address, and ends it when nobody listens any more."""
    other.close()
    workers = RayWorkers(CLUSTER_CPUS, None)
    with workers.connected(), contextlib.suppress(EOFError):
        import ray

        connection.send(str(ray.get_runtime_context().gcs_address))
        connection.recv()


def _import() -> None:
    """Imports what the commands need."""
    import energon_packing.cli.measure
    import energon_packing.cli.pack
    import energon_packing.energon.task_encoder  # noqa: F401

    os.environ |= ONE_THREAD
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # as in the cluster that Ray starts; read when Ray is imported
    with contextlib.suppress(ImportError):
        import ray  # noqa: F401
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else a fork's first collection of garbage writes to every page that it shares with this process


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line per command, executor and victim; 1 if a file ever differed or was left over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=20, help="kills of each row")
    parser.add_argument("--executor", choices=EXECUTORS.names(), action="append")
    parser.add_argument("--command", choices=get_args(Command), action="append")
    parser.add_argument("--victim", choices=get_args(Victim), action="append")
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--longest", type=float, default=1.5, help="seconds from the first written file to the kill")
    parser.add_argument("--workers", type=int, default=2, help="of a command")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of each row, after which nothing is killed")
    parser.add_argument("--seed", type=int, default=0)
    right = True
    for row in results(parser.parse_args(arguments)):
        print(json.dumps({"bench": "offline kills", **row}), flush=True)
        right = right and row["same"] and not row["leftovers"]
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
