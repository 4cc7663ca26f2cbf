"""Benchmark of cost-balanced emission: the share of a step in which ranks compute, with and without it.

The ``window`` policy packs a length list; each simulated data-parallel rank draws from the costs of the packs. See
`energon_packing.packing.balance` for the cost of a pack and for the orders. ``--two-costs`` makes the table of packs
in the order of a plan, where ranks wait after the vision tower and after the language model.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bench.length_lists import load_lists, look_alike, omnibal_list
from bench.offline_index import drawn_mix
from energon_packing.errors import UserError
from energon_packing.offline.order import balanced_order
from energon_packing.packing.balance import LINEAR, PATCH, pack_cost, serpentine_order, step_efficiency
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.policies.best_fit import pack_limited
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


MIX: Mapping[str, dict[str, int]] = {
    "mix, 120 images": {"images": 120},
    "mix, 120 images, 80,000 patches, 96 samples": {"images": 120, "patches": 80_000, "segments": 96},
}
"""Limits of packs of 32,768 tokens from `bench.offline_index.drawn_mix`."""
TILES = ((18, 6016), (24, 8192), (18, 5000))
"""Tiles and tokens of a pack; tokens are scarce in the last."""


def packs_of_lists(samples: int, omnibal: Path | None, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a name and the costs ``[P, 2]`` of packs, of vision and of language: of `samples` of the mix in the units
    of `pack_cost`, and of lists of tiles in tiles and tokens."""
    mix = drawn_mix(samples, seed)
    for name, limits in MIX.items():
        columns = {"images": mix.images, "patches": mix.patches, "segments": np.ones_like(mix.images)}
        fits = np.logical_and.reduce([mix.length <= 32768, *(columns[limit] <= most for limit, most in limits.items())])
        costs = np.stack([PATCH * mix.patches[fits], (LINEAR + mix.length[fits]) * mix.length[fits]], axis=1)
        pairs = {limit: (columns[limit][fits], most) for limit, most in limits.items()}
        packs = pack_limited(-(-mix.length[fits] // 8), 4096, Constraints.from_pairs(pairs, len(costs)))
        yield name, np.add.reduceat(costs[packs.order], packs.offsets[:-1])
    for given in (look_alike(seed=seed), *([omnibal_list(omnibal, seed)] if omnibal else [])):
        for most, capacity in TILES:
            pairs = {"tiles": (given.images, most)}
            packs = pack_limited(given.lengths, capacity, Constraints.from_pairs(pairs, given.lengths.size))
            costs = np.stack([given.images, given.lengths], axis=1)[packs.order]
            yield f"{given.name}, {most} / {capacity}", np.add.reduceat(costs, packs.offsets[:-1])


def turns(costs: np.ndarray, ranks: int, window: int, runs: int) -> np.ndarray:
    """The packs ``[P, 2]``, dealt to ranks, in the order of steps. Each sorts blocks of `window`, up and down in turn,
    by the sum of costs (`runs` 1, as ``packing.balance_window``), or cuts them by vision into runs that it sorts by
    language."""
    of_ranks = costs[: len(costs) // ranks * ranks].reshape(ranks, -1, 2).copy()
    for packs in of_ranks:
        for number, start in enumerate(range(0, len(packs), window)):
            block = packs[start : start + window]
            place = block[:, 0].argsort(kind="stable").argsort() * runs // len(block)
            order = np.lexsort((block[:, 1] + (block[:, 0] if runs == 1 else 0), place))
            packs[start : start + window] = block[order[:: -1 if number % 2 else 1]]
    return of_ranks.swapaxes(0, 1).reshape(-1, 2)


def run_two_costs(
    lists: Iterable[tuple[str, np.ndarray]], *, ranks: Sequence[int], window: int = 64, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Steps of these packs in several orders: at random; as plans by one and by two costs; and as `turns`.

    Yields:
        ``list, packs, order, ranks``; ``wait_vision`` and ``wait_language``, (max - mean) / max of a step's costs, mean
        over steps; ``vision`` and ``language``, the share of the time in which ranks compute where they wait after
        either; ``sum``, that share of both costs together, where they wait once a step; ``sum_of_4``, once in four;
        and ``seconds`` of CPU.
    """
    for name, costs in lists:
        given = np.random.default_rng(seed).permutation(costs).astype(np.float64)
        weighed = given if name in MIX else given / given.mean(axis=0)  # tiles and tokens count the same
        nothing, wide = np.zeros(0), max(ranks)
        for order in ("none", "one cost", "two costs", "online", "online, two costs"):
            start, planned = time.process_time(), weighed
            if order in ("one cost", "two costs"):
                by = weighed.sum(axis=1) if order == "one cost" else weighed
                planned = weighed[balanced_order(by, group=wide, before=nothing, seed=[seed])]
            seconds = time.process_time() - start
            for size in ranks:
                start, found = time.process_time(), planned
                if order.startswith("online"):
                    found = turns(weighed, size, window, 1 if order == "online" else round(window**0.5))
                    seconds = time.process_time() - start
                row = {"list": name, "packs": len(costs), "order": order, "ranks": size, **figures(found, size)}
                yield row | {"seconds": round(seconds, 3)}


def figures(costs: np.ndarray, ranks: int) -> dict[str, float | None]:
    """The figures of `run_two_costs` of packs in their order."""
    steps = costs[: len(costs) // ranks * ranks].reshape(-1, ranks, 2)
    if not len(steps):
        return dict.fromkeys(("wait_vision", "wait_language", "vision", "language", "sum", "sum_of_4"))
    waits = (1 - steps.mean(axis=1) / np.maximum(steps.max(axis=1), 1e-9)).mean(axis=0)
    both = steps.sum(axis=2)
    fours = both[: len(both) // 4 * 4].reshape(-1, 4, ranks).sum(axis=1)
    found = {"wait_vision": waits[0], "wait_language": waits[1]}
    found |= {"vision": step_efficiency(steps[..., 0].T), "language": step_efficiency(steps[..., 1].T)}
    found |= {"sum": step_efficiency(both.T), "sum_of_4": step_efficiency(fours.T) if len(fours) else np.nan}
    return {name: round(float(value), 5) for name, value in found.items()}


def draw(file: Path, costs: np.ndarray, *, ranks: int = 64, seed: int = 0) -> None:
    """Draws one step of packs ``[P, 2]`` at random and in the order of a plan, each rank a line: vision, and language
    once all ranks are through with it; what lies between is waiting. Raises UserError: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--picture needs matplotlib; pip install matplotlib") from error
    given = np.random.default_rng(seed).permutation(costs).astype(np.float64)
    given /= given.sum(axis=1).mean()
    planned = given[balanced_order(given, group=512, before=np.zeros(0), seed=[seed])]
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels = zip(figure.subplots(1, 2, sharex=True, sharey=True), (given, planned), ("random", "plan"), strict=True)
    for axes, order, name in panels:
        steps = order[: len(order) // ranks * ranks].reshape(-1, ranks, 2)
        lasts = steps.max(axis=1).sum(axis=1)
        vision, language = steps[lasts.argsort()[len(lasts) // 2]].T  # the step that takes the median
        lines, barrier = np.arange(ranks), vision.max()
        axes.barh(lines, vision, color="#4477aa", label="vision")
        axes.barh(lines, language, left=barrier, color="#ee8866", label="language")
        for wait in (barrier, barrier + language.max()):
            axes.axvline(wait, color="black", linewidth=1)
        computed = 100 * (vision.mean() + language.mean()) / (barrier + language.max())
        what = "packs at random" if name == "random" else "packs of a plan"
        axes.set(title=f"{what}: {computed:.0f} % computing", xlabel="time, in mean packs", yticks=[])
    figure.axes[0].set(ylabel=f"{ranks} ranks")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(file, metadata={"Date": None})


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
    parser.add_argument("--two-costs", action="store_true", help="the table of orders by two costs; --samples of a mix")
    parser.add_argument("--omnibal", type=Path, help="--two-costs: directory of OmniBal's lists")
    parser.add_argument("--picture", type=Path, help="--two-costs: draw a step of the mix into this file instead")
    given = parser.parse_args(argv)
    try:
        if given.picture:
            draw(given.picture, next(packs_of_lists(given.samples, None, given.seed))[1], seed=given.seed)
            return 0
        if given.two_costs:
            lists = packs_of_lists(given.samples, given.omnibal, given.seed)
            for row in run_two_costs(lists, ranks=given.ranks or (8, 64, 512), seed=given.seed):
                print(json.dumps(row), flush=True)
            return 0
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
