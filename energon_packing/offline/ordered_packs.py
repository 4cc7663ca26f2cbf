"""All packs of a plan in their global order: the blend of every epoch, packed and put in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energon_packing.errors import UserError
from energon_packing.offline.array_limits import AnyLimits
from energon_packing.offline.blend import Blend
from energon_packing.offline.epoch_packs import bound_of, packs_of, policy_of, show_padding
from energon_packing.offline.fitting_samples import Samples
from energon_packing.offline.order import balanced_order, incomplete_group
from energon_packing.offline.rest_of_epoch import RestThenBlend
from energon_packing.offline.sample_kind import AnyRun
from energon_packing.offline.sources import Sources


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OrderedPacks:
    """All packs of a plan in their global order.

    Attributes:
        order: ``[rows]`` rows of `Samples`, one pack after another.
        offsets: ``[packs + 1]`` int64.
        epoch_ends: for each epoch, the number of packs up to its end.
        costs: ``[packs]`` int64, as `pack_cost`.
        bound: packs that no packer can do without, over all epochs.
        repeats: ``[data sets]``, how often each occurs in an epoch.
    """

    order: np.ndarray
    offsets: np.ndarray
    epoch_ends: tuple[int, ...]
    costs: np.ndarray
    bound: int
    repeats: tuple[float, ...]

    @property
    def count(self) -> int:
        """Number of packs."""
        return self.offsets.size - 1


def ordered_packs(
    sources: Sources, samples: Samples, limits: AnyLimits, config: AnyRun, rest: np.ndarray | None = None
) -> OrderedPacks:
    """Packs every epoch of the blend and puts all packs into their order.

    Args:
        rest: rows of `samples` that come first, as an epoch of their own; None begins with a whole epoch.

    Raises:
        ConfigError: the section ``plan`` does not suit the data sets.
        UserError: an epoch has no samples.
    """
    settings = config.plan
    whole = Blend.of(sources.datasets, sources.dataset_ends(), samples, settings)
    blend: Blend | RestThenBlend = whole
    epochs = settings.epochs
    if rest is not None and rest.size:
        blend, epochs = RestThenBlend(blend=whole, rows=rest), epochs + 1
    sample_costs = samples.sizes.cost
    small = np.int32 if len(samples) < 1 << 31 else np.int64
    order: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    costs: list[np.ndarray] = []
    ends: list[int] = []
    near: float | None = None
    bounds = 0
    for epoch in range(epochs):
        rows, counts, bound = _packed_epoch(blend, epoch, samples, limits, config)
        if rows.size == 0:
            raise UserError(f"epoch {epoch} of the plan has no samples; raise plan.datasets' weights or epochs.")
        bounds += bound
        offsets = np.concatenate([[0], np.cumsum(counts)])
        pack_costs = np.add.reduceat(sample_costs[rows], offsets[:-1])
        start = ends[-1] if ends else 0
        wide = settings.max_data_parallel
        chosen = balanced_order(pack_costs, group=wide, start=start, near=near, seed=[settings.seed, epoch, 3])
        near = incomplete_group(pack_costs[chosen], start, wide)
        order.append(rows[_gathered(offsets, chosen)].astype(small))
        sizes.append(counts[chosen])
        costs.append(pack_costs[chosen])
        ends.append(start + chosen.size)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    shown = show_padding(np.concatenate(order), offsets, samples.sizes, limits.multiple)
    return OrderedPacks(
        order=shown,
        offsets=offsets,
        epoch_ends=tuple(ends),
        costs=np.concatenate(costs),
        bound=bounds,
        repeats=whole.repeats,
    )


def _packed_epoch(
    blend: Blend | RestThenBlend, epoch: int, samples: Samples, limits: AnyLimits, config: AnyRun
) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows of `Samples`, pack after pack, the number of rows of each pack, and the bound."""
    rows, counts, bound = [], [], 0
    for group in sorted(blend.groups):
        drawn = blend.epoch(epoch, group)
        if drawn.size == 0:
            continue
        sizes = samples.sizes.take(drawn)
        packs = packs_of(
            sizes,
            limits,
            policy_of(config.packing),
            window=config.packing.window,
            seed=config.plan.seed,
        )
        rows.append(drawn[packs.order])
        counts.append(np.diff(packs.offsets))
        bound += bound_of(sizes, limits)
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([*rows, empty]), np.concatenate([*counts, empty]), bound


def _gathered(offsets: np.ndarray, packs: np.ndarray) -> np.ndarray:
    """Positions of the members of these packs, pack after pack."""
    counts = offsets[packs + 1] - offsets[packs]
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if ends.size else 0) + np.repeat(offsets[packs] - (ends - counts), counts)
