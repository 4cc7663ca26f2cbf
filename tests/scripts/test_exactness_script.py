"""`scripts/exactness.sh` with an installer that only notes what it is asked, and refuses releases outside of bounds."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "exactness.sh"
UV = """#!/usr/bin/env bash
echo "$*" >>"$ASKED"
[[ "$*" != *==9.9* || "$*" == *--override* ]]
"""


def test_only_a_release_outside_of_the_bounds_takes_their_place_and_each_has_its_row(tmp_path):
    for name, text in {"uv": UV, "python": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    told = {"PYTHON": f"{tmp_path}/python", "FOLDER": f"{tmp_path}/made", "ASKED": f"{tmp_path}/asked"}
    command = ["bash", SCRIPT, "torch==2.7", "transformers==9.9"]
    done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    rows = [line.split()[0] for line in done.stdout.splitlines() if "no test ran" in line]
    assert rows == ["torch==2.7", "transformers==9.9"], done
    asked = [line for line in (tmp_path / "asked").read_text().splitlines() if line.startswith("pip install")]
    assert ["--override" in line for line in asked] == [False, False, True], asked
    assert "torch==2.7" in asked[0], asked
