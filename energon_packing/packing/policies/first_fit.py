"""Policy ``first_fit``: each sample, in order, goes into the first open pack that holds it.

Good for: comparing with packers that work this way. Each pack's samples are in stream order, but packs stay open to
the end. Cost: two NumPy scans per sample (blocks of packs, then one block), about 10 microseconds.
Measured: 97-99.9 % of the bound's fill on lists of 100,000.
"""

import numpy as np

from energon_packing.packing.constraints import Constraints
from energon_packing.packing.policies import Groups, PackingPolicy

BLOCK = 256  # packs per block: the scan over block maxima and the scan inside a block cost about the same


def pack_first_fit(lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int) -> Groups:
    """The policy: `lengths` int64 ``[N]``; packs in the order in which they were opened."""
    del window, seed  # all packs stay open, deterministic
    costs = np.stack([lengths.astype(np.float64), *(cost.astype(np.float64) for cost in constraints.costs.values())])
    limits = np.array([capacity, *(constraints.limits[name] for name in constraints.costs)], dtype=np.float64)
    width = limits.size
    left = np.full((BLOCK, BLOCK, width), -1.0)
    most = np.full((BLOCK, width), -1.0)
    members: list[list[int]] = []
    for index, cost in enumerate(costs.T):
        blocks = -(-len(members) // BLOCK)
        for block in np.flatnonzero((most[:blocks] >= cost).all(axis=1)).tolist():
            # With several limits, a block's maxima may come from different packs, so no pack in the block may fit.
            fits = (left[block] >= cost).all(axis=1)
            slot = int(fits.argmax())
            if fits[slot]:
                break
        else:
            block, slot = divmod(len(members), BLOCK)
            if block == len(most):
                left = np.concatenate([left, np.full_like(left, -1.0)])
                most = np.concatenate([most, np.full_like(most, -1.0)])
            left[block, slot] = limits
            members.append([])
        members[block * BLOCK + slot].append(index)
        left[block, slot] -= cost
        most[block] = left[block].max(axis=0)
    return [np.array(group, dtype=np.int64) for group in members]


POLICY = PackingPolicy(whole_list=pack_first_fit)
