"""Benchmark of the drop budget: how often runs with a known share of bad samples stop, and after how many reads.

Every run is a real `WindowPackingDataset` with the real `Ledger` on a stream of samples that cost nothing. A sample is
bad with the given probability. It is found out when it is measured (too long, for example) or only when it is rendered,
after its way through the window (damaged media). See `energon_packing.drops` for the rule.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from energon_packing.drops import BUDGET_STARTS_AT, FALSE_STOP, evidence
from energon_packing.energon.internals import SavableDataset
from energon_packing.energon.samples import MeasuredSample, Pack, Problem, RenderedSample
from energon_packing.energon.window import WindowPackingDataset
from energon_packing.errors import SampleRejected, UserError
from energon_packing.ledger import DropBudgetExceeded, Ledger

Stage = Literal["measure", "render"]
LUCK = 1e-6
"""Probability that a run lasts longer than ``at_most``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What the runs of one result have in common.

    Attributes:
        share: probability that a sample is bad.
        budget: ``packing.drop_budget``.
        window: samples held.
        stage: when a bad sample is found out.
        reads: samples of a run that is not stopped.
        pack: samples of a pack.
    """

    share: float
    budget: float = 0.1
    window: int = 256
    stage: Stage = "measure"
    reads: int = 5000
    pack: int = 8


CELLS = (
    *(Cell(share=share, window=window) for share in (0.02, 0.06) for window in (1, 256, 1024)),
    *(Cell(share=0.06, window=1024, stage="render"), Cell(share=0.09), Cell(share=0.1)),
    *(Cell(share=0.5, budget=0.5), Cell(share=0.01, budget=0.01)),
    *(Cell(share=share, window=window) for share in (0.2, 0.5, 1.0) for window in (1, 1024)),
    *(Cell(share=0.15), Cell(share=0.2, window=1024, stage="render"), Cell(share=0.05, budget=0.01)),
)


class _Stream(SavableDataset[MeasuredSample]):
    """Samples without content, some of them bad."""

    def __init__(self, bad: np.ndarray, stage: Stage, worker_config: Any) -> None:
        super().__init__(worker_config=worker_config)
        self._bad, self._stage = bad, stage

    def reset_state_own(self) -> None:
        """Nothing to reset."""

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Returns the number of samples of the run."""
        return len(self._bad)

    def worker_has_samples(self) -> bool:
        """Returns True, always."""
        return True

    def config(self) -> dict[str, Any]:
        """Returns what Energon writes into the description of a loader."""
        return {"type": type(self).__qualname__}

    def __iter__(self) -> Iterator[MeasuredSample]:
        problem = Problem(reason="oversize", detail="too long")
        for number, bad in enumerate(self._bad.tolist()):
            refused = bad and self._stage == "measure"
            yield MeasuredSample(
                __key__=f"{number}x" if bad else str(number),
                __restore_key__=(number,),
                __subflavors__={},
                measured=None if refused else _NOTHING,
                problem=problem if refused else None,
            )


_NOTHING: Any = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packer:
    """The `Packer` of a run: a pack is the next samples of the stream, in order."""

    pack: int
    ledger: Ledger

    def make_ledger(self, worker_config: Any) -> Ledger:
        return self.ledger

    def select_pack(self, samples: Sequence[MeasuredSample], ended: bool) -> Sequence[int]:
        return range(min(self.pack, len(samples)))

    def select_samples_to_pack(self, samples: list[MeasuredSample]) -> Sequence[Sequence[MeasuredSample]]:
        return [samples]

    def order_plans(self, plans: Sequence[Sequence[MeasuredSample]], block: int) -> Sequence[int]:
        return range(len(plans))

    def fewest_packs(self, samples: Sequence[MeasuredSample]) -> int:
        return 0

    def postencode_sample(self, sample: MeasuredSample) -> RenderedSample:
        if sample.__key__.endswith("x"):
            raise SampleRejected("corrupt_media", "cannot be decoded")
        return RenderedSample.derive_from(sample, rows=())

    def arrange(self, samples: Sequence[RenderedSample]) -> Sequence[int]:
        return range(len(samples))

    def pack_selected_samples(self, samples: list[RenderedSample]) -> Pack:
        nothing: Any = None
        return Pack(__key__="", __restore_key__=(), __subflavors__={}, batch=nothing)


def stopped_after(cell: Cell, seed: int) -> int | None:
    """Returns the samples that a run had read when its budget stopped it; None if it reached its end."""
    from megatron.energon import WorkerConfig

    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    ledger = Ledger(None, budget=cell.budget, name="simulated", most_pending=10**9)
    bad = np.random.default_rng(seed).random(cell.reads) < cell.share
    dataset = WindowPackingDataset(
        _Stream(bad, cell.stage, config),
        window=cell.window,
        balance_window=1,
        packer=_Packer(pack=cell.pack, ledger=ledger),
        fingerprint={},
        worker_config=config,
    )
    config.worker_activate(0)
    try:
        for _ in dataset:
            pass
    except DropBudgetExceeded:
        return ledger.read
    finally:
        config.worker_deactivate()
    return None


