"""Shards whose workers die, jobs for Slurm, and commands that are killed: what is not there is named."""

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner
from forking_python import quick_python
from support.ranks import ranks_environment
from test_planned_loader import planned

from energon_packing.cli.main import cli
from energon_packing.config import to_mapping
from energon_packing.errors import UserError
from energon_packing.offline import index as index_file
from energon_packing.offline import shared_work
from energon_packing.offline.formats.shards import ShardPacker
from energon_packing.offline.index import Index
from energon_packing.offline.measure import ShardMeasurer
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.packed import Packed
from energon_packing.offline.plan import Plan, drops_path
from energon_packing.offline.planner import make_plan
from energon_packing.offline.shared_work import SharedConfig, _listed, work_shared, write_job
from energon_packing.offline.source import source_parts
from energon_packing.offline.verify import ShardVerifier, VerifyConfig, verify

POISON = "train-000002.tar"


def digests(directory):
    """Path -> digest of every finished file."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name[0] != "."
    }


def invoke(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture(scope="module")
def config(dataset, run_of, tmp_path_factory):
    """The YAML of a run on the data set."""
    file = tmp_path_factory.mktemp("config") / "run.yaml"
    file.write_text(json.dumps(to_mapping(run_of(dataset))))
    return file


@pytest.fixture(scope="module")
def plan_of(dataset, run_of, tmp_path_factory):
    """A run on a plan, beside whose file are its index (``index``) and its packs (``packed``), of one process."""
    run = planned(run_of(dataset), dataset, tmp_path_factory.mktemp("plan"))
    pack(PackConfig(plan=Path(run.data.path), out=Path(run.data.path).with_name("packed"), workers=0, shard_packs=1))
    return run


def dies_at(monkeypatch, kind, method, is_it):
    """Workers die when they begin some task."""
    done, calling = getattr(kind, method), os.getpid()

    def do(self, *given):
        if os.getpid() != calling and is_it(*given):
            os.kill(os.getpid(), signal.SIGKILL)
        return done(self, *given)

    monkeypatch.setattr(kind, method, do)


def test_a_shard_that_kills_its_workers_is_a_hole_that_the_plan_must_name(
    dataset, config, run_of, plan_of, tmp_path, monkeypatch
):
    out, whole = tmp_path / "index", Path(plan_of.data.path).with_name("index")
    words = ("measure", dataset, "--config", config, "--out", out, "--workers", 2, "--json")
    with monkeypatch.context() as patch:
        dies_at(patch, ShardMeasurer, "do", lambda task: task.shard == POISON)
        for _ in range(2):  # also alone, when all others are there
            done = invoke(*words)
            assert done.exit_code == 1, done.output
            (told,) = json.loads(done.stdout)["set_aside"]
            assert re.match(f"measuring {POISON} of .* was given up: 3 workers died at it, and the last one was", told)
        done = invoke("stats", dataset, "--config", config, "--full", "--workers", 2)
        assert (done.exit_code, done.stderr.count("was given up")) == (2, 1), done.output
    index = Index.open(out)
    (part,) = index.datasets
    hole = f"{part.root}/{POISON}"
    assert [shard.name for shard in part.shards if shard.set_aside] == [POISON]
    (finding,) = verify(VerifyConfig(directory=out)).findings
    assert hole in str(finding)
    run = run_of(dataset)
    with pytest.raises(UserError, match=f"lacks the 6 samples of shards .*--without .*{POISON}"):
        make_plan([out], run, tmp_path / "plan.parquet")
    with pytest.raises(UserError, match="--without other is no shard that `measure` set aside"):
        make_plan([out], run, tmp_path / "plan.parquet", without=[hole, "other"])
    done = invoke("plan", out, "--config", config, "--out", tmp_path / "plan.parquet", "--without", hole, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["drops"]["set_aside"] == 6
    dropped = [json.loads(line) for line in drops_path(tmp_path / "plan.parquet").read_text().splitlines()[1:]]
    left_out = {each["dropped"] for each in dropped if each["reason"] == "set_aside"}
    (measured,) = Index.open(whole).datasets
    names = Index.open(whole).rows(measured, next(it for it in measured.shards if it.name == POISON), ["key"])
    assert left_out == {*names.column("key").to_pylist()}
    make_plan([whole], run, tmp_path / "whole.parquet")
    kept, every = (
        {each.name for pack in plan.packs(0, len(plan)) for each in pack.samples}
        for plan in (Plan.open(tmp_path / name) for name in ("plan.parquet", "whole.parquet"))
    )
    assert every - kept == every & left_out != set()
    assert kept < every
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert digests(out) == digests(whole)


def test_ranks_that_each_set_a_shard_aside_complete_an_index_with_both_holes(
    dataset, config, plan_of, tmp_path, monkeypatch
):
    out, holes = tmp_path / "index", [POISON, "train-000003.tar"]
    words = ("measure", dataset, "--config", config, "--out", out, "--workers", 2, "--world-size", 2, "--json")

    def each_rank():
        for rank in range(2):
            done = invoke(*words, "--rank", rank)
            yield done.exit_code, [told.split()[-2:] for told in json.loads(done.stdout)["set_aside"]]

    with monkeypatch.context() as patch:
        dies_at(patch, ShardMeasurer, "do", lambda task: task.shard in holes)
        assert [(code, len(told)) for code, told in each_rank()] == [(1, 1), (1, 2)]
    (part,) = Index.open(out).datasets
    assert [shard.name for shard in part.shards if shard.set_aside] == holes
    listed = invoke("measure", "--list", "--out", out, "--json")
    assert [each in told for each, told in zip(holes, json.loads(listed.stdout)["warnings"], strict=True)] == [True] * 2
    assert list(each_rank()) == [(1, [["another", "command"]]), (0, [])]
    assert digests(out) == digests(Path(plan_of.data.path).with_name("index"))


def test_rows_that_another_command_measured_meanwhile_are_not_set_aside(
    dataset, config, plan_of, tmp_path, monkeypatch
):
    out, own, calling = tmp_path / "index", ShardMeasurer.do, os.getpid()

    def do(self, task):
        done = own(self, task)
        if os.getpid() != calling and task.shard == POISON:
            os.kill(os.getpid(), signal.SIGKILL)  # after its rows are there, as if another one had written them
        return done

    with monkeypatch.context() as patch:
        patch.setattr(ShardMeasurer, "do", do)
        done = invoke("measure", dataset, "--config", config, "--out", out, "--workers", 2, "--json")
    assert (done.exit_code, json.loads(done.stdout)["set_aside"]) == (0, [])
    assert digests(out) == digests(Path(plan_of.data.path).with_name("index"))


def test_a_plan_refuses_rows_that_were_set_aside_after_the_index_was_written(dataset, run_of, plan_of, tmp_path):
    index, run = tmp_path / "index", run_of(dataset)
    shutil.copytree(Path(plan_of.data.path).with_name("index"), index)
    (part,) = Index.open(index).datasets
    (measured,) = source_parts(Path(part.path), part.asked, "conversations")
    ShardMeasurer(run).measure(measured, POISON, index / part.name, "3 workers died at it")
    with pytest.raises(UserError, match=f"{POISON} was set aside after its index was written; run '.* measure' again"):
        make_plan([index], run, tmp_path / "plan.parquet")


def test_a_plan_refuses_rows_that_were_measured_after_the_index_was_written_or_that_a_store_does_not_give(
    dataset, run_of, plan_of, tmp_path, monkeypatch
):
    index, run = tmp_path / "index", run_of(dataset)
    shutil.copytree(Path(plan_of.data.path).with_name("index"), index)
    held = Index.open(index)
    (part,) = held.datasets
    (measured,) = source_parts(Path(part.path), part.asked, "conversations")
    shards = tuple(dataclasses.replace(it, set_aside=it.name == POISON) for it in part.shards)
    dataclasses.replace(held, datasets=(dataclasses.replace(part, shards=shards),)).save()
    with pytest.raises(UserError, match=f"{POISON} was measured after its index was written"):  # it would have them
        make_plan([index], run, tmp_path / "plan.parquet", without=[f"{part.root}/{POISON}"])

    def failed(*_, **__):
        raise OSError(errno.EIO, "Failed to HEAD it, status_code: 500")

    monkeypatch.setattr(index_file, "parquet_file", failed)
    with pytest.raises(UserError, match=r"parquet cannot be read \(.*Failed to HEAD .*\); see to the storage$"):
        make_plan([index], run, tmp_path / "plan.parquet", without=[f"{part.root}/{POISON}"])
    monkeypatch.setattr(index_file, "shard_status", failed)
    with pytest.raises(UserError, match=r"cannot be read \(Failed to HEAD it, status_code: 500\); put it back"):
        ShardMeasurer(run).measure(measured, POISON, index / part.name)


@dataclass(frozen=True)
class Task:
    number: int
    wait: bool = False


class SomeNeverComes:
    def begin(self):
        pass

    def do(self, task):
        return task.number or None


def test_shards_of_others_are_counted_without_opening_them_and_what_never_came_is_not_done(tmp_path):
    for number in (2, 3):
        (tmp_path / str(number)).touch()
    opened = []
    with pytest.warns(UserWarning, match=r"Waiting for another command that is making 0\."):
        shared = work_shared(
            SharedConfig(workers=0, rank=0, world_size=2),
            [Task(number) for number in range(6)],
            SomeNeverComes(),
            label=lambda task: str(task.number),
            there=lambda task: opened.append(task.number),
            file=lambda task: tmp_path / str(task.number),
            size=lambda _: 1,
            progress=lambda *_: None,
        )
    assert (shared.done, shared.missing) == (2, 3)  # 0, 1 and 5: 2 and 4 are done, and 3 is there
    assert shared.set_aside == ("0 is being made by another command",)  # so the command does not end with 0
    assert opened == [0, 2, 4]


def test_packs_that_kill_their_workers_are_named_and_the_others_are_there(plan_of, tmp_path, monkeypatch):
    whole, out = Path(plan_of.data.path).with_name("packed"), tmp_path / "packed"
    words = ("pack", plan_of.data.path, "--out", out, "--shard-packs", 1, "--workers", 2, "--json")
    with monkeypatch.context() as patch:
        dies_at(patch, ShardPacker, "do", lambda task: task.number == 1)
        done = invoke(*words)
    assert done.exit_code == 1
    (told,) = json.loads(done.stdout)["set_aside"]
    assert "shard-00001.bin was given up: 3 workers died at it" in told
    assert {*digests(whole)} - {*digests(out)} == {"shard-00001.bin", "drops.jsonl"}
    with pytest.raises(UserError, match="is not complete; run 'energon-packing pack' again"):
        Packed.open(out)
    assert invoke(*words).exit_code == 0
    assert digests(out) == digests(whole)
    with monkeypatch.context() as patch:
        dies_at(patch, ShardVerifier, "do", lambda task: task.number == 2)
        done = invoke("verify", out, "--share", 0, "--workers", 2, "--json")
    assert done.exit_code == 1
    (finding,) = json.loads(done.output)["findings"]
    assert (finding["shard"], "3 workers died at it" in finding["what"]) == (2, True)


def test_a_shard_that_two_workers_pack_at_once_has_the_same_bytes(plan_of, tmp_path, monkeypatch):
    from energon_packing.executors import work

    whole, out = Path(plan_of.data.path).with_name("packed"), tmp_path / "packed"
    done, packed, first = ShardPacker.do, ShardPacker._pack, tmp_path / "first"

    def waits(self, task):
        assert not task.wait, "the first worker was ended before there was a result"
        return done(self, task)

    def stalls_at_first(self, number):
        if number == 0 and not first.exists():
            first.touch()
            time.sleep(1000)
        return packed(self, number)

    monkeypatch.setattr(work, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(ShardPacker, "do", waits)
    monkeypatch.setattr(ShardPacker, "_pack", stalls_at_first)  # while it has the lock of its shard
    report = pack(PackConfig(plan=Path(plan_of.data.path), out=out, workers=2, shard_packs=1))
    assert (report.missing, report.set_aside) == (0, ())
    assert digests(out) == digests(whole)
    assert not [path.name for path in out.iterdir() if path.name[0] == "." and path.name != ".lock"]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A directory for a job with a quote and spaces in its name; the commands that its script runs are on PATH."""
    (programs := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for name, line in {
        "energon-packing": f'exec {quick_python()} -m energon_packing.cli.main "$@"',
        "sbatch": f'printf "%s\\n" "$*" >> {tmp_path}/submitted; echo "77;here"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{line}\n")
        (programs / name).chmod(0o755)
    return tmp_path / "it's a job"


def sbatch(line):
    """What ``sbatch`` takes such words for: the last of an option counts."""
    options = dict(re.findall(r"--(array|dependency)=(\S+)", line))
    return options | {"script": line[re.search(r"/", line).start() :]}


def array(folder, *, killed=()):
    """Runs what the job's ``sbatch`` would: its array, of which some are killed while they work, and its last step."""
    words = ["--partition=low", "--dependency=afterok:5", "--array=0-99%3"]  # of another array, as here
    subprocess.run(["bash", folder / "job.sh", *words], env={**os.environ, "SLURM_ARRAY_TASK_ID": "0"}, check=True)
    first, last = (folder.parent / "submitted").read_text().splitlines()[-2:]
    count = int(sbatch(first)["array"].split("-")[1].split("%")[0]) + 1
    assert (sbatch(first)["array"], sbatch(first)["dependency"]) == (f"0-{count - 1}%3", "afterok:5")
    assert (sbatch(last)["array"], sbatch(last)["dependency"]) == ("0", "afterany:77")
    assert [sbatch(each)["script"] for each in (first, last)] == [
        f"{folder}/job.sh --{it}" for it in ("task", "complete")
    ]
    tasks = [
        subprocess.Popen(
            ["bash", str(folder / "job.sh"), "--task"],
            env=ranks_environment(SLURM_ARRAY_TASK_ID=str(number), SLURM_JOB_ID="77"),
            cwd="/",
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for number in range(count)
    ]
    for number, sent in killed:
        time.sleep(0.5)
        os.killpg(tasks[number].pid, sent)
    codes = [task.wait() for task in tasks]
    assert not any(code for number, code in enumerate(codes) if number not in dict(killed)), codes
    return subprocess.run(
        ["bash", str(folder / "job.sh"), "--complete"], env=ranks_environment(SLURM_JOB_ID="78"), cwd="/", check=False
    ).returncode


def test_an_array_of_slurm_of_which_some_are_killed_ends_with_the_files_of_one_process(
    dataset, config, plan_of, slurm, tmp_path
):
    jobs, folder = slurm, Path(plan_of.data.path).parent
    for name, words in {
        "index": ("measure", "--config", config, "--out", "index", "--workers", 0, "--", dataset),
        "packed": ("pack", "--out", "packed", "--shard-packs", 1, folder / "plan.parquet", "--workers", 0),
    }.items():
        slurm = jobs.with_name(f"{jobs.name} of {name}")
        job = [*words[:1], "--slurm", slurm, *(["--shards-per-task", 2] if name == "index" else []), *words[1:]]
        here = os.getcwd()
        os.chdir(tmp_path)
        try:
            done = invoke(*job)
            assert done.exit_code == 0, done.output
            missing = (slurm / "missing.txt").read_text().splitlines()
            assert missing
            killed = [(0, signal.SIGKILL), (1, signal.SIGTERM)]
            code = array(slurm, killed=killed)
            left = (slurm / "missing.txt").read_text().splitlines()
            assert bool(code) == bool(left)
            assert len(left) <= (4 if name == "index" else 2)
            if left:
                (slurm / "header.sh").write_text("export HEADER=seen\n")
                assert invoke(*job).exit_code == 0
                assert "\nexport HEADER=seen\n" in (slurm / "job.sh").read_text()
                assert array(slurm) == 0
            assert (slurm / "missing.txt").read_text() == ""
            assert digests(tmp_path / name) == digests(folder / name)
            done = invoke(*job)
            assert done.exit_code == 0, done.output
        finally:
            os.chdir(here)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slurm", "job", "--tasks", "list"], "--slurm divides the shards itself"),
        (["--shards-per-task", "3"], "--shards-per-task is of a job for Slurm"),
        (["--tasks", "list", "--rank", "1", "--world-size", "2"], "--tasks names the shards"),
        (["--slurm", "s3://bucket/job"], "--slurm writes to this machine; name a local directory."),
        (["--tasks", "nowhere"], "--tasks nowhere cannot be read"),
        (["--tasks", "/proc/self/exe"], "which is no shard of this command; write the lists anew"),
        (["--tasks", "/proc/self/status"], "which is no shard of this command; write the lists anew"),
    ],
)
def test_lists_that_cannot_be_are_refused(dataset, config, tmp_path, words, said):
    done = invoke("measure", dataset, "--config", config, "--out", tmp_path / "index", *words)
    assert (done.exit_code, said in done.output.replace("\n", " ")) == (2, True), done.output


def test_a_job_has_the_names_and_the_header_that_are_there_in_whatever_encoding(tmp_path):
    (tmp_path / "header.sh").write_bytes(b"# gr\xfc\xdfe\n")
    names = [os.fsdecode(b"caf\xe9.tar"), "a\u2028b\rc.tar"]
    write_job(tmp_path, ["measure", "--config", os.fsdecode(b"\xe9.yaml")], names, None)
    assert b"# gr\xfc\xdfe\n" in (tmp_path / "job.sh").read_bytes()
    assert b"\xe9.yaml" in (tmp_path / "job.sh").read_bytes()
    assert _listed(tmp_path / "missing.txt", {name: name for name in names}) == names


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a/b.tar", "a/b.tar"], "'a/b.tar' is the name of two shards"),
        (["a.tar", "b\nc.tar"], r"'b\\nc.tar' is the name of two shards, or has a line break"),
    ],
)
def test_a_job_of_names_that_lists_cannot_hold_is_refused(tmp_path, names, said):
    with pytest.raises(UserError, match=said):
        write_job(tmp_path / "job", ["measure"], names, None)
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["--array=%3"], "%3"),
        (["--array", "0-99%3", "--comment", "9%4"], "%3"),
        (["-a", "0-9:2%3"], "%3"),
        (["-a0%3"], "%3"),
        (["--comment", "3%4", "--array=0-9"], ""),
    ],
)
def test_the_limit_of_an_array_is_that_of_the_option_and_of_no_other(slurm, words, limit):
    write_job(slurm, ["measure", "--out=index"], ["a.tar", "b.tar"], 1)
    subprocess.run(["bash", slurm / "job.sh", *words], check=True)
    first, _ = (slurm.parent / "submitted").read_text().splitlines()
    assert sbatch(first)["array"] == f"0-1{limit}"


