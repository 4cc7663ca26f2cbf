"""Samples that are measured again for a plan, because they fit no pack as they are.

An index knows each sample as it is without a row length. ``packing.oversize`` and ``encoder.limits.when_over`` may cut,
split or resize what fits no pack, which takes the sample itself: a planner is given a function for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from energon_packing.offline.index import IndexedDataset, IndexedShard
from energon_packing.offline.sample_kind import AnyRun
from energon_packing.wan.config import TextToVideoRunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A sample or a piece of one, as it is packed, or the reason why it is not.

    Attributes:
        length: tokens; of the chosen answer of a preference pair.
        second: tokens of the rejected answer; 0 if it is no pair.
        images, patches: as in the index.
        reason, detail: why it is dropped; None if it is not.
    """

    length: int = 0
    second: int = 0
    images: int = 0
    patches: int = 0
    reason: str | None = None
    detail: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Remeasured:
    """What becomes of a sample under the limits of a pack.

    Attributes:
        pieces: one, or the pieces of a split sample in order.
        split: whether they are pieces ``KEY#0``, ``KEY#1`` and so on; else there is one, of the whole sample.
    """

    pieces: tuple[Piece, ...]
    split: bool = False


Remeasure = Callable[[IndexedDataset, IndexedShard, list[int]], Sequence[Remeasured]]
"""Measures rows of a shard again, under the limits of the run; one result per row."""


def changes_samples(config: AnyRun) -> bool:
    """Whether a sample that fits no pack may fit after it is cut, split or resized."""
    if isinstance(config, TextToVideoRunConfig):
        return False  # a clip is resized when it is measured, whatever the row
    limits = config.encoder.limits
    limited = (limits.max_images, limits.max_frames, limits.max_visual_tokens, limits.max_tokens)
    lowered = config.packing.oversize != "split" and any(limit is not None for limit in limited)
    return config.packing.oversize in ("truncate", "split") or (
        lowered and bool({"resize", "truncate"} & set(limits.when_over))
    )
