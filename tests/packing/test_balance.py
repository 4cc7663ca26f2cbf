"""Cost-balanced emission."""

import numpy as np
import pytest

from energon_packing.packing import pack_cost, serpentine_order
from energon_packing.packing.balance import step_efficiency


def test_blocks_rise_and_fall_in_turn() -> None:
    assert serpentine_order([3, 1, 2], 0) == [1, 2, 0]
    assert serpentine_order([3, 1, 2], 1) == [0, 2, 1]


def test_step_efficiency_is_mean_over_maximum() -> None:
    assert step_efficiency(np.array([[1.0, 3.0], [2.0, 3.0]])) == pytest.approx(4.5 / 5)


def test_cost_grows_with_the_square_of_each_segment_and_with_patches() -> None:
    assert pack_cost([2, 3], linear=10) == 10 * 5 + 4 + 9
    assert pack_cost(np.array([2], dtype=np.int32), patches=7, linear=0, patch=2) == 4 + 14
    assert pack_cost(np.array([60_000], dtype=np.int32), linear=0) == 3_600_000_000
