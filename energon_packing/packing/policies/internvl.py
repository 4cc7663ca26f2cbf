"""Policy ``internvl``: the buffer list of InternVL's packed data set.

Good for: reproducing InternVL's packs, without its losses (text of split samples) and over-full packs: samples that
fit no pack alone never get here, and a pack never exceeds its token capacity.
Cost: up to ``max_buffer_size`` comparisons per sample. Measured: 64-94 % of the bound's fill with 48 images.

Rules: open packs are kept in descending order of image count. A sample joins the first open pack whose images and
tokens still fit, or opens a new one; the pack is put back before the first one with strictly fewer images. After each
sample, packs that are full of tokens are emitted, then packs at the front with exactly the image limit, then the front
pack as long as more than ``max_buffer_size`` are open. At the end, the open packs are emitted in order.
"""

from dataclasses import dataclass, field

import numpy as np

from energon_packing.packing.constraints import Constraints
from energon_packing.packing.policies import Groups, PackingPolicy


@dataclass(slots=True)
class _Open:
    """An open pack: used tokens, images and other costs, and its samples."""

    images: float
    used: list[float]
    members: list[int] = field(default_factory=list)


def pack_internvl(lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int) -> Groups:
    """The policy: `lengths` int64 ``[N]``; packs in the order of emission.

    ``images`` of `constraints` counts images or tiles; a sample without any counts as one, for its dummy tile. Other
    limits must fit as well. `window` is its ``max_buffer_size``, the most packs that stay open.
    """
    del seed  # deterministic
    others = [name for name in constraints.costs if name != "images"]
    columns = [lengths.tolist(), *(constraints.costs[name].tolist() for name in others)]
    limits: list[float] = [capacity, *(constraints.limits[name] for name in others)]
    limited = "images" in constraints.costs
    images = np.maximum(constraints.costs["images"], 1).tolist() if limited else [1] * lengths.size
    image_limit = constraints.limits["images"] if limited else float("inf")
    open_: list[_Open] = []
    emitted: list[_Open] = []
    for index in range(lengths.size):
        needs = [column[index] for column in columns]
        pack = _first_fit(open_, needs, limits, images[index], image_limit)
        pack.members.append(index)
        pack.images += images[index]
        pack.used = [used + need for used, need in zip(pack.used, needs, strict=True)]
        if pack.used[0] == capacity:
            emitted.append(pack)
        else:
            fewer = (at for at, other in enumerate(open_) if other.images < pack.images)
            open_.insert(next(fewer, len(open_)), pack)
        while open_ and (open_[0].images == image_limit or len(open_) > window):
            emitted.append(open_.pop(0))
    return [np.array(pack.members, dtype=np.int64) for pack in [*emitted, *open_]]


def _first_fit(open_: list[_Open], needs: list[float], limits: list[float], images: float, image_limit: float) -> _Open:
    """Removes and returns the first open pack that holds the sample, or a new one."""
    for at, pack in enumerate(open_):
        if pack.images + images <= image_limit and all(
            used + need <= limit for used, need, limit in zip(pack.used, needs, limits, strict=True)
        ):
            return open_.pop(at)
    return _Open(images=0, used=[0] * len(limits))


POLICY = PackingPolicy(whole_list=pack_internvl, streams=False)
