"""``scripts/bench.py``: one door to the benchmarks, JSON lines for machines."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forking_python import quick_python

DOOR = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"


@pytest.fixture
def lists(tmp_path):
    """A directory with one list of 300 samples."""
    random = np.random.default_rng(0)
    lengths = random.integers(10, 900, 300)
    np.savez(tmp_path / "mine.npz", length=lengths, images=random.integers(1, 5, 300), capacity=2048)
    return tmp_path


def door(*arguments):
    """``scripts/bench.py`` in a process of its own."""
    command = [quick_python(), str(DOOR), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rows(*arguments):
    done = door(*arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_packing_compares_every_policy_on_a_list_of_ones_own(lists):
    found = rows("packing", "--lists", lists, "--no-peers", "--window", "64", "--json")
    assert {row["policy"] for row in found} >= {"window", "best_fit", "first_fit", "next_fit", "internvl"}
    for row in found:
        assert row["list"] == "mine"
        assert row["packs"] >= row["bound"]
    limited = rows("packing", "--lists", lists, "--policy", "window", "--image-limit", "6", "--no-peers", "--json")
    assert all(row["bound"] > found[0]["bound"] for row in limited)


def test_a_benchmark_that_is_repeated_prints_medians_and_the_spread_of_what_differs(lists):
    found = rows("--repeat", "3", "packing", "--lists", lists, "--no-peers", "--policy", "best_fit", "--json")
    once = rows("packing", "--lists", lists, "--no-peers", "--policy", "best_fit", "--json")
    assert [row["packs"] for row in found] == [row["packs"] for row in once]
    for row in found:
        assert "us_per_sample" in row["spread"]
        assert not {"packs", "fill"} & row["spread"].keys(), "they are the same in each run"
        for name, (least, most) in row["spread"].items():
            assert least <= row[name] <= most


@pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed")
def test_bridges_own_packing_is_a_peer_in_a_process_of_its_own(lists, monkeypatch):
    monkeypatch.syspath_prepend(str(DOOR.parent))
    from bench.length_lists import read_list
    from bench.peers import run_peer

    found = run_peer("bridge:first_fit", read_list(lists / "mine.npz"))
    assert "error" not in found
    assert found["samples"] == 300


@pytest.mark.parametrize(("grown", "code"), [(0.0, 0), (2.0, 1)])
def test_memory_that_a_slow_start_takes_is_no_growth(monkeypatch, grown, code):
    monkeypatch.syspath_prepend(str(DOOR.parent))
    from bench import memory

    places = [*range(10, 610, 15), *range(900, 7300, 320)]  # the first 40 of 60 are in the start
    sizes = [min(25 + place / 10, 69) + grown * max(place - 440, 0) / 10_000 for place in places]
    monkeypatch.setattr(memory, "prepare_data", lambda *_, **__: SimpleNamespace(root="data"))
    monkeypatch.setattr(memory, "measure", lambda *_: (places, {"worker": sizes, "decoder": [50.0] * len(places)}))
    assert memory.main([]) == code


def test_an_unknown_benchmark_names_the_known_ones():
    done = door("lodaer")
    assert done.returncode == 2
    assert "loader|memory|convert|measure|plan|pack|store|packing" in done.stderr
