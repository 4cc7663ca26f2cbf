"""Whole lists: packs within all limits, as few as the bound asks for; their order is even, level and a fair shuffle."""

import numpy as np
import pytest
from bench.length_lists import synthetic_list
from bench.offline_index import drawn_mix
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_packing.offline.order import RUN, SHARE, balanced_order, incomplete_group
from energon_packing.offline.planner import efficiency_of
from energon_packing.packing.balance import LINEAR, PATCH
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.decreasing import best_fit_decreasing, best_fit_into
from energon_packing.packing.partition import check_groups
from energon_packing.packing.policies.best_fit import pack_limited
from energon_packing.packing.statistics import lower_bound
from energon_packing.packing.whole_list import pack_lengths_flat


def costs_of_packs(lengths: np.ndarray, patches: np.ndarray, capacity: int) -> np.ndarray:
    packs = pack_lengths_flat(lengths, capacity)
    tokens = lengths[packs.order].astype(np.float64)
    cost = LINEAR * tokens + tokens**2 + PATCH * patches[packs.order]
    return np.add.reduceat(cost, packs.offsets[:-1])


@pytest.fixture(scope="module")
def mixes() -> dict[str, np.ndarray]:
    """Costs of the packs of three multimodal mixes, tens of thousands of packs each."""
    found = {}
    for name, samples in (("d32", 400_000), ("e", 300_000)):
        made = synthetic_list(name, samples).fitting()
        patches = np.where(made.images > 1, 3 * made.lengths, 0)
        found[name] = costs_of_packs(made.lengths, patches, made.capacity)
    mix = drawn_mix(700_000)
    fits = mix.length <= 32768
    found["mix"] = costs_of_packs(mix.length[fits], mix.patches[fits], 32768)
    return found


@pytest.mark.parametrize("name", ["d32", "e", "mix"])
def test_ranks_hardly_wait_at_any_data_parallel_size(mixes: dict[str, np.ndarray], name: str) -> None:
    costs = mixes[name]
    ordered = costs[balanced_order(costs, group=512, start=0, near=None, seed=[0])]
    for ranks, least in ((8, 0.998), (64, 0.99), (512, 0.98)):
        efficiency = efficiency_of(ordered, ranks)
        assert efficiency is not None
        assert efficiency >= least, ranks
    shuffled = efficiency_of(np.random.default_rng(0).permutation(costs), 512)
    assert shuffled is not None
    assert shuffled < 0.9


@pytest.mark.parametrize(("name", "seed"), [("d32", 0), ("e", 1), ("mix", 2)])
def test_the_mean_of_any_32_steps_is_near_that_of_the_whole(mixes: dict[str, np.ndarray], name: str, seed: int) -> None:
    costs = mixes[name]
    group = 64  # hundreds of steps of the largest size
    ordered = costs[balanced_order(costs, group=group, start=0, near=None, seed=[seed])]
    steps = ordered[: costs.size // group * group].reshape(-1, group).mean(axis=1)
    sums = np.concatenate([[0.0], np.cumsum(steps)])
    means = (sums[RUN:] - sums[:-RUN]) / RUN / costs.mean()
    assert len(means) > 150
    # Blocks differ from the whole by a little, which the walk carries on.
    assert np.abs(means - 1).max() <= SHARE + 0.005


@given(
    costs=st.lists(st.integers(1, 50), max_size=120),
    group=st.integers(1, 24),
    start=st.integers(0, 50),
    near=st.one_of(st.none(), st.floats(1, 50)),
    seed=st.integers(0, 5),
)
def test_every_pack_has_one_place(costs: list[int], group: int, start: int, near: float | None, seed: int) -> None:
    order = balanced_order(np.array(costs), group=group, start=start, near=near, seed=[seed])
    assert sorted(order.tolist()) == list(range(len(costs)))
    again = balanced_order(np.array(costs), group=group, start=start, near=near, seed=[seed])
    assert order.tolist() == again.tolist()


def test_a_group_that_two_epochs_share_has_packs_of_similar_cost(mixes: dict[str, np.ndarray]) -> None:
    costs, group = mixes["d32"][:5000], 512
    first = costs[balanced_order(costs, group=group, start=0, near=None, seed=[0])]
    near = incomplete_group(first, 0, group)
    second = costs[balanced_order(costs, group=group, start=first.size, near=near, seed=[1])]
    both = np.concatenate([first, second])
    shared = both[first.size // group * group :][:group]
    assert shared.mean() >= 0.95 * shared.max()
    assert np.random.default_rng(0).permutation(costs)[:group].mean() < 0.6 * costs.max()
    whole, alone = efficiency_of(both, group), efficiency_of(first, group)
    assert whole is not None
    assert alone is not None
    assert whole >= alone - 0.005


def test_the_order_is_a_fair_shuffle(mixes: dict[str, np.ndarray]) -> None:
    """Where a pack is says nothing about where it is under another seed, or about its cost or its number."""
    costs, group = mixes["d32"], 16
    places = []
    for seed in range(4):
        place = np.empty(costs.size)
        place[balanced_order(costs, group=group, start=0, near=None, seed=[seed])] = np.arange(costs.size)
        places.append(place)
    # A group moves as a whole: a correlation has the noise of as many numbers as there are groups.
    noise = 4 / np.sqrt(costs.size / group)
    ranks = np.argsort(np.argsort(costs))
    for at, place in enumerate(places):
        for other in (np.arange(costs.size), ranks, *places[at + 1 :]):
            assert abs(np.corrcoef(place, other)[0, 1]) < noise


def test_every_group_is_shuffled_in_its_own_way() -> None:
    groups = balanced_order(np.arange(1024.0), group=64, start=0, near=None, seed=[0]).reshape(16, 64)
    assert len({tuple(np.argsort(group)) for group in groups}) == 16


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
        ("mix", {"images": 100}),
        ("mix", {"images": 120, "patches": 80_000, "segments": 96}),
        ("d32", {"images": 64}),
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
