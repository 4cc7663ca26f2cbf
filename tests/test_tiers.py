"""Which tests run when: ``scripts/test.sh`` without arguments, with ``--all``, with others; and in which order."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
# By its path: every directory has a module of that name.
_spec = importlib.util.spec_from_file_location("conftest_of_all_tests", ROOT / "tests" / "conftest.py")
conftest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(conftest)


def item(file, *marks):
    """As much of a collected test as the tiers look at."""
    path, _, case = file.partition("::")
    return SimpleNamespace(
        path=ROOT / "tests" / path,
        nodeid=f"{path}::{case or marks}",
        get_closest_marker=lambda name: name if name in marks else None,
    )


def chosen(items, *, fast):
    """The tests that are left, in their order, and those that pytest is told of as deselected."""
    told = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    config = SimpleNamespace(hook=hook, getoption=lambda name: {"--fast": fast}[name])
    left = list(items)
    conftest.pytest_collection_modifyitems(config, left)
    return left, told


def test_the_longest_files_exist_and_start_first_in_the_order_of_the_list():
    files = [ROOT / "tests" / name for name in conftest.LONGEST_FIRST]
    assert [file for file in files if not file.is_file()] == []
    assert len(set(files)) == len(files)
    long, other = conftest.LONGEST_FIRST, ("chat/test_a.py", "test_z.py")
    tests = [item(name, *marks) for name in (other[0], *reversed(long), other[1]) for marks in ((), ("slow",))]
    left, _ = chosen(tests, fast=False)
    names = [str(test.path.relative_to(ROOT / "tests")) for test in left]
    assert names == [name for name in (*long, *other) for _ in range(2)]
    assert sorted(map(id, left)) == sorted(map(id, tests))


def test_files_that_fork_come_before_those_that_fill_the_memory_of_their_process():
    names = ("bench/test_a.py", "offline/test_a.py", conftest.LONGEST_FIRST[-1], conftest.LONGEST_FIRST[0])
    left, _ = chosen([item(name) for name in names], fast=False)
    assert left[0].nodeid.startswith(names[3])
    assert [test.nodeid.partition("::")[0] for test in left[1:]] == [names[1], names[2], names[0]]


def test_fast_leaves_out_what_is_marked_full_and_says_so_and_nothing_else():
    tests = [item("test_a.py"), item("test_a.py", "full"), item("test_b.py", "slow"), item("test_b.py", "slow", "full")]
    assert chosen(tests, fast=True) == ([tests[0], tests[2]], [tests[1], tests[3]])
    assert chosen(tests, fast=False) == (tests, [])


def test_fast_runs_one_case_of_each_test_that_runs_loaders_or_training_and_every_case_of_others():
    cases = [item(f"{folder}/test_a.py::test[{case}]") for folder in ("energon", "packing") for case in (1, 2)]
    other = item("energon/test_a.py::test_b[1]")
    tests = [*cases[:2], other, *cases[2:]]
    assert chosen(tests, fast=True) == ([cases[0], other, *cases[2:]], [cases[1]])
    assert chosen(tests, fast=False) == (tests, [])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["--fast"]),
        (["--all"], []),
        (["--all", "-x"], ["-x"]),
        (["tests/packing", "-k", "a window"], ["tests/packing", "-k", "a window"]),
        (["--fast", "tests/packing"], ["--fast", "tests/packing"]),
    ],
)
def test_the_script_runs_the_fast_tier_everything_or_what_it_is_given(given, expected, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "setup.sh").write_text("")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/bash\n[[ $1 == -c ]] && echo 2 || printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    command = ["bash", str(tmp_path / "scripts" / "test.sh"), *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]})
    words = done.stdout.splitlines()
    assert words[:7] == ["-m", "pytest", "--numprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
    assert words[7:] == expected


def test_what_a_commit_must_pass_is_everything():
    assert "stage bash scripts/test.sh --all\n" in (ROOT / ".ci" / "run").read_text()
