"""Statistics of online packing, counted pack by pack in bounded memory."""

from __future__ import annotations

import math
from collections import Counter

from energon_packing.energon.samples import Pack
from energon_packing.pack_sums import PackSums
from energon_packing.packing.statistics import PackStatistics


def sums_of(pack: Pack, capacity: int) -> PackSums:
    """The sums of one pack.

    Args:
        capacity: tokens of a full pack.
    """
    dropped = Counter(entry.reason for entry in pack.dropped)
    if pack.padding:
        return PackSums(padding_packs=1, dropped=dropped)
    batch = pack.batch
    return PackSums(
        packs=1,
        samples=len(pack.keys),
        segments=batch.num_samples,
        real=batch.real_tokens,
        alignment=pack.occupied - batch.real_tokens,
        tail=batch.total_tokens - pack.occupied,
        unused=capacity - batch.total_tokens,
        delays=sum(pack.delays),
        delay_max=max(pack.delays, default=0),
        held=pack.held,
        dropped=dropped,
    )


class PackingMonitor:
    """Counts packs as they are emitted.

    Args:
        capacity: tokens of a full pack, ``packing.seq_length``; shares refer to it, whatever the width of a row.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._sums = PackSums()
        self._delays: Counter[int] = Counter()
        self._cost_mean = self._cost_squares = self._cost_max = 0.0

    def add(self, pack: Pack) -> None:
        """Counts one pack; a pack that contains only padding is counted separately."""
        self._sums.add(sums_of(pack, self.capacity))
        if pack.padding:
            return
        self._delays.update(pack.delays)
        # Welford's running variance: summing squares of costs near 10^9 would lose the spread to rounding.
        difference = pack.cost - self._cost_mean
        self._cost_mean += difference / self._sums.packs
        self._cost_squares += difference * (pack.cost - self._cost_mean)
        self._cost_max = max(self._cost_max, float(pack.cost))

    def statistics(self) -> PackStatistics:
        """Returns the figures so far, all 0 before the first pack; delays and samples held are per worker."""
        sums, packs = self._sums, max(self._sums.packs, 1)
        room = packs * self.capacity
        spread = math.sqrt(self._cost_squares / packs)
        return PackStatistics(
            packs=sums.packs,
            samples=sums.segments,
            fill=sums.real / room,
            alignment_padding=sums.alignment / room,
            tail_padding=(sums.tail + sums.unused) / room,
            delay_p50=self._delay(0.5),
            delay_p99=self._delay(0.99),
            delay_max=max(self._delays, default=0),
            held=sums.held,
            samples_per_pack=sums.segments / packs,
            cost_mean=self._cost_mean,
            cost_spread=spread / self._cost_mean if self._cost_mean else 0.0,
            cost_max_over_mean=self._cost_max / self._cost_mean if self._cost_mean else 0.0,
        )

    def _delay(self, share: float) -> float:
        """The smallest delay that at least `share` of the samples do not exceed."""
        wanted, seen = share * self._delays.total(), 0
        for delay in sorted(self._delays):
            seen += self._delays[delay]
            if seen >= wanted:
                return float(delay)
        return 0.0
