"""Constraints: what a pack may hold besides tokens (images or tiles, patches, segments, attention cost, bytes)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_packing.errors import ConfigError

# Sums of floats depend on their order, so a pack may exceed a fractional limit by at most this share.
FLOAT_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """A vector of costs per sample, with one limit per pack for each cost.

    Attributes:
        costs: name -> ``[N]``, int64 or float64, finite and non-negative.
        limits: name -> the largest allowed sum of one pack's costs; the same names.
    """

    costs: Mapping[str, np.ndarray] = field(default_factory=dict)
    limits: Mapping[str, int | float] = field(default_factory=dict)

    @classmethod
    def from_pairs(cls, pairs: Mapping[str, tuple[Any, int | float]] | None, count: int) -> Constraints:
        """Constraints from name -> (cost of each sample, limit per pack), the form that `pack_lengths` takes.

        Raises:
            ConfigError: no such pair, a wrong number of costs, a negative or non-finite number.
        """
        arrays: dict[str, np.ndarray] = {}
        for name, pair in (pairs or {}).items():
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise ConfigError(f"constraint {name!r} must be a pair (cost of each sample, limit), not {pair!r}")
            cost, limit = pair
            arrays[name] = _column(name, cost, count)
            if not (isinstance(limit, int | float | np.integer | np.floating) and math.isfinite(limit) and limit >= 0):
                raise ConfigError(f"constraint {name!r} needs a finite non-negative limit, not {limit!r}")
        return cls(costs=arrays, limits={name: limit for name, (_, limit) in (pairs or {}).items()})

    def __bool__(self) -> bool:
        return bool(self.limits)

    def take(self, indices: np.ndarray) -> Constraints:
        """The same limits over the samples at `indices`."""
        return Constraints(costs={name: cost[indices] for name, cost in self.costs.items()}, limits=self.limits)

    def oversize(self, count: int) -> np.ndarray:
        """``[count]`` bool: which samples exceed some limit on their own."""
        over = np.zeros(count, dtype=bool)
        for name, cost in self.costs.items():
            over |= cost > self.limits[name]
        return over


def _column(name: str, values: Sequence[int | float] | np.ndarray, count: int) -> np.ndarray:
    column = np.asarray(values)
    if column.shape != (count,):
        raise ConfigError(f"constraint {name!r} needs one cost for each of {count} samples, got shape {column.shape}")
    if column.size == 0:
        return column.astype(np.int64)
    if column.dtype.kind in "iub":
        column = column.astype(np.int64)
    elif column.dtype.kind == "f":
        column = column.astype(np.float64)
    else:
        raise ConfigError(f"constraint {name!r} needs numbers as costs, got {column.dtype}")
    if not np.isfinite(column).all() or column.min() < 0:
        raise ConfigError(f"constraint {name!r} needs finite non-negative costs")
    return column
