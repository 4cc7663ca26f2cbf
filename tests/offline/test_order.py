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
from energon_packing.packing.partition import best_fit_decreasing, best_fit_into, check_groups, lower_bound
from energon_packing.packing.policies.best_fit import pack_limited
from energon_packing.packing.whole_list import pack_lengths_flat

NOTHING = np.zeros(0)


def costs_of_packs(lengths: np.ndarray, patches: np.ndarray, capacity: int) -> np.ndarray:
    packs = pack_lengths_flat(lengths, capacity)
    tokens = lengths[packs.order].astype(np.float64)
    return np.add.reduceat(np.stack([PATCH * patches[packs.order], LINEAR * tokens + tokens**2], 1), packs.offsets[:-1])


ONE, TWO = 1, 2
"""What orders are even in: the sum of costs, or that of the vision tower and that of the language model."""


def told(costs: np.ndarray, count: int) -> np.ndarray:
    return costs.sum(axis=1) if count == ONE else costs


def worst(ordered: np.ndarray, ranks: int) -> float:
    """The efficiency at the barrier at which ranks wait most."""
    found = [efficiency_of(each, ranks) for each in ordered.reshape(len(ordered), -1).T]
    return min(each for each in found if each is not None)


@pytest.fixture(scope="module")
def mixes() -> dict[str, np.ndarray]:
    """Costs of the packs of three multimodal mixes, ``[P, 2]``, tens of thousands of packs each."""
    found = {}
    for name, samples in (("d32", 400_000), ("e", 300_000)):
        made = synthetic_list(name, samples).fitting()
        patches = np.where(made.images > 1, 3 * made.lengths, 0)
        found[name] = costs_of_packs(made.lengths, patches, made.capacity)
    mix = drawn_mix(700_000)
    fits = mix.length <= 32768
    found["mix"] = costs_of_packs(mix.length[fits], mix.patches[fits], 32768)
    return found


@pytest.mark.parametrize("count", [ONE, TWO])
@pytest.mark.parametrize("name", ["d32", "e", "mix"])
def test_ranks_hardly_wait_at_any_data_parallel_size(mixes: dict[str, np.ndarray], name: str, count: int) -> None:
    costs = told(mixes[name], count)
    ordered = costs[balanced_order(costs, group=512, before=NOTHING, seed=[0])]
    for ranks, least in ((8, (0.998, 0.995)), (64, (0.99, 0.98)), (512, (0.98, 0.945))):  # of 42 groups or a few more
        assert worst(ordered, ranks) >= least[count - 1], ranks
    assert worst(np.random.default_rng(0).permutation(costs), 512) < 0.9


