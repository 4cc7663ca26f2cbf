"""A command that is killed by ``kill -9`` is continued by the same one; ``bench.py offline kills`` does it 20 times."""

from __future__ import annotations

import importlib.util

import pytest
from bench.offline_kills import Subject, contents, killed, prepare
from forking_python import quick_python

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
HAS_RAY = importlib.util.find_spec("ray") is not None
NEEDS_RAY = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'energon-packing[ray]'")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    prepare(folder, 40)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(("command", "executor"), [("measure", "local"), pytest.param("pack", "ray", marks=NEEDS_RAY)])
def test_a_killed_command_is_continued_and_leaves_the_files_of_one_nobody_killed(command, executor, place):
    subject = Subject(
        place=place, command=command, executor=executor, victim="command", longest=0.1, workers=1, python=quick_python()
    )
    found = killed(subject, 1)
    assert (found["kills"], found["same"], found["leftovers"]) == (1, True, 0)
    assert found["commands"] >= 2 or found["directories"] > 1


@pytest.mark.full
def test_another_byte_in_a_finished_file_is_told(place, monkeypatch):
    """So that ``same`` is no empty word."""
    from bench import offline_kills

    real = contents

    def with_a_flipped_byte(directory):
        found = real(directory)
        if found and directory.name.startswith("measure-"):
            name = min(found)
            found[name] = bytes([found[name][0] ^ 1]) + found[name][1:]
        return found

    monkeypatch.setattr(offline_kills, "contents", with_a_flipped_byte)
    subject = Subject(place=place, command="measure", executor="local", victim="worker", longest=0.0, workers=1)
    assert not killed(subject, 1)["same"]
