"""The policies by hand-worked examples, their registry and their errors."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.errors import ConfigError, PackingError, UserError
from energon_packing.packing import (
    PackGroups,
    check_partition,
    lower_bound,
    pack_lengths,
    pack_lengths_flat,
    policy_names,
    register_policy,
)


def _lists(groups: list[np.ndarray]) -> list[list[int]]:
    return [group.tolist() for group in groups]


IMAGES = {"constraints": {"images": ([0, 4, 5], 4)}}


@pytest.mark.parametrize(
    ("lengths", "options", "error", "message"),
    [
        (
            [1],
            {"policy": "best_fitt"},
            ConfigError,
            "'best_fitt'.*best_fit, .*next_fit.*Did you mean 'best_fit'",
        ),
        ([8, 9, 3], {}, UserError, "sample 1 does not fit into a pack: length 9, capacity 8 "),
        ([8, 2, 3], IMAGES, UserError, "sample 2 does not fit into a pack: 5 images, limit 4 "),
        *(([9], {"oversize": mode}, ConfigError, "pack_sequences") for mode in ("truncate", "split")),
        ([1], {"oversize": "ignore"}, ConfigError, "'ignore' is not known here, but raise and drop"),
        ([3, 0], {}, UserError, "sample 1 has length 0"),
        ([-2], {}, UserError, "sample 0 has length -2"),
        ([1.5], {}, UserError, "integers"),
        ([[1]], {}, UserError, "flat list"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_a_sentence(
    lengths: list[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pack_lengths(lengths, 8, **options)


def test_a_user_can_register_a_policy_and_use_it_by_name() -> None:
    @register_policy("one_each")
    def one_each(lengths, capacity, constraints, *, window, seed):  # type: ignore[no-untyped-def]
        return [np.array([index]) for index in range(len(lengths))]

    assert "one_each" in policy_names()
    assert _lists(pack_lengths([3, 3], 8, "one_each")) == [[0], [1]]
    with pytest.raises(ConfigError, match="'one_each' exists already"):
        register_policy("one_each", one_each)
    with pytest.raises(ConfigError, match="'window' exists already"):
        register_policy("window", one_each)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 1]], "missing: 2"),
        ([[0, 1], [1, 2]], "more than once: 1"),
        ([[0, 1, 2, 3]], "not among the input: 3"),
        ([[0, 1, 2], []], "empty packs: 1"),
        ([[0, 1, -1]], "negative indices -1"),
    ],
)
def test_a_policy_that_loses_doubles_or_invents_samples_is_stopped_by_index(
    groups: list[list[int]], message: str
) -> None:
    def broken(lengths, capacity, constraints, *, window, seed):  # type: ignore[no-untyped-def]
        return [np.array(group, dtype=np.int64) for group in groups]

    with pytest.raises(PackingError, match=message):
        pack_lengths([1, 1, 1], 8, broken)
    with pytest.raises(PackingError, match=message):
        check_partition(groups, 3)


def test_a_policy_that_breaks_a_limit_is_stopped() -> None:
    def greedy(lengths, capacity, constraints, *, window, seed):  # type: ignore[no-untyped-def]
        return [np.arange(len(lengths))]

    with pytest.raises(PackingError, match="pack 0 holds 9 tokens, limit 8; its indices: 0, 1"):
        pack_lengths([4, 5], 8, greedy)
    with pytest.raises(PackingError, match="pack 0 holds 5 images, limit 4"):
        pack_lengths([1, 1], 8, greedy, constraints={"images": ([2, 3], 4)})


def test_check_partition_accepts_a_subset_of_indices_as_the_expected_ones() -> None:
    check_partition([[4, 2], [9]], [2, 4, 9])
    with pytest.raises(PackingError, match="missing: 9"):
        check_partition([[4, 2]], np.array([2, 4, 9]))


def test_dropped_oversize_samples_leave_the_other_indices_as_they_were() -> None:
    groups = pack_lengths([9, 5, 9, 3], 8, "next_fit", oversize="drop")
    assert _lists(groups) == [[1, 3]]
    groups = pack_lengths([1, 5, 2, 3], 8, "next_fit", oversize="drop", constraints={"images": ([7, 1, 7, 1], 4)})
    assert _lists(groups) == [[1, 3]]


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (([1, 2], 4), "one cost for each of 3"),
        (([1, -1, 0], 4), "finite non-negative costs"),
        (([1, float("nan"), 0], 4), "finite non-negative costs"),
        (([1, 1, 1], float("inf")), "finite non-negative limit"),
        (["a", "b", "c"], "must be a pair"),
        ((["a", "b", "c"], 4), "numbers as costs"),
    ],
)
def test_constraints_that_cannot_be_kept_are_refused_by_name(constraint: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"'images'.*{message}"):
        pack_lengths([1, 1, 1], 8, constraints={"images": constraint})  # type: ignore[dict-item]


def test_next_fit_keeps_the_order() -> None:
    assert _lists(pack_lengths([3, 2, 4, 3], 8, "next_fit")) == [[0, 1], [2, 3]]


def test_the_window_fills_the_oldest_samples_pack_exactly_where_that_is_possible() -> None:
    # 5 is oldest; 2 would fit first, but only 3 fills the pack.
    assert _lists(pack_lengths([5, 2, 3, 6], 8, "window", window=4)) == [[0, 2], [1, 3]]


def test_text_and_image_heavy_samples_share_packs_so_that_both_limits_are_used() -> None:
    # Ten long texts without images and ten short samples with four: together they fill ten packs in both respects.
    lengths = [80] * 10 + [20] * 10
    images = [0] * 10 + [4] * 10
    for policy in ("window", "best_fit"):
        assert len(pack_lengths(lengths, 100, policy, constraints={"images": (images, 4)})) == 10


def test_the_lower_bound_of_a_hand_worked_list() -> None:
    # Three above half of 10 cannot share; 4 + 4 of the small ones do not fit beside 9 and 8, one fits beside 6.
    assert lower_bound([9, 8, 6, 4, 4], 10) == 4
    assert lower_bound([], 10) == 0
    assert lower_bound([10, 10], 10) == 2


def test_importing_the_engine_imports_no_torch() -> None:
    code = "import sys, energon_packing.packing as p; p.pack_lengths([1], 2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


LIMITED = """
import numpy as np
from energon_packing.packing import Constraints
from energon_packing.packing.policies.best_fit import pack_limited
draw = np.random.default_rng(5)
images = draw.integers(1, 9, 4000) * (draw.random(4000) < 0.3)  # mostly text, so that no list is packed by a window
units = draw.integers(1, 300, 4000) + 60 * images
packs = pack_limited(units, 4096, Constraints.from_pairs({"images": (images, 8)}, 4000))
print(len(packs), packs.order.tolist())
"""


def test_packs_under_limits_are_the_same_on_every_processor() -> None:
    """NumPy selects by other instructions where it may not use these, and puts other ones of equal values first."""
    fewer = {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR AVX512_SKX AVX512F AVX2"}
    known = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LIMITED], env=os.environ | env, capture_output=True, check=True
        ).stdout
        for env in ({}, fewer)
    ]
    assert known[0] == known[1]


@given(pack=st.lists(st.integers(0, 9), max_size=40))
@settings(max_examples=60, deadline=None)
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
