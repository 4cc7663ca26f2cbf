"""Statistics of online packing, counted pack by pack in bounded memory."""

from __future__ import annotations

import math
from collections import Counter

from energon_packing.energon.samples import Pack
from energon_packing.packing.statistics import PackStatistics


class PackingMonitor:
    """Counts packs as they are emitted.

    Args:
        capacity: tokens of a full pack, ``packing.seq_length``; shares refer to it, whatever the width of a row.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.padding_packs = 0
        self._packs = self._samples = self._real = self._occupied = self._held = 0
        self._delays: Counter[int] = Counter()
        self._cost_mean = self._cost_squares = self._cost_max = 0.0

    def add(self, pack: Pack) -> None:
        """Counts one pack; a pack that contains only padding is counted separately."""
        if pack.padding:
            self.padding_packs += 1
            return
        self._packs += 1
        self._samples += pack.batch.num_samples
        self._real += pack.batch.real_tokens
        self._occupied += pack.occupied
        self._held = max(self._held, pack.held)
        self._delays.update(pack.delays)
        # Welford's running variance: summing squares of costs near 10^9 would lose the spread to rounding.
        difference = pack.cost - self._cost_mean
        self._cost_mean += difference / self._packs
        self._cost_squares += difference * (pack.cost - self._cost_mean)
        self._cost_max = max(self._cost_max, float(pack.cost))

    def statistics(self) -> PackStatistics:
        """Returns the figures so far, all 0 before the first pack; delays and samples held are per worker."""
        room = max(self._packs, 1) * self.capacity
        spread = math.sqrt(self._cost_squares / max(self._packs, 1))
        return PackStatistics(
            packs=self._packs,
            samples=self._samples,
            fill=self._real / room,
            alignment_padding=(self._occupied - self._real) / room,
            tail_padding=1 - self._occupied / room if self._packs else 0.0,
            delay_p50=self._delay(0.5),
            delay_p99=self._delay(0.99),
            delay_max=max(self._delays, default=0),
            held=self._held,
            samples_per_pack=self._samples / max(self._packs, 1),
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
