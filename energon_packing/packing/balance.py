"""Steps of equal cost on all ranks, without communication.

A step lasts as long as its slowest rank, and packs of equal length differ in attention cost. Each rank sorts blocks of
W finished packs by cost and emits them in *serpentine* order: one block ascending, the next descending. At every step
the ranks then process packs from a similar place in the cost order. This holds even if a rank is a few packs ahead,
because the order has no jump between blocks.

Costs are in token units of one transformer: a segment of L tokens costs ``LINEAR * L + L**2``.
"""

from collections.abc import Sequence

import numpy as np

# A layer of hidden size h spends 24 h^2 FLOPs per token on matrices and 4 h L on attention, so attention over 6 h
# tokens costs as much as the matrices. This is 6 * 4096, for a 7B model.
LINEAR = 24576
# A patch in a vision tower with 32 layers of hidden size 1280, for a model with 32 layers of 4096, costs
# 24 * 1280^2 / (24 * 4096^2) of a token's matrices. The tower's attention is windowed in recent models and left out.
PATCH = 2400


def pack_cost(
    lengths: Sequence[int] | np.ndarray, *, patches: int = 0, linear: int = LINEAR, patch: int = PATCH
) -> int:
    """Cost of one pack: `linear` for each token of its segments, the square of each length, and `patch` for each of the
    vision patches of its media, before merging."""
    return sum(linear * int(length) + int(length) ** 2 for length in lengths) + patch * patches


def serpentine_order(costs: Sequence[int | float] | np.ndarray, block: int) -> list[int]:
    """The order in which block number `block` of finished packs is emitted: positions, each once. Costs ascend in even
    blocks and descend in odd ones; packs of equal cost keep their order (reversed in odd blocks). All ranks must use
    the same W and count blocks from the same start."""
    order = np.argsort(np.asarray(costs), kind="stable")
    return [int(position) for position in (order if block % 2 == 0 else order[::-1])]


def step_efficiency(costs: np.ndarray) -> float:
    """Share of time in which ranks do not wait: mean cost by the slowest rank's, of costs ``[ranks, steps]``."""
    return float(costs.mean(axis=0).sum() / costs.max(axis=0).sum())
