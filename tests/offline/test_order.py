"""The order of packs: even steps at every data-parallel size, a level mean, and a fair shuffle."""

from __future__ import annotations

import numpy as np
import pytest
from bench.length_lists import synthetic_list
from bench.offline_index import drawn_mix
from hypothesis import given
from hypothesis import strategies as st

from energon_packing.offline.order import RUN, SHARE, balanced_order, incomplete_group
from energon_packing.offline.planner import efficiency_of
from energon_packing.packing.balance import LINEAR, PATCH
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


@pytest.mark.parametrize("name", ["d32", "e", "mix"])
@pytest.mark.parametrize("seed", range(4))
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
