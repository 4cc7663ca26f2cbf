"""Cost-balanced emission and the figures of a packing."""

import numpy as np
import pytest

from energon_packing.errors import ConfigError
from energon_packing.packing import PackStatistics, pack_cost, pack_lengths, serpentine_order, simulate_steps
from energon_packing.packing.balance import emission_order, step_efficiency


def _costs(count: int = 5000) -> np.ndarray:
    """Costs of packs of equal length, some of one long sample and some of many short ones."""
    random = np.random.default_rng(1)
    return 24576.0 * 32768 + 32768.0**2 * random.beta(0.6, 2.0, count)


def test_blocks_rise_and_fall_in_turn() -> None:
    assert serpentine_order([3, 1, 2], 0) == [1, 2, 0]
    assert serpentine_order([3, 1, 2], 1) == [0, 2, 1]
    assert emission_order(np.array([3, 1, 2, 3, 1, 2, 9]), 3).tolist() == [1, 2, 0, 3, 5, 4, 6]


@pytest.mark.parametrize("window", [1, 2, 7, 64])
@pytest.mark.parametrize("order", ["none", "ascending", "serpentine"])
def test_every_pack_is_emitted_once_whatever_the_order(window: int, order: str) -> None:
    costs = np.random.default_rng(0).random(100)
    assert sorted(emission_order(costs, window, order).tolist()) == list(range(100))  # type: ignore[arg-type]


def test_a_pack_is_emitted_within_its_own_block() -> None:
    order = emission_order(np.random.default_rng(0).random(100), 16)
    assert all(position // 16 == place // 16 for place, position in enumerate(order.tolist()))


def test_step_efficiency_is_mean_over_maximum() -> None:
    assert step_efficiency(np.array([[1.0, 3.0], [2.0, 3.0]])) == pytest.approx(4.5 / 5)


@pytest.mark.parametrize("ranks", [8, 64])
def test_sorted_blocks_make_ranks_wait_less_also_when_they_are_shifted(ranks: int) -> None:
    plain = simulate_steps(_costs(), ranks=ranks, window=1, order="none")
    sorted_ = simulate_steps(_costs(), ranks=ranks, window=64)
    shifted = simulate_steps(_costs(), ranks=ranks, window=64, max_shift=2)
    jumping = simulate_steps(_costs(), ranks=ranks, window=64, max_shift=2, order="ascending")
    assert 1 - sorted_.efficiency < 0.4 * (1 - plain.efficiency)
    assert shifted.efficiency > sorted_.efficiency - 0.01
    assert shifted.efficiency > jumping.efficiency
    assert sorted_.drift > plain.drift


def test_impossible_simulations_are_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        simulate_steps([], ranks=2, window=4)
    with pytest.raises(ConfigError, match="'random', known"):
        simulate_steps([1.0], ranks=2, window=4, order="random")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1 pack"):
        simulate_steps([1.0], ranks=2, window=0)


def test_cost_grows_with_the_square_of_each_segment_and_with_patches() -> None:
    assert pack_cost([2, 3], linear=10) == 10 * 5 + 4 + 9
    assert pack_cost(np.array([2], dtype=np.int32), patches=7, linear=0, patch=2) == 4 + 14
    assert pack_cost(np.array([60_000], dtype=np.int32), linear=0) == 3_600_000_000


def test_padding_is_told_apart_by_its_cause() -> None:
    # Two packs of 16: real 5 + 3 of aligned 8 + 4, and real 9 of aligned 12.
    figures = PackStatistics.of([[0, 1], [2]], [8, 4, 12], 16, real_lengths=[5, 3, 9])
    assert figures.fill == pytest.approx(17 / 32)
    assert figures.alignment_padding == pytest.approx(7 / 32)
    assert figures.tail_padding == pytest.approx(8 / 32)
    assert figures.fill + figures.alignment_padding + figures.tail_padding == pytest.approx(1)


def test_delay_counts_the_samples_that_came_in_between() -> None:
    # Sample 0 leaves with 3, so three came after it; 1 and 2 leave next, nothing newer has come than 3.
    figures = PackStatistics.of([[0, 3], [1, 2]], [1, 1, 1, 1], 2)
    assert (figures.delay_max, figures.held) == (3, 4)
    in_order = PackStatistics.of([[0, 1], [2, 3]], [1, 1, 1, 1], 2)
    assert (in_order.delay_max, in_order.held) == (1, 2)


def test_a_window_holds_no_more_than_it_says() -> None:
    lengths = np.random.default_rng(2).integers(1, 500, 3000)
    figures = PackStatistics.of(pack_lengths(lengths, 2048, "window", window=64), lengths, 2048)
    assert figures.held <= 64
    assert figures.samples == 3000


def test_nothing_packed_has_figures_too() -> None:
    assert PackStatistics.of([], [], 8).packs == 0
