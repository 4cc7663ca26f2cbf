"""Constraints: what a pack may hold besides tokens (images or tiles, patches, segments, attention cost, bytes).

Tokens are counted in units of the alignment multiple: a sample of 13 tokens at a multiple of 8 takes 2 units. This is
exact, and makes the integers in the ``window`` policy's subset sum that much shorter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from energon_packing.errors import ConfigError
from energon_packing.packing.balance import LINEAR
from energon_packing.packing.model_cost import CONSTANTS, segments_of

# Sums of floats depend on their order, so a pack may exceed a fractional limit by at most this share.
FLOAT_TOLERANCE = 1e-9
# `shape_of` samples, ``[3, N]`` int64, and the most pixels of all images of a pack with their padding.
Padded = tuple[np.ndarray, int]


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """A vector of costs per sample, name -> ``[N]`` int64 or float64, finite and non-negative; and by the same names
    the largest allowed sum of one pack's costs."""

    costs: Mapping[str, np.ndarray] = field(default_factory=dict)
    limits: Mapping[str, int | float] = field(default_factory=dict)

    @classmethod
    def from_pairs(cls, pairs: Mapping[str, tuple[Any, int | float]] | None, count: int) -> "Constraints":
        """Constraints from name -> (cost of each sample, limit per pack), the form that `pack_lengths` takes. Raises
        ConfigError: no such pair, a wrong number of costs, a negative or non-finite number."""
        arrays: dict[str, np.ndarray] = {}
        limits: dict[str, int | float] = {}
        for name, pair in (pairs or {}).items():
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise ConfigError(f"constraint {name!r} must be a pair (cost of each sample, limit), not {pair!r}")
            cost, limit = pair
            arrays[name] = _column(name, cost, count)
            limits[name] = limit.item() if isinstance(limit, np.generic) else limit  # NumPy's integers have bounds
            if not (isinstance(limit, int | float | np.integer | np.floating) and math.isfinite(limit) and limit >= 0):
                raise ConfigError(f"constraint {name!r} needs a finite non-negative limit, not {limit!r}")
        return cls(costs=arrays, limits=limits)

    def __bool__(self) -> bool:
        return bool(self.limits)

    def take(self, indices: np.ndarray) -> "Constraints":
        """The same limits over the samples at `indices`."""
        return Constraints(costs={name: cost[indices] for name, cost in self.costs.items()}, limits=self.limits)

    def oversize(self, count: int) -> np.ndarray:
        """``[count]`` bool: which samples exceed some limit on their own."""
        over = [cost > self.limits[name] for name, cost in self.costs.items()]
        return np.any([np.zeros(count, dtype=bool), *over], axis=0)


