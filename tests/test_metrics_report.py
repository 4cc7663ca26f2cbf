"""Lines of several ranks against a model: whatever was cut off and whenever it is looked at, the newest whole line of
each rank counts."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.energon.metrics import PackSums, RankLine, RunLines, figures
from energon_packing.line_file import LineFile, LineFollower


def entry(rank: int, number: int, *, ranks: int = 4, time: float = 0.0, run: str = "a", **more: Any) -> dict[str, Any]:
    """A line of two steps in which the rank's packs are the costlier, the higher its rank."""
    last = PackSums(packs=2, samples=6, segments=6, real=150, alignment=10, tail=20, unused=20, seconds=10.0)
    last.waited, last.dropped["oversize"], last.read = float(rank), rank, 50
    last.done.update(samples=6, tokens=150, targets=40 + rank)
    total = PackSums()
    for _ in range(number):
        total.add(last)
    steps = [[2 * number - 1, 10.0 + rank], [2 * number, 20.0 + rank]]
    marks = {"run": run, "rank": rank, "ranks": ranks, "time": time or float(number), "pack": 2 * number}
    return {**marks, "last": last.to_json(), "total": total.to_json(), "steps": steps, **more}


@settings(max_examples=40)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("line"), st.integers(0, 3)),
            st.tuples(st.just("kill"), st.integers(0, 3), st.integers(1, 600)),
            st.tuples(st.just("look")),
        ),
        max_size=30,
    )
)
def test_whenever_somebody_looks_the_newest_whole_line_of_each_rank_counts(tmp_path_factory, actions):
    folder = tmp_path_factory.mktemp("run")
    files: dict[int, LineFile] = {}
    newest: dict[int, PackSums] = {}
    followed = RunLines(folder)
    followed.read()
    for number, (kind, *details) in enumerate([*actions, ("look",)], start=1):
        if kind == "look":
            followed.read()
            assert {line.rank: line.total for line in followed.present()} == newest
            continue
        rank = details[0]
        made = entry(rank, number)
        if kind == "kill":  # in the middle of a line; the next line is of a process that goes on
            files.pop(rank, None)
            with (folder / f"rank{rank}.jsonl").open("ab") as stream:
                stream.write(json.dumps(made).encode()[: details[1]])
            continue
        if rank not in files:
            files[rank] = LineFile(folder / f"rank{rank}.jsonl")
        files[rank].append(made)
        newest[rank] = PackSums.from_json(made["total"])


def test_an_unfinished_line_waits_and_a_file_that_was_replaced_is_read_anew(tmp_path):
    path = tmp_path / "rank0.jsonl"
    follower = LineFollower(path)
    assert follower.read() == []
    path.write_bytes(b'{"a": 1}\n{"a": ')
    late = LineFollower(path, skip=True)
    assert follower.read() == [{"a": 1}]
    assert late.read() == []
    with path.open("ab") as stream:
        stream.write(b'2}\nnonsense\n[3]\n\xff\n{"a": 4}\n')
    assert follower.read() == [{"a": 2}, {"a": 4}]
    assert late.read() == [{"a": 4}]  # what began before is no entry
    assert follower.read() == []
    path.write_bytes(b'{"a": 5}\n')
    assert follower.read() == [{"a": 5}]


def lines(*entries: dict[str, Any]) -> list[RankLine]:
    found = [RankLine.of(each) for each in entries]
    assert None not in found
    return found  # type: ignore[return-value]


def test_ranks_are_compared_step_by_step():
    found = figures(lines(*(entry(rank, 5) for rank in range(4))))
    # Costs 10 + rank and 20 + rank: the costliest of four ranks over their mean.
    assert found["cost_max_over_mean"] == pytest.approx((13 / 11.5 + 23 / 21.5) / 2)
    assert found["wait_share"] == pytest.approx((0 + 1 + 2 + 3) / 40)
    assert found["wait_share_max"] == pytest.approx(0.3)
    assert found["fill"] == 0.75
    assert found["padding_alignment"] + found["padding_tail"] + found["padding_unused"] == 0.25
    assert found["dropped_share"] == pytest.approx(6 / 200)  # of samples that were read; 24 are in packs
    per_second = {"samples": 4 * 0.6, "tokens": 4 * 15.0, "targets": (4 * 40 + 6) / 10}
    assert {name: found[f"{name}_per_second"] for name in per_second} == pytest.approx(per_second)


def present(folder: Path, *entries: dict[str, Any]) -> list[RankLine]:
    """The lines that count after these were written."""
    run = RunLines(folder)
    run.read()
    for each in entries:
        LineFile(folder / f"rank{each['rank']}.jsonl").append(each)
    run.read()
    return run.present()


def test_a_rank_that_is_a_line_ahead_is_compared_on_the_steps_that_all_have(tmp_path):
    found = figures(present(tmp_path, *(entry(*each, ranks=2) for each in ((0, 1), (0, 2), (1, 1)))))
    assert found["cost_max_over_mean"] == pytest.approx((2 * 11 / 21 + 2 * 21 / 41) / 2)


def test_the_last_line_of_a_run_keeps_the_figures_of_the_one_before(tmp_path):
    end = {"last": PackSums().to_json(), "steps": []}
    first = entry(0, 3, ranks=1)
    (line,) = present(tmp_path, first, {**first, **end, "ended": True}, {"rank": 0}, {**first, "steps": None})
    assert (line.ended, figures([line])["fill"]) == (True, 0.75)  # lines of something else are left out
    (line,) = present(tmp_path, {**entry(0, 0, ranks=1, run="b"), **end})
    assert (line.ended, figures([line]), line.total.packs) == (False, {}, 0)


def test_ranks_of_an_earlier_larger_run_are_left_out(tmp_path):
    before = [entry(rank, 1) for rank in range(4)]
    after = [entry(rank, 2, ranks=2, run="b") for rank in range(2)]
    assert [line.rank for line in present(tmp_path, *before, *after)] == [0, 1]
