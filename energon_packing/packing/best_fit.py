"""Policy ``best_fit``: best-fit decreasing over a whole list; the default offline.

Good for: lists that are known as a whole. Cost: O(N + C), about 0.1-0.3 microseconds a sample at a million samples.
Measured: the packs of textbook best-fit decreasing, 99.9-100 % of the bound's fill on lists of 100,000.

With further limits this is vector bin packing, where best-fit decreasing by the largest share wastes 20-30 % of the
packs (measured on multimodal mixes with images limited): it fills packs in one respect and leaves them empty in the
other. There the packs of the ``window`` policy with a large window are made instead, 1-4 % above the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from energon_packing.packing.constraints import Constraints
from energon_packing.packing.decreasing import best_fit_decreasing
from energon_packing.packing.window import pack_window

# Samples held where limits apply: more is slower and hardly fuller.
LIMITED_WINDOW = 1024


def pack_best_fit(
    lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int
) -> Sequence[np.ndarray]:
    """The policy: `lengths` int64 ``[N]``; packs in the order of their oldest sample. `window` is not used."""
    del window
    if constraints:
        return pack_window(lengths, capacity, constraints, window=LIMITED_WINDOW, seed=seed)
    return best_fit_decreasing(lengths, capacity)
