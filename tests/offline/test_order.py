"""Whole lists: packs within all limits, as few as the bound asks for; their order is even, level and a fair shuffle."""

import numpy as np
import pytest
from bench.length_lists import synthetic_list
from bench.offline_index import drawn_mix
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_packing.offline.order import RUN, SHARE, balanced_order, order_again
from energon_packing.offline.planner import efficiency_of
from energon_packing.packing.balance import LINEAR, PATCH
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.decreasing import best_fit_decreasing, best_fit_into
from energon_packing.packing.partition import check_groups
from energon_packing.packing.policies.best_fit import pack_limited
from energon_packing.packing.statistics import lower_bound
from energon_packing.packing.whole_list import pack_lengths_flat

NOTHING = np.zeros(0)


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
    ordered = costs[balanced_order(costs, group=512, before=NOTHING, seed=[0])]
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
    ordered = costs[balanced_order(costs, group=group, before=NOTHING, seed=[seed])]
    steps = ordered[: costs.size // group * group].reshape(-1, group).mean(axis=1)
    sums = np.concatenate([[0.0], np.cumsum(steps)])
    means = (sums[RUN:] - sums[:-RUN]) / RUN / costs.mean()
    assert len(means) > 150
    # Blocks differ from the whole by a little, which the walk carries on.
    assert np.abs(means - 1).max() <= SHARE + 0.005


@given(
    costs=st.lists(st.integers(1, 50), max_size=120),
    group=st.integers(1, 24),
    before=st.lists(st.integers(1, 50), max_size=50),
    seed=st.integers(0, 5),
)
def test_every_pack_has_one_place_in_every_epoch_and_pass(
    costs: list[int], group: int, before: list[int], seed: int
) -> None:
    begun = np.array(before[: len(before) % group])
    order = balanced_order(np.array(costs), group=group, before=begun, seed=[seed])
    assert sorted(order.tolist()) == list(range(len(costs)))
    again = balanced_order(np.array(costs), group=group, before=begun, seed=[seed])
    assert order.tolist() == again.tolist()
    start, stop = len(before), len(before) + len(costs)
    for position, older in ((stop, False), (start, False), (stop, True)):
        passed = order_again(start, stop, position=position, group=group, seed=[seed], older=older)
        assert sorted(passed.tolist()) == list(range(start, stop))


def epochs_of(costs: np.ndarray, group: int, seed: int, epochs: int = 3) -> np.ndarray:
    """Costs of these packs in the order of a plan of several epochs."""
    planned = NOTHING
    for epoch in range(epochs):
        before = planned[planned.size // group * group :]
        planned = np.append(planned, costs[balanced_order(costs, group=group, before=before, seed=[seed, epoch])])
    return planned


@pytest.mark.parametrize(("packs", "least"), [(242, 0.98), (477, 0.99), (1011, 0.993), (2420, 0.997)])
def test_small_epochs_and_what_is_left_of_large_ones_have_even_steps_in_every_epoch_and_pass(
    mixes: dict[str, np.ndarray], packs: int, least: float
) -> None:
    for seed in range(3):
        costs = np.random.default_rng(seed).choice(mixes["d32"], packs, replace=False)
        planned = epochs_of(costs, 512, seed)
        passes = [planned[:packs]]
        for later in (1, 2):
            order = order_again(0, packs, position=later * packs, group=512, seed=[seed, later])
            passes.append(passes[0][order])
        for ordered in (planned, np.concatenate(passes)):
            for ranks in (2, 4, 8):
                efficiency = efficiency_of(ordered, ranks)
                assert efficiency is not None
                assert efficiency >= least, (seed, ranks)


@pytest.mark.parametrize("group", [96, 384])
def test_the_rest_is_cut_by_the_divisors_of_any_group(mixes: dict[str, np.ndarray], group: int) -> None:
    costs = np.random.default_rng(0).choice(mixes["d32"], group - 1, replace=False)
    efficiency = efficiency_of(epochs_of(costs, group, 0), 8)
    assert efficiency is not None
    assert efficiency >= 0.9
    shuffled = efficiency_of(np.random.default_rng(0).permutation(costs), 8)
    assert shuffled is not None
    assert shuffled < 0.75


def test_an_order_of_older_versions_is_that_of_their_states() -> None:
    """As main of 2651f827 gave it."""
    packs = order_again(0, 22, position=22, group=8, seed=[7, 1, 0, 5], older=True)
    assert packs.tolist() == [10, 11, 7, 6, 4, 5, 0, 1, 2, 3, 9, 8, 15, 14, 12, 13, 21, 19, 18, 20, 16, 17]
    assert packs.tolist() != order_again(0, 22, position=22, group=8, seed=[7, 1, 0, 5]).tolist()


def test_a_group_that_two_epochs_share_has_packs_of_similar_cost(mixes: dict[str, np.ndarray]) -> None:
    costs, group = mixes["d32"][:5000], 512
    both = epochs_of(costs, group, 0, epochs=2)
    shared = both[costs.size // group * group :][:group]
    assert shared.mean() >= 0.95 * shared.max()
    assert np.random.default_rng(0).permutation(costs)[:group].mean() < 0.6 * costs.max()
    whole, alone = efficiency_of(both, group), efficiency_of(both[: costs.size], group)
    assert whole is not None
    assert alone is not None
    assert whole >= alone - 0.005


def test_the_order_is_a_fair_shuffle(mixes: dict[str, np.ndarray]) -> None:
    """Where a pack is says nothing about where it is under another seed, or about its cost or its number."""
    costs, group = mixes["d32"], 16
    places = []
    for seed in range(4):
        place = np.empty(costs.size)
        place[balanced_order(costs, group=group, before=NOTHING, seed=[seed])] = np.arange(costs.size)
        places.append(place)
    # A group moves as a whole: a correlation has the noise of as many numbers as there are groups.
    noise = 4 / np.sqrt(costs.size / group)
    ranks = np.argsort(np.argsort(costs))
    for at, place in enumerate(places):
        for other in (np.arange(costs.size), ranks, *places[at + 1 :]):
            assert abs(np.corrcoef(place, other)[0, 1]) < noise


def test_every_group_is_shuffled_in_its_own_way() -> None:
    groups = balanced_order(np.arange(1024.0), group=64, before=NOTHING, seed=[0]).reshape(16, 64)
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
