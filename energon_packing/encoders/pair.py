"""A preference pair: two measured answers to the same beginning, packed or dropped together."""

from __future__ import annotations

from dataclasses import dataclass

from energon_packing.encoders.measured import Measured
from energon_packing.families.base import MediaPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredPair:
    """Two adjacent segments of one row, the chosen answer first.

    Attributes:
        key: of the record; those of the segments end with ``/chosen`` and ``/rejected``.
    """

    key: str
    chosen: Measured
    rejected: Measured

    @property
    def segments(self) -> tuple[Measured, ...]:
        """The rows that this sample becomes."""
        return (self.chosen, self.rejected)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment; each segment is aligned separately."""
        return (self.chosen.length, self.rejected.length)

    @property
    def length(self) -> int:
        """Tokens of both answers; their common beginning counts twice."""
        return self.chosen.length + self.rejected.length

    @property
    def plans(self) -> tuple[MediaPlan, ...]:
        """Geometry of all media; those of the common beginning appear twice."""
        return (*self.chosen.plans, *self.rejected.plans)

    @property
    def patches(self) -> int:
        """Rows of the vision encoder's input for both answers."""
        return self.chosen.patches + self.rejected.patches

    @property
    def images(self) -> int:
        """Images that the vision encoder sees for both answers."""
        return self.chosen.images + self.rejected.images

    @property
    def changes(self) -> tuple[tuple[str, str], ...]:
        """How the pair differs from its record, for the ledger."""
        return (*self.chosen.changes, *self.rejected.changes)
