"""A measured sample: everything about a conversation that is known before a pixel is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from energon_packing.conversation import Media
from energon_packing.families.base import MediaPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """A sample between selection and rendering. Small on purpose: a packing window holds hundreds of them.

    Attributes:
        key: of the conversation.
        token_ids: int32 ``[n]``; each run of placeholders is still ONE token.
        trained: uint8 ``[ceil(n / 8)]``, bit i says whether token i is a target.
        weights: float32 ``[n]`` loss weight of each target, or None where all weigh 1.
        run_positions: int32 ``[r]``, where in ``token_ids`` the runs stand.
        run_lengths: int32 ``[r]``, tokens that each run becomes.
        plans: geometry of each medium, in conversation order.
        media: the media, in conversation order.
        scale: factor of every weight, by ``loss_weighting``.
        length: tokens of the sample once every run is expanded.
        turns: of the conversation that was measured, after any truncation.
        settings: fields of the configuration that are lower for this sample's media, by name.
        changes: how the sample differs from its record, as ``(how, detail)`` for the ledger.
        position_start: position of the first token; above 0 only for a piece that goes on counting.
        extras: name -> one number for all targets, or float32 ``[targets]``.
    """

    key: str
    token_ids: np.ndarray
    trained: np.ndarray
    weights: np.ndarray | None
    run_positions: np.ndarray
    run_lengths: np.ndarray
    plans: tuple[MediaPlan, ...]
    media: tuple[Media, ...]
    length: int
    turns: int
    scale: float = 1.0
    settings: tuple[tuple[str, int], ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    position_start: int = 0
    extras: Mapping[str, float | np.ndarray] = field(default_factory=dict)

    @property
    def segments(self) -> tuple[Measured, ...]:
        """The rows that this sample becomes: itself."""
        return (self,)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment."""
        return (self.length,)

    @property
    def targets(self) -> int:
        """Tokens that are learned; the first token of a sample never is, since nothing stands before it."""
        bits = np.unpackbits(self.trained, count=len(self.token_ids))
        return int(bits[1:].sum())

    @property
    def patches(self) -> int:
        """Rows of vision input of all media."""
        return sum(plan.patches for plan in self.plans)

    @property
    def images(self) -> int:
        """Images that the vision encoder sees: tiles and frames where the family cuts media up, media elsewhere."""
        return sum(plan.tiles for plan in self.plans)

    def expand(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int64 ``[length]`` with every run at full length, and the weight of each as a target, float32."""
        count = len(self.token_ids)
        weights = np.unpackbits(self.trained, count=count).astype(np.float32)
        if self.weights is not None:
            weights *= self.weights
        if self.scale != 1.0:
            weights *= np.float32(self.scale)
        ids = self.token_ids.astype(np.int64)
        if len(self.run_positions):
            repeats = np.ones(count, dtype=np.int64)
            repeats[self.run_positions] = self.run_lengths
            ids, weights = np.repeat(ids, repeats), np.repeat(weights, repeats)
        return ids, weights
