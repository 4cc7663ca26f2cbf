"""What the readers of a run would read of each data set: its share of the mix, and the tokens of each reader."""

from __future__ import annotations

import dataclasses
import os.path
from typing import Any

import numpy as np

from energon_packing.config import RunConfig
from energon_packing.energon.loader import build_dataset
from energon_packing.energon.reader_shares import dealt_shares
from energon_packing.offline.source import source_parts
from energon_packing.report.stats_samples import StatsSamples


def reader_figures(path: str, split: str, run: RunConfig, samples: StatsSamples, data_parallel: int) -> dict[str, Any]:
    """Deals a data set to the readers of a run, as the run does.

    Args:
        path, split: of the data set that ``samples`` were measured of.
        run: with ``data.workers`` and ``data.repeat``.
        data_parallel: ranks that read different samples.

    Returns:
        Plain values: ``data_parallel``, ``workers``, and for each of ``datasets`` and for ``all`` of them ``share`` and
        ``token_share`` of the mix, and the tokens that a reader has in an epoch: ``mean_tokens``, ``least_tokens`` and
        ``most_tokens``. The last two are None unless all samples were measured.

    Raises:
        UserError: as `build_dataset` and `source_parts`.
    """
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=path, split=split))
    shares = dict(dealt_shares(build_dataset(run, world_size=data_parallel)))
    shares = {os.path.abspath(name): share for name, share in shares.items()}
    readers = data_parallel * max(run.data.workers, 1)
    parts = source_parts(path, split)
    scale = samples.total / samples.measured
    dropped = [sum(each.values()) for each in samples.drops]
    counts = (np.bincount(samples.dataset, minlength=len(parts)) + dropped) * scale
    tokens = np.bincount(samples.dataset, samples.tokens, len(parts)) * scale
    given = np.zeros((len(parts), readers))
    mix = np.zeros(len(parts))
    for number, part in enumerate(parts):
        repetitions = 1.0 if part.repetitions is None else part.repetitions
        mix[number] = counts[number] * repetitions if part.weight is None else part.weight
        share = shares.get(part.root)
        own = samples.dataset == number
        if share is None or not samples.whole:
            each = share is not None and share.reader_of is None
            given[number] = tokens[number] * repetitions / (1 if each else readers)
        else:
            copies = max(int(share.bounds[-1]) // share.samples, 1)
            given[number] = share.amounts(samples.place[own], samples.tokens[own], readers) * repetitions / copies
    of_tokens = mix * tokens / np.maximum(counts, 1)
    rows = zip(samples.datasets, mix / mix.sum(), of_tokens / max(of_tokens.sum(), 1e-9), given, strict=True)
    return {
        "data_parallel": data_parallel,
        "workers": run.data.workers,
        "datasets": [_row(*row, whole=samples.whole) for row in rows],
        "all": _row("all", 1.0, 1.0, given.sum(axis=0), whole=samples.whole),
    }


def _row(name: str, share: float, token_share: float, tokens: np.ndarray, *, whole: bool) -> dict[str, Any]:
    return {
        "name": name,
        "share": float(share),
        "token_share": float(token_share),
        "mean_tokens": float(tokens.mean()),
        "least_tokens": float(tokens.min()) if whole else None,
        "most_tokens": float(tokens.max()) if whole else None,
    }
