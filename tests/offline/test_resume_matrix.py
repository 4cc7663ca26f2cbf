"""A run on a plan, saved with 4 ranks and 2 workers, goes on at the same pack with any other sizes."""

from __future__ import annotations

import pytest
import torch.utils.data._utils
from bench.offline_resume import RANKS, SIZES, WORKERS, matrix, planned_run

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # closing a worker takes seconds otherwise


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return planned_run(tmp_path_factory.mktemp("matrix"))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "sizes", [pytest.param(each, marks=() if each == (2, 1) else pytest.mark.full) for each in SIZES]
)
def test_every_size_reads_the_global_packs_of_a_run_that_never_stopped(run, sizes):
    rows = list(matrix(run, after=8, sizes=[sizes]))
    assert {(row["ranks"], row["workers"]) for row in rows} == {(r, w) for r in RANKS for w in WORKERS}
    assert {row["multiple"] for row in rows} == {{(1, 1): 1, (1, 2): 4, (2, 1): 2, (2, 2): 4}[sizes]}
    assert {row["packs"] for row in rows} == {8}
    assert [row for row in rows if not (row["same_samples"] and row["same_bytes"])] == []
