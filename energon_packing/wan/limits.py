"""What a pack of clips may hold: latent patches in its row, and text tokens in the row of keys beside it.

Both rows are padded to the alignment multiple, clip by clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from energon_packing.packing.balance import pack_cost
from energon_packing.packing.pack_limits import PackLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipLimits:
    """The limits of one pack of clips.

    Attributes:
        patches: latent patches of the row, alignment padding included; a multiple of `multiple`.
        multiple: patches and text tokens that every clip is padded to a multiple of.
        text_tokens: of all clips, alignment padding included; None for no limit.
        segments: clips.
        cost: of all clips by `pack_cost`, in patches without attention.
        lone_room: a clip alone in its row that has the only padding needs room for a masked clip of one multiple.
    """

    patches: int
    multiple: int = 1
    text_tokens: int | None = None
    segments: int | None = None
    cost: float | None = None
    lone_room: bool = False
    _row: PackLimits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        row = PackLimits(tokens=self.patches, multiple=self.multiple, segments=self.segments, cost=self.cost)
        object.__setattr__(self, "_row", row)

    @property
    def units(self) -> int:
        """Capacity of a row of patches in alignment units."""
        return self._row.units

    @property
    def limited(self) -> dict[str, int]:
        """Limits besides patches, by name."""
        text = {} if self.text_tokens is None else {"text_tokens": self.text_tokens}
        return text | self._row.limited

    def length_units(self, clip: Any) -> int:
        """Alignment units that a clip occupies in the row of patches."""
        return self._row.length_units(clip)

    def text_place(self, clip: Any) -> int:
        """Text tokens that a clip occupies in the row of keys."""
        return -(-clip.text_tokens // self.multiple) * self.multiple

    def costs(self, clips: Sequence[Any]) -> dict[str, list[int]]:
        """One cost per clip for each limited name."""
        text = {} if self.text_tokens is None else {"text_tokens": [self.text_place(clip) for clip in clips]}
        return text | self._row.costs(clips)

    def too_long(self, clip: Any) -> bool:
        """Whether a clip, with the masked clip that it may need, has more patches than a whole row."""
        return self.length_units(clip) + self.masked_units(clip) > self.units

    def masked_units(self, clip: Any) -> int:
        """Alignment units of the masked clip that follows a clip which is alone in its row."""
        return int(self.lone_room and (clip.length % self.multiple != 0 or clip.text_tokens % self.multiple != 0))

    def holds(self, clip: Any) -> bool:
        """Whether the clip fits a pack by itself."""
        return not self.too_long(clip) and self.exceeded(clip) is None

    def exceeded(self, clip: Any) -> str | None:
        """The first limit besides patches that a clip exceeds alone, as part of a sentence; None if it fits."""
        text = self.text_place(clip) + self.masked_units(clip) * self.multiple
        if self.text_tokens is not None and text > self.text_tokens:
            return f"{text} text tokens; a pack holds packing.max_text_tokens_per_pack={self.text_tokens}"
        return self._row.exceeded(clip)


def clip_cost(patches: int) -> int:
    """Cost of one clip, in the unit of `pack_cost`; its text is short in comparison and not counted."""
    return pack_cost([patches])
