"""Steps of equal cost on all ranks, without communication.

A step lasts as long as its slowest rank, and packs of equal length differ in attention cost. Each rank sorts blocks of
W finished packs by cost and emits them in *serpentine* order: one block ascending, the next descending. At every step
the ranks then process packs from a similar place in the cost order. This holds even if a rank is a few packs ahead,
because the order has no jump between blocks.

Costs are in token units of one transformer: a segment of L tokens costs ``LINEAR * L + L**2``.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from energon_packing.errors import ConfigError

# A layer of hidden size h spends 24 h^2 FLOPs per token on matrices and 4 h L on attention, so attention over 6 h
# tokens costs as much as the matrices. This is 6 * 4096, for a 7B model.
LINEAR = 24576
# A patch in a vision tower with 32 layers of hidden size 1280, for a model with 32 layers of 4096, costs
# 24 * 1280^2 / (24 * 4096^2) of a token's matrices. The tower's attention is windowed in recent models and left out.
PATCH = 2400

Order = Literal["none", "ascending", "serpentine"]
ORDERS: tuple[Order, ...] = ("none", "ascending", "serpentine")


def pack_cost(
    lengths: Sequence[int] | np.ndarray, *, patches: int = 0, linear: int = LINEAR, patch: int = PATCH
) -> int:
    """Cost of one pack: `linear` for each token of its segments, the square of each length, and `patch` for each of the
    vision patches of its media, before merging."""
    return sum(linear * int(length) + int(length) ** 2 for length in lengths) + patch * patches


def serpentine_order(costs: Sequence[int | float] | np.ndarray, block: int) -> list[int]:
    """The order in which block number `block` of finished packs is emitted: positions, each once.

    Costs ascend in even blocks and descend in odd ones; packs of equal cost keep their order (reversed in odd blocks).
    All ranks must use the same W and count blocks from the same start.
    """
    order = np.argsort(np.asarray(costs), kind="stable")
    return [int(position) for position in (order if block % 2 == 0 else order[::-1])]


def emission_order(costs: np.ndarray, window: int, order: Order = "serpentine") -> np.ndarray:
    """The order in which one rank emits all its packs: positions ``[N]`` int64, one block of `window` after another."""
    if window < 1:
        raise ConfigError(f"balance window must hold at least 1 pack, not {window}")
    if order not in ORDERS:
        raise ConfigError(f"unknown emission order {order!r}, known: {', '.join(ORDERS)}")
    positions = np.arange(len(costs))
    for block, start in enumerate(range(0, 0 if order == "none" else len(costs), window)):
        number = block if order == "serpentine" else 0
        positions[start : start + window] = start + np.array(serpentine_order(costs[start : start + window], number))
    return positions


def step_efficiency(costs: np.ndarray) -> float:
    """Share of the time in which ranks do not wait: mean cost divided by the slowest rank's, from costs
    ``[ranks, steps]``."""
    return float(costs.mean(axis=0).sum() / costs.max(axis=0).sum())


class StepReport(NamedTuple):
    """``efficiency``: share of the time in which ranks compute. ``drift``: (p95 - p5) / mean of the cost of a step, the
    price of sorting: cost rises and falls over 2 W steps."""

    efficiency: float
    drift: float


def simulate_steps(
    pool: Sequence[int | float] | np.ndarray,
    *,
    ranks: int,
    window: int,
    order: Order = "serpentine",
    max_shift: int = 0,
    blocks: int = 20,
    seed: int = 0,
) -> StepReport:
    """Step efficiency when each rank draws its packs from one distribution of pack costs.

    Args:
        pool: costs of the data set's packs, for example from `pack_cost`; each rank draws from it with replacement.
        window: packs that a rank sorts at a time.
        order: ``"serpentine"``, ``"ascending"`` (sorted, with a jump from block to block) or ``"none"``.
        max_shift: each rank is ahead by a number of packs drawn from 0 to this; a rank gets ahead when one of its packs
            is lost to a failing sample.
        blocks: length of the simulation in blocks of `window` (of 64 if the window is smaller).
    """
    costs = np.asarray(pool, dtype=np.float64)
    if costs.size == 0:
        raise ConfigError("the pool of pack costs is empty")
    if ranks < 1 or blocks < 1 or max_shift < 0:
        raise ConfigError(f"ranks and blocks are at least 1, max_shift at least 0: not {ranks}, {blocks}, {max_shift}")
    random = np.random.default_rng(seed)
    steps = blocks * max(window, 64)
    carried = np.empty((ranks, steps))
    for rank in range(ranks):
        drawn = random.choice(costs, size=steps + max_shift)
        shift = int(random.integers(0, max_shift + 1))
        carried[rank] = drawn[emission_order(drawn, window, order)][shift : shift + steps]
    low, high = np.percentile(carried.mean(axis=0), [5, 95])
    return StepReport(step_efficiency(carried), float((high - low) / carried.mean()))
