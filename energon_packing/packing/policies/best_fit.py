"""Policy ``best_fit``: best-fit decreasing over a whole list; the default offline.

Good for: lists that are fully known. Cost: O(N + C), about 0.1-0.3 microseconds per sample at a million samples.
Measured: the packs of textbook best-fit decreasing, 99.9-100 % of the bound's fill on lists of 100,000.

With limits other than tokens, this becomes vector bin packing. Best-fit decreasing by the largest share then wastes
20-30 % of the packs (measured on multimodal mixes with limited images), because it fills packs with one resource and
leaves them empty in the other. Under such limits ``window`` therefore replaces it, which packs 1-4 % above the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from energon_packing.packing.constraints import Constraints
from energon_packing.packing.decreasing import best_fit_decreasing
from energon_packing.packing.policies import PackingPolicy
from energon_packing.packing.policies.window import pack_window

# Samples that ``window`` holds under limits; more would be slower and fill hardly better.
LIMITED_WINDOW = 1024


def pack_best_fit(
    lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int
) -> Sequence[np.ndarray]:
    """The policy: `lengths` int64 ``[N]``; packs in the order of their oldest sample. `window` is not used."""
    del window  # a whole list
    if constraints:
        return pack_window(lengths, capacity, constraints, window=LIMITED_WINDOW, seed=seed)
    return best_fit_decreasing(lengths, capacity)


POLICY = PackingPolicy(whole_list=pack_best_fit)
