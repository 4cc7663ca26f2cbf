"""`scripts/exactness.sh` with an installer that only notes what it is asked, and refuses releases outside of bounds."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from energon_packing.families.registry import TESTED

ROOT = Path(__file__).parents[2]


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
