"""How long the steps of a run took for what its packs cost, and how long those of a plan take on pipelines."""

from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from energon_packing.errors import UserError, refuse
from energon_packing.line_file import read_lines
from energon_packing.packing.pipeline import Layout, best_order, simulate, stage_costs

LEAST_STEPS = 10  # that a fit needs
FAR = 6.0
"""Steps that miss the fit by so many median errors did something else: a checkpoint, an evaluation, a compilation."""


def measured_steps(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """What the packs of a run's steps cost and how long they took: ``[S, R, 2]`` of vision and language on each rank,
    and ``[S]`` seconds, both float64. ``path`` is the directory of the metrics of a run, or the file of a rank; where
    runs of other numbers of ranks wrote there before, those of the last count. A run replaces the steps of one before
    from its own first pack on. Raises UserError: there are no metrics, or of an older version."""
    files = sorted(path.glob("rank*.jsonl")) if path.is_dir() else [path]
    # (ranks of the run, pack) -> file -> vision, language, seconds
    steps: dict[tuple[int, int], dict[int, tuple[float, float, float]]] = defaultdict(dict)
    named: dict[int, set[int]] = defaultdict(set)  # files of the runs of so many ranks
    newest, older = (0.0, 0), False  # when the last one wrote, and its ranks
    try:
        for number, file in enumerate(files):
            lines = [line for line in read_lines(file) if line["steps"]]
            runs: dict[int, list[Any]] = defaultdict(list)  # of so many ranks
            older = older or bool(lines)
            for line in lines:
                if "took" in line:  # a version before this one wrote none, perhaps into the same file
                    own, first = runs[line["ranks"]], line["steps"][0][0]
                    while own and own[-1][1] >= first:
                        own.pop()  # this run does them again
                    named[line["ranks"]].add(number)
                    newest = max(newest, (line["time"], line["ranks"]))
                    pairs = zip(line["steps"], line["took"], strict=True)
                    own += [(line["run"], *step, *took) for step, took in pairs]
            for count, own in runs.items():
                for (run, pack, cost, vision, _), (following, *_, seconds) in pairwise(own):
                    if run == following and seconds > 0:
                        steps[count, pack][number] = vision, cost - vision, seconds
        refuse((older and not named, f"{path} has no costs and times of steps; write metrics with this version."))
        ranks = sorted(named[newest[1]])
        known = [each for (of, _), each in steps.items() if of == newest[1] and len(each) == len(ranks)]
        found = np.array([[each[rank] for rank in ranks] for each in known]).reshape(-1, max(len(ranks), 1), 3)
    except OSError as error:
        raise UserError(f"The metrics {path} cannot be read ({error.strerror}).") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} has no costs and times of steps; write metrics with this version.") from error
    return found[:, :, :2], found[:, :, 2].mean(axis=1)


def fit_report(path: Path) -> dict[str, Any]:
    """Fits the seconds of `measured_steps` to what their packs cost, on the rank that takes longest: so much for each
    unit of vision and of language, and a constant, none negative, by least squares. Returns ``vision``, ``language``:
    seconds per unit of cost; ``constant``: seconds; ``r_squared``, ``median_error`` as a share of a step, ``steps`` and
    ``left_out`` (steps that took far longer than the fit says), ``ranks``. Raises UserError: as `measured_steps`, or
    too few steps."""
    costs, seconds = measured_steps(path)
    if len(seconds) < LEAST_STEPS:
        fix = f"a fit needs {LEAST_STEPS}; give the metrics.directory of a longer run."
        raise UserError(f"{path} has {len(seconds)} steps whose time all ranks know, and {fix}")
    slope, kept = np.ones(2), np.ones(len(seconds), dtype=bool)
    for _ in range(8):
        slowest = costs[np.arange(len(seconds)), (costs @ slope).argmax(axis=1)]
        columns = np.column_stack([slowest, np.ones(len(seconds))])
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
        "ranks": costs.shape[1],
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


def layout_report(path: Path, layout: str, ranks: int, count: int, most: int = 128) -> dict[str, Any]:
    """How long steps of a plan take on pipelines, by the costs of its packs; ``layout`` is ``PP`` or ``PPxVP``:
    pipeline ranks, and stages of each; ``ranks`` the data-parallel size, each with ``count`` micro-batches. ``most``
    replicas are simulated in all; steps, and replicas of one, are taken at equal distances. Returns ``steps``
    simulated, ``of`` all, ``data_parallel``, and per order (``plan``, ``ordered``) ``efficiency``, the share of steps
    in which ranks compute until the slowest replica is through, and ``bubble``, that in which those of a replica wait
    until it is. Raises UserError: no plan, another layout, one that Core refuses, or a plan shorter than a step."""
    from energon_packing.offline.plan import Plan

    sizes = layout.split("x")
    refuse((len(sizes) > 2 or not all(map(str.isdecimal, sizes)), f"--layout is {layout!r}; give it as 4, or as 4x2."))
    shape, plan, size = Layout(*map(int, sizes)), Plan.open(path), ranks * count
    steps = len(plan) // size
    refuse((not steps, f"{path} has {len(plan)} packs, less than a step of {size}; give fewer ranks or micro-batches."))
    costs, own = plan.costs(0, len(plan)), np.linspace(0, ranks - 1, min(ranks, most)).astype(int).tolist()
    chosen = np.unique(np.linspace(0, steps - 1, max(1, most // ranks)).astype(int))
    busy, taken, bubbles = 0.0, np.zeros(2), np.zeros(2)
    for first in chosen * size:
        longest = np.zeros(2)
        for rank in own:
            forward, backward = stage_costs(costs[first + rank : first + size : ranks], shape)
            orders = range(count), best_order(forward, backward, shape)
            both = [simulate(forward[order], backward[order], shape) for order in orders]
            longest = np.maximum(longest, [each.makespan for each in both])
            bubbles += [each.bubble for each in both]
            busy += float(both[0].busy.mean()) / len(own)
        taken += longest
    found = zip(("plan", "ordered"), busy / taken, bubbles / (len(chosen) * len(own)), strict=True)
    orders_found = [dict(zip(("order", "efficiency", "bubble"), each, strict=True)) for each in found]
    return {"steps": len(chosen), "of": steps, "data_parallel": ranks, "orders": orders_found}
