"""Decides when the share of dropped samples is beyond doubt above what a run allows.

The budget is checked after every drop of a run of any length, so an ordinary confidence bound would sooner or later
stop a good run. The bound used here holds at all times at once (Robbins 1970, from Ville's inequality): while each
sample is bad independently with a probability of at most ``budget``, the chance that

    ``(read + 1) * P[Binomial(read, budget) = dropped] <= FALSE_STOP``   with   ``dropped > budget * read``

is ever true is at most `FALSE_STOP`. Drops found late (a sample in the window whose media cannot be decoded) only make
the count too small, so the statement stays true.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

FALSE_STOP = 1e-6
"""Chance that a worker whose true share is within the budget is ever stopped, however long it runs."""

BUDGET_STARTS_AT = 200
"""Samples read before a budget above 0 is checked: the first samples of an unshuffled split may all come from one bad
file."""


WISHED = ("pair", "labelled_answer", "unwanted_answer")
"""Reasons of samples that ``packing.pairs`` leaves out: the run asked for it, so they are no samples to the budget."""


def unwished(reasons: Mapping[str, int], read: int) -> tuple[Counter[str], int]:
    """What the budget counts: drops by reason, and samples read, both without those that the run left out."""
    counted = Counter({reason: count for reason, count in reasons.items() if reason not in WISHED})
    return counted, read - sum(reasons.values()) + counted.total()


def over_budget(dropped: int, read: int, budget: float) -> bool:
    """Whether more than ``budget`` of the data is dropped, beyond doubt.

    Args:
        dropped: samples dropped so far.
        read: all samples read so far: dropped, emitted, or still held in the window.
        budget: share that may be dropped; 0 allows no drop at all, 1 allows everything.
    """
    if dropped == 0 or budget >= 1.0:
        return False
    if budget <= 0.0:
        return True
    read = max(read, dropped)
    if read < BUDGET_STARTS_AT or dropped <= budget * read:
        return False
    return _evidence(dropped, read, budget) >= -math.log(FALSE_STOP)


def _evidence(dropped: float, read: int, budget: float) -> float:
    """``-log((read + 1) * P[Binomial(read, budget) = dropped])``; ``dropped`` may be a fraction."""
    log_beta = math.lgamma(dropped + 1) + math.lgamma(read - dropped + 1) - math.lgamma(read + 2)
    return log_beta - dropped * math.log(budget) - (read - dropped) * math.log1p(-budget)


def reads_until_stop(share: float, budget: float, *, held: int = 0, luck: float = 1.0) -> int:
    """Samples read until a run stops if ``share`` of its data is bad.

    Args:
        share: share of the data that is dropped; above ``budget``.
        budget: above 0 and below 1.
        held: samples in the window, if they turn out to be bad only after it; 0 if that is seen at once.
        luck: the chance, or slightly more, that a run lasts longer; 1 assumes a run of exactly average luck.

    Raises:
        ValueError: the share is not above the budget, or a number is out of range.
    """
    if not (0.0 < budget < share <= 1.0 and 0.0 < luck <= 1.0):
        raise ValueError(f"share {share} must be above budget {budget}, both in 0..1, and luck {luck} in 0..1")
    # The budget is checked only at a drop, and the first drop after the start may take a while.
    first = BUDGET_STARTS_AT + (0 if share == 1.0 else math.ceil(math.log(luck) / math.log1p(-share)))
    low, high = first - 1, first
    while not _stops(high, high - held, share, budget, luck):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _stops(middle, middle - held, share, budget, luck) else (middle, high)
    return high


def _stops(read: int, judged: int, share: float, budget: float, luck: float) -> bool:
    dropped = _fewest(judged, share, luck) if judged > 0 else 0.0
    return dropped > budget * read and _evidence(dropped, read, budget) >= -math.log(FALSE_STOP)


def _fewest(read: int, share: float, luck: float) -> float:
    """A number of drops that a run stays below with a chance of at most ``luck``, by Chernoff's bound."""
    low, high = 0.0, share
    wanted = -math.log(luck) / read
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _divergence(middle, share) > wanted else (low, middle)
    return high * read


def _divergence(found: float, share: float) -> float:
    """Kullback-Leibler divergence of two coins, in nats."""
    first = found * math.log(found / share) if found > 0.0 else 0.0
    if found >= 1.0:
        return first
    return math.inf if share >= 1.0 else first + (1.0 - found) * math.log((1.0 - found) / (1.0 - share))
