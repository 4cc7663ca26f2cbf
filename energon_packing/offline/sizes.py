"""Limits of a pack for millions of samples at once: the same numbers, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_packing.packing.balance import LINEAR, PATCH

AnyLimits = Any
"""`PackLimits`, or the limits of another kind of sample with the same properties and methods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of N samples.

    Attributes:
        length: ``[N]`` int32, tokens; of the chosen answer of a preference pair.
        second: ``[N]`` int32, tokens of the rejected answer, 0 if the sample is no pair.
        images: ``[N]`` int32, tiles counted one by one.
        patches: ``[N]`` int64, rows of vision input.
        text_tokens: ``[N]`` int32, of clips, whose ``length`` is their patches; None for conversations.
    """

    length: np.ndarray
    second: np.ndarray
    images: np.ndarray
    patches: np.ndarray
    text_tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return int(self.length.size)

    @property
    def tokens(self) -> np.ndarray:
        """``[N]`` int64, of all segments."""
        return self.length.astype(np.int64) + self.second

    @property
    def segments(self) -> np.ndarray:
        """``[N]`` int64, 1 or 2."""
        return 1 + (self.second > 0).astype(np.int64)

    @property
    def cost(self) -> np.ndarray:
        """``[N]`` int64, as `pack_cost`."""
        length, second = self.length.astype(np.int64), self.second.astype(np.int64)
        return LINEAR * (length + second) + length**2 + second**2 + PATCH * self.patches

    def take(self, indices: np.ndarray | slice) -> Sizes:
        """The sizes of some of the samples."""
        return Sizes(
            length=self.length[indices],
            second=self.second[indices],
            images=self.images[indices],
            patches=self.patches[indices],
            text_tokens=None if self.text_tokens is None else self.text_tokens[indices],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedRow:
    """One sample, in the form that limits take."""

    segment_lengths: tuple[int, ...]
    images: int
    patches: int
    text_tokens: int = 0

    @property
    def length(self) -> int:
        """Tokens of all segments."""
        return sum(self.segment_lengths)

    @classmethod
    def of(cls, sizes: Sizes, index: int) -> SizedRow:
        """The sample number `index`."""
        length, second = int(sizes.length[index]), int(sizes.second[index])
        return cls(
            segment_lengths=(length, second) if second else (length,),
            images=int(sizes.images[index]),
            patches=int(sizes.patches[index]),
            text_tokens=0 if sizes.text_tokens is None else int(sizes.text_tokens[index]),
        )


def length_units(limits: AnyLimits, sizes: Sizes) -> np.ndarray:
    """``[N]`` int64: alignment units that each sample occupies."""
    multiple = limits.multiple
    return -(-sizes.length.astype(np.int64) // multiple) + -(-sizes.second.astype(np.int64) // multiple)


def masked_units(limits: AnyLimits, sizes: Sizes) -> np.ndarray:
    """``[N]`` int64, 0 or 1: alignment units of the masked segment after each sample if it is alone in its row."""
    if not limits.lone_room:
        return np.zeros(len(sizes), dtype=np.int64)
    pair = sizes.second > 0
    last = np.where(pair, sizes.second, sizes.length)
    before_is_padded = pair & (sizes.length % limits.multiple != 0)
    padded = last % limits.multiple != 0
    if sizes.text_tokens is not None:
        padded |= sizes.text_tokens % limits.multiple != 0
    return (padded & ~before_is_padded).astype(np.int64)


def costs(limits: AnyLimits, sizes: Sizes) -> dict[str, np.ndarray]:
    """For each limited name, what each sample costs, ``[N]`` int64."""
    measures = {
        "images": lambda: sizes.images.astype(np.int64),
        "patches": lambda: sizes.patches.astype(np.int64),
        "segments": lambda: sizes.segments,
        "cost": lambda: sizes.cost,
        "text_tokens": lambda: _text_places(limits, sizes),
    }
    return {name: measures[name]() for name in limits.limited}


def too_long(limits: AnyLimits, sizes: Sizes) -> np.ndarray:
    """``[N]`` bool: which samples are longer than a row, with the masked segment that they may need."""
    return length_units(limits, sizes) + masked_units(limits, sizes) > limits.units


def holds(limits: AnyLimits, sizes: Sizes) -> np.ndarray:
    """``[N]`` bool: which samples fit a pack by themselves."""
    fits = ~too_long(limits, sizes)
    for name, cost in costs(limits, sizes).items():
        # The masked clip after a clip that is alone has text tokens too.
        alone = masked_units(limits, sizes) * limits.multiple if name == "text_tokens" else 0
        fits &= cost + alone <= limits.limited[name]
    return fits


def _text_places(limits: AnyLimits, sizes: Sizes) -> np.ndarray:
    """``[N]`` int64: text tokens of each clip, alignment padding included."""
    assert sizes.text_tokens is not None, "only clips are limited in text tokens"
    return -(-sizes.text_tokens.astype(np.int64) // limits.multiple) * limits.multiple
