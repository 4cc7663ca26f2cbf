"""The whole report of ``energon-packing stats``, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon_packing.config import RunConfig
from energon_packing.report.stats import statistics
from energon_packing.report.stats_packing import packings, planned_packing, recommendation
from energon_packing.report.stats_samples import StatsSamples

SEQ_LENGTHS = (4096, 8192, 16384, 32768)
WINDOWS = (64, 256, 1024)


def stats_report(
    samples: StatsSamples,
    run: RunConfig,
    *,
    seq_lengths: Sequence[int] = (),
    multiples: Sequence[int] = (),
    windows: Sequence[int] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """Statistics, packings side by side, and a recommendation.

    Args:
        run: limits of a pack, alignment, global batch size and drop budget.
        seq_lengths, multiples, windows: to compare; empty takes `SEQ_LENGTHS`, the run's alignment and `WINDOWS`.

    Raises:
        ConfigError: a ``seq_length`` is not a multiple of the alignment.
    """
    compared = list(
        packings(
            samples,
            run,
            seq_lengths=sorted(set(seq_lengths or SEQ_LENGTHS)),
            multiples=sorted(set(multiples or (run.parallel.multiple,))),
            windows=sorted(set(windows or WINDOWS)),
            seed=seed,
        )
    )
    planned = [planned_packing(samples, run)] if samples.kind == "plan" else []
    return {
        **statistics(samples),
        "global_batch_size": run.training.global_batch_size,
        "plan": planned[0] if planned else None,
        "packing": compared,
        "recommendation": recommendation(samples, run, compared),
    }
