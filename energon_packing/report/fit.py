"""How long the steps of a run took for what its packs cost."""

from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from energon_packing.errors import UserError
from energon_packing.line_file import read_lines

LEAST_STEPS = 10
"""That a fit needs."""
FAR = 6.0
"""Steps that miss the fit by so many median errors did something else: a checkpoint, an evaluation, a compilation."""


def fit_report(path: Path) -> dict[str, Any]:
    """Fits the seconds of a run's steps to what their packs cost, on the rank that takes longest: so much for each unit
    of vision and of language, and a constant, none negative, by least squares.

    Args:
        path: directory of the metrics of a run, or the file of a rank.

    Returns:
        ``vision``, ``language``: seconds per unit of cost; ``constant``: seconds; ``r_squared``, ``median_error`` as a
        share of a step, ``steps`` and ``left_out`` (steps that took far longer than the fit says), ``ranks``.

    Raises:
        UserError: there are no metrics, of an older version, or too few steps.
    """
    files = sorted(path.glob("rank*.jsonl")) if path.is_dir() else [path]
    steps: dict[int, dict[int, tuple[float, float, float]]] = defaultdict(dict)  # pack -> rank -> vision, language, s
    try:
        for number, file in enumerate(files):
            lines = [line for line in read_lines(file) if line["steps"]]
            of_run = [
                (line["run"], *step, *took)
                for line in lines
                for step, took in zip(line["steps"], line["took"], strict=True)
            ]
            for (run, pack, cost, vision, _), (following, *_, seconds) in pairwise(of_run):
                if run == following and seconds > 0:
                    steps[pack][number] = vision, cost - vision, seconds
        found = np.array(
            [[each[rank] for rank in range(len(files))] for each in steps.values() if len(each) == len(files)]
        )
        found = found.reshape(-1, max(len(files), 1), 3)
    except OSError as error:
        raise UserError(f"The metrics {path} cannot be read ({error.strerror}).") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} has no costs and times of steps; write metrics with this version.") from error
    if len(found) < LEAST_STEPS:
        raise UserError(
            f"{path} has {len(found)} steps whose time all ranks know, and a fit needs {LEAST_STEPS}; give the "
            "metrics.directory of a longer run."
        )
    costs, seconds = found[:, :, :2], found[:, :, 2].mean(axis=1)
    slope, kept = np.ones(2), np.ones(len(found), dtype=bool)
    for _ in range(8):
        slowest = costs[np.arange(len(found)), (costs @ slope).argmax(axis=1)]
        columns = np.column_stack([slowest, np.ones(len(found))])
        fitted = _non_negative(columns[kept], seconds[kept])
        slope, errors = fitted[:2], np.abs(columns @ fitted - seconds)
        kept = errors <= FAR * max(float(np.median(errors)), 1e-9)
    around = float(np.square(seconds[kept] - seconds[kept].mean()).sum())
    return {
        **dict(zip(("vision", "language", "constant"), fitted.tolist(), strict=True)),
        "r_squared": 1 - float(np.square(errors[kept]).sum()) / max(around, 1e-30),
        "median_error": float(np.median(errors[kept] / seconds[kept])),
        "steps": int(kept.sum()),
        "left_out": int((~kept).sum()),
        "ranks": len(files),
    }


def _non_negative(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The least squares of non-negative weights of few columns ``[N, C]``: the best of those of some columns alone that
    are none negative."""
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
    best, least = np.zeros(columns.shape[1]), float(np.square(values).sum())
    for count in range(1, columns.shape[1] + 1):
        for some in map(list, combinations(range(columns.shape[1]), count)):
            weights, *_ = np.linalg.lstsq(columns[:, some] / scale[some], values)
            left = float(np.square(columns[:, some] / scale[some] @ weights - values).sum())
            if (weights >= 0).all() and left < least:
                best, least = np.zeros(columns.shape[1]), left
                best[some] = weights / scale[some]
    return best