def test_ranks_hardly_wait_after_the_vision_tower_nor_after_the_language_model() -> None:
    mix = drawn_mix(2_400_000)
    units = -(-mix.length // 8)
    fits = (units <= 4096) & (mix.images <= 120)
    limits = Constraints(costs={"images": mix.images[fits]}, limits={"images": 120})
    packs = pack_limited(units[fits], 4096, limits)
    tokens = mix.length[fits][packs.order].astype(np.float64)
    both = np.stack([PATCH * mix.patches[fits][packs.order], LINEAR * tokens + tokens**2], axis=1)
    costs = np.add.reduceat(both, packs.offsets[:-1])
    ordered = costs[balanced_order(costs, group=512, before=NOTHING, seed=[0])]
    assert worst(ordered, 512) >= 0.98
    assert worst(ordered, 64) >= 0.99
    assert worst(ordered, 8) >= 0.998
    summed = costs[balanced_order(costs.sum(axis=1), group=512, before=NOTHING, seed=[0])]
    assert worst(summed, 512) < 0.9, "even in the sum alone"
    # Where gradients are the only barrier, after one micro-batch or after four, both together count.
    assert worst(ordered.sum(axis=1), 512) >= worst(summed.sum(axis=1), 512)
    of_four = [
        each[: len(each) // 2048 * 2048].sum(axis=1).reshape(-1, 4, 512).sum(axis=1).ravel()
        for each in (ordered, summed)
    ]
    assert worst(of_four[0], 512) >= max(0.99, worst(of_four[1], 512))


def waits(ordered: np.ndarray, ranks: int) -> np.ndarray:
    """(max - mean) / max of each cost, mean over steps."""
    steps = ordered[: len(ordered) // ranks * ranks].reshape(-1, ranks, 2)
    return np.asarray((1 - steps.mean(axis=1) / steps.max(axis=1)).mean(axis=0))


@pytest.mark.parametrize("scarce", ["tiles", "tokens"])
def test_tiles_are_even_within_a_thousandth_and_tokens_within_a_hundredth(scarce: str) -> None:
    """Packs as those of OmniBal's lists, at 18 tiles and 6,016 tokens, and at 18 and 5,000."""
    random, count = np.random.default_rng(0), 100_000
    shares, most = ([0.993, 0.005, 0.002], 6016) if scarce == "tiles" else ([0.57, 0.28, 0.1, 0.04, 0.01], 5000)
    tiles = 18 - random.choice(len(shares), count, p=shares)
    tokens = np.clip(random.normal(5172, 160, count).round(), 4000, most)
    costs = np.stack([tiles / tiles.mean(), tokens / tokens.mean()], axis=1)  # the same unit: both matter
    ordered = costs[balanced_order(costs, group=512, before=NOTHING, seed=[0])]
    for ranks in (8, 64, 512):
        assert (waits(ordered, ranks) <= [0.001, 0.01]).all(), (ranks, waits(ordered, ranks))
    assert (waits(costs, 64) > [0.001, 0.01]).any()


def test_text_keeps_the_order_of_one_cost() -> None:
    language = np.random.default_rng(0).integers(1, 1000, 5000)
    both = np.stack([np.zeros_like(language), language], axis=1)
    alone = balanced_order(language, group=64, before=language[:7], seed=[0])
    assert (balanced_order(both, group=64, before=both[:7], seed=[0]) == alone).all()


def test_a_few_packs_with_images_do_not_disturb_those_of_text(mixes: dict[str, np.ndarray]) -> None:
    costs = np.random.default_rng(0).permutation(mixes["e"])
    costs[3:, 0] = 0
    ordered = costs[balanced_order(costs, group=512, before=NOTHING, seed=[0])]
    alone = costs[balanced_order(costs[:, 1], group=512, before=NOTHING, seed=[0])]
    assert worst(ordered[:, 1], 512) >= worst(alone[:, 1], 512) - 0.01


@given(
    share=st.floats(-6, -2.5).map(lambda power: 10**power),
    few=st.floats(0.1, 1),
    rise=st.sampled_from([-1, 0, 1]),
    group=st.sampled_from([16, 64]),
    first=st.booleans(),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_a_cost_that_is_next_to_nothing_takes_next_to_nothing_from_the_other(
    share: float, few: float, rise: int, group: int, first: bool, seed: int
) -> None:
    """A small tower under a large model: ranks lose hardly more time than by the sum, wherever they wait."""
    random = np.random.default_rng(seed)
    main = random.beta(4, 6, 4000) * 0.8 + 0.6
    small = np.where(random.random(4000) < few, random.gamma(1.2, 1, 4000) * main**rise, 0)
    costs = np.stack([small / small.mean() * main.mean() * share, main][:: 1 if first else -1], axis=1) * 1e9

    def kept(by: np.ndarray) -> np.ndarray:
        """The share of the time in which ranks compute: with one barrier, and with one after either."""
        ordered = costs[balanced_order(by, group=group, before=NOTHING, seed=[seed])]
        steps = ordered[: len(ordered) // group * group].reshape(-1, group, 2)
        lasts = [steps.sum(axis=2).max(axis=1).sum(), steps.max(axis=1).sum()]
        return np.asarray(steps.sum() / group / lasts)

    assert (kept(costs) >= kept(costs.sum(axis=1)) - [0.012, 0.002]).all()


@pytest.mark.parametrize(("share", "images"), [(0.002, 0.4), (0.02, 0.4), (0.02, 0.02)])
def test_what_one_cost_is_worth_is_the_time_that_ranks_wait_for_it(share: float, images: float) -> None:
    random, count = np.random.default_rng(1), 31_000
    language = 1e6 * (random.beta(4, 6, count) * 0.8 + 0.6)
    vision = np.where(random.random(count) < images, random.gamma(1.2, 1, count), 0)
    costs = np.stack([vision / vision.mean() * language.mean() * share, language], axis=1)
    lasts = []
    for by in (costs, costs.sum(axis=1)):
        ordered = costs[balanced_order(by, group=512, before=NOTHING, seed=[0])]
        lasts.append(ordered[: count // 512 * 512].reshape(-1, 512, 2).max(axis=1).sum())
        alone = worst(ordered[:, 1], 512)
        assert alone >= 0.97, alone
    assert lasts[0] < 0.99 * lasts[1]


@pytest.mark.parametrize("count", [ONE, TWO])
@pytest.mark.parametrize(("name", "seed"), [("d32", 0), ("e", 1), ("mix", 2)])
def test_the_mean_of_any_32_steps_is_near_that_of_the_whole(
    mixes: dict[str, np.ndarray], name: str, seed: int, count: int
) -> None:
    costs = told(mixes[name], count)
    group = 64  # hundreds of steps of the largest size
    ordered = costs[balanced_order(costs, group=group, before=NOTHING, seed=[seed])]
    steps = ordered[: len(costs) // group * group].reshape(-1, group, count).mean(axis=1)
    sums = np.concatenate([np.zeros((1, count)), np.cumsum(steps, axis=0)])
    means = (sums[RUN:] - sums[:-RUN]) / RUN / costs.mean(axis=0)
    assert len(means) > 150
    # Blocks differ from the whole by a little, which the walk carries on.
    assert np.abs(means - 1).max() <= SHARE + 0.005


@given(
    costs=st.lists(st.integers(1, 50), max_size=120),
    vision=st.none() | st.integers(0, 5),
    group=st.integers(1, 24),
    before=st.lists(st.integers(1, 50), max_size=50),
    seed=st.integers(0, 5),
)
def test_every_pack_has_one_place_in_every_epoch_and_pass(
    costs: list[int], vision: int | None, group: int, before: list[int], seed: int
) -> None:
    begun, given = np.array(before[: len(before) % group]), np.array(costs)
    if vision is not None:
        begun, given = (np.stack([each % 7 * vision, each], axis=1) for each in (begun, given))
    order = balanced_order(given, group=group, before=begun, seed=[seed])
    assert sorted(order.tolist()) == list(range(len(costs)))
    again = balanced_order(given, group=group, before=begun, seed=[seed])
    assert order.tolist() == again.tolist()
    start, stop = len(before), len(before) + len(costs)
    for position, older in ((stop, False), (start, False), (stop, True)):
        passed = order_again(start, stop, position=position, group=group, seed=[seed], older=older)
        assert sorted(passed.tolist()) == list(range(start, stop))


def epochs_of(costs: np.ndarray, group: int, seed: int, epochs: int = 3) -> np.ndarray:
    """Costs of these packs in the order of a plan of several epochs."""
    planned = costs[:0]
    for epoch in range(epochs):
        before = planned[len(planned) // group * group :]
        chosen = balanced_order(costs, group=group, before=before, seed=[seed, epoch])
        planned = np.concatenate([planned, costs[chosen]])
    return planned


@pytest.mark.parametrize(
    ("count", "packs", "least"),
    [
        *((ONE, 242, 0.98), (ONE, 477, 0.99), (ONE, 1011, 0.993), (ONE, 2420, 0.997)),
        *((TWO, 242, 0.945), (TWO, 477, 0.96), (TWO, 1011, 0.965), (TWO, 2420, 0.98)),
    ],
)
def test_small_epochs_and_what_is_left_of_large_ones_have_even_steps_in_every_epoch_and_pass(
    mixes: dict[str, np.ndarray], count: int, packs: int, least: float
) -> None:
    for seed in range(3):
        costs = np.random.default_rng(seed).choice(told(mixes["d32"], count), packs, replace=False)
        planned = epochs_of(costs, 512, seed)
        passes = [planned[:packs]]
        for later in (1, 2):
            order = order_again(0, packs, position=later * packs, group=512, seed=[seed, later])
            passes.append(passes[0][order])
        for ordered in (planned, np.concatenate(passes)):
            for ranks in (2, 4, 8):
                assert worst(ordered, ranks) >= least, (seed, ranks)


@pytest.mark.parametrize("count", [ONE, TWO])
@pytest.mark.parametrize("group", [96, 384])
def test_the_rest_is_cut_by_the_divisors_of_any_group(mixes: dict[str, np.ndarray], group: int, count: int) -> None:
    costs = np.random.default_rng(0).choice(told(mixes["d32"], count), group - 1, replace=False)
    assert worst(epochs_of(costs, group, 0), 8) >= 0.9
    assert worst(np.random.default_rng(0).permutation(costs), 8) < 0.75


def test_an_order_of_older_versions_is_that_of_their_states() -> None:
    """As main of 2651f827 gave it."""
    packs = order_again(0, 22, position=22, group=8, seed=[7, 1, 0, 5], older=True)
    assert packs.tolist() == [10, 11, 7, 6, 4, 5, 0, 1, 2, 3, 9, 8, 15, 14, 12, 13, 21, 19, 18, 20, 16, 17]
    assert packs.tolist() != order_again(0, 22, position=22, group=8, seed=[7, 1, 0, 5]).tolist()


@pytest.mark.parametrize(("count", "even"), [(ONE, 0.95), (TWO, 0.75)])
def test_a_group_that_two_epochs_share_has_packs_of_similar_cost(
    mixes: dict[str, np.ndarray], count: int, even: float
) -> None:
    costs, group = told(mixes["d32"][:5000], count), 512
    both = epochs_of(costs, group, 0, epochs=2)
    shared = both[len(costs) // group * group :][:group]
    assert worst(shared, group) >= even
    assert (np.random.default_rng(0).permutation(costs)[:group].mean(axis=0) < 0.6 * costs.max(axis=0)).all()
    assert worst(both, group) >= worst(both[: len(costs)], group) - 0.005


@pytest.mark.parametrize("count", [ONE, TWO])
def test_the_order_is_a_fair_shuffle(mixes: dict[str, np.ndarray], count: int) -> None:
    """Where a pack is says nothing about where it is under another seed, or about its costs or its number."""
    costs, group = told(mixes["d32"], count), 16
    places = []
    for seed in range(4):
        place = np.empty(len(costs))
        place[balanced_order(costs, group=group, before=NOTHING, seed=[seed])] = np.arange(len(costs))
        places.append(place)
    # A group moves as a whole: a correlation has the noise of as many numbers as there are groups.
    noise = 4 / np.sqrt(len(costs) / group)
    ranks = [np.argsort(np.argsort(each)) for each in costs.reshape(len(costs), -1).T]
    for at, place in enumerate(places):
        for other in (np.arange(len(costs)), *ranks, *places[at + 1 :]):
            assert abs(np.corrcoef(place, other)[0, 1]) < noise


@pytest.mark.parametrize("count", [ONE, TWO])
def test_every_group_is_shuffled_in_its_own_way(count: int) -> None:
    costs = np.arange(1024.0) if count == ONE else np.stack([np.arange(1024) % 32, np.arange(1024) // 32], axis=1)
    groups = balanced_order(costs, group=64, before=NOTHING, seed=[0]).reshape(16, 64)
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
