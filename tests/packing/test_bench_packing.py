"""The benchmark of policies: its lists, its rows, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from energon_packing.errors import UserError
from energon_packing.packing import policies
from energon_packing.report.bench_packing import LengthList, main, run, synthetic_list


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    made = synthetic_list("d8", 400)
    np.savez(tmp_path / "mine.npz", length=made.lengths, images=made.images, capacity=np.int64(made.capacity))
    return tmp_path


def test_each_policy_has_a_row_for_each_list_with_fill_and_time(lists: Path) -> None:
    rows = list(run(lists, windows=(16, 64), with_peers=False))
    assert {row["list"] for row in rows} == {"mine"}
    assert {row["policy"] for row in rows} == set(policies())
    assert [row["window"] for row in rows if row["policy"] == "window"] == [16, 64]
    for row in rows:
        assert row["packs"] >= row["bound"]
        assert row["fill_of_bound"] == pytest.approx(100 * row["bound"] / row["packs"], abs=0.001)
        assert row["seconds"] >= 0
        assert row["fill"] + row["tail_padding"] == pytest.approx(1)


def test_samples_that_fit_no_pack_alone_are_left_out_before_anything_is_counted() -> None:
    given = LengthList(name="x", lengths=np.array([5, 11, 3]), images=np.array([1, 1, 9]), capacity=10)
    assert given.fitting().lengths.tolist() == [5, 3]
    assert given.fitting(image_limit=4).lengths.tolist() == [5]
    assert given.fitting(samples=1).lengths.tolist() == [5]


def test_an_image_limit_is_kept_and_raises_the_bound(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", length=np.full(40, 10), images=np.full(40, 20), capacity=np.int64(100))
    free, limited = (
        next(run(tmp_path, chosen=["window"], windows=[64], image_limit=limit, with_peers=False))
        for limit in (None, 60)
    )
    assert (free["bound"], free["packs"]) == (4, 4)
    assert (limited["bound"], limited["packs"]) == (14, 14)


def test_equal_seeds_make_equal_lists() -> None:
    assert (synthetic_list("d32", 50, seed=4).lengths == synthetic_list("d32", 50, seed=4).lengths).all()
    assert (synthetic_list("d32", 50, seed=4).lengths != synthetic_list("d32", 50, seed=5).lengths).any()


def test_text_lists_have_the_means_that_they_are_named_for() -> None:
    for name, low, high in (("a", 240, 265), ("b", 470, 520), ("c", 830, 1000)):
        assert low < synthetic_list(name, 20_000).lengths.mean() < high


def test_the_command_prints_one_json_line_a_result(lists: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lists", str(lists), "--policy", "best_fit", "--policy", "next_fit", "--no-peers"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["policy"] for row in rows] == ["best_fit", "next_fit"]


def test_unusable_input_is_one_sentence_and_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lists", str(tmp_path)]) == 2
    assert "holds no .npz length lists" in capsys.readouterr().err
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    assert main(["--lists", str(tmp_path)]) == 2
    assert "bad.npz is no length list" in capsys.readouterr().err
    with pytest.raises(UserError, match="no synthetic list named 'z'"):
        synthetic_list("z")
