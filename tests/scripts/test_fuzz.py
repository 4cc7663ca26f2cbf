"""The fuzzer: it finds planted faults, each target accepts its seeds, and no found case of the past is wrong again."""

import fuzz
import pytest
from fuzz import TARGETS

QUICK = ("media", "records", "tensors", "yaml")
"""Targets whose seeds are made quickly."""


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
