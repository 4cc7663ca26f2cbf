"""What holds for every list of lengths, whatever the policy.

ENERGON_PACKING_EXAMPLES sets how many random lists each property sees: 50 by default, 10,000 before a release.
"""

import math
import os
from collections.abc import Iterator
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.packing import (
    WindowPacker,
    check_groups,
    drain_window,
    lower_bound,
    pack_lengths,
    pack_stream,
    policy_names,
    register_policy,
)
from energon_packing.packing.constraints import Constraints, PackLimits
from energon_packing.packing.online import next_of_copies, next_pack, sliding_packs
from energon_packing.packing.policies.best_fit import pack_limited
from energon_packing.packing.policies.window import fill_exactly, fill_two
from energon_packing.packing.whole_list import dealt

MANY = settings(max_examples=int(os.environ.get("ENERGON_PACKING_EXAMPLES", "50")), deadline=None)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Lengths, a capacity that holds each of them, a window."""
    capacity = draw(st.integers(1, 80))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=60))
    return lengths, capacity, draw(st.integers(1, 20))


@st.composite
def limited_problems(draw: st.DrawFn) -> tuple[list[int], int, int, dict[str, tuple[list[float], float]]]:
    """The same with up to three limits: small whole images, fractional bytes, large squares."""
    lengths, capacity, window = draw(problems())
    size = len(lengths)
    limits: dict[str, tuple[list[float], float]] = {}
    if draw(st.booleans()):
        limit = draw(st.integers(1, 12))
        limits["images"] = (draw(st.lists(st.integers(0, limit), min_size=size, max_size=size)), limit)
    if draw(st.booleans()):
        shares = st.floats(0, 1, allow_nan=False, width=16)
        limits["bytes"] = (draw(st.lists(shares, min_size=size, max_size=size)), 1.0)
    if draw(st.booleans()):
        limits["attention"] = ([length * length for length in lengths], capacity * capacity)
    return lengths, capacity, window, limits


def assert_packs_are_right(
    groups: list[np.ndarray],
    lengths: list[int],
    capacity: int,
    limits: dict[str, tuple[list[float], float]] | None = None,
) -> None:
    assert sorted(int(index) for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[index] for index in group) <= capacity
        for cost, limit in (limits or {}).values():
            assert sum(cost[index] for index in group) <= limit * (1 + 1e-9)


@pytest.mark.parametrize("policy", policy_names())
@given(problem=problems())
@MANY
def test_each_sample_is_in_exactly_one_pack_and_no_pack_is_over_capacity(policy: str, problem) -> None:  # type: ignore[no-untyped-def]
    lengths, capacity, window = problem
    groups = pack_lengths(lengths, capacity, policy, window=window)
    assert_packs_are_right(groups, lengths, capacity)
    assert all(group.dtype == np.int64 for group in groups)
    assert len(groups) >= lower_bound(lengths, capacity)


@pytest.mark.parametrize("policy", policy_names())
@given(problem=limited_problems())
@MANY
def test_each_pack_keeps_every_limit(policy: str, problem) -> None:  # type: ignore[no-untyped-def]
    lengths, capacity, window, limits = problem
    groups = pack_lengths(lengths, capacity, policy, window=window, constraints=limits)
    assert_packs_are_right(groups, lengths, capacity, limits)
    again = pack_lengths(np.array(lengths, dtype=np.int32), capacity, policy, window=window, constraints=limits)
    assert [group.tolist() for group in again] == [group.tolist() for group in groups]


def _naive_best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Free tokens of each pack."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [room for room in left if room >= length]
        if fits:
            left[left.index(min(fits))] -= length
        else:
            left.append(capacity - length)
    return left


@given(problem=problems())
@MANY
def test_best_fit_leaves_the_gaps_of_textbook_best_fit_decreasing(problem) -> None:  # type: ignore[no-untyped-def]
    lengths, capacity, _ = problem
    groups = pack_lengths(lengths, capacity, "best_fit")
    left = [capacity - sum(lengths[index] for index in group) for group in groups]
    assert sorted(left) == sorted(_naive_best_fit_decreasing(lengths, capacity))


def _fit(lengths: list[int], left: list[int]) -> bool:
    """Whether all samples find room, tried in every way; packs with equal room are one choice."""
    if not lengths:
        return True
    first, *others = lengths
    choices = {room: at for at, room in enumerate(left) if room >= first}
    return any(_fit(others, [*left[:at], room - first, *left[at + 1 :]]) for room, at in choices.items())


@given(st.integers(1, 20).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1, max_size=8))))
@MANY
def test_the_lower_bound_is_never_above_the_optimum(problem: tuple[int, list[int]]) -> None:
    capacity, lengths = problem
    ordered = sorted(lengths, reverse=True)
    fewest = next(count for count in range(len(lengths) + 1) if _fit(ordered, [capacity] * count))
    assert lower_bound(lengths, capacity) <= fewest


@given(st.lists(st.integers(1, 40), max_size=10), st.integers(0, 90))
@MANY
def test_subset_sum_finds_the_brute_force_optimum(lengths: list[int], room: int) -> None:
    sums = [sum(subset) for size in range(len(lengths) + 1) for subset in combinations(lengths, size)]
    chosen = fill_exactly(lengths, room, range(len(lengths)))
    assert len(set(chosen)) == len(chosen)
    assert sum(lengths[position] for position in chosen) == max(total for total in sums if total <= room)
    if room and sum(lengths[position] for position in chosen) == room:  # of the oldest samples that fit exactly
        before = lengths[: max(chosen)]
        assert room not in {sum(some) for size in range(len(before) + 1) for some in combinations(before, size)}


def _subsets(positions: range) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(positions, size) for size in range(len(positions) + 1))


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), max_size=9),
    st.integers(0, 60),
    st.integers(0, 8),
    st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)),
)
@MANY
def test_two_dimensional_subset_sum_finds_the_brute_force_optimum(
    samples: list[tuple[int, int]], room: int, unit_room: int, weights: tuple[float, float]
) -> None:
    lengths, units = [sample[0] for sample in samples], [sample[1] for sample in samples]

    def waste(subset: tuple[int, ...] | list[int]) -> float:
        left = room - sum(lengths[position] for position in subset)
        unit_left = unit_room - sum(units[position] for position in subset)
        if left < 0 or unit_left < 0:
            return float("inf")
        return left * weights[0] / max(room, 1) + unit_left * weights[1] / max(unit_room, 1)

    positions = range(len(samples))
    best = min(map(waste, _subsets(positions)))
    offered = [(position, *samples[position]) for position in positions]
    chosen = fill_two(offered, room, unit_room, weights=weights)
    assert len(set(chosen)) == len(chosen)
    assert waste(chosen) == pytest.approx(best, abs=1e-9)
    # The first subset within what may stay free, of the shortest prefix, wins; if there is none, nothing is lost.
    spare = room // 4, unit_room // 4
    chosen = fill_two(offered, room, unit_room, weights=weights, spare=spare)

    def full(subset: tuple[int, ...] | list[int]) -> bool:
        left = room - sum(lengths[position] for position in subset)
        unit_left = unit_room - sum(units[position] for position in subset)
        return 0 <= left <= spare[0] and 0 <= unit_left <= spare[1]

    prefixes = (size for size in range(len(samples) + 1) if any(map(full, _subsets(range(size)))))
    if (shortest := next(prefixes, None)) is None:
        assert waste(chosen) < math.inf
    else:
        assert full(chosen)
        assert max(chosen, default=-1) < shortest


@given(
    st.integers(1, 60).flatmap(
        lambda capacity: st.tuples(
            st.just(capacity),
            st.lists(st.integers(0, 9), min_size=1, max_size=4),
            st.lists(
                st.tuples(st.integers(1, capacity), st.lists(st.integers(0, 9), min_size=4, max_size=4)), max_size=50
            ),
        )
    )
)
@MANY
def test_no_limit_is_exceeded_where_others_are_used_up_or_zero(problem) -> None:  # type: ignore[no-untyped-def]
    capacity, limits, samples = problem
    lengths = np.array([length for length, _ in samples], dtype=np.int64)
    # Most cost nothing of a limit, and some all of it.
    costs = {
        str(at): np.array([cost[at] * (cost[at] <= limit) for _, cost in samples], dtype=np.int64)
        for at, limit in enumerate(limits)
    }
    constraints = Constraints(costs=costs, limits={str(at): limit for at, limit in enumerate(limits)})
    check_groups(pack_limited(lengths, capacity, constraints), lengths, capacity, constraints)
    pairs = {name: (cost, constraints.limits[name]) for name, cost in costs.items()}
    check_groups(pack_lengths(lengths, capacity, "window", window=9, constraints=pairs), lengths, capacity, constraints)


def test_integers_beyond_those_of_floats_keep_their_limit() -> None:
    packs = pack_lengths([1, 1], 10, "window", constraints={"bytes": ([2**53, 4], 2**53 + 3)})
    assert [pack.tolist() for pack in packs] == [[0], [1]]


@given(problem=limited_problems(), cut=st.integers(0, 60))
@MANY
def test_a_packer_restored_from_its_state_goes_on_as_if_nothing_had_happened(problem, cut: int) -> None:  # type: ignore[no-untyped-def]
    lengths, capacity, window, limits = problem
    bounds = {name: limit for name, (_, limit) in limits.items()}
    packer: WindowPacker[int] = WindowPacker(capacity, window, bounds)
    packs = []
    for index, length in enumerate(lengths):
        if index == cut:
            state = packer.state()
            packer = WindowPacker(capacity, window, bounds)
            packer.load_state(state)
        packer.add(index, length, {name: cost[index] for name, (cost, _) in limits.items()})
        if packer.full:
            oldest = packer.state()["keys"][0]
            packs.append(packer.next_pack())
            assert packs[-1][0] == oldest
            assert packs[-1] == sorted(packs[-1])
    packs += packer.drain()
    expected = pack_lengths(lengths, capacity, "window", window=window, constraints=limits)
    assert packs == [group.tolist() for group in expected]


@given(problem=limited_problems())
@MANY
def test_draining_pack_by_pack_gives_the_packs_of_draining_at_once(problem) -> None:  # type: ignore[no-untyped-def]
    lengths, capacity, _, limits = problem
    bounds = {name: limit for name, (_, limit) in limits.items()}

    def columns(indices: list[int]) -> dict[str, list[float]]:
        return {name: [cost[index] for index in indices] for name, (cost, _) in limits.items()}

    left = list(range(len(lengths)))
    at_once = drain_window(lengths, capacity, columns(left), bounds)
    one_by_one = []
    while left:
        first = drain_window([lengths[index] for index in left], capacity, columns(left), bounds)[0]
        one_by_one.append([left[position] for position in first])
        left = [index for index in left if index not in one_by_one[-1]]
    assert one_by_one == at_once


@given(problem=problems())
@MANY
def test_a_stream_is_packed_as_the_list_of_its_samples(problem) -> None:  # type: ignore[no-untyped-def]
    lengths, capacity, window = problem
    samples = [(index, length) for index, length in enumerate(lengths)]
    packs = list(pack_stream(iter(samples), capacity, length=lambda sample: sample[1], window=window))
    expected = pack_lengths(lengths, capacity, "window", window=window)
    assert [[sample[0] for sample in pack] for pack in packs] == [group.tolist() for group in expected]


@given(problem=problems(), multiple=st.sampled_from([2, 8, 64]))
@MANY
def test_aligned_lengths_pack_as_their_units_do(problem, multiple: int) -> None:  # type: ignore[no-untyped-def]
    lengths, capacity, window = problem
    for policy in policy_names():
        units = pack_lengths(lengths, capacity, policy, window=window)
        tokens = pack_lengths([n * multiple for n in lengths], capacity * multiple, policy, window=window)
        assert [group.tolist() for group in units] == [group.tolist() for group in tokens]


@given(problem=problems(), multiple=st.sampled_from([1, 4, 16]))
@MANY
def test_no_pack_of_a_sliding_window_is_over_its_row_after_alignment(problem, multiple: int) -> None:  # type: ignore[no-untyped-def]
    lengths, units, window = problem
    limits = PackLimits(tokens=units * multiple, multiple=multiple)
    samples = [_Sample(max(1, length * multiple - length % multiple)) for length in lengths]
    for policy in ("window", "best_fit", "next_fit"):
        for pack in _slide(policy, samples, limits, window):
            assert sum(-(-sample.length // multiple) * multiple for sample in pack) <= units * multiple


class _Sample:
    images = patches = 0

    def __init__(self, length: int) -> None:
        self.length = length


def _slide(policy: str, samples: list[_Sample], limits: PackLimits, window: int) -> list[list[_Sample]]:
    """All packs of a window that is kept full; checks that each sample is in one of them and none waits too long."""
    held: list[int] = []
    packs, came, waited = [], 0, dict.fromkeys(range(len(samples)), 0)
    while held or came < len(samples):
        while len(held) < window and came < len(samples):
            held.append(came)
            came += 1
        units = [limits.length_units(samples[index]) for index in held]
        chosen = next_pack(policy, units, limits.units, ended=came == len(samples))
        assert chosen[0] == 0
        packs.append([samples[held[position]] for position in chosen])
        held = [index for position, index in enumerate(held) if position not in set(chosen)]
        for index in held:
            waited[index] += 1
            assert waited[index] < window
    assert sorted(map(id, samples)) == sorted(id(sample) for pack in packs for sample in pack)
    return packs


@given(problem=limited_problems(), data=st.data())
@MANY
def test_no_sample_that_comes_several_times_meets_itself_in_a_pack(problem, data) -> None:  # type: ignore[no-untyped-def]
    lengths, capacity, window, pairs = problem
    size = st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths))
    numbers = np.array(data.draw(size), dtype=np.int64)
    limits = Constraints.from_pairs(pairs, len(lengths))
    packs = [*sliding_packs(numbers, np.array(lengths, dtype=np.int64), capacity, limits, window=window)]
    assert_packs_are_right(packs, lengths, capacity, pairs)
    parts = dealt(numbers)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for held in (*packs, *parts):
        assert len(set(numbers[held].tolist())) == len(held)
        assert held.tolist() == sorted(held.tolist())


@pytest.mark.parametrize("policy", policy_names())
@given(problem=limited_problems(), draw=st.data(), ended=st.booleans())
@MANY
def test_copies_are_offered_only_where_all_samples_together_leave_a_part_of_a_row(policy, problem, draw, ended) -> None:
    """A sixteenth of it, and of each limit; most of the window are copies, and the source goes on."""
    lengths, capacity, _, limited = problem
    if not lengths:
        return
    numbers = np.array(draw.draw(st.lists(st.integers(0, min(3, len(lengths) - 1)), min_size=1, max_size=60)))
    own = [lengths[at] for at in numbers]
    costs = {name: [cost[at] for at in numbers] for name, (cost, _) in limited.items()}
    limits = {name: limit for name, (_, limit) in limited.items()}
    pack, once = (
        next_of_copies(policy, numbers, own, capacity, costs, limits, ended=ended, copies=copies)
        for copies in (True, False)
    )
    first = sorted(np.unique(numbers, return_index=True)[1].tolist())
    assert {*once} <= {*first}, "no number twice"
    columns = [(own, capacity), *((costs[name], limits[name]) for name in limits)]
    few = all(sum(column[at] for at in first) < 15 / 16 * limit for column, limit in columns)
    if ended or not few or 2 * len(first) >= len(numbers):
        assert pack == once
    else:
        assert pack == sorted({0, *pack})
        assert all(sum(column[at] for at in pack) <= limit + 1e-9 for column, limit in columns)
        assert sum(own[at] for at in pack) >= sum(own[at] for at in once)


def test_rows_of_few_samples_stay_full_and_a_policy_of_ones_own_decides_on_copies() -> None:
    """Also once the short samples of the first windows are used up."""
    numbers = np.concatenate([np.random.default_rng(at).permutation(3) for at in range(1000)])
    lengths = np.array([21, 24, 32])[numbers]
    packs = [*sliding_packs(numbers, lengths, 100, Constraints(), window=128, steady=True)]
    late = packs[len(packs) // 2 :]
    assert sum(lengths[pack].sum() for pack in late) > 95 * len(late)
    most = 16_000
    shapes = np.where(numbers[:256] == 1, [[1], [100], [80]], 0)
    padded = next_of_copies("window", numbers[:256], [40] * 256, 2048, {}, {}, ended=False, padding=(shapes, most))
    assert len(padded) == 51
    assert shapes[0, padded].sum() * 8000 <= most
    pairs = register_policy("pairs", next_pack=lambda lengths, *_, **__: [*range(min(2, len(lengths)))])
    pairs(lambda lengths, *_, **__: [np.array([at]) for at in range(len(lengths))])
    assert next_of_copies("pairs", numbers, lengths.tolist(), 999, {}, {}, ended=False) == [0, 1]
