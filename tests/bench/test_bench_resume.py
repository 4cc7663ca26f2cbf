"""``bench.py resume``: a row of the matrix, and that a cell fails where a pack differs."""

from __future__ import annotations

import pytest
from bench import resume
from bench.resume import CASES, EVALUATION, FIRST, LEDGER, WINDOW, Process, end_of_epoch, run, table


def test_an_epoch_ends_when_every_sample_came_once_and_the_table_shows_each_cell():
    packs = [[step, keys, {}] for step, keys in enumerate((["a", "b"], ["c"], ["a"], ["d"], ["b", "c"]))]
    assert end_of_epoch(packs) == 4
    row = {"what": "x", **dict.fromkeys((*resume.PLACES, LEDGER), (1, 2))}
    assert table([row]).splitlines()[-1] == "| x |" + " 1/2 |" * 5


@pytest.mark.full
def test_a_run_goes_on_exactly_everywhere_and_a_state_of_another_step_is_noticed(tmp_path, monkeypatch):
    case = next(case for case in CASES if case.name == "no workers")
    (row,) = run([case], tmp_path / "right", packs=60)
    assert all(row[name][0] == row[name][1] > 0 for name in (*resume.PLACES, LEDGER))
    original = Process._reader

    def begins_anew(self, config, encoder, **what):
        reader = original(self, config, encoder, **what)
        reader.restore_state = lambda state: None
        return reader

    monkeypatch.setattr(Process, "_reader", begins_anew)
    (row,) = run([case], tmp_path / "wrong", packs=60)
    assert row[FIRST] == [1, 1]
    assert (row[WINDOW][0], row[EVALUATION][0]) == (0, 0)
