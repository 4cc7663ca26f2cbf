"""How good a packing is: fill, padding by cause, delay, samples held; and what no packer can beat."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_packing.packing.constraints import Constraints
from energon_packing.packing.partition import flatten


@dataclass(frozen=True, kw_only=True)
class PackStatistics:
    """Figures of one packing. Shares are of all tokens of all packs, 0 to 1.

    Attributes:
        packs, samples: how many there are.
        fill: share of real tokens.
        alignment_padding: share spent on padding segments to the alignment multiple.
        tail_padding: share left free at the ends of packs.
        delay_p99, delay_max: 99th percentile and worst number of samples that arrived after a sample before it was
            emitted.
        held: the most samples held at once.
    """

    packs: int
    samples: int
    fill: float
    alignment_padding: float
    tail_padding: float
    delay_p99: float
    delay_max: int
    held: int

    @classmethod
    def of(
        cls,
        groups: Sequence[np.ndarray | Sequence[int]],
        lengths: Sequence[int] | np.ndarray,
        capacity: int,
        *,
        real_lengths: Sequence[int] | np.ndarray | None = None,
    ) -> "PackStatistics":
        """Measures `groups`, in order of emission, over samples in stream order.

        A pack is assumed to be emitted as soon as its newest sample and those of all packs before it have arrived. A
        policy that looks further ahead holds more.

        Args:
            groups: index groups, for example from `pack_lengths`.
            lengths: tokens that each sample occupies, alignment included, ``[N]``.
            real_lengths: tokens without alignment, ``[N]``; None if there is no alignment.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        real = tokens if real_lengths is None else np.asarray(real_lengths, dtype=np.int64)
        if len(groups) == 0:
            zeros: dict[str, Any] = dict.fromkeys(cls.__dataclass_fields__, 0)
            return cls(**zeros)
        flat, starts = flatten(groups)
        sizes = np.diff(starts, append=flat.size)
        arrived = np.maximum.accumulate(np.maximum.reduceat(flat, starts)) + 1
        delay = np.repeat(arrived, sizes) - 1 - flat
        # Held just before a pack leaves: all samples that arrived, minus those in earlier packs.
        present = np.zeros(int(flat.max()) + 1, dtype=np.int64)
        present[flat] = 1
        came = np.cumsum(present)
        room = len(groups) * capacity
        return cls(
            packs=len(groups),
            samples=int(flat.size),
            fill=float(real[flat].sum() / room),
            alignment_padding=float((tokens[flat] - real[flat]).sum() / room),
            tail_padding=float(1 - tokens[flat].sum() / room),
            delay_p99=float(np.percentile(delay, 99)),
            delay_max=int(delay.max()),
            held=int((came[arrived - 1] - starts).max()),
        )


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
