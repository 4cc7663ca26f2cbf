"""Benchmark of packing policies: fill compared with the lower bound, and time, list by list.

The lists are files, or made from a seed (`bench.length_lists`). Packers of other packages take part if they are
installed (`bench.peers`). A result is a mapping; `table` puts them side by side. ``--tiles`` makes the table of
`bench.tiles` instead: packs and steps under two limits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bench import peers as bench_peers
from bench import tiles
from bench.length_lists import LOOK_ALIKE_SAMPLES, LengthList, load_lists, look_alike, omnibal_list
from energon_packing.errors import UserError
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.partition import flat_groups, lower_bound
from energon_packing.packing.policies import Groups, Policy, policy_names
from energon_packing.packing.whole_list import pack_lengths

COMPARED: Mapping[str, Policy] = {"first_fit": bench_peers.first_fit, "internvl": bench_peers.internvl}
"""Policies of others, to compare with."""
# Samples held by the policy `window`; `internvl` has its own default of 20 open packs.
DEFAULT_WINDOWS = (256, 1024)
INTERNVL_BUFFERS = 20
TWO_LIMITS = {"d32": 64, "e": 48}
"""Images per pack in the rows with a second limit, by list."""
TWO_LIMITS_SAMPLES = 20_000


def run(
    sources: Sequence[Path] = (),
    *,
    capacity: int = 0,
    names: Sequence[str] | None = None,
    chosen: Sequence[str] | None = None,
    windows: Sequence[int] = DEFAULT_WINDOWS,
    samples: int = 100_000,
    image_limit: int | None = None,
    multiple: int = 1,
    repeat: int = 1,
    with_peers: bool = True,
    peers_python: Path | None = None,
    missing: Mapping[str, str] = MappingProxyType({}),
    peer_seconds: float = bench_peers.LIMIT_SECONDS,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Packs each list by each policy.

    Args:
        sources: lists, or directories of them; without any, lists are made from `seed`.
        capacity: tokens of a pack, for lists that do not say it.
        names: lists to take; all by default.
        chosen: policies to take; all by default.
        windows: sizes for the policy ``window``.
        samples: at most this many of each list.
        image_limit: images per pack, as a second constraint (peers, which have none, are then left out).
        multiple: lengths are rounded up to a multiple of it, as alignment for context and sequence parallelism does;
            the bound is that of the rounded lengths.
        repeat: time is the best of this many runs.
        with_peers: also run packers of other projects.
        peers_python: interpreter that has their packages; None is this one.
        missing: peers that could not be installed there, and why.
        peer_seconds: time limit for each of them.

    Yields:
        A dict for each list and packer: ``list, policy, window, samples, packs, bound, fill_of_bound`` (percent of the
        fill that the lower bound allows), ``utilisation`` and ``unpacked`` (percent of real tokens in the packs, and in
        rows of one sample), ``times`` (their ratio), ``seconds, us_per_sample`` and, for ours, the figures of
        `figures`. A peer that fails has ``error`` in place of figures.
    """
    for found in load_lists(sources, names, samples, seed, capacity):
        given = found.aligned(multiple).fitting(samples, image_limit)
        constraints = {} if image_limit is None else {"images": (given.images, image_limit)}
        bound = lower_bound(given.lengths, given.capacity, Constraints.from_pairs(constraints, given.lengths.size))
        for policy in chosen or [*policy_names(), *COMPARED]:
            for window in windows if policy == "window" else (INTERNVL_BUFFERS if policy == "internvl" else 1,):

                def pack(policy: str = policy, window: int = window) -> list[np.ndarray]:
                    name, costs = COMPARED.get(policy, policy), constraints  # noqa: B023
                    return pack_lengths(given.lengths, given.capacity, name, constraints=costs, window=window)  # noqa: B023

                groups, seconds = _timed(pack, repeat)
                row = _row(given, policy, len(groups), bound, seconds)
                row["window"] = window if policy in ("window", "internvl") else None
                yield row | figures(groups, given.lengths)
        if with_peers and image_limit is None:
            for name in bench_peers.PEERS:
                if name in missing:
                    yield {"list": given.name, "policy": name, "error": f"not installed: {missing[name]}"}
                    continue
                found_there = bench_peers.run_peer(name, given, python=peers_python, limit=peer_seconds)
                if "error" in found_there:
                    yield {"list": given.name, "policy": name, **found_there}
                    continue
                part = given.fitting(found_there["samples"])
                bound_there = (
                    bound if part.lengths.size == given.lengths.size else lower_bound(part.lengths, part.capacity)
                )
                yield _row(part, name, found_there["packs"], bound_there, found_there["seconds"])


