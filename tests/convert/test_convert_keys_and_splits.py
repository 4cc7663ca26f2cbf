"""Keys are safe, unique and the same in every run; splits depend on the content alone."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_packing.convert.config import normalised_split, parse_split
from energon_packing.convert.keys import (
    MAX_KEY_LENGTH,
    KeyAssigner,
    KeySet,
    SplitAssigner,
    key_digest,
    wanted_key,
)
from energon_packing.errors import ConfigError


def key_hash(key: str) -> int:
    return int.from_bytes(key_digest(key), "big")


def assign_all(ids: list) -> list[str]:
    keys = [wanted_key(name, "dir/chats.json", number)[0] for number, name in enumerate(ids)]
    changed = KeyAssigner().assign_all(keys, np.array([key_hash(key) for key in keys], np.uint64))
    return [changed.get(index, key) for index, key in enumerate(keys)]


def test_dots_and_slashes_and_duplicates_are_told_apart() -> None:
    ids = ["a.b", "a/b", "a_b", "plain", "plain", 7]
    assert assign_all(ids) == ["a_b", "a_b-2", "a_b-3", "plain", "plain-2", "7"]
    assert [wanted_key(name, "", 0)[2] for name in ids] == [*[["sanitised_id"]] * 2, *[[]] * 4]


@given(st.text() | st.integers())
def test_keys_are_safe(name: str | int) -> None:
    key = wanted_key(name, "dir/chats.json", 3)[0]
    assert re.fullmatch(rf"[A-Za-z0-9_-]{{1,{MAX_KEY_LENGTH}}}", key)


def test_a_record_without_id_is_named_by_file_and_line() -> None:
    assert wanted_key(None, "sub/my chats.v2.jsonl", 12) == ("sub_my_chats_v2-12", False, [])
    assert wanted_key("", "x.json", 0) == ("x-0", False, [])
    assert wanted_key({}, "x.json", 0) == ("x-0", False, ["unusable_id"])


def test_a_split_reads_as_written_and_is_normalised() -> None:
    assert parse_split("train=0.8, val=0.1,test=0.1") == {"train": 0.8, "val": 0.1, "test": 0.1}
    assert parse_split("a=0.33,b=0.33,c=0.33") == pytest.approx(dict.fromkeys("abc", 1 / 3))
    assert parse_split("train=1,val=0") == {"train": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "train",
        "train=x",
        "train=-1",
        "train=nan",
        "train=inf",
        "train=0",
        "a.b=1",
        "train=1,train=1",
        "=1",
        "train=1,",
        "train=8,val=2",
        "train=0.1",
        "train=0.6,val=0.3",
    ],
)
def test_a_split_that_makes_no_sense_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_split(text)


def assigned_one_by_one(keys: list[str]) -> list[str]:
    """The rule in its plainest form, with a set of texts."""
    taken: set[str] = set()
    found = []
    for key in keys:
        suffix, unique = 2, key
        while unique in taken:
            unique, suffix = f"{key}-{suffix}", suffix + 1
        taken.add(unique)
        found.append(unique)
    return found


@given(st.lists(st.sampled_from(["a", "b", "a-2", "a-3", "a-2-2", "c", *map(str, range(20))]), max_size=60), st.data())
def test_keys_do_not_depend_on_how_many_are_assigned_at_once(keys: list[str], data: st.DataObject) -> None:
    assigner = KeyAssigner()
    found = list(keys)
    start = 0
    while start < len(keys):
        end = data.draw(st.integers(start + 1, len(keys)))
        hashes = np.array([key_hash(key) for key in keys[start:end]], np.uint64)
        for index, key in assigner.assign_all(keys[start:end], hashes).items():
            found[start + index] = key
        start = end
    assert found == assigned_one_by_one(keys)


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=50), max_size=20), st.integers(0, 2**64 - 1))
def test_a_key_set_holds_what_was_added_and_nothing_else(batches: list[list[int]], other: int) -> None:
    keys, known = KeySet(), set()
    for batch in batches:
        keys.add(np.array(batch, np.uint64))
        known.update(batch)
        assert keys.holds(np.array(batch, np.uint64)).all()
    assert keys.holds(np.array([other], np.uint64))[0] == (other in known)


def splits_of_all(positions: list[float], split: dict[str, float]) -> list[str]:
    """The rule over all positions at once; equal positions stand for copies."""
    names, ends, total = list(split), [], 0.0
    for share in split.values():
        total += share
        ends.append(total)
    ends[-1] = 1.0
    assigned = [next(index for index, end in enumerate(ends) if position < end) for position in positions]
    for empty in [index for index in range(len(names)) if index not in assigned]:
        fullest = max(range(len(names)), key=assigned.count)
        start, end = (ends[empty - 1] if empty else 0.0), ends[empty]
        members = {position for position, index in zip(positions, assigned, strict=True) if index == fullest}
        few = [position for position in members if 2 * positions.count(position) <= assigned.count(fullest)]
        if few:
            nearest = min(few, key=lambda position: (max(start - position, position - end), position))
            assigned = [
                empty if position == nearest else index for position, index in zip(positions, assigned, strict=True)
            ]
    return [names[index] for index in assigned]


POSITIONS = st.floats(0, 1, exclude_max=True)


@given(st.lists(POSITIONS | st.sampled_from([0.1, 0.2, 0.97, 0.5]), max_size=40), st.integers(1, 40))
def test_splits_do_not_depend_on_how_many_samples_come_at_once(positions: list[float], batch: int) -> None:
    split = normalised_split({"train": 0.9, "val": 0.05, "test": 0.03, "probe": 0.001})
    assigner = SplitAssigner(split)
    for start in range(0, len(positions), batch):
        assigner.add(np.array(positions[start : start + batch]))
    assigner.finish()
    found = [assigner.names[index] for index in assigner.of(np.array(positions)).tolist()]
    assert found == splits_of_all(positions, split)
    assert assigner.counts == [found.count(name) for name in assigner.names]