def measure(cell: Cell, *, runs: int, seed: int = 0) -> dict[str, Any]:
    """Counts how many of the runs were stopped, and when.

    Returns:
        ``share, budget, window, stage, reads, runs, stopped``; if any run was stopped, the ``median`` and the ``last``
        number of reads; if the share is above the budget, ``expected`` (`reads_until_stop`, with average luck) and
        ``at_most`` (with a luck of `LUCK`).
    """
    found = [stopped_after(cell, seed + run) for run in range(runs)]
    stops = [reads for reads in found if reads is not None]
    result = {
        "share": cell.share,
        "budget": cell.budget,
        "window": cell.window,
        "stage": cell.stage,
        "reads": cell.reads,
        "runs": runs,
        "stopped": len(stops),
        "median": statistics.median(stops) if stops else None,
        "last": max(stops, default=None),
        "expected": None,
        "at_most": None,
    }
    if cell.share > cell.budget:
        result["expected"] = _reads(cell, 1.0)
        result["at_most"] = _reads(cell, LUCK)
    return result


def _reads(cell: Cell, luck: float) -> int:
    held = cell.window if cell.stage == "render" else 0
    return reads_until_stop(cell.share, cell.budget, held=held, luck=luck)


def run(cells: Sequence[Cell] = CELLS, *, runs: int = 200, reads: int | None = None, seed: int = 0) -> Iterator[Any]:
    """Yields the results of all cells, see `measure`.

    Args:
        cells: what to simulate.
        runs: of each cell.
        reads: samples of a run; None takes the cell's, or enough for a stop if the share is above the budget.
        seed: of the first run; each following run adds 1.

    Raises:
        UserError: ``runs`` or ``reads`` is below 1.
    """
    if runs < 1 or (reads is not None and reads < 1):
        raise UserError("runs and reads must be at least 1")
    for cell in cells:
        if reads is not None:
            cell = replace(cell, reads=reads)
        elif cell.share > cell.budget:
            cell = replace(cell, reads=max(cell.reads, _reads(cell, LUCK)))
        yield measure(cell, runs=runs, seed=seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """``bench.py budget [--runs N] [--reads N] [--seed N]``: one JSON line per result; 2 on unusable options."""
    import argparse
    import json
    import sys

    parser = argparse.ArgumentParser(prog="bench.py budget", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="runs per cell (default 200)")
    parser.add_argument("--reads", type=int, help="samples per run (default 5,000, more if a stop needs them)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        for result in run(runs=options.runs, reads=options.reads, seed=options.seed):
            print(json.dumps(result), flush=True)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())


def reads_until_stop(share: float, budget: float, *, held: int = 0, luck: float = 1.0) -> int:
    """Samples read until a run stops if ``share`` of its data is bad.

    Args:
        share: share of the data that is dropped; above ``budget``.
        budget: above 0 and below 1.
        held: samples in the window, if they turn out to be bad only after it; 0 if that is seen at once.
        luck: the chance, or slightly more, that a run lasts longer; 1 assumes a run of exactly average luck.

    Raises:
        ValueError: the share is not above the budget, or a number is out of range.
    """
    if not (0.0 < budget < share <= 1.0 and 0.0 < luck <= 1.0):
        raise ValueError(f"share {share} must be above budget {budget}, both in 0..1, and luck {luck} in 0..1")
    # The budget is checked only at a drop, and the first drop after the start may take a while.
    first = BUDGET_STARTS_AT + (0 if share == 1.0 else math.ceil(math.log(luck) / math.log1p(-share)))
    low, high = first - 1, first
    while not _stops(high, high - held, share, budget, luck):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _stops(middle, middle - held, share, budget, luck) else (middle, high)
    return high


def _stops(read: int, judged: int, share: float, budget: float, luck: float) -> bool:
    dropped = _fewest(judged, share, luck) if judged > 0 else 0.0
    return dropped > budget * read and evidence(dropped, read, budget) >= -math.log(FALSE_STOP)


def _fewest(read: int, share: float, luck: float) -> float:
    """A number of drops that a run stays below with a chance of at most ``luck``, by Chernoff's bound."""
    low, high = 0.0, share
    wanted = -math.log(luck) / read
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _divergence(middle, share) > wanted else (low, middle)
    return high * read


def _divergence(found: float, share: float) -> float:
    """Kullback-Leibler divergence of two coins, in nats."""
    first = found * math.log(found / share) if found > 0.0 else 0.0
    if found >= 1.0:
        return first
    return math.inf if share >= 1.0 else first + (1.0 - found) * math.log((1.0 - found) / (1.0 - share))
