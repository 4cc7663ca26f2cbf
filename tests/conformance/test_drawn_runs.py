"""Random runs are judged as Bridge's own ``validate()`` judges them: the installed one, and that of a checkout of main.

A few hundred by default; ``ENERGON_PACKING_DRAWN_RUNS=9000`` draws more, and ``judge_runs.py`` prints their figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bridge_here  # noqa: F401
import pytest
from bridge_sources import path_of_main
from forking_python import quick_python

from energon_packing.validate.rules.registry import RULES

HERE = Path(__file__).parent
RUNS = int(os.environ.get("ENERGON_PACKING_DRAWN_RUNS", "400"))
NEEDS_NO_ERROR = {rule.id for rule in RULES if not rule.bridge_says and rule.severity == "error"}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["installed", "main"])
def test_random_runs_are_refused_by_the_rules_that_restate_bridge_exactly_where_bridge_refuses_them(
    version: str,
) -> None:
    first, python = "", quick_python()
    if version == "main":
        found = path_of_main()
        if isinstance(found, str):
            pytest.skip(found)
        first, python = os.pathsep.join(str(folder) for folder in found) + os.pathsep, sys.executable
    path = first + os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [python, str(HERE / "judge_runs.py"), str(RUNS), "--json"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tally = json.loads(done.stdout)
    print(tally)
    assert tally["version"].startswith("0.7" if version == "main" else "0.")
    assert tally["runs"] == RUNS
    assert tally["accepted_by_both"] + tally["refused_by_both"] + tally["by_ours_alone"] == RUNS
    assert not tally["false_accepts"] + tally["false_refusals"] + tally["other_rule"]
    assert min(tally["accepted_by_both"], tally["refused_by_both"], tally["by_ours_alone"]) > RUNS // 10
    assert set(tally["refusals"]) <= NEEDS_NO_ERROR
    assert len(tally["refusals"]) >= 20
