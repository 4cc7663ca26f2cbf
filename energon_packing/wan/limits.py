"""What a pack of clips may hold: latent patches in its row, and text tokens in the row of keys beside it.

Both rows are padded to the alignment multiple, clip by clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from energon_packing.packing.balance import pack_cost
from energon_packing.packing.pack_limits import PackLimits
from energon_packing.wan.config import TextToVideoRunConfig


@dataclass(frozen=True, kw_only=True)
class ClipLimits(PackLimits):
    """The limits of one pack of clips; what `PackLimits` calls tokens are latent patches here.

    Attributes:
        text_tokens: of all clips, alignment padding included; None for no limit.
        lone_room: a clip alone in its row that has the only padding needs room for a masked clip of one multiple.
    """

    text_tokens: int | None = None

    @classmethod
    def of(cls, run: TextToVideoRunConfig) -> ClipLimits:
        """Returns the limits of a run's packs."""
        return cls(
            tokens=run.packing.seq_length,
            multiple=run.multiple,
            text_tokens=run.packing.max_text_tokens_per_pack,
            segments=run.packing.max_segments_per_pack,
            cost=run.packing.max_cost_per_pack,
            lone_room=run.encoder.compat == "none",
        )

    @property
    def limited(self) -> dict[str, int]:
        """Limits other than patches, by name."""
        text = {} if self.text_tokens is None else {"text_tokens": self.text_tokens}
        return text | super().limited

    def text_place(self, clip: Any) -> int:
        """Text tokens that a clip occupies in the row of keys."""
        return -(-clip.text_tokens // self.multiple) * self.multiple

    def costs(self, clips: Sequence[Any]) -> dict[str, list[Any]]:
        """One cost per clip for each limited name."""
        if self.text_tokens is None:
            return super().costs(clips)
        return {"text_tokens": [self.text_place(clip) for clip in clips]} | replace(self, text_tokens=None).costs(clips)

    def masked_units(self, clip: Any) -> int:
        """Alignment units of the masked clip that follows a clip which is alone in its row."""
        padded: int = (clip.length % self.multiple != 0) | (clip.text_tokens % self.multiple != 0)
        return padded * self.lone_room

    def overlong(self, clip: Any) -> str:
        """Says why a clip is longer than a row."""
        room = self.masked_units(clip) * self.multiple
        masked = f" and {room} for a masked clip after it" if room else ""
        grid = f" ({'x'.join(map(str, clip.grid))})" if hasattr(clip, "grid") else ""  # a planned clip has none
        return f"{clip.length} patches{grid}{masked}; a row holds packing.seq_length={self.tokens}"

    def exceeded(self, clip: Any) -> str | None:
        """The first limit besides patches that a clip exceeds alone, as part of a sentence; None if it fits."""
        text = self.text_place(clip) + self.masked_units(clip) * self.multiple
        if self.text_tokens is not None and text > self.text_tokens:
            return f"{text} text tokens; a pack holds packing.max_text_tokens_per_pack={self.text_tokens}"
        return super().exceeded(clip)


def clip_cost(patches: int) -> int:
    """Cost of one clip, in the unit of `pack_cost`; its text is short in comparison and not counted."""
    return pack_cost([patches])
