"""`scripts/exactness.sh` with an installer that only notes what it is asked, and refuses releases outside of bounds."""

import os
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from energon_packing.families.registry import TESTED

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "exactness.sh"
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


def test_the_pinned_releases_are_the_ends_of_the_bounds():
    """The next minor release after the newest is out of them, so that raising a bound asks for new pins."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vlm"]
    for end in ("first", "newest"):
        lines = (ROOT / "scripts" / "requirements" / f"{end}-releases.txt").read_text().splitlines()
        pins = dict(line.split("==") for line in lines if "==" in line)
        for name, (first, beyond, _) in TESTED.items():
            (bounds,) = (asked.specifier for asked in map(Requirement, extra) if asked.name == name)
            pinned = Version(pins[name])
            assert pinned in bounds, (end, name)
            following = Version(f"{pinned.major}.{pinned.minor + 1}")
            assert pinned == Version(first) if end == "first" else following == Version(beyond), (end, name)
