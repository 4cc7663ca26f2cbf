"""Sizes of samples drawn at random from a data set, measured on the spot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from energon_packing.config import RunConfig
from energon_packing.convert.report import counted_pairs
from energon_packing.drops import FrequentDrops
from energon_packing.errors import UserError
from energon_packing.offline.index import dropped_row, modality_of
from energon_packing.offline.measure import ShardMeasurer
from energon_packing.offline.source import source_parts
from energon_packing.report.stats_samples import COLUMNS, StatsSamples, dataset_names

Progress = Callable[[str, int, int], None]
"""Called with the stage ``sample``, the samples that are done, and all samples to measure."""


def samples_of_dataset(
    path: str, split: str, run: RunConfig, *, most: int, seed: int = 0, progress: Progress = lambda *_: None
) -> StatsSamples:
    """Measures samples of a data set in this process, drawn at random without replacement; all where they are few.

    Args:
        run: its ``encoder`` section is used, and ``packing.pairs``.
        most: samples to measure.

    Raises:
        UserError: the data set or the processor cannot be used, or it holds nothing.
    """
    parts = source_parts(path, split)
    counted_pairs(Path(part.root) for part in parts).check(path, run.packing.pairs)
    measurer = ShardMeasurer(run)
    shards = [(number, shard) for number, part in enumerate(parts) for shard in part.shards]
    counts = [measurer.index_of(parts[number].root).samples[shard] for number, shard in shards]
    starts = np.cumsum([0, *counts])
    total = int(starts[-1])
    if total == 0:
        raise UserError(f"{path} holds no samples in its split {split!r}")
    drawn = np.sort(np.random.default_rng(seed).choice(total, min(most, total), replace=False))
    progress("sample", 0, drawn.size)
    rows: list[tuple[int, ...]] = []
    drops: list[Counter[str]] = [Counter() for _ in parts]
    frequent = FrequentDrops("measured")
    done = 0
    for place, (number, shard) in enumerate(shards):
        low, high = np.searchsorted(drawn, starts[place : place + 2])
        wanted = (drawn[low:high] - starts[place]).tolist()
        first = starts[next(at for at, (owner, _) in enumerate(shards) if owner == number)]
        if not wanted:
            continue
        for at, row in zip(wanted, measurer.rows(parts[number], shard, set(wanted)), strict=True):
            done += 1
            progress("sample", done, drawn.size)
            path_of = parts[number].path
            dropped = [] if row["reason"] is None else [dropped_row(row, path_of)]
            frequent.add({(path_of, modality_of(row)): 1}, dropped)
            if not dropped:
                rows.append((number, starts[place] + at - first, *(row[name] for name in COLUMNS)))
            else:
                drops[number][row["reason"]] += 1
    table = np.array(rows, dtype=np.int64).reshape(-1, 2 + len(COLUMNS))
    return StatsSamples(
        path=path,
        kind="data set",
        total=total,
        measured=int(drawn.size),
        datasets=dataset_names(parts),
        dataset=table[:, 0],
        place=table[:, 1],
        columns={name: table[:, 2 + at] for at, name in enumerate(COLUMNS)},
        drops=tuple(dict(each) for each in drops),
        frequent=frequent,
        pair_counts=measurer.pair_counts,
    )
