"""A run on a plan, saved with 4 ranks and 2 workers, goes on at the same pack with any other sizes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch.utils.data._utils
from bench.offline_resume import RANKS, SIZES, WORKERS, matrix, planned_run

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
EACH = tuple(itertools.zip_longest(RANKS, WORKERS, fillvalue=WORKERS[0]))
"""Each number of ranks and of workers; `python scripts/bench.py offline resume` tries all pairs at every size."""
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # closing a worker takes seconds otherwise


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = planned_run(tmp_path_factory.mktemp("matrix"))
    # No child process for each of a hundred readers: tests/energon and tests/media decode in one.
    return dataclasses.replace(run, encoder=dataclasses.replace(run.encoder, decode_in_child=False))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("sizes", "readers"),
    [
        pytest.param((2, 1), EACH, marks=pytest.mark.full),
        *(((tensor, context), ((2, 3), (8, 0))) for tensor, context in SIZES if (tensor, context) != (2, 1)),
    ],
)
def test_every_size_reads_the_global_packs_of_a_run_that_never_stopped(run, sizes, readers):
    rows = list(matrix(run, after=8, sizes=[sizes], readers=readers))
    assert [(row["ranks"], row["workers"]) for row in rows] == list(readers)
    assert {row["multiple"] for row in rows} == {{(1, 1): 1, (1, 2): 4, (2, 1): 2, (2, 2): 4}[sizes]}
    assert {row["packs"] for row in rows} == {8}
    assert [row for row in rows if not (row["same_samples"] and row["same_bytes"])] == []
