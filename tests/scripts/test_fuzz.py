"""The fuzzer: it finds planted faults, each target accepts its seeds, and no found case of the past is wrong again."""

import os
import time
from pathlib import Path

import fuzz
import pytest
from fuzz import TARGETS, Target

QUICK = ("media", "records", "tensors", "yaml")
"""Targets whose seeds are made quickly."""


def planted(data: bytes, folder: Path) -> None:
    if data.startswith(b"raise"):
        raise ValueError("planted")
    if data.startswith(b"crash"):
        os.abort()
    if data.startswith(b"hang"):
        time.sleep(600)


def test_errors_crashes_and_hangs_are_found_and_the_cases_between_are_read(tmp_path):
    target = Target(lambda folder: [b"fine"], planted, lambda: KeyError)
    cases = [b"fine", b"raise", b"fine", b"crash", b"hang", b"fine"]
    found = []
    while (wrong := fuzz.in_child(target, cases, tmp_path, 1)) is not None:
        found.append((cases[wrong[0]], wrong[1]))
        cases = cases[wrong[0] + 1 :]
    assert found == [
        (b"raise", "ValueError: planted"),
        (b"crash", "crash: SIGABRT"),
        (b"hang", "more than 1 s"),
    ]


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in sorted(TARGETS)]
)
def test_a_target_reads_its_seeds_and_some_changes_of_them(name, tmp_path):
    target = TARGETS[name]
    seeds = target.seeds(tmp_path)
    for data in seeds:
        target.read(data, tmp_path)
    assert list(fuzz.fuzz(target, seeds, tmp_path, cases=30, seed=1, seconds=60)) == []


CORPUS = [(each.parent.name, each) for each in sorted(fuzz.CORPUS.glob("*/*.bin"))]


@pytest.mark.parametrize(("name", "case"), CORPUS, ids=[f"{name}-{case.stem}" for name, case in CORPUS])
def test_a_case_that_was_found_is_refused_as_documented(name, case, tmp_path):
    assert fuzz.in_child(TARGETS[name], [case.read_bytes()], tmp_path, 60) is None
