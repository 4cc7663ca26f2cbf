"""A plan that goes on where an online run stopped: first the rest of its running epoch, then whole epochs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from energon_packing.errors import UserError
from energon_packing.offline.blend import Blend
from energon_packing.offline.fitting_samples import Samples
from energon_packing.offline.sources import Sources

ALL = 1 << 30
"""No sample is divided into so many pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What an online run has still to give in its running epoch.

    Attributes:
        samples: ``(shard, row, first, stop)`` -> how often: pieces ``[first, stop)`` of a sample; ``[0, ALL)`` is the
            whole. More than once if some worker has begun an epoch that the worker of this sample has not.
        epoch: number of that epoch, from 0.
        ranks, workers: of the run; no workers is one process.
        packs: that each rank has given.
    """

    samples: Mapping[tuple[str, int, int, int], int]
    epoch: int
    ranks: int
    workers: int
    packs: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RestThenBlend:
    """Draws the samples of each epoch, as `Blend` does, but the first is the rest.

    Attributes:
        blend: of the epochs after it.
        rows: ``[N]`` rows of `Samples` in the rest.
    """

    blend: Blend
    rows: np.ndarray

    @property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """As `Blend.groups`."""
        return self.blend.groups

    def epoch(self, number: int, group: str) -> np.ndarray:
        """As `Blend.epoch`."""
        if number:
            return self.blend.epoch(number - 1, group)
        return np.random.default_rng([self.blend.config.seed, 4]).permutation(self.rows)


def rows_left(left: Left, sources: Sources, samples: Samples) -> np.ndarray:
    """Rows of `Samples` that a run has still to give, ``[N]`` int64; one that it owes twice is there twice.

    Samples that are dropped under the plan's settings have no row; they are among the plan's drops.

    Raises:
        UserError: the index is of another data set, or of more than one.
    """
    if len(sources.datasets) != 1:
        names = ", ".join(dataset.name for dataset in sources.datasets)
        raise UserError(f"the index has several data sets ({names}); measure the run's own into an index for itself")
    (dataset,) = sources.datasets
    first_source = {shard.name: int(start) for shard, start in zip(dataset.shards, sources.starts, strict=False)}
    size = {shard.name: shard.samples for shard in dataset.shards}
    rows: list[int] = []
    bounds = np.searchsorted(samples.source, np.arange(len(sources) + 1)).tolist()
    pieces = np.maximum(samples.piece, 0).tolist()
    for (shard, row, first, stop), times in sorted(left.samples.items()):
        if row >= size.get(shard, 0):
            raise UserError(f"{dataset.path} has no sample {row} of {shard} in the index; measure the run's data set")
        source = first_source[shard] + row
        rows.extend(times * [at for at in range(bounds[source], bounds[source + 1]) if first <= pieces[at] < stop])
    return np.array(rows, dtype=np.int64)


def digest_of(left: Left) -> str:
    """What tells plans of different rests apart."""
    listed = [[*sample, times] for sample, times in sorted(left.samples.items())]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]
