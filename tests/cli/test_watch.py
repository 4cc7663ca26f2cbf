"""`energon-packing watch`: how a run is, on a terminal, in a log, as JSON; silent ranks are named."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from energon_packing.cli import watch as module
from energon_packing.cli.main import cli
from energon_packing.cli.watch_tables import table
from energon_packing.line_file import LineFile
from energon_packing.metrics_report import open_run, run_state
from energon_packing.pack_sums import PackSums


def add_line(folder: Path, rank: int, *, ago: float = 0.0, ranks: int = 2, ended: bool = False) -> None:
    sums = PackSums(packs=10, samples=50, segments=50, real=9000, alignment=200, tail=300, unused=500, seconds=20.0)
    sums.waited, sums.delays, sums.delay_max, sums.held = 1.0 + rank, 5000, 250, 256
    sums.dropped["oversize"] = 1 + rank
    marks = {"run": "a", "rank": rank, "ranks": ranks, "time": time.time() - ago, "pack": 10}
    rest = {"ended": True} if ended else {}
    entry = {**marks, "last": sums.to_json(), "total": sums.to_json(), "steps": [[10, 100.0 + 10 * rank]], **rest}
    LineFile(folder / f"rank{rank}.jsonl").append(entry)


def watch(*arguments: Any) -> Any:
    return CliRunner().invoke(cli, ["watch", *map(str, arguments)])


def test_a_look_tells_the_figures_and_exits_with_0(tmp_path):
    for rank in (0, 1):
        add_line(tmp_path, rank)
    done = watch(tmp_path, "--once")
    assert done.exit_code == 0, done.output
    for told in ("running, 2 ranks, pack 10", "90.00 %", "dropped: oversize 3", "cost, costliest rank / mean"):
        assert told in " ".join(done.output.split())
    assert f"{110 / 105:.3f}" in done.output
    found = json.loads(watch(tmp_path, "--once", "--json").output)
    assert (found["state"], found["run"]) == ("running", str(tmp_path))
    assert found["last"]["padding_unused"] == 0.05
    assert found["total"]["dropped"] == {"oversize": 3}


def test_a_rank_that_stopped_writing_is_named_and_exits_with_1(tmp_path):
    add_line(tmp_path, 0)
    add_line(tmp_path, 1, ago=700)
    done = watch(tmp_path, "--once")
    assert done.exit_code == 1
    assert "rank 1 silent for 12 min" in " ".join(done.output.split())
    assert watch(tmp_path, "--once", "--patience", 900).exit_code == 0
    assert json.loads(watch(tmp_path, "--once", "--json").output)["silent"] == [1]


def test_a_log_gets_a_line_at_a_time_until_the_run_ends(tmp_path, monkeypatch):
    for rank in (0, 1):
        add_line(tmp_path, rank)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        with (tmp_path / "rank1.jsonl").open("a") as stream:
            stream.write('{"run": "a", "ra')  # half a line is no line yet
        for rank in (0, 1):
            add_line(tmp_path, rank, ended=len(pauses) == 2)

    monkeypatch.setattr(module.time, "sleep", sleep)
    done = watch(tmp_path)
    assert done.exit_code == 0, done.output
    first, *_, last = lines = done.output.splitlines()
    assert len(lines) == 3
    assert pauses == [30.0, 30.0]
    for told in ("running, 2 ranks, pack 10", "fill 90.00 %", "segments 5", "delay 100", "cost 1.048", "dropped 3"):
        assert told in first
    assert "ended" in last
    found = [json.loads(line) for line in watch(tmp_path, "--json", "--every", 5).output.splitlines()]
    assert [each["state"] for each in found] == ["ended"]


def test_ctrl_c_ends_as_in_other_commands(tmp_path, monkeypatch):
    add_line(tmp_path, 0, ranks=1)
    monkeypatch.setattr(module.time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    done = watch(tmp_path)
    assert done.exit_code == 130
    assert "Traceback" not in done.output


def test_a_directory_without_metrics_is_one_sentence(tmp_path):
    (tmp_path / "rank0.jsonl").write_text("not ours\n")
    for place in (tmp_path, tmp_path / "nothing"):
        done = watch(place, "--once")
        assert done.exit_code == 2
        assert "holds no metrics of a run" in done.output


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_of_any_width_shows_the_ranks_that_need_a_look_and_no_escape_of_a_reason(tmp_path, width):
    for rank in range(40):
        add_line(tmp_path, rank, ranks=40, ago=5000 if rank == 33 else 0)
    sums = PackSums(packs=1, samples=1, segments=1, real=5)
    sums.dropped["\x1b[2Jevil"] = 9
    marks = {"run": "a", "rank": 0, "ranks": 40, "time": time.time(), "pack": 11, "steps": []}
    LineFile(tmp_path / "rank0.jsonl").append({**marks, "last": sums.to_json(), "total": sums.to_json()})
    told = io.StringIO()
    state = run_state(open_run(tmp_path).present(), time.time())
    Console(file=told, width=width).print(table({"run": str(tmp_path), **state}))
    text = told.getvalue()
    assert "\x1b" not in text
    assert "evil 9" in text
    assert max(map(len, text.splitlines())) <= width
    listed = [line.split()[0] for line in text.splitlines() if line.split()[1:2] in (["running"], ["silent"])]
    assert "33" in listed
    assert len(listed) == 16
    assert "and 24 ranks" in text


def test_the_live_table_ends_with_the_run(tmp_path, monkeypatch):
    add_line(tmp_path, 0, ranks=1)
    told = io.StringIO()
    monkeypatch.setattr(module.time, "sleep", lambda _: add_line(tmp_path, 0, ranks=1, ended=True))
    states = [json.loads(line) for line in watch(tmp_path, "--json").output.splitlines()]
    assert [each["state"] for each in states] == ["running", "ended"]
    module._show(Console(file=told, force_terminal=True, width=400), iter(states))  # of any path in one line
    assert "ended, 1 rank" in told.getvalue()
