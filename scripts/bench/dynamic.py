"""Benchmark of dynamic context parallelism: useful cost over the time of all ranks, ours beside static and Core's.

Every way of sharing gets the same samples: those of the global batches of a plan. One simulator runs all of them:
each rank has a clock, the ranks of a row begin together, all meet at the gradients. A sample costs what a plan says,
padding and the exchange of keys and values included. ``--megatron-lm`` names a checkout of Megatron-LM's branch ``dev``
(d48bd6be), whose two schedulers run here, on the CPU. ``--picture`` draws a step of the first list.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench.offline_index import drawn_mix
from energon_packing.errors import UserError
from energon_packing.offline.order import balanced_order
from energon_packing.packing.balance import LINEAR, PATCH
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.dynamic_context import (
    EXCHANGE,
    Domain,
    SharedRow,
    StepSamples,
    best_size,
    share_step,
    static_step,
)
from energon_packing.packing.policies.best_fit import pack_limited

LISTS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "published": (2048, 8192, (16, 32, 64)),
    "mix": (8192, 32768, (64, 512)),
    "mix, text only": (8192, 32768, (64, 512)),
}
"""Tokens that a rank holds, tokens of a row of the plan, ranks. ``published``: that of Core's example, log-normal."""


def drawn(name: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and patches of samples, ``[N]`` int64."""
    if name == "published":
        lengths = np.random.default_rng(seed).lognormal(np.log(1024) - 1.5**2 / 2, 1.5, count)
        return np.clip(lengths, 128, 8192).astype(np.int64), np.zeros(count, dtype=np.int64)
    mix = drawn_mix(count, seed)
    fits = mix.length <= LISTS[name][1] - 128
    return mix.length[fits], mix.patches[fits] * ("text only" not in name)


def planned(name: str, multiple: int, rows: int, steps: int, group: int, seed: int = 0) -> Iterator[StepSamples]:
    """Samples of the first global batches, of `rows` packs each, of a plan of a list for `group` replicas; 1 is the
    order of a plan for dynamic context parallelism."""
    capacity = LISTS[name][1]
    mean = float(drawn(name, 20_000, seed)[0].mean())
    count = int(max((steps + 1) * rows, 4096) * capacity / mean)
    lengths, patches = drawn(name, count, seed)
    packs = pack_limited(-(-lengths // multiple), capacity // multiple, Constraints.from_pairs({}, len(lengths)))
    language, vision = (LINEAR + lengths) * lengths, PATCH * patches
    costs = np.stack([vision, language], axis=1)[packs.order]
    of_packs = np.add.reduceat(costs, packs.offsets[:-1]).astype(np.float64)
    order = np.random.default_rng(seed).permutation(len(of_packs))
    if group > 1:
        order = balanced_order(of_packs, group=group, before=np.zeros(0), seed=[seed])
    for step in range(steps):
        chosen = order[step * rows : (step + 1) * rows]
        members = [packs.order[packs.offsets[at] : packs.offsets[at + 1]] for at in chosen]
        flat = np.concatenate(members)
        yield StepSamples(
            lengths=np.stack([lengths[flat], np.zeros_like(flat)], axis=1),
            vision=vision[flat],
            language=language[flat],
            packs=np.repeat(np.arange(len(members)), [*map(len, members)]),
            groups=np.zeros_like(flat),
            sources=flat,
            token=LINEAR,
            limited={},
        )


def in_turn(samples: StepSamples, domain: Domain, size: int) -> list[list[SharedRow]]:
    """Rows of each rank where replicas of `size` ranks take the packs of a plan in turn."""
    packs = np.split(np.arange(len(samples)), np.flatnonzero(np.diff(samples.packs)) + 1)
    blocks = domain.ranks // size
    return [
        [SharedRow(size, tuple(each.tolist())) for each in packs[rank // size :: blocks]]
        for rank in range(domain.ranks)
    ]


def simulate(rows: Sequence[Sequence[SharedRow]], samples: StepSamples, domain: Domain) -> float:
    """When the last rank ends. Those that share a row begin it together, once all of them are there."""
    times = {size: samples.times(size, domain) for size in {row.size for own in rows for row in own}}
    clock = np.zeros(domain.ranks)
    for at in range(max(map(len, rows))):
        meeting: dict[Any, list[int]] = {}
        for rank, own in enumerate(rows):
            if at < len(own):
                meeting.setdefault((own[at].samples or -rank - 1, own[at].size), []).append(rank)
        for (held, size), ranks in meeting.items():
            took = times[size][list(held)].sum() if isinstance(held, tuple) else 0.0
            clock[ranks] = clock[ranks].max() + took
    return float(clock.max())


def schedulers(checkout: Path) -> Any:
    """Core's module of schedulers; what only its process groups and kernels need is replaced."""
    folder = checkout / "megatron" / "core" / "datasets"
    if not (folder / "data_schedule_utils.py").is_file():
        raise UserError(f"{checkout} has no megatron/core/datasets/data_schedule_utils.py; check out Megatron-LM's dev")
    names: tuple[str, ...] = (
        "",
        ".core",
        ".core.parallel_state",
        ".core.datasets",
        ".core.datasets.data_schedule_utils",
    )
    names += (".core.extensions", ".core.extensions.transformer_engine", ".core.rerun_state_machine")
    names += (".core.packed_seq_params", ".core.pipeline_parallel", ".core.pipeline_parallel.hybrid_cp_schedule")
    names += (".core.process_groups_config", ".core.transformer", ".core.transformer.multi_token_prediction")
    with mock.patch.dict(sys.modules, {f"megatron{name}": mock.MagicMock() for name in names}):
        for name in ("data_schedule_utils", "data_schedule"):
            spec = spec_from_file_location(f"megatron.core.datasets.{name}", folder / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module: Any = module_from_spec(spec)
            sys.modules[f"megatron.core.datasets.{name}"] = module
            spec.loader.exec_module(module)
    return module


def of_core(module: Any, name: str, samples: StepSamples, domain: Domain, size: int, seed: int) -> list[Any]:
    """The rows of each rank by one of Core's schedulers, which gets the samples in random order."""
    order = np.random.default_rng(seed).permutation(len(samples))
    dynamic = name == "default_dynamic_cp"
    padded = samples.padded(1 if dynamic else size, domain)[order].tolist()
    made = module.scheduler_map[name](domain.tokens, size, domain.ranks // size, None)
    groups = made.get_groups_and_subsamples([*enumerate(padded)])
    rows: list[list[SharedRow]] = [[] for _ in range(domain.ranks)]
    for group in groups:
        sharing: dict[tuple[int, ...], int] = {}
        for held in group:
            sharing[tuple(held)] = sharing.get(tuple(held), 0) + 1
        for rank, held in enumerate(group):
            rows[rank].append(SharedRow(sharing[tuple(held)], tuple(order[list(held)].tolist())))
    return rows


def run(
    names: Sequence[str],
    *,
    exchange: Sequence[float] = (EXCHANGE, 0.05),
    ranks: Sequence[int] = (),
    micro_batches: int = 8,
    steps: int = 4,
    checkout: Path | None = None,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Steps of `micro_batches` rows of the plan for each static replica.

    Yields:
        ``list, ranks, exchange, samples`` of a step; ``dynamic`` and ``static`` (of the smallest size that holds a
        row): efficiencies; ``gain``; ``size``, static where the gain is too small, else None; ``rows`` of a rank,
        ``milliseconds`` for a step; ``core_dynamic`` and ``dp_balanced`` with `checkout`, up to 64 ranks.
    """
    module = schedulers(checkout) if checkout else None
    for name in names:
        tokens, capacity, sizes = LISTS[name]
        static = capacity // tokens
        for number in ranks or sizes:
            multiple = 2 * static
            replicas = number // static
            batches, level = (
                [*planned(name, multiple, micro_batches * replicas, steps, group, seed)] for group in (1, replicas)
            )
            for paid in exchange:
                domain = Domain(ranks=number, tokens=tokens, exchange=paid)
                useful = sum(each.cost for each in batches) / number
                start = time.process_time()
                made = [share_step(each, domain) for each in batches]
                seconds = time.process_time() - start
                chosen, ours, plain = best_size(batches, domain, capacity)
                measured = useful / sum(simulate(each.rows, it, domain) for each, it in zip(made, batches, strict=True))
                assert abs(measured - ours) < 1e-6
                row = {"list": name, "ranks": number, "exchange": paid, "samples": len(batches[0])}
                row |= {"dynamic": ours, "static": plain, "gain": ours / plain - 1, "size": chosen}
                turns = [in_turn(each, domain, static) for each in level]
                took = sum(simulate(each, it, domain) for each, it in zip(turns, level, strict=True))
                row["static_plan"] = sum(each.cost for each in level) / number / took
                row |= {"rows": len(made[0].rows[0]), "milliseconds": 1000 * seconds / steps}
                for key in ("default_dynamic_cp", "dp_balanced") if module and number <= 64 else ():
                    try:
                        theirs = [of_core(module, key, each, domain, static, seed) for each in batches]
                    except AssertionError:  # "Not enough samples to move"
                        continue
                    took = sum(simulate(each, it, domain) for each, it in zip(theirs, batches, strict=True))
                    row[{"default_dynamic_cp": "core_dynamic"}.get(key, key)] = useful / took
                yield {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def draw(file: Path, ranks: int = 16, seed: int = 0) -> None:
    """Draws a step of the published list, a line for each rank: at static size 4, and with a size for each row."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--picture needs matplotlib; pip install matplotlib") from error
    (batch,) = planned("published", 8, 2 * ranks, 1, 1, seed)
    domain = Domain(ranks=ranks, tokens=2048, most=8, exchange=0.05)
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels = zip(
        figure.subplots(1, 2, sharex=True, sharey=True),
        (static_step(batch, domain, 4), share_step(batch, domain)),
        strict=True,
    )
    unit = batch.cost / ranks
    colours = {1: "#ee8866", 2: "#77aadd", 4: "#4477aa", 8: "#223366"}
    for axes, step in panels:
        for rank, own in enumerate(step.rows):
            at = 0.0
            for row in own:
                took = float(batch.times(row.size, domain)[list(row.samples)].sum()) / unit
                axes.barh(rank, took, left=at, color=colours[row.size], edgecolor="white", linewidth=0.3)
                at += took
        axes.axvline(step.time / unit, color="black", linewidth=1)
        name = "dynamic" if len({row.size for own in step.rows for row in own}) > 1 else "one size"
        axes.set(title=f"{name}: {100 * unit / step.time:.0f} % useful", xlabel="time, in useful work of a rank")
    figure.axes[0].set(ylabel=f"{ranks} ranks")
    for size in (1, 2, 4):
        figure.axes[0].barh(0, 0, color=colours[size], label=f"{size} rank{'s' if size > 1 else ''}")
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(file, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line per result; 2 on unusable input."""
    parser = argparse.ArgumentParser(prog="bench.py dynamic", description=__doc__)
    parser.add_argument("--list", action="append", dest="names", choices=[*LISTS], help="may be repeated")
    parser.add_argument("--ranks", action="append", type=int, default=[], help="data- x context-parallel; repeatable")
    parser.add_argument("--exchange", action="append", type=float, help="cost of a token's keys and values; repeatable")
    parser.add_argument("--micro-batches", type=int, default=8, help="rows of a static replica in a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--megatron-lm", type=Path, help="checkout of Megatron-LM's dev, for its schedulers")
    parser.add_argument("--picture", type=Path, help="draw a step into this file instead")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        if given.picture:
            draw(given.picture, seed=given.seed)
            return 0
        for row in run(
            given.names or [*LISTS],
            exchange=given.exchange or (EXCHANGE, 0.05),
            ranks=given.ranks,
            micro_batches=given.micro_batches,
            steps=given.steps,
            checkout=given.megatron_lm,
            seed=given.seed,
        ):
            print(json.dumps(row), flush=True)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0
