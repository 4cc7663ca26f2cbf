"""The packs of one epoch: which samples share a row, and in which order they are in it."""

from __future__ import annotations

import numpy as np

from energon_packing.config import PackingConfig
from energon_packing.offline import array_limits
from energon_packing.offline.array_limits import AnyLimits, Sizes
from energon_packing.offline.limited_packs import pack_limited
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.partition import PackGroups, check_groups
from energon_packing.packing.statistics import lower_bound
from energon_packing.packing.whole_list import pack_lengths_flat
from energon_packing.wan.config import TextToVideoPackingConfig


def policy_of(packing: PackingConfig | TextToVideoPackingConfig) -> str:
    """The policy for whole lists: ``best_fit`` instead of ``window``, which is for streams; else what is configured."""
    return "best_fit" if packing.policy == "window" else packing.policy


def packs_of(sizes: Sizes, limits: AnyLimits, policy: str, *, window: int, seed: int) -> PackGroups:
    """Packs samples that fit alone; the samples of a pack are in the order in which they are given.

    Raises:
        PackingError: the policy's result is not a partition or breaks a limit.
    """
    units, constraints = _constraints(sizes, limits)
    if constraints and policy == "best_fit":
        packs = pack_limited(units, limits.units, constraints)
        check_groups(packs, units, limits.units, constraints)
        return packs
    pairs = {name: (cost, constraints.limits[name]) for name, cost in constraints.costs.items()}
    return pack_lengths_flat(units, limits.units, policy, constraints=pairs, window=window, seed=seed)


def bound_of(sizes: Sizes, limits: AnyLimits) -> int:
    """Fewest packs that these samples can need, by tokens or by the scarcest of the other limits."""
    units, constraints = _constraints(sizes, limits)
    return lower_bound(units, limits.units, constraints)


def _constraints(sizes: Sizes, limits: AnyLimits) -> tuple[np.ndarray, Constraints]:
    """Alignment units of each sample, and its costs under the other limits."""
    constraints = Constraints(costs=array_limits.costs(limits, sizes), limits=limits.limited)
    return array_limits.length_units(limits, sizes), constraints


def show_padding(order: np.ndarray, offsets: np.ndarray, sizes: Sizes, multiple: int) -> np.ndarray:
    """`energon_packing.thd.visible_padding.visible_order` for all packs, or `energon_packing.wan.pack.clip_order`.

    Args:
        order: ``[N]``, rows of `sizes`, one pack after another.
        offsets: ``[packs + 1]``.

    Returns:
        The order with the last two samples of some packs swapped.
    """
    if multiple == 1 or order.size == 0:
        return order
    first = (sizes.length % multiple != 0)[order]
    second = (sizes.second % multiple != 0)[order]
    if sizes.text_tokens is not None:  # where no clip of a pack has padding among its patches, text counts
        visible = np.repeat(np.logical_or.reduceat(first, offsets[:-1]), np.diff(offsets))
        first = np.where(visible, first, (sizes.text_tokens % multiple != 0)[order])
    padded = np.add.reduceat(first.astype(np.int64) + second, offsets[:-1])
    last = offsets[1:] - 1
    last_padded = np.where(sizes.second[order[last]] > 0, second[last], first[last])
    swapped = last[(padded == 1) & last_padded & (np.diff(offsets) > 1)]
    found = order.copy()
    found[swapped], found[swapped - 1] = order[swapped - 1], order[swapped]
    return found
