"""Statistics of samples: distributions, shares by modality and data set, and drops, with error bars where sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_packing.offline.index import MODALITIES
from energon_packing.report.stats_samples import StatsSamples

Z = 1.959964
"""Half the width of a 95 % interval, in standard errors."""
SHARE_BINS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """What is counted in a sample."""

    title: str
    unit: str


QUANTITIES: Mapping[str, Quantity] = {
    "tokens": Quantity(title="Tokens", unit="tokens per sample"),
    "trained_share": Quantity(title="Trained share", unit="targets per token of a sample"),
    "turns": Quantity(title="Turns", unit="turns per sample"),
    "stills": Quantity(title="Images", unit="images per sample"),
    "videos": Quantity(title="Videos", unit="videos per sample"),
    "frames": Quantity(title="Frames", unit="sampled video frames per sample"),
    "pixels": Quantity(title="Pixels", unit="source pixels of images and frames per sample"),
    "patches": Quantity(title="Patches", unit="rows of vision input per sample"),
}


def statistics(samples: StatsSamples) -> dict[str, Any]:
    """Describes samples.

    Returns:
        Plain values. ``pairs``, ``unwanted``: of the measured samples, see `PairCounts`. ``quantities``: for each of
        `QUANTITIES` that the source has, ``mean``, ``sum``, percentiles and a ``histogram``; ``modalities`` and
        ``datasets``: shares of samples and tokens; ``drops``: by reason; ``warnings``: about frequent ones. Where only
        a random part was measured, ``sum`` is an estimate for all samples, and each ``error`` is half the width of its
        95 % confidence interval; otherwise an error is 0.
    """
    values = {name: _values(samples, name) for name in QUANTITIES}
    return {
        "path": samples.path,
        "kind": samples.kind,
        "samples": samples.total,
        "measured": samples.measured,
        "pairs": samples.pair_counts.pairs,
        "unwanted": samples.pair_counts.unwanted,
        "quantities": {name: _quantity(samples, array) for name, array in values.items() if array is not None},
        "modalities": _modalities(samples),
        "datasets": [
            _group(samples, name, samples.dataset == number, samples.drops[number] if samples.drops else {})
            for number, name in enumerate(samples.datasets)
        ],
        "drops": _drops(samples),
        "warnings": samples.frequent.news(final=True),
    }


def _values(samples: StatsSamples, name: str) -> np.ndarray | None:
    if name == "tokens":
        return samples.tokens
    if name == "trained_share":
        targets = samples.columns.get("targets")
        return None if targets is None else targets / np.maximum(samples.tokens, 1)
    return samples.columns.get(name)


def share_error(samples: StatsSamples, share: float) -> float:
    """Half the width of a 95 % interval of a share of all samples (Wilson's, for a finite population)."""
    if samples.whole:
        return 0.0
    n = samples.measured * (samples.total - 1) / max(samples.total - samples.measured, 1)
    return Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))


def mean_error(samples: StatsSamples, array: np.ndarray) -> float:
    """Half the width of a 95 % interval of a mean over usable samples."""
    if samples.whole or array.size < 2:
        return 0.0
    left = 1 - samples.measured / samples.total
    return Z * float(array.std(ddof=1)) * math.sqrt(left / array.size)


def _quantity(samples: StatsSamples, array: np.ndarray) -> dict[str, Any]:
    if array.size == 0:
        return {"samples": 0, "histogram": []}
    # Dropped samples count as nothing, so that the estimate includes how many of them there are.
    scale = samples.total / samples.measured
    all_of_them = np.concatenate([array, np.zeros(samples.measured - array.size)]) if not samples.whole else array
    total = float(array.sum())
    marks = np.percentile(array, [5, 50, 95, 99])
    return {
        "samples": int(array.size),
        "mean": float(array.mean()),
        "mean_error": mean_error(samples, array),
        "deviation": float(array.std()),
        "smallest": float(array.min()),
        **{f"p{mark}": float(value) for mark, value in zip((5, 50, 95, 99), marks, strict=True)},
        "largest": float(array.max()),
        "sum": total * scale,
        "sum_error": mean_error(samples, all_of_them) * samples.total,
        "histogram": _histogram(samples, array),
    }


def _histogram(samples: StatsSamples, array: np.ndarray) -> list[dict[str, Any]]:
    """Bins ``[from, below)``: powers of two with a bin for 0, or tenths for a share."""
    edges: list[float]
    if array.dtype.kind == "f":
        edges = [number / SHARE_BINS for number in range(SHARE_BINS + 1)]
        counts = np.bincount(np.minimum((array * SHARE_BINS).astype(int), SHARE_BINS - 1), minlength=SHARE_BINS)
    else:
        # frexp is exact for integers below 2**53: 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3.
        counts = np.bincount(np.frexp(array.astype(np.float64))[1])
        edges = [0, *(1 << power for power in range(counts.size))]
    first, last = np.flatnonzero(counts)[[0, -1]]
    found = []
    for number in range(int(first), int(last) + 1):
        share = int(counts[number]) / samples.measured
        found.append(
            {
                "from": edges[number],
                "below": edges[number + 1],
                "samples": int(counts[number]),
                "share": share,
                "error": share_error(samples, share),
            }
        )
    return found


def _modalities(samples: StatsSamples) -> list[dict[str, Any]]:
    if "stills" not in samples.columns:
        return []
    number = (samples.columns["stills"] > 0) + 2 * (samples.columns["videos"] > 0)
    return [
        _group(samples, name, number == place, {}) for place, name in enumerate(MODALITIES) if (number == place).any()
    ]


def _group(samples: StatsSamples, name: str, members: np.ndarray, drops: Mapping[str, int]) -> dict[str, Any]:
    tokens = samples.tokens
    own = int(tokens[members].sum())
    count = int(members.sum())
    share = count / samples.measured
    found: dict[str, Any] = {
        "name": name,
        "samples": round(count * samples.total / samples.measured),
        "share": share,
        "error": share_error(samples, share),
        "tokens": round(own * samples.total / samples.measured),
        "token_share": own / max(int(tokens.sum()), 1),
        "mean_tokens": own / max(count, 1),
    }
    if "targets" in samples.columns:
        found["trained_share"] = int(samples.columns["targets"][members].sum()) / max(own, 1)
    if drops:
        found["dropped"] = round(sum(drops.values()) * samples.total / samples.measured)
    return found


def _drops(samples: StatsSamples) -> list[dict[str, Any]]:
    return [
        {
            "reason": reason,
            "samples": round(count * samples.total / samples.measured),
            "share": count / samples.measured,
            "error": share_error(samples, count / samples.measured),
        }
        for reason, count in samples.dropped.most_common()
    ]
