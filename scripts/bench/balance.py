"""Benchmark of cost-balanced emission: the share of a step in which ranks compute, with and without it.

The ``window`` policy packs a length list; each simulated data-parallel rank draws from the costs of the packs. See
`energon_packing.packing.balance` for the cost of a pack and for the orders.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bench.length_lists import load_lists
from energon_packing.errors import UserError
from energon_packing.packing.balance import pack_cost, serpentine_order, step_efficiency
from energon_packing.packing.whole_list import pack_lengths

RANKS = (2, 8, 64)
WINDOWS = (64, 128)
Order = Literal["none", "ascending", "serpentine"]


def emission_order(costs: np.ndarray, window: int, order: Order = "serpentine") -> np.ndarray:
    """The order in which one rank emits all its packs: positions ``[N]`` int64, one block of `window` after another."""
    positions = np.arange(len(costs))
    for block, start in enumerate(range(0, 0 if order == "none" else len(costs), window)):
        number = block if order == "serpentine" else 0
        positions[start : start + window] = start + np.array(serpentine_order(costs[start : start + window], number))
    return positions


class StepReport(NamedTuple):
    """``efficiency``: share of the time in which ranks compute. ``drift``: (p95 - p5) / mean of the cost of a step, the
    price of sorting: cost rises and falls over 2 W steps."""

    efficiency: float
    drift: float


def simulate_steps(
    pool: Sequence[int | float] | np.ndarray,
    *,
    ranks: int,
    window: int,
    order: Order = "serpentine",
    max_shift: int = 0,
    blocks: int = 20,
    seed: int = 0,
) -> StepReport:
    """Step efficiency when each rank draws its packs from one distribution of pack costs.

    Args:
        pool: costs of the data set's packs, for example from `pack_cost`; each rank draws from it with replacement.
        window: packs that a rank sorts at a time.
        order: ``"serpentine"``, ``"ascending"`` (sorted, with a jump from block to block) or ``"none"``.
        max_shift: each rank is ahead by a number of packs drawn from 0 to this; a rank gets ahead when one of its packs
            is lost to a failing sample.
        blocks: length of the simulation in blocks of `window` (of 64 if the window is smaller).
    """
    random = np.random.default_rng(seed)
    steps = blocks * max(window, 64)
    carried = np.empty((ranks, steps))
    for rank in range(ranks):
        drawn = random.choice(np.asarray(pool, dtype=np.float64), size=steps + max_shift)
        shift = int(random.integers(0, max_shift + 1))
        carried[rank] = drawn[emission_order(drawn, window, order)][shift : shift + steps]
    low, high = np.percentile(carried.mean(axis=0), [5, 95])
    return StepReport(step_efficiency(carried), float((high - low) / carried.mean()))


def run(
    sources: Sequence[Path] = (),
    *,
    capacity: int = 0,
    names: Sequence[str] | None = None,
    ranks: Sequence[int] = RANKS,
    windows: Sequence[int] = WINDOWS,
    max_shift: int = 2,
    samples: int = 100_000,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Simulates the steps of each list and data-parallel size.

    Args:
        sources: lists, or directories of them; without any, lists are made from `seed`.
        capacity: tokens of a pack, for lists that do not say it.
        names: lists to take; without `sources` d32 by default, a mix of text, images and video at 32,768 tokens.
        ranks: data-parallel sizes.
        windows: packs that a rank sorts at a time.
        max_shift: ranks are aligned in one run, and up to this many packs apart in another.
        samples: at most this many of each list.

    Yields:
        ``list, packs, ranks, window`` (1 is the unsorted stream), ``order, max_shift, efficiency`` (share of the time
        in which ranks compute) and ``drift`` (distance between the 5th and 95th percentile of a step's cost, in means).
    """
    if min((*ranks, *windows, samples), default=0) < 1 or max_shift < 0:
        raise UserError("data-parallel sizes, windows and samples must be at least 1, the shift at least 0")
    for found in load_lists(sources, names or (None if sources else ("d32",)), samples, seed, capacity):
        given = found.fitting(samples)
        packs = pack_lengths(given.lengths, given.capacity, "window")
        costs = [pack_cost(given.lengths[pack]) for pack in packs]
        for size in ranks:
            for window in (1, *windows):
                orders: tuple[Order, ...] = ("none",) if window == 1 else ("ascending", "serpentine")
                for order in orders:
                    for shift in sorted({0, max_shift}):
                        told: dict[str, Any] = {"ranks": size, "window": window, "order": order, "max_shift": shift}
                        report = simulate_steps(
                            costs, ranks=size, window=window, order=order, max_shift=shift, seed=seed
                        )
                        told |= {name: round(value, 4) for name, value in report._asdict().items()}
                        yield {"list": given.name, "packs": len(packs), **told}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line per result; 2 on unusable input."""
    parser = argparse.ArgumentParser(prog="bench.py balance", description=__doc__)
    parser.add_argument("--lists", type=Path, nargs="+", default=[], help="as of `bench.py packing`")
    parser.add_argument("--capacity", type=int, default=0, help="tokens of a pack; default: what the list says")
    parser.add_argument("--list", action="append", dest="names", help="one list of --lists; may be repeated")
    parser.add_argument("--ranks", action="append", type=int, help="data-parallel size; may be repeated")
    parser.add_argument(
        "--window", action="append", type=int, dest="windows", help="packs to sort by cost; may be repeated"
    )
    parser.add_argument("--shift", type=int, default=2, help="largest distance between ranks, in packs")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        for row in run(
            given.lists,
            capacity=given.capacity,
            names=given.names,
            ranks=given.ranks or RANKS,
            windows=given.windows or WINDOWS,
            max_shift=given.shift,
            samples=given.samples,
            seed=given.seed,
        ):
            print(json.dumps(row), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
