"""Packs and steps under two limits, tiles and tokens: ours, OmniBal's search, LoongForge's packer, a plain buffer.

The lists are `bench.length_lists.look_alike`, and OmniBal's own if its checkout is given. Other projects' programs run
from their checkouts, in a process of their own: ``python -m bench.tiles PROGRAM CHECKOUT FILE``.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from bench.length_lists import LengthList
from bench.peers import SEARCH_PATH, first_fit
from energon_packing.errors import UserError
from energon_packing.offline.order import balanced_order
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.partition import PackGroups, lower_bound
from energon_packing.packing.policies.best_fit import pack_limited
from energon_packing.packing.whole_list import pack_lengths

LIMITS = ((18, 6016), (24, 8192), (48, 16384), (18, 5000), (60, 16384), (18, 5600))
"""Tiles and tokens of a pack: tiles are scarce in the first three, tokens in the next two, both nearly in the last."""
WINDOWS = (64, 256, 1024)
RANKS = (8, 64, 512)
BUFFER = 64
"""Samples that Energon's packing buffer holds in Bridge's recipes."""
ITERATIONS, SEED, MARGIN = 50, 1024, 128
"""Of OmniBal's search: its ``test_balanced_dynamic_batch.py`` and the defaults of its ``BalancedDataset``."""
PROGRAMS = {
    "OmniBal's search": "--omnibal",
    "LoongForge's best fit": "--loongforge",
    "LoongForge's all-to-all": "--loongforge",  # of the packs of its best fit
}
LONGEST = 1.2
"""Tokens of a rank after LoongForge's all-to-all, compared with the mean: its ``dp_balance_max_len_ratio_vlm``."""
Groups = Sequence[np.ndarray]
Made = tuple[Groups, float, dict[str, Any]]
"""Packs, seconds of CPU (0 if they are to be measured from outside), and figures that the packs alone do not give."""


def run(
    lists: Sequence[LengthList],
    checkouts: Mapping[str, Path | None],
    *,
    windows: Sequence[int] = WINDOWS,
) -> Iterator[dict[str, Any]]:
    """Packs each list by everybody under each pair of limits.

    Args:
        checkouts: directory of each of `PROGRAMS`; None skips it, which a row with ``error`` says.

    Yields:
        ``list, tiles, tokens`` (of a pack), ``packer, packs, bound``; ``over`` (percent of the bound); ``steady`` (the
        same of the packs before the end of the stream, by the scarcer limit) and ``tail`` (packs too many after it),
        both None for whole lists; ``vision_8`` and so on and ``language_8``: (max - mean) / max of a step's tiles and
        tokens, mean over whole steps of so many ranks; ``us`` (of CPU per sample) and ``broken`` (packs over a limit).
    """
    for given in lists:
        for most, capacity in LIMITS:
            for name, pack in _packers(given, most, capacity, checkouts, windows).items():
                row: dict[str, Any] = {"list": given.name, "tiles": most, "tokens": capacity, "packer": name}
                start = time.process_time()
                try:
                    packs, seconds, more = pack()
                except UserError as error:
                    yield row | {"error": str(error)}
                    continue
                seconds = seconds or time.process_time() - start
                window = int(name.split()[1]) if name.startswith("`window`") else 0
                yield (
                    row
                    | figures(given, packs, most, capacity, window)
                    | more
                    | {"us": round(seconds / given.lengths.size * 1e6, 1)}
                )


