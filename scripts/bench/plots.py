"""The plots of docs/packing.md: fill and delay over the window size, step efficiency over the data-parallel size.

Needs matplotlib. Equal lists and seeds give equal files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench.length_lists import LengthList, load_lists
from energon_packing.errors import UserError
from energon_packing.packing.balance import pack_cost, simulate_steps
from energon_packing.packing.statistics import PackStatistics, lower_bound
from energon_packing.packing.whole_list import pack_lengths

LISTS = ("a", "c", "d32", "e")
WINDOWS = (16, 32, 64, 128, 256, 512, 1024)
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS = ((1, 0, "unsorted"), (64, 0, "W = 64"), (64, 2, "W = 64, ranks up to 2 packs apart"), (128, 2, "W = 128, same"))
"""Window, shift and label of each line of the third plot; window 1 is the unsorted stream."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def draw(out: Path, source: Path | None = None, *, samples: int = 100_000, seed: int = 0) -> Iterator[Path]:
    """Draws ``packing-fill.svg``, ``packing-delay.svg`` and ``packing-steps.svg``.

    Args:
        out: directory, made if it is missing.
        source: directory of length lists; None makes them from `seed`.
        samples: at most this many of each list.

    Yields:
        The path of each file once it is written.

    Raises:
        UserError: matplotlib is not installed, or a list is missing.
    """
    pyplot = _pyplot()
    out.mkdir(parents=True, exist_ok=True)
    lists = [found.fitting(samples) for found in load_lists(source, LISTS, samples, seed)]
    sliding = {given.name: _sliding(given) for given in lists}

    figure, axes = _axes(pyplot, "samples held", "fill, % of the bound's")
    for given, colour in zip(lists, COLOURS, strict=True):
        bound = lower_bound(given.lengths, given.capacity)
        held = [100 * bound / found.packs for found in sliding[given.name]]
        axes.plot(WINDOWS, held, color=colour, marker="o", markersize=3, label=f"{given.name}, sliding window")
        apart = [100 * bound / disjoint_packs(given, size) for size in WINDOWS]
        axes.plot(WINDOWS, apart, color=colour, linestyle=":", label=f"{given.name}, disjoint buffers")
    axes.set_ylim(86, 100.3)
    yield _save(pyplot, figure, axes, out / "packing-fill.svg")

    figure, axes = _axes(pyplot, "samples held", "delay, samples")
    for given, colour in zip(lists, COLOURS, strict=True):
        found = sliding[given.name]
        axes.plot(WINDOWS, [max(each.delay_p99, 1) for each in found], color=colour, label=f"{given.name}, p99")
        axes.plot(WINDOWS, [max(each.delay_p50, 1) for each in found], color=colour, linestyle=":", label="p50")
    axes.set_yscale("log")
    yield _save(pyplot, figure, axes, out / "packing-delay.svg")

    figure, axes = _axes(pyplot, "data-parallel size", "share of a step in which ranks compute")
    mixed = next(given for given in lists if given.name == "d32")
    costs = [pack_cost(mixed.lengths[pack]) for pack in pack_lengths(mixed.lengths, mixed.capacity, "window")]
    for (window, shift, label), colour in zip(STEPS, COLOURS, strict=True):
        order: Any = "none" if window == 1 else "serpentine"
        reports = [
            simulate_steps(costs, ranks=size, window=window, order=order, max_shift=shift, seed=seed) for size in RANKS
        ]
        axes.plot(RANKS, [report.efficiency for report in reports], color=colour, marker="o", markersize=3, label=label)
    axes.set_ylim(0.5, 1.01)
    yield _save(pyplot, figure, axes, out / "packing-steps.svg")


def disjoint_packs(given: LengthList, size: int) -> int:
    """Returns the number of packs if each buffer of `size` samples is packed by itself, best-fit decreasing."""
    starts = range(0, given.lengths.size, size)
    return sum(len(pack_lengths(given.lengths[start : start + size], given.capacity, "best_fit")) for start in starts)


def _sliding(given: LengthList) -> Sequence[PackStatistics]:
    found = []
    for window in WINDOWS:
        groups = pack_lengths(given.lengths, given.capacity, "window", window=window)
        found.append(PackStatistics.of(groups, given.lengths, given.capacity))
    return found


def _pyplot() -> Any:
    try:
        matplotlib = import_module("matplotlib")
        matplotlib.use("Agg")
        # Equal input gives equal bytes; text stays text, which is smaller and can be searched.
        matplotlib.rcParams.update({"svg.hashsalt": "energon-packing", "svg.fonttype": "none", "font.size": 9})
        return import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UserError(f"Plots need matplotlib: pip install matplotlib ({error}).") from error


def _axes(pyplot: Any, across: str, up: str) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    axes.set_xscale("log", base=2)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(True, color="#dddddd", linewidth=0.5)
    return figure, axes


def _save(pyplot: Any, figure: Any, axes: Any, path: Path) -> Path:
    from matplotlib.ticker import ScalarFormatter

    ticks = np.unique(np.concatenate([line.get_xdata() for line in axes.get_lines()]))
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return path
