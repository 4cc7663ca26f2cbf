"""What no packer can beat."""

from collections.abc import Sequence

import numpy as np

from energon_packing.packing.constraints import Constraints


def lower_bound(lengths: Sequence[int] | np.ndarray, capacity: int, constraints: Constraints | None = None) -> int:
    """Fewest packs that the samples can need: Martello and Toth's L2, and for each further limit total cost over limit.

    For each threshold K up to half the capacity, L2 counts the samples that cannot share with a sample of K or more,
    the other samples above half the capacity, and whatever of the rest does not fit beside the latter.

    Source: S. Martello, P. Toth, "Lower bounds and reduction procedures for the bin packing problem" (1990).
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if tokens.size == 0:
        return 0
    constraints = constraints or Constraints()
    bounds = [_martello_toth(tokens, capacity)]
    for name, cost in constraints.costs.items():
        if (limit := constraints.limits[name]) > 0:
            # A float sum may exceed a whole number of packs by a rounding error, which must not count as another pack.
            bounds.append(int(np.ceil(float(cost.sum()) / limit - 1e-9)))
    return max(bounds)


def _martello_toth(tokens: np.ndarray, capacity: int) -> int:
    counts = np.bincount(tokens, minlength=capacity + 1)
    sums = counts * np.arange(counts.size)
    # number[x] and total[x]: samples of at most x tokens
    number, total = np.cumsum(counts), np.cumsum(sums)
    half = capacity // 2
    threshold = np.arange(half + 1)
    alone = number[capacity] - number[capacity - threshold]
    large = number[capacity - threshold] - number[half]
    large_sum = total[capacity - threshold] - total[half]
    below = np.where(threshold > 0, total[np.maximum(threshold - 1, 0)], 0)
    rest = total[half] - below
    overflow = np.maximum(0, rest - (large * capacity - large_sum))
    return int((alone + large + -(-overflow // capacity)).max())