def test_a_job_takes_no_place_of_another_one_or_of_other_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["measure", "--out=index", "--", "data"]
    for name in ("job.sh", "missing.txt"):
        (tmp_path / name).write_text("mine\n")
        with pytest.raises(UserError, match=f"--slurm {tmp_path} has a {name} that is not of this command"):
            write_job(Path(), command, ["a.tar"], None)
        assert [(it.name, it.read_text()) for it in tmp_path.iterdir()] == [(name, "mine\n")]
        (tmp_path / name).unlink()
    write_job(Path("job"), command, [], None)  # nothing was missing then
    full = mock.patch.object(shared_work, "batched", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with full, pytest.raises(UserError, match="No space left"):
        write_job(Path("job"), command, ["a.tar"], None)
    for names in (["a.tar", "b.tar"], ["b.tar"], []):
        write_job(Path("job"), [*command, "more"], names, None)
    script = (tmp_path / "job/job.sh").read_bytes()
    for other in (["pack", *command[1:]], ["measure", "--out=another", "--", "data"]):
        with pytest.raises(UserError, match=r"has a job\.sh that is not of this command; name another directory"):
            write_job(Path("job"), other, ["c.tar"], None)
    assert (tmp_path / "job/job.sh").read_bytes() == script
    assert sorted(it.name for it in (tmp_path / "job").iterdir() if it.is_dir()) == ["lists-1", "lists-2", "lists-3"]


def test_a_command_that_is_ended_by_sigterm_leaves_nothing_half_written(plan_of, tmp_path):
    out = tmp_path / "packed"
    words = ["-m", "energon_packing.cli.main", "pack", plan_of.data.path, "--out", str(out), "--shard-packs", "1"]
    running = subprocess.Popen([quick_python(), *words, "--workers", "2"], env=ranks_environment())
    while running.poll() is None and not [*out.glob(".shard*"), *out.glob("shard*")]:
        time.sleep(0.01)
    running.terminate()
    assert running.wait() in (0, 128 + signal.SIGTERM)
    assert not [path.name for path in out.iterdir() if path.name[0] == "." and path.name != ".lock"]
