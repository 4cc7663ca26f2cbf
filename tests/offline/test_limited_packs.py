"""Whole lists under limits: valid always, and as many packs as the bound asks for on multimodal mixes."""

from __future__ import annotations

import numpy as np
import pytest
from bench.length_lists import synthetic_list
from bench.offline_index import drawn_mix
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_packing.packing.constraints import Constraints
from energon_packing.packing.decreasing import best_fit_decreasing, best_fit_into
from energon_packing.packing.limited import pack_limited
from energon_packing.packing.partition import check_groups
from energon_packing.packing.statistics import lower_bound

MULTIPLE = 8


def mixed(name: str, limits: dict[str, int], samples: int) -> tuple[np.ndarray, int, Constraints]:
    """Units, capacity and constraints of the samples of a mix that fit alone."""
    if name == "mix":
        drawn = drawn_mix(samples)
        length, images, patches, capacity = drawn.length, drawn.images, drawn.patches, 32768
    else:
        made = synthetic_list(name, samples)
        images = np.where(made.images == 1, 0, made.images)  # the list counts 1 for text
        length, patches, capacity = made.lengths, np.where(images > 0, 3 * made.lengths, 0), made.capacity
    units = -(-length // MULTIPLE)
    columns = {"images": images, "patches": patches, "segments": np.ones_like(images)}
    fits = units <= capacity // MULTIPLE
    for limit, most in limits.items():
        fits &= columns[limit] <= most
    return (
        units[fits],
        capacity // MULTIPLE,
        Constraints(costs={limit: columns[limit][fits] for limit in limits}, limits=limits),
    )


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("mix", {"images": 120}),
        ("mix", {"images": 100}),
        ("mix", {"images": 120, "patches": 80_000, "segments": 96}),
        ("d32", {"images": 64}),
        ("e", {"images": 48}),
        ("e", {"images": 64, "patches": 40_000}),
    ],
)
def test_mixes_of_text_images_and_videos_need_no_more_packs_than_the_bound(name: str, limits: dict[str, int]) -> None:
    units, capacity, constraints = mixed(name, limits, 200_000)
    packs = pack_limited(units, capacity, constraints)
    check_groups(packs, units, capacity, constraints)
    by_tokens = best_fit_decreasing(units, capacity)
    images = np.add.reduceat(constraints.costs["images"][by_tokens.order], by_tokens.offsets[:-1])
    assert (images > limits["images"]).mean() > 0.01, "packs by tokens alone would break the limit"
    assert lower_bound(units, capacity, constraints) / len(packs) >= 0.999


rows = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 10), st.integers(0, 40)), min_size=1, max_size=200)


@given(rows=rows, images=st.integers(10, 60), patches=st.integers(40, 200), repeat=st.integers(1, 20))
@settings(max_examples=150)
def test_packs_are_a_partition_within_all_limits(
    rows: list[tuple[int, int, int]], images: int, patches: int, repeat: int
) -> None:
    columns = np.array(rows * repeat, dtype=np.int64)
    constraints = Constraints(
        costs={"images": columns[:, 1], "patches": columns[:, 2], "segments": np.ones(len(columns), np.int64)},
        limits={"images": images, "patches": patches, "segments": 7},
    )
    packs = pack_limited(columns[:, 0].copy(), 30, constraints)
    check_groups(packs, columns[:, 0], 30, constraints)


@example(lengths=[3, 21], rooms=[18], divisor=1)  # rooms of 18 and 19 hold the same lengths
@given(
    lengths=st.lists(st.integers(1, 40), max_size=80),
    rooms=st.lists(st.integers(0, 40), max_size=20),
    divisor=st.sampled_from([1, 4]),
)
def test_best_fit_fills_packs_that_are_there_before_it_opens_new_ones(
    lengths: list[int], rooms: list[int], divisor: int
) -> None:
    capacity = 40 * divisor
    given_lengths = np.array(lengths, dtype=np.int64) * divisor
    found = best_fit_into(given_lengths, capacity, np.array(rooms, dtype=np.int64) * divisor)
    # Textbook best-fit decreasing, in units of what divides all lengths: what no sample can use decides nothing.
    unit = int(np.gcd.reduce(given_lengths)) or 1
    left = [room * divisor // unit for room in rooms]
    start = list(left)
    for at in np.argsort(-given_lengths, kind="stable").tolist():
        length = int(given_lengths[at]) // unit
        fitting = [(room, number) for number, room in enumerate(left) if room >= length]
        if fitting:
            left[min(fitting)[1]] -= length
        else:
            left.append(capacity // unit - length)
    used = np.bincount(found, given_lengths // unit, minlength=len(left)).tolist() if lengths else [0] * len(left)
    start += [capacity // unit] * (len(left) - len(rooms))
    assert sorted(room - taken for room, taken in zip(start, used, strict=True)) == sorted(left)