def _packers(
    given: LengthList, most: int, capacity: int, checkouts: Mapping[str, Path | None], windows: Sequence[int]
) -> dict[str, Callable[[], Made]]:
    pairs = {"tiles": (given.images, most)}
    constraints = Constraints.from_pairs(pairs, given.lengths.size)

    def ours(policy: Any, window: int = 1) -> Made:
        return pack_lengths(given.lengths, capacity, policy, constraints=pairs, window=window), 0.0, {}

    def planned() -> Made:
        start = time.process_time()
        packs = pack_limited(given.lengths, capacity, constraints)
        seconds = time.process_time() - start
        costs = np.array([(given.images[pack].sum(), given.lengths[pack].sum()) for pack in packs], dtype=np.float64)
        order = balanced_order(costs / costs.mean(axis=0), group=max(RANKS), before=np.zeros(0), seed=[0])
        return [packs[at] for at in order.tolist()], seconds, {}

    packers: dict[str, Callable[[], Made]] = {
        **{f"`window` {window} held": partial(ours, "window", window) for window in windows},
        "a plan": planned,
        **{name: partial(other, name, checkouts.get(name), given, most, capacity) for name in PROGRAMS},
        f"first fit decreasing, {BUFFER} held": partial(ours, buffered),
        "as they come": partial(ours, "next_fit"),
    }
    return packers


def buffered(lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int) -> Groups:
    """What Energon's buffer with Bridge's ``first_fit_decreasing`` makes, which knows no limit but tokens: a policy
    with all limits in their place."""
    packs: list[np.ndarray] = []
    for start in range(0, lengths.size, BUFFER):
        part = start + np.argsort(-lengths[start : start + BUFFER], kind="stable")
        made = first_fit(lengths[part], capacity, constraints.take(part), window=window, seed=seed)
        packs += [part[pack] for pack in made]
    return packs


