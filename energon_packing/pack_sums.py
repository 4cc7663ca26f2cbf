"""Sums over packs that can be added over time and ranks: tokens by what they are spent on, delays, drops, waiting."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class PackSums:
    """Sums over packs of one rank or of several. The four kinds of tokens add up to the room of the packs.

    Attributes:
        packs: packs with samples.
        padding_packs: packs that contain only padding; the other sums leave them out.
        samples: source samples.
        segments: of the rows; a preference pair is one sample and two segments.
        real: tokens that belong to samples.
        alignment: padding after samples, up to the alignment multiple.
        tail: padding of the rest of a row: its masked tail, dummy images.
        unused: room up to the capacity of a pack that the row leaves out, so that no step computes it.
        delays: samples that were measured after a sample and before its pack, summed over samples.
        delay_max: the longest of these delays.
        held: the most samples that a worker held.
        dropped: dropped samples by reason.
        seconds: wall-clock time in which the packs were used, after the first pack had arrived.
        waited: the part of it in which the trainer waited for a pack.
    """

    packs: int = 0
    padding_packs: int = 0
    samples: int = 0
    segments: int = 0
    real: int = 0
    alignment: int = 0
    tail: int = 0
    unused: int = 0
    delays: int = 0
    delay_max: int = 0
    held: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, other: PackSums) -> None:
        """Adds the sums of other packs."""
        for name in _NUMBERS:
            mine, others = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, others) if name in _LARGEST else mine + others)
        self.dropped.update(other.dropped)

    @property
    def room(self) -> int:
        """Tokens that the packs have room for."""
        return self.real + self.alignment + self.tail + self.unused

    def figures(self) -> dict[str, float]:
        """What readers want to know, by name; a figure is left out where there is nothing to divide by.

        Shares are 0 to 1: ``fill`` and the three causes of padding are shares of `room` and add up to 1.
        """
        found: dict[str, float] = {}
        for name, part, whole in (
            ("fill", self.real, self.room),
            ("padding_alignment", self.alignment, self.room),
            ("padding_tail", self.tail, self.room),
            ("padding_unused", self.unused, self.room),
            ("segments_per_pack", self.segments, self.packs),
            ("delay_mean", self.delays, self.samples),
            ("wait_share", self.waited, self.seconds),
            ("dropped_share", self.dropped.total(), self.samples + self.dropped.total()),
        ):
            if whole:
                found[name] = part / whole
        if self.samples:
            found |= {"delay_max": self.delay_max, "held_max": self.held}
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by name; times to the microsecond."""
        times = {name: round(getattr(self, name), 6) for name in ("seconds", "waited")}
        return dataclasses.asdict(self) | times | {"dropped": dict(self.dropped)}

    @classmethod
    def from_json(cls, values: Any) -> PackSums:
        """The sums that `to_json` made plain; a missing one is 0.

        Raises:
            TypeError, ValueError: something else.
        """
        if not isinstance(values, Mapping):
            raise ValueError("no sums of packs")
        numbers = {name: values.get(name, 0) for name in _NUMBERS}
        if not all(0 <= number < math.inf for number in numbers.values()):
            raise ValueError(f"a sum that cannot be: {numbers}")
        return cls(**numbers, dropped=Counter(values.get("dropped", {})))


_NUMBERS = tuple(entry.name for entry in dataclasses.fields(PackSums) if entry.name != "dropped")
_LARGEST = ("delay_max", "held")