def _timed[Result](function: Callable[[], Result], repeat: int) -> tuple[Result, float]:
    best = float("inf")
    for _ in range(max(repeat, 1)):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return result, best


def _row(given: LengthList, policy: str, packs: int, bound: int, seconds: float) -> dict[str, Any]:
    count, tokens = given.lengths.size, int(given.lengths.sum())
    return {
        "list": given.name,
        "policy": policy,
        "samples": count,
        "packs": packs,
        "bound": bound,
        "fill_of_bound": round(100 * bound / packs, 3) if packs else None,
        "utilisation": round(100 * tokens / (packs * given.capacity), 2) if packs else None,
        "unpacked": round(100 * tokens / (count * given.capacity), 2) if count else None,
        "times": round(count / packs, 2) if packs else None,
        "seconds": round(seconds, 4),
        "us_per_sample": round(seconds / count * 1e6, 3) if count else None,
    }


def figures(groups: Groups, lengths: np.ndarray) -> dict[str, Any]:
    """Delay and memory of `groups`, in order of emission, over samples in stream order.

    Returns:
        ``delay_p99, delay_max``: 99th percentile and worst number of samples that arrived after a sample before it was
        emitted; ``held``: the most samples held at once. A pack is assumed to be emitted as soon as its newest sample
        and those of all packs before it have arrived. A policy that looks further ahead holds more.
    """
    packs = flat_groups(groups)
    flat, starts = packs.order, packs.offsets[:-1]
    if not starts.size:
        return dict.fromkeys(("delay_p99", "delay_max", "held"), 0)
    arrived = np.maximum.accumulate(np.maximum.reduceat(flat, starts)) + 1
    delay = np.repeat(arrived, np.diff(starts, append=flat.size)) - 1 - flat
    # Held just before a pack leaves: all samples that arrived, minus those in earlier packs.
    came = np.cumsum(np.bincount(flat, minlength=lengths.size) > 0)
    held = int((came[arrived - 1] - starts).max())
    return {"delay_p99": float(np.percentile(delay, 99)), "delay_max": int(delay.max()), "held": held}


