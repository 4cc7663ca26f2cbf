"""The benchmark of policies: its lists, its rows, its errors."""

from pathlib import Path

import numpy as np
import pytest
from bench.length_lists import synthetic_list
from bench.packing import run

from energon_packing.packing import policy_names


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    made = synthetic_list("d8", 400)
    np.savez(tmp_path / "mine.npz", length=made.lengths, images=made.images, capacity=np.int64(made.capacity))
    return tmp_path


def test_each_policy_has_a_row_for_each_list_with_fill_and_time(lists: Path) -> None:
    rows = list(run(lists, windows=(16, 64)))
    assert {row["list"] for row in rows} == {"mine"}
    assert {row["policy"] for row in rows} == set(policy_names())
    assert [row["window"] for row in rows if row["policy"] == "window"] == [16, 64]
    for row in rows:
        assert row["packs"] >= row["bound"]
        assert row["fill_of_bound"] == pytest.approx(100 * row["bound"] / row["packs"], abs=0.001)
        assert row["seconds"] >= 0
        assert row["fill"] + row["tail_padding"] == pytest.approx(1)


def test_an_image_limit_is_kept_and_raises_the_bound(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", length=np.full(40, 10), images=np.full(40, 20), capacity=np.int64(100))
    free, limited = (next(run(tmp_path, chosen=["window"], windows=[64], image_limit=limit)) for limit in (None, 60))
    assert (free["bound"], free["packs"]) == (4, 4)
    assert (limited["bound"], limited["packs"]) == (14, 14)
