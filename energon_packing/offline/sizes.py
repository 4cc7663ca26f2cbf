"""Sizes of millions of samples at once, as arrays, and which of them fit the limits of a pack."""

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
    def segment_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Twice ``[N]`` int64, as limits take them."""
        return self.length.astype(np.int64), self.second.astype(np.int64)

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
    units: np.ndarray = limits.length_units(sizes)
    return units


def costs(limits: AnyLimits, sizes: Sizes) -> dict[str, np.ndarray]:
    """For each limited name, what each sample costs, ``[N]`` int64."""
    return {name: cost.astype(np.int64) for name, (cost,) in limits.costs([sizes]).items()}


def holds(limits: AnyLimits, sizes: Sizes) -> np.ndarray:
    """``[N]`` bool: which samples fit a pack by themselves."""
    fits: np.ndarray = ~limits.too_long(sizes)
    for name, cost in costs(limits, sizes).items():
        # The masked clip after a clip that is alone has text tokens too.
        alone = limits.masked_units(sizes) * limits.multiple if name == "text_tokens" else 0
        fits &= cost + alone <= limits.limited[name]
    return fits