def figures(given: LengthList, packs: Groups, most: int, capacity: int, window: int = 0) -> dict[str, Any]:
    """The figures of `run` but for time; `window` samples were held, 0 for a whole list."""
    sums = np.array([(given.images[pack].sum(), given.lengths[pack].sum()) for pack in packs], dtype=np.float64)
    bounds = np.array([most, capacity])
    own = Constraints.from_pairs({"tiles": (given.images, most)}, given.lengths.size)
    bound = max(lower_bound(given.lengths, capacity, own), tiles_bound(given.lengths, given.images, most, capacity))
    found: dict[str, Any] = {"packs": len(packs), "bound": bound, "over": round(100 * (len(packs) / bound - 1), 3)}
    needed = (sums / bounds)[:, int((sums.sum(axis=0) / bounds).argmax())]
    came = np.cumsum([0, *map(len, packs[:-1])]) + window
    steady = int((came < given.lengths.size).sum()) if window else 0
    found["steady"] = round(100 * (steady / needed[:steady].sum() - 1), 3) if steady else None
    found["tail"] = round(float((1 - needed[steady:]).sum()), 1) if steady else None
    for ranks in RANKS:
        steps = sums[: len(packs) // ranks * ranks].reshape(-1, ranks, 2)
        waiting = (
            (1 - steps.mean(axis=1) / steps.max(axis=1)).mean(axis=0).round(5).tolist() if len(steps) else (None,) * 2
        )
        found |= {f"vision_{ranks}": waiting[0], f"language_{ranks}": waiting[1]}
    return found | {"broken": int((sums > bounds).any(axis=1).sum())}


def tiles_bound(lengths: np.ndarray, images: np.ndarray, most: int, capacity: int) -> int:
    """Fewest packs, where some samples have so many tokens that no others beside them bring `most` tiles.

    Each sample counts for its tiles and for those that are free in every pack with it. If no pack can count for more
    than `most` (samples may occur in it any number of times), all of these over `most` are a bound; else 0.
    """
    # The fewest tokens of one sample, and of any pack, of so many tiles.
    least = {tiles: int(lengths[images == tiles].min()) for tiles in np.unique(images).tolist()}
    of_pack = [0.0, *[math.inf] * most]
    for tiles in range(1, most + 1):
        reached = (of_pack[tiles - one] + tokens for one, tokens in least.items() if one <= tiles)
        of_pack[tiles] = min(reached, default=math.inf)
    beside = np.full(lengths.size, -1)
    for tiles in range(most, -1, -1):
        beside[(beside < 0) & (images + tiles <= most) & (of_pack[tiles] <= capacity - lengths)] = tiles
    counts = most - beside
    both = np.full((most + 1, 2 * most + 1), math.inf)  # tiles, what they count for -> fewest tokens
    both[0, 0] = 0
    kinds = np.unique([images, counts], axis=1).T.tolist()
    fewest = [int(lengths[(images == tiles) & (counts == count)].min()) for tiles, count in kinds]
    for tiles, count in np.ndindex(*both.shape):
        for (one, worth), tokens in zip(kinds, fewest, strict=True):
            if one <= tiles and worth <= count:
                both[tiles, count] = min(both[tiles, count], both[tiles - one, count - worth] + tokens)
    return -(-int(counts.sum()) // most) if both[:, most + 1 :].min() > capacity else 0


def other(name: str, checkout: Path | None, given: LengthList, most: int, capacity: int) -> Made:
    """Packs of another project's program, shuffled. Raises UserError: it is not there, fails,
    or loses samples."""
    if checkout is None:
        raise UserError(f"skipped; {PROGRAMS[name]} names its checkout")
    with tempfile.TemporaryDirectory(prefix="bench-tiles-") as work:
        file = Path(work) / "list.npz"
        np.savez(file, lengths=given.lengths, images=given.images, limits=[most, capacity])
        command = [sys.executable, "-m", "bench.tiles", name, str(checkout.absolute()), str(file)]
        environment = os.environ | {"PYTHONPATH": SEARCH_PATH}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise UserError((done.stderr.strip().splitlines() or ["it failed"])[-1])
        with np.load(file) as made:
            pack, seconds, waiting = made["pack"], float(made["seconds"]), json.loads(str(made["waiting"]))
    if pack.min() < 0:
        raise UserError(f"it lost {int((pack < 0).sum())} samples")
    more = {f"{what}_{ranks}": round(share, 5) for what, ranks, share in waiting}
    return shuffled(pack), seconds, more


def shuffled(pack: np.ndarray) -> Groups:
    """The packs of which `pack` ``[N]`` are the numbers, in random order."""
    packs = PackGroups.of(pack)
    return [packs[at] for at in np.random.default_rng(0).permutation(len(packs)).tolist()]


def omnibal(checkout: Path, lengths: list[int], images: list[int], most: int, capacity: int) -> Sequence[Sequence[int]]:
    """The packs of OmniBal's iterated search, as its ``search_arguments`` calls it."""
    sys.path.insert(0, str(checkout))
    search = import_module("dataset").BalancedDataset
    samples = [[at, *sizes] for at, sizes in enumerate(zip(images, lengths, strict=True))]
    limits = (most, most, capacity - MARGIN, capacity)
    groups = search.iter_random_groups(search.__new__(search), samples, SEED, *limits, iter_time=ITERATIONS)
    return [[sample[0] for sample in group] for group in groups]


def loongforge(
    checkout: Path, lengths: list[int], images: list[int], most: int, capacity: int
) -> Sequence[Sequence[int]]:
    """The packs of LoongForge's offline packing, by tokens alone: it knows no other limit."""
    sys.path.insert(0, str(checkout / "tools/data_preprocess/vlm/offline_packing"))
    processor = import_module("wds_pack.algorithms.hashbucket").HashBucketProcessor
    items = [{"sample_id": str(at), "token_len": length} for at, length in enumerate(lengths)]
    boxes = processor.from_items(items).pack_best_fit_decreasing(box_capacity=capacity)
    return [[int(name) for name in box["name"]] for box in boxes]


def all_to_all(
    checkout: Path, packs: Groups, lengths: np.ndarray, images: np.ndarray
) -> Iterator[tuple[str, int, float]]:
    """(max - mean) / max of tiles and tokens after LoongForge's solver has moved tiles, and samples, between the ranks
    of each step; its default trigger would leave those that are even within 20 %. It gets no process groups,
    arguments and models: modules that only those need are replaced."""
    import torch

    home = "loongforge.data.dp_balance.rebalance"
    absent = [f"{home}.{name}" for name in ("pack", "reconstruct", "warmup")]
    absent += ["loongforge.utils", "megatron", "megatron.core", "megatron.training"]
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in absent}):
        spec = spec_from_file_location("balance", checkout / f"{home.replace('.', '/')}/balance.py")
        assert spec is not None
        assert spec.loader is not None
        solver: Any = module_from_spec(spec)
        spec.loader.exec_module(solver)
    solver.get_args = lambda: SimpleNamespace(dp_balance_trigger_threshold_vit=0, dp_balance_trigger_threshold_vlm=0)
    solver.dist = mock.MagicMock(get_rank=lambda _: 0)
    for ranks in RANKS:
        solver.get_dp_group_by_device = lambda _, ranks=ranks: mock.MagicMock(size=lambda: ranks)
        shares: dict[str, list[float]] = {"vision": [], "language": []}
        for at in range(0, len(packs) // ranks * ranks, ranks):
            step = packs[at : at + ranks]
            tiles = [np.ones(images[pack].sum(), dtype=np.int64) for pack in step]
            for what, items in (("vision", tiles), ("language", [lengths[pack] for pack in step])):
                rank = torch.tensor(np.repeat(np.arange(ranks), [*map(len, items)]))
                options = {"pack_len_ratio": None, "caller": "ViT"} if what == "vision" else {"pack_len_ratio": LONGEST}
                moved = (torch.tensor(np.concatenate(items)), torch.arange(len(rank)), rank)
                _, costs = solver.solve_sample_dp_reorder_plan(*moved, cost_fn=float, **options)
                shares[what].append(1 - sum(costs) / ranks / max(costs))
        yield from ((what, ranks, float(np.mean(each))) for what, each in shares.items() if each)


def main(argv: Sequence[str]) -> int:
    """Packs the list in a file, in the process that `other` starts, and writes the pack of each sample into it."""
    name, checkout, file = argv
    with np.load(file) as arrays:
        lengths, images, limits = (arrays[each].tolist() for each in ("lengths", "images", "limits"))
    with redirect_stdout(sys.stderr):
        program = dict(zip(PROGRAMS, (omnibal, loongforge, loongforge), strict=True))[name]
        start = time.process_time()
        groups = program(Path(checkout), lengths, images, *limits)
        seconds = time.process_time() - start
    pack = np.full(len(lengths), -1)
    for number, group in enumerate(groups):
        pack[group] = number
    balanced = name.endswith("all-to-all") and pack.min() >= 0
    waiting = [*all_to_all(Path(checkout), shuffled(pack), np.array(lengths), np.array(images))] if balanced else []
    np.savez(file, pack=pack, seconds=seconds, waiting=json.dumps(waiting))
    return 0


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table, a line per list, limits and packer, and a line per packer that was skipped."""
    names = ["packs", "over, %", "steady, %", "tail, packs"]
    names += [f"{what}, DP {ranks}" for what in ("tiles", "tokens") for ranks in RANKS] + ["us"]
    text = [f"| list | limits | packer | {' | '.join(names)} |", f"| {' | '.join(['---'] * (3 + len(names)))} |"]
    keys = ("packs", "over", "steady", "tail", *(f"{of}_{n}" for of in ("vision", "language") for n in RANKS), "us")
    notes: dict[str, None] = {}
    last = ""
    for row in rows:
        if "error" in row:
            notes[f"{row['packer']}: {row['error']}"] = None
            continue
        place = f"| {row['list']} | {row['tiles']} / {row['tokens']:,}"
        if place != last:
            text.append(f"{place} | bound | {row['bound']:,} |{' |' * (len(keys) - 1)}")
        last = place
        cells = ["" if row[key] is None else f"{row[key]:,}" for key in keys]
        broken = f" ({row['broken']:,} packs over a limit)" if row["broken"] else ""
        text.append(f"{place} | {row['packer']}{broken} | {' | '.join(cells)} |")
    return "\n".join([*text, "", *notes])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
