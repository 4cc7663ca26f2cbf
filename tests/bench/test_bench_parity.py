"""The table of parity: real comparisons, and an exit code that cannot hide a difference."""

from __future__ import annotations

import json

import pytest
from bench import parity as bench_parity

from energon_packing.report import parity as parity_run


@pytest.mark.slow
def test_packs_of_a_family_equal_their_samples_and_the_control_is_found(capsys):
    assert bench_parity.main(["--family", "text", "--packs", "1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["on"] == "Hugging Face"
    for row in rows:
        assert row["segments"] > 1
        assert row["logits"] < 1e-4 < 1e-2 < row["control"]


@pytest.fixture
def outcome(monkeypatch):
    """``outcome(right, wrong)``: what the comparison says without and with the mistake."""

    def install(right, wrong):
        segment = {"logits": 1e-7, "loss": 1.0, "loss_alone": 1.0, "gradient": 0.0}

        def compare_run(config, *, break_=None, **_):
            failures = wrong if break_ else right
            return {"model": "Tiny", "segments": [segment], "bridge": [], "failures": failures}

        monkeypatch.setattr(parity_run, "compare_run", compare_run)

    return install


@pytest.mark.parametrize(
    ("right", "wrong", "code"),
    [([], ["segment 0 differs"], 0), (["segment 0 differs"], ["segment 0 differs"], 1), ([], [], 1)],
)
def test_a_difference_or_a_control_that_is_not_found_exits_with_one(outcome, capsys, right, wrong, code):
    outcome(right, wrong)
    assert bench_parity.main(["--family", "text"]) == code
    assert "| text | Tiny |" in capsys.readouterr().out


def test_no_packs_are_one_sentence(capsys):
    assert bench_parity.main(["--packs", "0"]) == 2
    assert capsys.readouterr().err == "error: --packs and --cp must be at least 1\n"
