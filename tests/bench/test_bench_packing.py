"""The benchmark of policies: its lists, its rows, its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from bench import peers as bench_peers
from bench import plots as bench_plots
from bench.length_lists import SYNTHETIC, LengthList, synthetic_list
from bench.packing import main, run, run_two_limits, table

from energon_packing.errors import UserError
from energon_packing.packing import policy_names


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    made = synthetic_list("d8", 400)
    np.savez(tmp_path / "mine.npz", length=made.lengths, images=made.images, capacity=np.int64(made.capacity))
    return tmp_path


def test_each_policy_has_a_row_for_each_list_with_fill_and_time(lists: Path) -> None:
    rows = list(run(lists, windows=(16, 64), with_peers=False))
    assert {row["list"] for row in rows} == {"mine"}
    assert {row["policy"] for row in rows} == set(policy_names())
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
    assert main(["--lists", str(lists), "--policy", "best_fit", "--policy", "next_fit", "--no-peers", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["policy"] for row in rows] == ["best_fit", "next_fit"]


def test_without_json_the_command_prints_the_table(lists: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lists", str(lists), "--no-peers", "--window", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| packer | mine | us on mine |"
    assert {line.split("`")[1] for line in lines[2:]} == set(policy_names())


def test_the_table_has_a_column_a_list_and_says_what_a_packer_could_not_do() -> None:
    figures = {"fill_of_bound": 99.984, "us_per_sample": 2.54}
    rows = [
        {"list": "a", "policy": "window", "window": 256, "samples": 100_000, **figures},
        {"list": "a", "policy": "binpacking", "samples": 10_000, **figures},
        {"list": "d32", "policy": "window", "window": 256, "samples": 20_000, "image_limit": 64, **figures},
        {"list": "a", "policy": "trl:bfd", "error": "not installed: no network"},
    ]
    assert table(rows).splitlines() == [
        "| packer | a | d32, 64 images | us on a |",
        "| --- | --- | --- | --- |",
        "| `window`, 256 held | 99.98 | 99.98 | 2.5 |",
        "| `binpacking` | 99.98 |  | 2.5 |",
        "| `trl:bfd` | - |  |  |",
        "",
        "trl:bfd on a: not installed: no network",
        "binpacking got only the first 10000 of a",
    ]


def test_rows_with_a_second_limit_keep_it_on_the_lists_that_have_one() -> None:
    rows = list(run_two_limits(names=["d32", "a"], samples=1500))
    assert {row["list"] for row in rows} == {"d32"}
    assert all(row["packs"] >= row["bound"] for row in rows)
    by_name = {(row["policy"], row["window"]): row["packs"] for row in rows}
    assert by_name["window", 256] < by_name["internvl", 20]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_seeded_lists_have_the_images_and_lengths_of_their_tables(name: str) -> None:
    made = synthetic_list(name, 20_000)
    assert made.lengths.min() >= 8
    assert (made.images == 1).mean() > 0.7
    again = synthetic_list(name, 20_000, seed=1)
    assert abs(made.lengths.mean() / again.lengths.mean() - 1) < 0.06
    if name in ("d8", "d32", "e"):
        assert made.images.max() == 60
        assert made.lengths[made.images > 1].mean() > 2 * made.lengths[made.images == 1].mean()


def peer(name: str, tmp_path: Path, body: str) -> None:
    (tmp_path / f"{name}.py").write_text(body)


def test_a_peer_runs_in_a_process_of_its_own_and_its_packs_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = LengthList(name="x", lengths=np.array([5, 3, 4, 8]), images=np.ones(4, dtype=int), capacity=8)
    monkeypatch.setattr(bench_peers, "SEARCH_PATH", f"{bench_peers.SEARCH_PATH}:{tmp_path}")
    peer("binpacking", tmp_path, "def to_constant_volume(lengths, capacity): return [[n] for n in lengths]")
    found = bench_peers.run_peer("binpacking", given)
    assert (found["samples"], found["packs"]) == (4, 4)
    monkeypatch.setitem(bench_peers.PREFIX, "binpacking", 3)
    assert bench_peers.run_peer("binpacking", given)["packs"] == 3
    monkeypatch.setitem(bench_peers.MOST_TOKENS, "trl:bfd", 12)
    assert bench_peers.prefix_of("trl:bfd", given) == 3
    peer("binpacking", tmp_path, "def to_constant_volume(lengths, capacity): return [lengths[1:]]")
    assert "returned different lengths" in bench_peers.run_peer("binpacking", given)["error"]
    peer("binpacking", tmp_path, "import time\ntime.sleep(60)")
    assert bench_peers.run_peer("binpacking", given, limit=0.5)["error"] == "not done within 0.5 s"


def test_a_peer_that_is_not_there_is_a_row_that_says_so(lists: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "PEERS", ("fast-axolotl", "trl:bfd"))
    monkeypatch.setattr(
        bench_peers, "run_peer", lambda *_, **__: {"samples": 1, "error": "No module named 'fast_axolotl'"}
    )
    rows = list(run(lists, chosen=["next_fit"], missing={"trl:bfd": "no network"}))
    assert [row.get("error") for row in rows] == [None, "No module named 'fast_axolotl'", "not installed: no network"]


def test_plots_without_matplotlib_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install matplotlib"):
        next(bench_plots.draw(tmp_path))


def test_the_plots_are_small_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_plots, "WINDOWS", (16, 64))
    files = [list(bench_plots.draw(tmp_path / number, samples=2_000)) for number in ("1", "2")]
    assert [file.name for file in files[0]] == ["packing-fill.svg", "packing-delay.svg", "packing-steps.svg"]
    for once, again in zip(*files, strict=True):
        assert once.read_bytes() == again.read_bytes()
        assert len(once.read_bytes()) < 80_000


def test_disjoint_buffers_are_packed_each_by_itself() -> None:
    given = LengthList(name="x", lengths=np.array([5, 3, 4, 4, 5, 3]), images=np.ones(6, dtype=int), capacity=8)
    assert [bench_plots.disjoint_packs(given, size) for size in (1, 2, 3, 6)] == [6, 3, 4, 3]


def test_unusable_input_is_one_sentence_and_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lists", str(tmp_path)]) == 2
    assert "contains no .npz length lists" in capsys.readouterr().err
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    assert main(["--lists", str(tmp_path)]) == 2
    assert "bad.npz is not a length list" in capsys.readouterr().err
    with pytest.raises(UserError, match="no synthetic list named 'z'"):
        synthetic_list("z")


def test_lengths_are_aligned_before_they_are_packed(lists: Path) -> None:
    (plain,) = run(lists, chosen=["best_fit"], with_peers=False)
    (aligned,) = run(lists, chosen=["best_fit"], multiple=256, with_peers=False)
    given = synthetic_list("d8", 400)
    units = -(-given.lengths[given.lengths <= given.capacity] // 256)
    assert aligned["packs"] * given.capacity >= int(units.sum()) * 256
    assert aligned["bound"] > plain["bound"]
    with pytest.raises(UserError, match="not a multiple of 60"):
        list(run(lists, chosen=["best_fit"], multiple=60, with_peers=False))
