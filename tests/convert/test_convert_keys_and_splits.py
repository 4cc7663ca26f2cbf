"""Keys are safe, unique and the same in every run; splits depend on the key alone."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_packing.convert.config import normalised_split, parse_split
from energon_packing.convert.key_names import MAX_KEY_LENGTH
from energon_packing.convert.keys import KeyAssigner
from energon_packing.convert.splits import assign_splits, position_of
from energon_packing.errors import ConfigError

IDS = st.one_of(
    st.none(), st.text(), st.integers(), st.sampled_from(["a.b", "a/b", "a_b", "a_b-2", "x"]), st.lists(st.text())
)


def assign_all(ids: list) -> list[str]:
    assigner = KeyAssigner()
    return [assigner.assign({"id": name}, "dir/chats.json", number)[0] for number, name in enumerate(ids)]


@given(st.lists(IDS, max_size=40))
def test_keys_are_unique_safe_and_deterministic(ids: list) -> None:
    keys = assign_all(ids)
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", key) for key in keys)
    assert all(len(key) <= MAX_KEY_LENGTH + 8 for key in keys)
    assert assign_all(ids) == keys


def test_dots_and_slashes_and_duplicates_are_told_apart() -> None:
    assigner = KeyAssigner()
    found = [assigner.assign({"id": name}, "f.json", 0) for name in ("a.b", "a/b", "a_b", "plain", "plain", 7)]
    assert found == [
        ("a_b", ["sanitised_id"]),
        ("a_b-2", ["sanitised_id", "duplicate_id"]),
        ("a_b-3", ["duplicate_id"]),
        ("plain", []),
        ("plain-2", ["duplicate_id"]),
        ("7", []),
    ]


def test_a_record_without_id_is_named_by_file_and_line() -> None:
    assert KeyAssigner().assign({}, "sub/my chats.v2.jsonl", 12) == ("sub_my_chats_v2-12", [])
    assert KeyAssigner().assign(None, "x.json", 0) == ("x-0", [])
    assert KeyAssigner().assign({"id": {}}, "x.json", 0) == ("x-0", ["unusable_id"])


@given(st.sets(st.text(min_size=1, max_size=8), min_size=3, max_size=60), st.floats(0.0, 1.0), st.floats(0.001, 1.0))
def test_every_split_gets_a_sample_where_there_are_enough(keys: set[str], train: float, val: float) -> None:
    split = normalised_split({"train": train, "val": val, "test": 0.01})
    assigned = assign_splits([position_of(key) for key in sorted(keys)], split)
    assert len(assigned) == len(keys)
    assert set(assigned) == set(split)


def test_one_sample_goes_to_one_split() -> None:
    assert len(assign_splits([0.5], {"train": 0.98, "val": 0.02})) == 1
    assert assign_splits([], {"train": 1.0}) == []


def test_shares_are_met_and_more_data_moves_no_old_sample() -> None:
    split = parse_split("train=0.9,val=0.1")
    keys = [f"k{number}" for number in range(4000)]
    positions = [position_of(key) for key in keys]
    assigned = assign_splits(positions, split)
    assert 330 < Counter(assigned)["val"] < 470
    assert assign_splits(positions[:1000], split) == assigned[:1000]


def test_a_split_reads_as_written_and_is_normalised() -> None:
    assert parse_split("train=8, val=1,test=1") == {"train": 0.8, "val": 0.1, "test": 0.1}
    assert parse_split("train=1,val=0") == {"train": 1.0}


@pytest.mark.parametrize(
    "text", ["", "train", "train=x", "train=-1", "train=nan", "train=inf", "train=0", "a.b=1", "train=1,train=1", "=1"]
)
def test_a_split_that_makes_no_sense_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_split(text)
