"""Benchmark of cost-balanced emission: the share of a step in which ranks compute, with and without it.

The ``window`` policy packs a length list; each simulated data-parallel rank draws from the costs of the packs. See
`energon_packing.packing.balance` for the cost of a pack and for the orders.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.length_lists import load_lists
from energon_packing.errors import UserError
from energon_packing.packing.balance import Order, pack_cost, simulate_steps
from energon_packing.packing.whole_list import pack_lengths

RANKS = (2, 8, 64)
WINDOWS = (64, 128)


def run(
    source: Path | None = None,
    *,
    names: Sequence[str] | None = None,
    ranks: Sequence[int] = RANKS,
    windows: Sequence[int] = WINDOWS,
    max_shift: int = 2,
    samples: int = 100_000,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Simulates the steps of each list and data-parallel size.

    Args:
        source: directory of length lists; None makes them from `seed`.
        names: lists to take; d32 by default, a mix of text, images and video at 32,768 tokens.
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
    for found in load_lists(source, names or ("d32",), samples, seed):
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
    parser.add_argument("--lists", type=Path, help="directory of NAME.npz; made from a seed by default")
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
