"""`energon-packing bench`: tables for people, JSON lines for machines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bench.peers import runs
from click.testing import CliRunner

from energon_packing.cli.main import cli


@pytest.fixture
def lists(tmp_path):
    """A directory with one list of 300 samples."""
    random = np.random.default_rng(0)
    lengths = random.integers(10, 900, 300)
    np.savez(tmp_path / "mine.npz", length=lengths, images=random.integers(1, 5, 300), capacity=2048)
    return tmp_path


def rows(*arguments):
    found = CliRunner().invoke(cli, ["bench", *map(str, arguments), "--json"])
    assert found.exit_code == 0, found.output
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_packing_compares_every_policy_on_a_list_of_ones_own(lists):
    found = rows("packing", "--lists", lists, "--no-peers", "--window", "64")
    assert {row["policy"] for row in found} >= {"window", "best_fit", "first_fit", "next_fit", "balanced", "internvl"}
    for row in found:
        assert row["list"] == "mine"
        assert row["packs"] >= row["bound"]
    limited = rows("packing", "--lists", lists, "--policy", "window", "--image-limit", "6")
    assert all(row["bound"] > found[0]["bound"] for row in limited)


def test_balance_shows_each_size_with_and_without_sorting(lists):
    found = rows("balance", "--lists", lists, "--list", "mine", "--ranks", "2", "--ranks", "8", "--window", "16")
    by = {(row["ranks"], row["order"], row["max_shift"]): row["efficiency"] for row in found}
    assert set(by) == {(r, o, s) for r in (2, 8) for o in ("none", "ascending", "serpentine") for s in (0, 2)}
    assert by[8, "serpentine", 0] > by[8, "none", 0]
    assert by[8, "none", 0] < by[2, "none", 0]


def test_thd_reports_milliseconds_of_each_operation():
    names = {row["benchmark"] for row in rows("thd", "--repeats", "1")}
    assert {"thd.assemble", "thd.check_thd"} <= names


def test_without_json_the_results_are_a_table(lists):
    found = CliRunner().invoke(cli, ["bench", "balance", "--lists", str(lists), "--list", "mine", "--ranks", "2"])
    assert found.exit_code == 0
    assert "serpentine" in found.output
    assert "{" not in found.output


def test_lists_that_are_none_are_told_in_a_sentence(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    found = CliRunner().invoke(cli, ["bench", "packing", "--lists", str(tmp_path), "--json"])
    assert found.exit_code == 2
    assert "is no length list" in json.loads(found.stdout)["error"]


def test_rows_of_numbered_samples_give_back_their_lengths():
    assert runs(np.array([3, 3, 1, 5, 5, 5, 0, 0])) == [2, 1, 3]
    assert runs(np.array([1, 1])) == [2]
