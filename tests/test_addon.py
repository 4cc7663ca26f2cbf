"""Wan is an add-on: its folder alone knows it, and the package works without it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from forking_python import quick_python

import energon_packing

PACKAGE = Path(energon_packing.__file__).parent
TESTS = Path(__file__).parent
NAMES = re.compile(r"\bwan\b|\bwan_|text.to.video|TextToVideo|WanPack|WanModel", re.IGNORECASE)


def test_no_module_outside_its_folder_names_wan() -> None:
    elsewhere = [path for path in PACKAGE.rglob("*.py") if "wan" not in path.relative_to(PACKAGE).parts]
    named = {
        str(path.relative_to(PACKAGE)): found
        for path in elsewhere
        if (found := NAMES.findall(path.read_text(encoding="utf-8")))
    }
    assert not named


@pytest.mark.full
def test_the_package_works_with_the_folder_deleted(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "wan")
    tests = ("offline/test_array_limits.py", "energon/test_packer.py")
    code = (
        f"import sys, pytest; sys.path.insert(0, {str(tmp_path)!r}); "
        "import energon_packing; from energon_packing.sample_kind import KINDS; "
        f"assert energon_packing.__path__ == [{str(copy)!r}] and KINDS.names() == ['conversations']; "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    command = [quick_python(), "-c", code, "-n0", "-q", "-x", "--fast", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(TESTS / name) for name in tests)],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
