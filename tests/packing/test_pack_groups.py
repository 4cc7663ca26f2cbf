"""Packs in two arrays are the packs of the list of arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.packing import PackGroups, check_partition, pack_lengths, pack_lengths_flat, policy_names


@given(pack=st.lists(st.integers(0, 9), max_size=40))
@settings(max_examples=200, deadline=None)
def test_groups_of_pack_numbers_are_ascending_and_ordered_by_their_oldest_sample(pack: list[int]) -> None:
    numbers = np.unique(np.array(pack, dtype=np.int64), return_inverse=True)[1]
    expected: dict[int, list[int]] = {}
    for index, number in enumerate(numbers.tolist()):
        expected.setdefault(number, []).append(index)
    groups = PackGroups.of(numbers)
    assert [group.tolist() for group in groups] == list(expected.values())
    assert len(groups) == len(expected)
    assert [groups[at].tolist() for at in range(-len(groups), 0)] == list(expected.values())
    assert [group.tolist() for group in groups[1:3]] == list(expected.values())[1:3]
    with pytest.raises(IndexError):
        groups[len(groups)]


def test_more_packs_and_longer_samples_than_sixteen_bits_are_ordered_rightly() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(98_000, 200_000, 70_000)
    groups = pack_lengths_flat(lengths, 200_000)
    assert len(groups) > 1 << 16
    check_partition(groups, lengths.size)
    oldest = groups.order[groups.offsets[:-1]]
    assert (np.diff(oldest) > 0).all()
    assert np.add.reduceat(lengths[groups.order], groups.offsets[:-1]).max() <= 200_000


def test_every_policy_gives_the_same_packs_flat() -> None:
    lengths = np.random.default_rng(1).integers(1, 120, 400)
    for policy in (name for name in policy_names() if not name.endswith("_test")):
        flat = pack_lengths_flat(lengths, 100, policy, oversize="drop", window=16)
        packs = pack_lengths(lengths, 100, policy, oversize="drop", window=16)
        assert [group.tolist() for group in flat] == [group.tolist() for group in packs]
        assert flat.offsets[-1] == flat.order.size == (lengths <= 100).sum()
