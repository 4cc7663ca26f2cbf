"""Figures about a plan, for readers: histogram, fill, balance of steps, steps per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from energon_packing.config import RunConfig
from energon_packing.offline import array_limits
from energon_packing.offline.array_limits import AnyLimits
from energon_packing.offline.fitting_samples import Samples
from energon_packing.offline.index import IndexedDataset
from energon_packing.offline.ordered_packs import OrderedPacks
from energon_packing.offline.sample_kind import AnyRun
from energon_packing.packing.balance import step_efficiency

BATCH_SIZES = (8, 32, 64, 128, 256, 512, 1024)
"""Global batch sizes, in packs, for which steps are counted, besides that of the configuration."""


def summary_of(
    datasets: Sequence[IndexedDataset], samples: Samples, packs: OrderedPacks, limits: AnyLimits, config: AnyRun
) -> dict[str, Any]:
    """The figures, as plain values.

    ``fill`` is the share of real tokens in all rows of ``seq_length``; ``aligned_fill`` counts alignment padding too;
    ``of_bound`` is the share of packs that no packer can do without. ``balance`` gives, for data-parallel sizes, the
    share of the time in which ranks do not wait for the slowest. ``steps`` gives, for global batch sizes, the whole
    steps of each epoch when epochs follow each other without a gap: the last step of an epoch may end in the next.
    ``datasets`` gives, for each data set, how often an epoch has each of its samples (``per_epoch``).
    Of clips, ``tokens`` are latent patches, and ``text_tokens`` are there too.
    """
    sizes = samples.sizes
    tokens = int(sizes.tokens[packs.order].sum())
    aligned = int(array_limits.length_units(limits, sizes)[packs.order].sum()) * limits.multiple
    room = packs.count * config.packing.seq_length
    lengths = np.bincount(np.frexp(np.maximum(sizes.tokens, 1))[1] - 1)  # of the power of two below each length
    own = {config.training.global_batch_size} if isinstance(config, RunConfig) else set()
    batches = sorted({*own, *BATCH_SIZES})
    text = samples.sizes.text_tokens
    return {
        "source_samples": int(np.count_nonzero(np.diff(samples.source, prepend=-1))),
        "rows": int(packs.order.size),
        "tokens": tokens,
        **({} if text is None else {"text_tokens": int(text[packs.order].sum(dtype=np.int64))}),
        "images": int(sizes.images[packs.order].sum(dtype=np.int64)),
        "patches": int(sizes.patches[packs.order].sum()),
        "packs": packs.count,
        "samples_per_pack": round(packs.order.size / packs.count, 3),
        "fill": round(tokens / room, 6),
        "aligned_fill": round(aligned / room, 6),
        "of_bound": round(packs.bound / packs.count, 6),
        "datasets": [
            {"name": dataset.name, "path": dataset.path, "root": dataset.root, "per_epoch": round(repeats, 12)}
            for dataset, repeats in zip(datasets, packs.repeats, strict=True)
        ],
        "histogram": [
            {"from": 1 << power, "below": 2 << power, "samples": int(count)}
            for power, count in enumerate(lengths.tolist())
            if count
        ],
        "balance": {
            str(ranks): round(efficiency, 4)
            for ranks in _sizes(config.plan.max_data_parallel)
            if (efficiency := efficiency_of(packs.costs, ranks)) is not None
        },
        "steps": {str(batch): _steps(packs.epoch_ends, batch) for batch in batches},
    }


def efficiency_of(costs: np.ndarray, ranks: int) -> float | None:
    """`step_efficiency` of all whole steps; None if there is none."""
    whole = costs.size // ranks * ranks
    return step_efficiency(costs[:whole].reshape(-1, ranks).T) if whole else None


def _sizes(most: int) -> list[int]:
    """Data-parallel sizes to report: powers of two that divide the maximum, and the maximum."""
    powers = [1 << power for power in range(1, most.bit_length()) if most % (1 << power) == 0]
    return sorted({*powers, most} - {1}) or [1]


def _steps(epoch_ends: tuple[int, ...], batch: int) -> list[int]:
    """Steps that end in each epoch."""
    ends = [end // batch for end in epoch_ends]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
