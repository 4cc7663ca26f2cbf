"""What a pack may hold, for samples whose length, images and patches are known before any pixel is decoded.

Tokens are counted in units of the alignment multiple: a sample of 13 tokens at a multiple of 8 takes 2 units. This is
exact, and makes the integers in the ``window`` policy's subset sum that much shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from energon_packing.errors import ConfigError
from energon_packing.packing.balance import LINEAR, pack_cost
from energon_packing.thd.visible_padding import hides_padding


class Sized(Protocol):
    """A sample that has been measured; `energon_packing.encoders.measured.Measured` is one."""

    @property
    def length(self) -> int:
        """Tokens."""

    @property
    def images(self) -> int:
        """Images, tiles counted one by one."""

    @property
    def patches(self) -> int:
        """Rows of vision input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A sample described by its numbers only."""

    length: int
    images: int = 0
    patches: int = 0


def _segments(sample: Sized) -> tuple[int, ...]:
    """Tokens of each segment; a preference pair has two, each aligned separately."""
    return getattr(sample, "segment_lengths", (sample.length,))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLimits:
    """The limits of one pack.

    Attributes:
        tokens: tokens of the row, alignment padding included; a multiple of `multiple`.
        multiple: every segment is padded to a multiple of this many tokens.
        images: images of all samples; each tile counts if the family tiles images; None for no limit.
        patches: rows of vision input of all media.
        segments: samples, not counting a masked tail (of a fixed-width row, or after a sample that is alone).
        cost: cost of all segments from `pack_cost`, in tokens without attention: ``L + L**2 / LINEAR + ...``.
        lone_room: reserve room for a masked segment of one multiple after a sample that is alone in a row and whose
            last segment is the only padded one (`energon_packing.thd.visible_padding`); beside others it needs none.
    """

    tokens: int
    multiple: int = 1
    images: int | None = None
    patches: int | None = None
    segments: int | None = None
    cost: float | None = None
    lone_room: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.multiple < 1 or self.tokens % self.multiple:
            raise ConfigError(f"a pack of {self.tokens} tokens is not a positive multiple of {self.multiple}")
        for name, limit in self.limited.items():
            if limit < 1:
                raise ConfigError(f"a limit of {limit} {name} per pack allows no samples; it must be at least 1")

    @property
    def units(self) -> int:
        """Capacity of a pack in alignment units."""
        return self.tokens // self.multiple

    @property
    def limited(self) -> dict[str, int]:
        """Limits other than tokens, by name; cost in the unit of `pack_cost`."""
        found = {
            "images": self.images,
            "patches": self.patches,
            "segments": self.segments,
            "cost": None if self.cost is None else int(self.cost * LINEAR),
        }
        return {name: limit for name, limit in found.items() if limit is not None}

    def aligned(self, sample: Sized) -> int:
        """Tokens that a sample occupies."""
        return self.length_units(sample) * self.multiple

    def length_units(self, sample: Sized) -> int:
        """Alignment units that a sample occupies."""
        return sum(-(-length // self.multiple) for length in _segments(sample))

    def masked_units(self, sample: Sized) -> int:
        """Alignment units of the masked segment after a sample that is alone in its row."""
        return int(self.lone_room and hides_padding(_segments(sample), self.multiple))

    def costs(self, samples: Sequence[Sized]) -> dict[str, list[int]]:
        """One cost per sample for each limited name."""
        measures = {
            "images": lambda sample: sample.images,
            "patches": lambda sample: sample.patches,
            "segments": lambda sample: len(_segments(sample)),
            "cost": lambda sample: pack_cost(_segments(sample), patches=sample.patches),
        }
        return {name: [measures[name](sample) for sample in samples] for name in self.limited}

    def too_long(self, sample: Sized) -> bool:
        """Whether a sample, including the masked segment that it may need, is longer than a row."""
        return self.length_units(sample) + self.masked_units(sample) > self.units

    def holds(self, sample: Sized) -> bool:
        """Whether the sample fits a pack by itself."""
        return not self.too_long(sample) and self.exceeded(sample) is None

    def exceeded(self, sample: Sized) -> str | None:
        """The first limit other than tokens that a sample exceeds by itself, as part of a sentence; None if it fits."""
        for name, (cost,) in self.costs([sample]).items():
            limit = self.limited[name]
            if cost > limit:
                if name == "cost":
                    return f"a cost of {cost / LINEAR:.0f} tokens; a pack holds packing.max_cost_per_pack={self.cost}"
                return f"{cost} {name}; a pack holds packing.max_{name}_per_pack={limit}"
        return None
