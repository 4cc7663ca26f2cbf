"""The drop budget's rule: never a false stop, always a true one, at any number of reads.

The oracles are the binomial distribution of SciPy, and the exact probability that a run is ever stopped, summed over
all runs.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_packing.drops import BUDGET_STARTS_AT, FALSE_STOP, over_budget

BUDGETS = (0.01, 0.1, 0.5, 0.9)


def limits(budget: float, reads: int) -> list[int]:
    """For each number of reads the smallest number of drops that stops a run; more than all where none does."""
    found, dropped = [], 0
    for read in range(reads + 1):
        if read < BUDGET_STARTS_AT:
            found.append(read + 1)
            continue
        while dropped <= read and not over_budget(dropped, read, budget):
            dropped += 1  # it never falls: more reads excuse more drops
        found.append(dropped)
    return found


def chance_of_a_stop(share: float, budget: float, reads: int) -> float:
    """Exact: the distribution of the drops of all runs that go on, sample by sample."""
    limit = limits(budget, reads)
    alive, stopped = np.zeros(reads + 2), 0.0
    alive[0] = 1.0
    for read in range(1, reads + 1):
        alive[1:] = alive[1:] * (1 - share) + alive[:-1] * share
        alive[0] *= 1 - share
        stopped += float(alive[limit[read] :].sum())
        alive[limit[read] :] = 0.0
    return stopped


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_share_within_the_budget_is_never_stopped(budget: float) -> None:
    for share in (budget, 0.9 * budget):
        assert chance_of_a_stop(share, budget, 4000) <= FALSE_STOP


@pytest.mark.parametrize(
    ("share", "budget", "usual", "late"),
    [(0.05, 0.01, 423, 1179), (0.2, 0.1, 378, 954), (0.3, 0.1, 200, 275), (0.7, 0.5, 200, 460), (1.0, 0.9, 200, 200)],
)
def test_a_share_above_the_budget_is_stopped_within_the_stated_number_of_reads(
    share: float, budget: float, usual: int, late: int
) -> None:
    assert chance_of_a_stop(share, budget, usual) > 0.4
    assert chance_of_a_stop(share, budget, late) >= 0.98


@given(budget=st.floats(0.001, 0.999), read=st.integers(1, 10**6), data=st.data())
def test_the_rule_is_the_binomial_probability_that_its_page_gives(
    budget: float, read: int, data: st.DataObject
) -> None:
    binom = pytest.importorskip("scipy.stats").binom
    near = int(read * budget + 8 * (read * budget) ** 0.5) + 20
    dropped = data.draw(st.integers(0, min(near, read)))
    evidence = np.log(read + 1) + binom.logpmf(dropped, read, budget)
    if abs(evidence - np.log(FALSE_STOP)) < 1e-5:
        return  # too near for the last digits of either
    expected = read >= BUDGET_STARTS_AT and dropped > budget * read and evidence <= np.log(FALSE_STOP)
    assert over_budget(dropped, read, budget) == expected