def run_two_limits(
    sources: Sequence[Path], *, names: Sequence[str] | None = None, samples: int = TWO_LIMITS_SAMPLES, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yields the rows of `run` with images as a second limit, for the lists of `TWO_LIMITS`, plus ``image_limit``."""
    for name, limit in TWO_LIMITS.items():
        files = [source / f"{name}.npz" for source in sources if (source / f"{name}.npz").is_file()]
        if (names is None or name in names) and (files or not sources):
            for row in run(
                files,
                names=[name],
                chosen=["window", "best_fit", "first_fit", "internvl"],
                samples=min(samples, TWO_LIMITS_SAMPLES),
                image_limit=limit,
                with_peers=False,
                seed=seed,
            ):
                yield row | {"image_limit": limit}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table: a line per packer, a column per list with the fill in percent of the bound's.

    Lists with a second limit have their own columns. The last column is microseconds per sample on the first list. A
    second table has what `bench.peers.PUBLISHED` is compared with.
    """
    columns: dict[str, None] = {}
    lines: dict[str, dict[str, str]] = {}
    notes: list[str] = []
    used: list[str] = []
    first = next((row["list"] for row in rows), "")
    shortened: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for row in rows:
        if "fill_of_bound" in row:
            sizes[row["list"]] = max(sizes.get(row["list"], 0), row["samples"])
    for row in rows:
        limit = row.get("image_limit")
        column = row["list"] if limit is None else f"{row['list']}, {limit} images"
        columns[column] = None
        held = f", {row['window']} held" if row.get("window") else ""
        name = f"`{row['policy']}`{held}"
        cells = lines.setdefault(name, {})
        if "error" in row:
            cells[column] = "-"
            notes.append(f"{row['policy']} on {row['list']}: {row['error']}")
            continue
        cells[column] = f"{row['fill_of_bound']:.2f}"
        if row["policy"] in bench_peers.PEERS and row["samples"] < sizes[row["list"]]:
            shortened.setdefault(row["policy"], []).append(f"{row['samples']} of {row['list']}")
        published = bench_peers.PUBLISHED.get(row["list"]) if limit is None else None
        if published and row["policy"] in ("window", "fast-axolotl"):
            figures = (f"{row['unpacked']:.1f}", published, name, f"{row['utilisation']:.1f}", f"{row['times']:.2f}")
            used.append(f"| {row['list']} | {' | '.join(figures)} |")
        if row["list"] == first and limit is None:
            cells["us"] = f"{row['us_per_sample']:.2g}"
    head = ["packer", *columns, f"us on {first}"]
    text = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for name, cells in lines.items():
        text.append(f"| {' | '.join([name, *(cells.get(column, '') for column in (*columns, 'us'))])} |")
    if used:
        head = ["list", "one sample per row, %", "fast-axolotl publishes, %", "packer", "packed, %", "times"]
        text += ["", f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |", *used]
    notes += [f"{policy} got only the first {', '.join(parts)}" for policy, parts in shortened.items()]
    return "\n".join([*text, *([""] if notes else []), *notes])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, or one JSON line per result; 2 on unusable input."""
    parser = argparse.ArgumentParser(prog="bench packing", description=__doc__)
    parser.add_argument(
        "--lists",
        type=Path,
        nargs="+",
        default=[],
        help="directories of .npz, or files: .npz with `length` and perhaps `images`, `capacity`; .npy; text; "
        "OmniBal's .json. Made from a seed by default",
    )
    parser.add_argument("--capacity", type=int, default=0, help="tokens of a pack; default: what the list says")
    parser.add_argument("--list", action="append", dest="names", help="one list of --lists; may be repeated")
    parser.add_argument("--tiles", action="store_true", help="the table under limits of tiles and tokens")
    parser.add_argument("--omnibal", type=Path, help="--tiles: checkout of ModelTC/OmniBal, for its lists and search")
    parser.add_argument("--loongforge", type=Path, help="--tiles: checkout of baidu-baige/LoongForge, for its packer")
    parser.add_argument("--policy", action="append", dest="chosen", help="packing policy; may be repeated")
    parser.add_argument(
        "--window",
        action="append",
        type=int,
        dest="windows",
        help="samples held by the window policy; may be repeated",
    )
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--image-limit", type=int, help="images per pack, as a second constraint, on every list")
    parser.add_argument("--multiple", type=int, default=1, help="lengths are rounded up to this multiple")
    parser.add_argument("--repeat", type=int, default=1, help="runs; the time is that of the fastest")
    parser.add_argument("--no-peers", action="store_true", help="leave out other projects' packers")
    parser.add_argument(
        "--peers-env", type=Path, help="environment to install other projects' packers into and run them from"
    )
    parser.add_argument("--peer-seconds", type=float, default=bench_peers.LIMIT_SECONDS, help="time limit per peer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON line per result instead of a table")
    given = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    try:
        for row in _tile_rows(given) if given.tiles else _rows(given):
            rows.append(row)
            if given.json:
                print(json.dumps(row), flush=True)
            else:
                print(row["list"], row.get("policy") or row["packer"], file=sys.stderr)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not given.json:
        print(tiles.table(rows) if given.tiles else table(rows))
    return 0


def _rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    python: Path | None = None
    missing: dict[str, str] = {}
    if given.peers_env is not None and not given.no_peers:
        python, missing = bench_peers.make_environment(given.peers_env)
    yield from run(
        given.lists,
        capacity=given.capacity,
        names=given.names,
        chosen=given.chosen,
        windows=given.windows or DEFAULT_WINDOWS,
        samples=given.samples,
        image_limit=given.image_limit,
        multiple=given.multiple,
        repeat=given.repeat,
        with_peers=not given.no_peers,
        peers_python=python,
        missing=missing,
        peer_seconds=given.peer_seconds,
        seed=given.seed,
    )
    if given.image_limit is None and given.chosen is None and given.multiple == 1:
        yield from run_two_limits(given.lists, names=given.names, samples=given.samples, seed=given.seed)


def _tile_rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    lists = [look_alike(min(given.samples, LOOK_ALIKE_SAMPLES), given.seed)]
    if given.omnibal is not None:
        lists.insert(0, omnibal_list(given.omnibal / "data" / "vision", given.seed).first(given.samples))
    checkouts = {name: vars(given)[option.strip("-")] for name, option in tiles.PROGRAMS.items()}
    yield from tiles.run(lists, checkouts, windows=given.windows or tiles.WINDOWS)


if __name__ == "__main__":
    sys.exit(main())