def _column(name: str, values: Sequence[int | float] | np.ndarray, count: int) -> np.ndarray:
    column = np.asarray(values)
    if column.shape != (count,):
        raise ConfigError(f"constraint {name!r} needs one cost for each of {count} samples, got shape {column.shape}")
    if column.dtype.kind not in "iubf":
        raise ConfigError(f"constraint {name!r} needs numbers as costs, got {column.dtype}")
    column = column.astype(np.float64 if column.dtype.kind == "f" else np.int64)
    if not np.isfinite(column).all() or column.min(initial=0) < 0:
        raise ConfigError(f"constraint {name!r} needs finite non-negative costs")
    return column


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A sample described by its numbers only; `shape_of` it is in three of them.

    Attributes:
        segment_lengths: tokens of its segment, or of both of a preference pair.
        text_tokens: of a clip, whose length is its patches.
        patch_squares, window_squares, visual: see `squares_of`.
    """

    segment_lengths: tuple[int, ...]
    images: int = 0
    patches: int = 0
    text_tokens: int = 0
    height: int = 0
    width: int = 0
    patch_squares: int = 0
    window_squares: int = 0
    visual: int = 0

    @property
    def length(self) -> int:
        """Tokens of all segments."""
        return sum(self.segment_lengths)


def shape_of(sample: Any) -> dict[str, Any]:
    """Images, and their largest height and width in pixels, to which all are padded: 0 in families that pad none."""
    sizes = [(getattr(sample, "height", 0), getattr(sample, "width", 0))]
    height, width = map(max, zip(*sizes, *(plan.size for plan in getattr(sample, "plans", ())), strict=True))
    return {"images": sample.images, "height": height, "width": width}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLimits:
    """The limits of one pack. Methods take a sample, or `energon_packing.offline.samples.Sizes` and then give arrays.

    Attributes:
        tokens: tokens of the row, alignment padding included; a multiple of `multiple`.
        multiple: every segment is padded to a multiple of this many tokens.
        images: of all samples; each tile counts if the family tiles images; None for no limit.
        patches: rows of vision input of all media.
        segments: samples, not counting a masked tail (of a fixed-width row, or after a sample that is alone).
        cost: of all segments from `pack_cost`, in tokens without attention: ``L + L**2 / LINEAR + ...``.
        padded_pixels: images x largest height x largest width, which is no sum, see `padding`.
        lone_room: reserve room for a masked segment of one multiple after a sample that is alone in a row and whose
            last segment is the only padded one (`energon_packing.thd.assembly`); beside others it needs none.
    """

    tokens: int
    multiple: int = 1
    images: int | None = None
    patches: int | None = None
    segments: int | None = None
    cost: float | None = None
    padded_pixels: int | None = None
    lone_room: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.multiple < 1 or self.tokens % self.multiple:
            raise ConfigError(f"a pack of {self.tokens} tokens is not a positive multiple of {self.multiple}")
        for name, limit in self.limited.items():
            if limit < 1:
                raise ConfigError(f"a limit of {limit} {name} per pack allows no samples; it must be at least 1")

    @classmethod
    def of_settings(cls, value: Callable[[str], Any], **others: Any) -> Self:
        """Limits of the settings ``max_images_per_pack`` and so on, whose values `value` gives, but for `others`."""
        names = [each.name for each in fields(PackLimits) if each.default is None]
        return cls(**{name: value(f"max_{name}_per_pack") for name in names} | others)

    @property
    def units(self) -> int:
        """Capacity of a pack in alignment units."""
        return self.tokens // self.multiple

    @property
    def limited(self) -> dict[str, int]:
        """Limits other than tokens, by name; cost in the unit of `pack_cost`."""
        cost = None if self.cost is None else int(self.cost * LINEAR)
        limits = {"images": self.images, "patches": self.patches, "segments": self.segments, "cost": cost}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def aligned(self, sample: Any) -> int:
        """Tokens that a sample occupies."""
        return self.length_units(sample) * self.multiple

    def length_units(self, sample: Any) -> int:
        """Alignment units that a sample occupies."""
        first, second = segments_of(sample)
        units: int = -(-first // self.multiple) - (-second // self.multiple)
        return units

    def masked_units(self, sample: Any) -> int:
        """Alignment units, 0 or 1, of the masked segment after a sample that is alone in its row: where only its last
        segment is padded, as `energon_packing.thd.assembly.hides_padding` says."""
        first, second = segments_of(sample)
        padded, is_pair = first % self.multiple != 0, second > 0
        hidden: int = (is_pair & (second % self.multiple != 0) & (padded == 0)) | (padded & (is_pair == 0))
        return hidden * self.lone_room

    def costs(self, samples: Sequence[Any]) -> dict[str, list[Any]]:
        """One cost per sample for each limited name."""
        measures: dict[str, Callable[[Any], Any]] = {
            "images": lambda sample: sample.images,
            "patches": lambda sample: sample.patches,
            "segments": lambda sample: 1 + (segments_of(sample)[1] > 0),
            "cost": lambda sample: sum(CONSTANTS.costs(sample)),
        }
        return {name: [measures[name](sample) for sample in samples] for name in self.limited}

    def padding(self, samples: Sequence[Any]) -> Padded | None:
        """The limit of padded pixels, as `energon_packing.packing.online` takes it; None without one."""
        if self.padded_pixels is None:
            return None
        columns = zip(*(shape_of(sample).values() for sample in samples), strict=True)
        return np.array([*columns], dtype=np.int64).reshape(3, -1), self.padded_pixels

    def too_long(self, sample: Any) -> bool:
        """Whether a sample, including the masked segment that it may need, is longer than a row."""
        return self.length_units(sample) + self.masked_units(sample) > self.units

    def length_text(self, sample: Any, seq_length: int) -> str:
        """How much longer a sample is than a row of so many tokens, dummy image included, as part of a sentence."""
        aligned = f", {self.aligned(sample)} aligned" if self.multiple > 1 else ""
        masked = self.masked_units(sample) * self.multiple
        aligned += f" and {masked} for a masked segment after it" if masked else ""
        less = f" less {seq_length - self.tokens} for dummy_image" if seq_length != self.tokens else ""
        return f"{sample.length} tokens{aligned}; a row holds packing.seq_length={seq_length}{less}"

    def holds(self, sample: Any) -> bool:
        """Whether the sample fits a pack by itself."""
        return not self.too_long(sample) and self.exceeded(sample) is None

    def exceeded(self, sample: Any) -> str | None:
        """The first limit other than tokens that a sample exceeds by itself, as part of a sentence; None if it fits."""
        for name, (cost,) in self.costs([sample]).items():
            limit = self.limited[name]
            if cost > limit:
                if name == "cost":
                    return f"a cost of {cost / LINEAR:.0f} tokens; a pack holds packing.max_cost_per_pack={self.cost}"
                return f"{cost} {name}; a pack holds packing.max_{name}_per_pack={limit}"
        if self.padded_pixels and (area := math.prod(shape_of(sample).values())) > self.padded_pixels:
            return f"{area} padded pixels; a pack holds packing.max_padded_pixels_per_pack={self.padded_pixels}"
        return None
