"""Makes a plan: from indexes and a configuration to the Parquet file.

Every epoch of the blend is packed, its packs are put in order, and the rows follow; of a large plan, band after band. A
plan may begin with the rest of an online run's epoch. Figures for readers end it: histogram, fill, balance of steps,
steps per epoch.
"""

import glob
import hashlib
import json
import os.path
import re
import shlex
from collections import Counter
from collections.abc import Buffer, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from energon_packing.config import PlanConfig, RunConfig, from_mapping, to_mapping
from energon_packing.config.setting import before, marked
from energon_packing.drops import over_budget, unwished
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline import plan as plan_file
from energon_packing.offline.bands import Band, Counted, bands_of, chunks, rounds_of
from energon_packing.offline.blend import (
    AllSamples,
    Blend,
    Part,
    gathered,
    group_numbers,
    shares_of,
    stage_weights,
)
from energon_packing.offline.files import read_metadata, remove_leftovers, said, write_json, write_table
from energon_packing.offline.index import MEDIA, IndexedDataset, kind_of, pair_counts
from energon_packing.offline.order import balanced_order
from energon_packing.offline.plan import Plan, PlanFacts, PlanPart, drops_path, hashed, step_samples, written_drops
from energon_packing.offline.samples import AnyLimits, Remeasure, Samples, Sizes, Sources, fitting_samples, joined
from energon_packing.packing.balance import step_efficiency
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.dynamic_context import Domain, best_size, efficiency_of_fixed, smallest_size
from energon_packing.packing.online import sliding_packs
from energon_packing.packing.partition import PackGroups, check_groups, lower_bound
from energon_packing.packing.policies.best_fit import pack_limited
from energon_packing.packing.whole_list import dealt, pack_lengths_flat, within_padding
from energon_packing.remote_files import check_remote, exists, file_size, names_in, remote_address, remove, shown
from energon_packing.sample_kind import AnyRun, kind_of_config

FEW, SLIDING = 100, 256
"""Packs per part below which the last ones of the parts, half full, are too many: a window of so many fills better."""


def policy_of(packing: Any) -> str:
    """The policy for whole lists: ``best_fit`` instead of ``window``, which is for streams; else what is configured."""
    return "best_fit" if packing.policy == "window" else packing.policy


def packs_of(sizes: Sizes, limits: AnyLimits, config: AnyRun, numbers: np.ndarray) -> tuple[PackGroups, int]:
    """Packs samples that fit alone, no number (``[N]``, of each) twice in a pack, those of a pack in the order in which
    they are given; and how many packs no packer can do without."""
    policy, window, seed = policy_of(config.packing), config.packing.window, config.plan.seed
    units = limits.length_units(sizes)  # of alignment
    constraints = Constraints(costs=sizes.costs(limits), limits=limits.limited)
    parts, padding = dealt(numbers), limits.padding([sizes])
    if len(parts) > 1:
        made = [packs_of(sizes.take(part), limits, config, numbers[part])[0] for part in parts]
        flat = np.concatenate([part[packs.order] for part, packs in zip(parts, made, strict=True)])
        packs = PackGroups(flat, np.cumsum([0, *np.concatenate([np.diff(packs.offsets) for packs in made])]))
        if policy == "best_fit" and len(packs) < FEW * len(parts):
            others = [*sliding_packs(numbers, units, limits.units, constraints, window=SLIDING, padding=padding)]
            packs = min(packs, PackGroups(np.concatenate(others), np.cumsum([0, *map(len, others)])), key=len)
        check_groups(packs, units, limits.units, constraints)
    elif constraints and policy == "best_fit":
        packs = pack_limited(units, limits.units, constraints)
        check_groups(packs, units, limits.units, constraints)
    else:
        pairs = {name: (cost, constraints.limits[name]) for name, cost in constraints.costs.items()}
        packs = pack_lengths_flat(units, limits.units, policy, constraints=pairs, window=window, seed=seed)
    bound = max(lower_bound(units, limits.units, constraints), len(parts))
    if padding:
        packs = within_padding(packs, units, limits.units, constraints, padding, policy=policy)
        bound = max(bound, -(-int(padding[0].prod(axis=0).sum()) // padding[1]))
    return packs, bound


def show_padding(order: np.ndarray, offsets: np.ndarray, sizes: Sizes, multiple: int) -> np.ndarray:
    """`energon_packing.thd.assembly.visible_order` for all packs, in both rows where samples have two: the last two
    samples of some packs change places. ``order`` ``[N]`` has rows of ``sizes``, one pack after another, ``offsets``
    ``[packs + 1]`` where packs begin."""
    if multiple == 1 or order.size == 0:
        return order
    first = (sizes.length % multiple != 0)[order]
    second = (sizes.second % multiple != 0)[order]
    if sizes.text_tokens is not None:  # where no clip of a pack has padding among its patches, text counts
        visible = np.repeat(np.logical_or.reduceat(first, offsets[:-1]), np.diff(offsets))
        first = np.where(visible, first, (sizes.text_tokens % multiple != 0)[order])
    padded = np.add.reduceat(first.astype(np.int64) + second, offsets[:-1])
    last = offsets[1:] - 1
    last_padded = np.where(sizes.second[order[last]] > 0, second[last], first[last])
    swapped = last[(padded == 1) & last_padded & (np.diff(offsets) > 1)]
    shown = order.copy()
    shown[swapped], shown[swapped - 1] = order[swapped - 1], order[swapped]
    return shown


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OrderedPacks:
    """The packs of some parts of a plan in their global order."""

    samples: Samples  # from which they were drawn
    order: np.ndarray  # ``[rows]`` rows of `samples`, one pack after another
    offsets: np.ndarray  # ``[packs + 1]`` int64
    epoch_ends: tuple[int, ...]  # for each epoch that ends, the number of packs up to its end
    costs: np.ndarray  # ``[packs]`` int64, of vision and language together
    of_samples: np.ndarray  # ``[N, 2]`` int64, vision and language of each of `samples`
    bound: int  # packs that no packer can do without
    unfinished: np.ndarray  # ``[P, 2]`` int64, costs of the packs of the last group, if it is not whole

    @property
    def held(self) -> list[np.ndarray]:
        """What the id of a plan covers: where packs begin, and of each row its source, piece and sizes."""
        samples, sizes = self.samples, self.samples.sizes
        columns = (samples.source, samples.piece, sizes.length, sizes.second, sizes.text_tokens)
        return [self.offsets.astype(np.int64), *(each[self.order] for each in columns if each is not None)]

    @property
    def row_groups(self) -> tuple[int, ...]:
        """The first pack of each row group of a file of them."""
        firsts, last = [0], self.offsets.size - 1
        least = min(max(plan_file.LEAST_ROWS, self.order.size // plan_file.MOST_GROUPS), plan_file.ROW_GROUP)
        while (following := int(np.searchsorted(self.offsets, self.offsets[firsts[-1]] + least))) < last:
            firsts.append(following)
        return tuple(firsts)


def is_dynamic(config: AnyRun) -> TypeGuard[RunConfig]:
    """Whether rows are made of a plan's global batches when they are read."""
    return isinstance(config, RunConfig) and config.parallel.is_dynamic


NOTHING = np.zeros((0, 2), dtype=np.int64)


def ordered_packs(
    blend: Blend,
    parts: Sequence[Part],
    drawn: AllSamples | Band,
    limits: AnyLimits,
    config: AnyRun,
    before: np.ndarray = NOTHING,
) -> OrderedPacks:
    """Packs some parts of the blend and puts all packs into their order. `before` are `OrderedPacks.unfinished` of the
    parts before them; without them, the packs that the blend keeps come first. Raises UserError: a part has no
    samples."""
    settings, samples = config.plan, drawn.samples
    of_samples = np.stack(np.broadcast_arrays(*kind_of_config(config).cost(config).costs(samples.sizes)), axis=1)
    small = np.int32 if len(samples) < 1 << 31 else np.int64
    order: list[np.ndarray] = [np.zeros(0, small)]
    sizes: list[np.ndarray] = [np.zeros(1, np.int64)]
    costs: list[np.ndarray] = [NOTHING]
    ends: list[int] = []
    bounds = stop = 0
    if (kept := blend.kept) is not None and kept.sizes.size:
        bounds, stop, ends = kept.sizes.size, kept.sizes.size, [*kept.ends]
        order.append(kept.order.astype(small))
        sizes.append(kept.sizes)
        costs.append(np.add.reduceat(of_samples[kept.order], np.cumsum(kept.sizes) - kept.sizes))
        before = costs[-1][stop // settings.max_data_parallel * settings.max_data_parallel :]
    for part in parts:
        rows, counts, bound = _packed_part(blend, part, drawn, limits, config)
        if rows.size == 0 and not part.band and stop <= (0, *ends)[-1]:  # else packs that are kept have all of it
            what, more = "epoch", "raise plan.datasets' weights or epochs"
            if blend.lengths is not None:
                what, more = "stage", "give it more tokens"
            raise UserError(f"{what} {part.number} of the plan has no samples; {more}.")
        bounds += bound
        offsets = np.concatenate([[0], np.cumsum(counts)])
        pack_costs = np.add.reduceat(of_samples[rows], offsets[:-1]) if rows.size else NOTHING
        wide = settings.max_data_parallel
        seed = [settings.seed, part.place, 3, *part.band]
        chosen = np.random.default_rng(seed).permutation(counts.size)  # whoever shares its rows evens a step out
        if not is_dynamic(config) and rows.size:
            chosen = balanced_order(pack_costs, group=wide, before=before, seed=seed)
        before = np.concatenate([before, pack_costs[chosen]])
        before = before[len(before) // wide * wide :]
        order.append(rows[gathered(offsets, chosen)].astype(small))
        sizes.append(counts[chosen])
        costs.append(pack_costs[chosen])
        stop += chosen.size
        ends += [stop] * part.ends
    offsets = np.cumsum(np.concatenate(sizes))
    return OrderedPacks(
        samples=samples,
        order=show_padding(np.concatenate(order), offsets, samples.sizes, limits.multiple),
        offsets=offsets,
        epoch_ends=tuple(ends),
        costs=np.concatenate(costs).sum(axis=1),
        of_samples=of_samples,
        bound=bounds,
        unfinished=before,
    )


def _packed_part(
    blend: Blend, part: Part, drawn: AllSamples | Band, limits: AnyLimits, config: AnyRun
) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows of `Samples`, pack after pack, the number of rows of each pack, and the bound."""
    made = [(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)]
    for group in sorted(blend.groups):
        if (found := blend.rows(part, group, drawn.of_dataset)).size:
            packs, bound = packs_of(drawn.samples.sizes.take(found), limits, config, found)
            made.append((found[packs.order], np.diff(packs.offsets), bound))
    rows, counts, bounds = zip(*made, strict=True)
    return np.concatenate(rows), np.concatenate(counts), sum(bounds)


ALL = 1 << 30  # no sample is divided into so many pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What an online run has still to give in its running epoch, number `epoch` from 0; each rank has given `packs`.

    `samples` are ``(shard, row, first, stop)`` -> how often: pieces ``[first, stop)`` of a sample; ``[0, ALL)`` is the
    whole. More than once if some worker has begun an epoch that the worker of this sample has not. No workers is one
    process. `uuid` is that of the index of the run's data set.
    """

    samples: Mapping[tuple[str, int, int, int], int]
    epoch: int
    ranks: int
    workers: int
    packs: int
    uuid: str


def rows_left(left: Left, sources: Sources, samples: Samples) -> np.ndarray:
    """Rows of `Samples` that a run has still to give, ``[N]`` int64; one that it owes twice is there twice. Samples
    that are dropped under the plan's settings have no row; they are among the plan's drops. Raises UserError: the index
    is of another data set, or of more than one."""
    if len(sources.datasets) != 1:
        names = ", ".join(dataset.name for dataset in sources.datasets)
        raise UserError(f"the index has several data sets ({names}); measure the run's own into an index for itself")
    (dataset,) = sources.datasets
    if any(each.identity["index_uuid"] != left.uuid for each in dataset.shards):  # shards have the same names anywhere
        raise UserError(f"{dataset.path} in the index is another data set than the run's; measure the run's own")
    pairs = zip(dataset.shards, sources.starts.tolist(), strict=False)
    spans = {shard.name: range(start, start + shard.samples) for shard, start in pairs}
    rows: list[int] = []
    bounds = np.searchsorted(samples.source, np.arange(len(sources) + 1)).tolist()
    pieces = np.maximum(samples.piece, 0).tolist()
    for (shard, row, first, stop), times in sorted(left.samples.items()):
        if row >= len(spans.get(shard, ())):
            raise UserError(f"{dataset.path} has no sample {row} of {shard} in the index; measure the run's data set")
        source = spans[shard][row]
        rows.extend(times * [at for at in range(bounds[source], bounds[source + 1]) if first <= pieces[at] < stop])
    return np.array(rows, dtype=np.int64)


BATCH_SIZES = (8, 32, 64, 128, 256, 512, 1024)
"""Global batch sizes, in packs, for which steps are counted, besides that of the configuration."""


def told_datasets(counted: Counted, blend: Blend) -> list[dict[str, Any]]:
    """Of each data set, its ``samples``, ``tokens`` of those that can be packed, samples ``dropped`` by reason, how
    often an epoch has each (``per_epoch``), its ``share_asked`` in the unit of weights, None without weights, and after
    the packs of another plan how often all of them have each (``turns``)."""
    weights, parts = [(share.weight or 0.0) * (share.epochs > 0) for share in blend.shares], blend.parts()
    return [
        {
            **{name: getattr(dataset, name) for name in ("name", "path", "root")},
            "samples": sum(shard.samples for shard in dataset.shards),
            "tokens": int(tokens),
            "dropped": dict(counted.dropped[number]),
            "per_epoch": round(blend.repeats[number], 12),
            "share_asked": round(weights[number] / sum(weights), 6) if any(weights) else None,
            **({"turns": round(parts[-1].intervals[number][1], 12)} if blend.kept is not None and parts else {}),
        }
        for number, (dataset, (_, _, tokens)) in enumerate(zip(counted.sources.datasets, counted.datasets, strict=True))
    ]


def figures_of(
    sources: Sources, packs: OrderedPacks, limits: AnyLimits, config: AnyRun, epoch: int | None = None
) -> Counter[Any]:
    """Sums over some packs, by name; those of one data set by name and its number; ``mix``, its tokens, by the number
    of the epoch or stage too, if that of the first packs is given."""
    samples, sizes = packs.samples, packs.samples.sizes
    times, amount = np.bincount(packs.order, minlength=len(samples)), samples.amounts(config.plan.weights_by)
    text = sizes.text_tokens  # clips have it, which all are media
    counted = {"rows": times, "rows_with_media": times * (sizes.patches > 0) if text is None else times}
    counted["reached"] = times * amount
    ends, tokens = sources.ends_of(samples), sizes.tokens
    figures: Counter[Any] = Counter(
        rows=packs.order.size,
        packs=packs.costs.size,
        bound=packs.bound,
        tokens=int(tokens[packs.order].sum()),
        aligned=int(limits.length_units(sizes)[packs.order].sum()) * limits.multiple,
        images=int(sizes.images[packs.order].sum(dtype=np.int64)),
        patches=int(sizes.patches[packs.order].sum()),
        text_tokens=0 if text is None else int(text[packs.order].sum(dtype=np.int64)),
    )
    for number, part in enumerate(starmap(slice, pairwise([0, *ends]))):
        figures.update({(name, number): int(each[part].sum()) for name, each in counted.items()})
    epochs = [] if epoch is None else [0, *packs.epoch_ends, packs.costs.size]
    for at, (first, stop) in enumerate(pairwise(epochs), epoch or 0):
        rows = packs.order[packs.offsets[first] : packs.offsets[stop]]
        mix = np.bincount(np.searchsorted(ends, rows, side="right"), tokens[rows], minlength=len(ends))
        figures.update({("mix", at, number): int(each) for number, each in enumerate(mix.tolist())})
    return figures


def summary_of(
    told: Sequence[Mapping[str, Any]],
    counted: Counted,
    figures: Mapping[Any, int],
    costs: np.ndarray,
    epoch_ends: Sequence[int],
) -> dict[str, Any]:
    """The figures, as plain values; ``costs`` ``[packs]`` are those of all packs.

    ``fill`` is the share of real tokens in all rows of ``seq_length``; ``aligned_fill`` counts alignment padding too;
    ``of_bound`` is the share of packs that no packer can do without. ``balance`` gives, for data-parallel sizes, the
    share of the time in which ranks do not wait for the slowest. ``steps`` gives, for global batch sizes, the whole
    steps of each epoch when epochs follow each other without a gap: the last step of an epoch may end in the next.
    ``datasets`` are `told`, each with its rows and its ``share_reached`` in the unit of weights.
    Of clips, ``tokens`` are latent patches, and ``text_tokens`` are there too.
    """
    config = counted.config
    room = figures["packs"] * config.packing.seq_length
    own = {config.training.global_batch_size} if isinstance(config, RunConfig) else set()
    batches = sorted({*own, *BATCH_SIZES})
    most = config.plan.max_data_parallel
    powers = [1 << power for power in range(1, most.bit_length()) if most % (1 << power) == 0]
    parallel_sizes = sorted({*powers, most} - {1}) or [1]
    reached = sum(figures["reached", number] for number in range(len(told)))
    text = {"text_tokens"} & {*kind_of_config(config).more_columns}
    balance = ((ranks, efficiency_of(costs, ranks)) for ranks in parallel_sizes)
    powers_of_tokens = enumerate(counted.lengths.tolist())
    ends = np.array([0, *epoch_ends])
    return {
        "source_samples": counted.samples,
        "pair_counts": asdict(pair_counts(counted.sources.datasets)),
        **{name: figures[name] for name in ("rows", "tokens", *text, "images", "patches", "packs")},
        "samples_per_pack": round(figures["rows"] / figures["packs"], 3),
        "fill": round(figures["tokens"] / room, 6),
        "aligned_fill": round(figures["aligned"] / room, 6),
        "of_bound": round(figures["bound"] / figures["packs"], 6),
        "datasets": [
            {
                **each,
                **{name: figures[name, number] for name in ("rows", "rows_with_media")},
                "share_reached": round(figures["reached", number] / reached, 6),
            }
            for number, each in enumerate(told)
        ],
        "histogram": [{"from": 1 << at, "below": 2 << at, "samples": count} for at, count in powers_of_tokens if count],
        "balance": {str(ranks): round(each, 4) for ranks, each in balance if each is not None},
        "steps": {str(batch): np.diff(ends // batch).tolist() for batch in batches},  # that end in each epoch
    }


SHARING = (16, 64, 512)
"""Data- and context-parallel ranks for which a plan says how well they share its rows, each with `BATCH` packs of a
global batch for a replica of the static size where the configuration has no ``training.global_batch_size``."""
BATCH, FIRST = 8, 4


def sharing_of(sources: Sources, packs: OrderedPacks, limits: AnyLimits, config: RunConfig) -> list[dict[str, Any]]:
    """How well ranks share the rows of the first global batches: of ``ranks`` and ``global_batch_size``, efficiencies
    with a ``dynamic`` size of each row, with the smallest ``static`` one, and in a plan for that (``fixed``); and the
    ``size`` that a run takes, None for dynamic. Of numbers of ranks for which the plan has too few packs, nothing."""
    parallel, seq_length, samples, found = config.parallel, config.packing.seq_length, packs.samples, []
    sizes = samples.sizes
    most = parallel.max_dynamic_context_parallel_size
    Domain.of(parallel, seq_length, ranks=most)  # refuses what no number of ranks mends
    token, groups = kind_of_config(config).cost(config).token, group_numbers(sources.datasets, config.plan)
    for ranks in (each for each in SHARING if each % most == 0):
        domain = Domain.of(parallel, seq_length, ranks=ranks)
        replicas = max(ranks * domain.tokens // seq_length, 1)
        own = config.training.global_batch_size
        batch = own if own > 1 else BATCH * replicas
        steps = min(FIRST, packs.costs.size // batch)
        if not steps or batch < replicas:
            continue
        batches = []
        for at in range(steps):
            ends = packs.offsets[at * batch : (at + 1) * batch + 1]
            rows = packs.order[ends[0] : ends[-1]]
            both = packs.of_samples[rows]
            columns = [sizes.length[rows], sizes.second[rows], both.sum(axis=1), both[:, 0]]
            columns += [sizes.images[rows], sizes.patches[rows], *sources.place(samples.source[rows])]
            table = np.stack([*columns, samples.piece[rows]], axis=1).astype(np.int64)
            batches.append(step_samples(table, np.repeat(np.arange(batch), np.diff(ends)), groups, token, limits))
        size, dynamic, static = best_size(batches, domain, seq_length)
        fixed = efficiency_of_fixed(batches, domain, smallest_size(domain, seq_length))
        shares = {"dynamic": dynamic, "static": static, "fixed": fixed}
        told = {"ranks": ranks, "global_batch_size": batch, "size": size}
        found.append(told | {name: round(value, 4) for name, value in shares.items()})
    return found


def efficiency_of(costs: np.ndarray, ranks: int) -> float | None:
    """`step_efficiency` of all whole steps; None if there is none."""
    whole = costs.size // ranks * ranks
    return step_efficiency(costs[:whole].reshape(-1, ranks).T) if whole else None


_FILE = pa.struct([pa.field("name", pa.large_string()), *(each for each in MEDIA.value_type if each.name != "name")])
_CONTENT = pa.schema(
    {"key": pa.large_string(), "offset": pa.int64(), "size": pa.int32(), "media": pa.large_list(_FILE)}
)
"""What a row of the plan has from its source, with offsets of 64 bits, which take longer."""
LARGEST_NARROW = 1 << 30  # bytes up to which offsets of 32 bits, which end at 2 GiB of names, are kept


def make_plan(
    directories: Sequence[str | Path],
    config: AnyRun,
    out: Path,
    *,
    limits: AnyLimits | None = None,
    remeasure: Remeasure | None = None,
    force: bool = False,
    left: Left | None = None,
    splits: Collection[str] = (),
    extend: Path | None = None,
    first: int = 0,
    without: Collection[str] = (),
) -> PlanFacts:
    """Makes the plan `out`, with its drops beside it, of all samples of the indexes in `directories`, all measured with
    the encoder of `config`. Of what was measured `splits` are taken, or the only one that there is; `without` names
    each shard that `measure` set aside, which is left out. `limits` are those of a pack, else those of
    `SampleKind.limits`, for which a dummy image is too much; `remeasure` measures samples again that fit no pack as
    they are, see `fitting_samples`. An existing plan is replaced by `force`. With what an online run has still to give
    in its epoch, the plan begins (`left`); of a plan that is trained up to pack `first`, these packs stay, and what
    they lack is planned anew (`extend`). Raises UserError: the plan exists or cannot be written, an index cannot be
    used, nothing is left to pack, more samples are dropped than ``packing.drop_budget`` allows, or a sample does not
    fit under ``oversize: raise``; ConfigError: the configuration does not suit the indexes."""
    _check_free(out, force)
    if extend is not None and os.path.realpath(extend) == os.path.realpath(out):
        raise UserError(f"--out {shown(out)} is the plan of --extend, which stays; name another file.")
    old = None if extend is None else Plan.open(extend)
    sources = Sources.open(directories, config, splits)
    _check_set_aside(sources, {*without})
    family = str(sources.indexes[0].fingerprint.get("family", ""))
    limits = limits or kind_of_config(config).limits(config, family)
    _check_measured(directories, sources, config, 0)
    try:
        with written_drops(out, sources) as dropped:  # takes its place after the plan
            samples, counted = None, Counted(sources=sources, config=config, shards=np.zeros((len(sources.shard), 3)))
            at_once = left is not None or extend is not None
            for shards in [range(len(sources.shard))] if at_once else chunks(sources):
                samples, again, drops = fitting_samples(sources, limits, config, remeasure, shards)
                counted.add(shards, samples, again, drops)
                dropped.add(drops)
            _check_measured(directories, sources, config, counted.pairs)
            if counted.images:
                kind_of_config(config).cost(config).check_fit(family)
            if samples is None or not counted.samples:
                most = f"; the most frequent reason is {_most(counted.drops)}" if counted.drops else ""
                raise UserError(f"None of the {len(sources)} samples can be packed{most}.")
            blend = Blend.of(sources.datasets, counted.datasets[:, 1:], config.plan)
            _check_drops(told_datasets(counted, blend), counted, blend, config.packing.drop_budget)
            if left is not None:
                blend = replace(blend, rest=rows_left(left, sources, samples))
            drawn = AllSamples(samples=samples, config=config.plan, sources=sources)
            decided = _decided(counted, limits, left)
            if old is not None:
                kept = drawn.kept_packs(old, first, decided)
                blend, drawn = replace(blend, kept=kept), replace(drawn, kept=kept)
                decided["extends"] = [old.facts.id, first]
            parts = blend.parts()
            bands = bands_of(parts, counted.datasets[:, 0])
            made = _Made(out, counted, blend, limits, decided)
            if at_once or (len(counted.again), len(bands)) == (1, 1):
                packs = ordered_packs(blend, parts, drawn, limits, config)
                if packs.costs.size == first:
                    raise UserError(f"the {first} packs before --from have all epochs or stages of a plan; add some.")
                facts, content = made.file(packs, drawn)
            else:
                # How samples are drawn does not depend on how many epochs or stages follow.
                before, again, several = NOTHING, joined(*counted.again), len(counted.again) > 1
                rounds = rounds_of(counted, parts)
                if several:
                    del samples, drawn
                for band in bands:
                    own = Band(band, blend, counted, again, rounds, limits, _CONTENT.names) if several else drawn
                    packs = ordered_packs(blend, band, own, limits, config, before)
                    before = packs.unfinished
                    made.band(packs, own)
                facts, content = made.finish()
            dropped.head = facts.id, content
    except OSError as error:
        left_over = "an existing plan is as it was, or is not complete"
        raise UserError(f"{shown(out)} cannot be written ({said(error)}); {left_over}.") from error
    return facts


_OURS = re.compile(rf"\.?(part-\d+\.parquet|{plan_file.MANIFEST}|{plan_file.SOURCES_FILE})(\..*)?")


def _check_free(out: Path, force: bool) -> None:
    """Refuses a place where a plan cannot be written, or shall not be replaced."""
    check_remote("the plan", out)
    complete = exists(out / plan_file.MANIFEST)
    if (exists(out) or complete) and not force:
        raise UserError(f"{shown(out)} exists already; name another file, or replace it with --force.")
    if not remote_address(out) and not out.parent.is_dir():
        raise UserError(f"{out.parent} is not a directory; make it, or name another file.")
    for name in names_in(out):  # other programs call their files part-0.parquet too
        foreign = name.startswith("part-") and not complete and read_metadata(out / name) is None
        if foreign or not _OURS.fullmatch(name):
            raise UserError(f"{shown(out)} is there and is no plan (it has {name}); name another file, or delete it.")
    for file in (out, drops_path(out)):
        remove_leftovers(out.parent, glob.escape(file.name))


class _Made:
    """Writes a plan, in one file or band after band."""

    def __init__(self, out: Path, counted: Counted, blend: Blend, limits: AnyLimits, decided: Any) -> None:
        self._out, self._counted, self._blend, self._limits, self._decided = out, counted, blend, limits, decided
        self._schema = plan_file.rows_schema(kind_of(counted.sources.datasets), self._decided)
        self._figures, self._costs, self._ends = Counter[Any](), list[np.ndarray](), list[int]()
        self._parts: list[PlanPart] = []
        self._sharing: list[dict[str, Any]] | None = None
        self._mixed = bool({"stages", "extends"} & {*decided, *decided["plan"]})

    def _add(self, packs: OrderedPacks) -> int:
        """Counts some packs, and returns the number of the first."""
        first, config, sources = self._figures["packs"], self._counted.config, self._counted.sources
        epoch = len(self._ends) if self._mixed else None
        self._figures.update(figures_of(sources, packs, self._limits, config, epoch))
        self._costs.append(packs.costs)
        self._ends += [first + end for end in packs.epoch_ends]
        if is_dynamic(config) and self._sharing is None:
            self._sharing = sharing_of(sources, packs, self._limits, config)
        return first

    def _facts(self, held: Sequence[Buffer], row_groups: tuple[int, ...] = ()) -> PlanFacts:
        counted, datasets = self._counted, self._counted.sources.datasets
        known: dict[str, Any] = {
            "fingerprint": dict(counted.sources.indexes[0].fingerprint),
            "decided": self._decided,
            "packs": self._figures["packs"],
            "samples": self._figures["rows"],
            "max_data_parallel": counted.config.plan.max_data_parallel,
            "epoch_ends": tuple(self._ends),
            "drops": dict(sorted(counted.drops.items())),
        }
        summary = summary_of(
            told_datasets(counted, self._blend), counted, self._figures, np.concatenate(self._costs), self._ends
        )
        if self._sharing is not None:
            summary["sharing"] = self._sharing
        if self._mixed:  # the tokens of each data set, by stage
            numbers = range(len(datasets))
            tokens = [[self._figures["mix", at, number] for number in numbers] for at in range(len(self._ends))]
            summary["mix"] = [{"packs": end, "tokens": of} for end, of in zip(self._ends, tokens, strict=True)]
            summary["ended"] = self._blend.ended(self._ends)
        return PlanFacts(
            id=plan_id(known, datasets, held),
            datasets=datasets,
            config=to_mapping(counted.config),
            row_groups=row_groups,
            summary=summary,
            parts=tuple(self._parts),
            **known,
        )

    def file(self, packs: OrderedPacks, drawn: AllSamples) -> tuple[PlanFacts, str]:
        """Writes all packs, and returns what the plan says and the digest of its rows and settings."""
        self._add(packs)
        facts = self._facts(packs.held, packs.row_groups)
        digest = plan_file.digest_of(facts.to_json())
        if self._out.is_dir():
            self.clear()
            self._out.rmdir()
        tables = hashed(_tables(self._counted.sources, packs, drawn, self._schema, 0), digest)
        write_table(self._out, self._schema, tables, facts.to_json())
        if remote_address(self._out):  # where both may be there, so that the old plan is, until there is the new one
            self.clear()
        return facts, digest.hexdigest()

    def clear(self) -> None:
        """Makes an empty directory of the plan's place; a file of that name in a store stays."""
        address = remote_address(self._out)
        if self._out.is_file():
            self._out.unlink()
        if address is None:
            self._out.mkdir(exist_ok=True)
        for name in filter(_OURS.fullmatch, names_in(self._out)):  # the manifest before the parts
            (self._out / name).unlink() if address is None else remove(f"{address}/{name}")

    def band(self, packs: OrderedPacks, drawn: AllSamples | Band) -> None:
        first = self._add(packs)
        if not packs.costs.size:
            return
        if not self._parts:
            self.clear()
            if (address := remote_address(self._out)) is not None and exists(self._out):
                remove(address)
        path, held = plan_file.part_path(self._out, len(self._parts)), rows_digest(packs.held)
        content = hashlib.sha256(held.encode())
        said = {"format": plan_file.FORMAT, "digest": held, "row_groups": [first + each for each in packs.row_groups]}
        tables = hashed(_tables(self._counted.sources, packs, drawn, self._schema, first), content)
        write_table(path, self._schema, tables, said)
        rows, size = packs.order.size, file_size(path)
        self._parts.append(PlanPart(first=first, rows=rows, bytes=size, digest=held, content=content.hexdigest()))

    def finish(self) -> tuple[PlanFacts, str]:
        """Completes the plan, and returns what it says and the digest of its rows and settings."""
        facts = self._facts([part.digest.encode() for part in self._parts])
        there = [file_size(plan_file.part_path(self._out, at)) for at in range(len(self._parts))]
        if there != [part.bytes for part in self._parts]:
            raise UserError(f"{shown(self._out)} was written by another command meanwhile; plan again.")
        facts = replace(facts, sources=write_sources(self._out, facts))
        write_json(self._out / plan_file.MANIFEST, facts.to_json())
        return facts, plan_file.digest_of(facts.to_json()).hexdigest()


def write_sources(path: Path, facts: PlanFacts) -> str:
    """Writes the shards of all data sets of a plan in bands; returns their `sources_digest`. Raises OSError."""
    rows: list[dict[str, Any]] = []
    for each in facts.datasets:
        rows += [asdict(shard) | {"identity": json.dumps(dict(shard.identity))} for shard in each.shards]
        rows += [{"name": name} for name in (*each.media_shards, *each.media_states)]
    table = pa.Table.from_pylist(rows, plan_file.SOURCES)
    write_table(path / plan_file.SOURCES_FILE, table.schema, [table], {"id": facts.id})
    return plan_file.sources_digest(table)


def rows_digest(held: Sequence[Buffer], before: bytes = b"") -> str:
    """SHA-256 of `OrderedPacks.held` of a band, after what is `before` them, hexadecimal."""
    digest = hashlib.sha256(before)
    for each in held:
        digest.update(each)
    return digest.hexdigest()


def _check_set_aside(sources: Sources, without: set[str]) -> None:
    """Refuses shards that were not measured and are not named, and names of others."""
    holes = {f"{each.root}/{it.name}": it.samples for each in sources.datasets for it in each.shards if it.set_aside}
    if unknown := without - holes.keys():
        raise UserError(f"--without {min(unknown)} is no shard that `measure` set aside; leave it out.")
    if left := sorted(holes.keys() - without):
        told = " ".join(f"--without {shlex.quote(name)}" for name in left)
        raise UserError(
            f"The index lacks the {sum(map(holes.__getitem__, left))} samples of shards that `measure` set aside; "
            f"measure again, or plan {told}"
        )


def _check_measured(directories: Sequence[str | Path], sources: Sources, config: AnyRun, pairs: int) -> None:
    """Refuses indexes whose samples were measured under other settings of packs, or with pairs that the run refuses."""
    where = ", ".join(map(shown, directories))
    for name in marked(config.packing, "newer", "lengths"):
        own = getattr(config.packing, name)
        if name == "pairs":  # an older index did not count them
            known = pair_counts(sources.datasets)
            replace(known, pairs=max(known.pairs, pairs)).check(where, own)
        default = getattr(type(config.packing)(), name)
        measured = sources.indexes[0].fingerprint.get(f"packing.{name}", default)
        if measured != own and (measured, own) != (default, before(config.packing).get(name)):
            what = f"was measured with packing.{name}={measured!r}, the configuration has {own!r}"
            raise ConfigError(f"{where} {what}; measure again with this configuration.")


def _check_drops(told: Sequence[Mapping[str, Any]], counted: Counted, blend: Blend, budget: float) -> None:
    """Refuses a data set with a share of which nothing can be packed, and drops beyond the budget of what is read."""
    lost, read, reasons = 0.0, 0.0, Counter[str]()
    for each, share in zip(told, blend.shares, strict=True):
        asked = f"epochs {share.epochs:g}" if share.weight is None else f"weight {share.weight:g}"
        if not each["tokens"] and share.epochs and asked not in ("epochs 1", "weight 0"):
            raise UserError(
                f"{each['name']} ({each['root']}) has {asked}, but none of its {each['samples']} samples can be packed "
                f"({_most(each['dropped'])}); change what drops them, or set its epochs in plan.datasets to 0."
            )
        if times := each["per_epoch"]:
            unwanted, size = unwished(each["dropped"], each["samples"])
            lost, read, reasons = lost + times * unwanted.total(), read + times * size, reasons + unwanted
    if over_budget(lost, read, budget, looks=0):
        firsts = (it for (at, reason), it in counted.first.items() if reason in reasons and told[at]["per_epoch"])
        first = min(firsts, key=lambda it: it.source)
        raise UserError(
            f"{lost:.0f} of {read:.0f} samples would be dropped ({_most(reasons)}; the first is {first.key}: "
            f"{first.detail}), more than packing.drop_budget={budget} allows; correct the cause or raise the budget."
        )


def _most(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in Counter(reasons).most_common(3)) or "it is empty"


def _decided(counted: Counted, limits: AnyLimits, left: Left | None) -> dict[str, Any]:
    config, sources = counted.config, counted.sources
    packing = config.packing
    decided = {
        "seq_length": packing.seq_length,
        "multiple": limits.multiple,
        **kind_of_config(config).decided(config, limits),
        "policy": policy_of(packing),
        "oversize": packing.oversize,
        "plan": (planned := to_mapping(config.plan)),
    }
    if is_dynamic(config):
        decided["token_cost"] = kind_of_config(config).cost(config).token
    names = {it for each in sources.datasets for it in each.names}
    stages = planned.pop("stages")
    for named in (planned["datasets"], *(stage["datasets"] for stage in stages)):
        if not named.keys() <= {*map(os.path.basename, names)}:  # if so, these are in the id
            for name in [it for it in named if it not in names and os.path.abspath(it) in names]:
                named[os.path.abspath(name)] = named.pop(name)  # is found from elsewhere too
    if stages:  # ids of plans without them are as they were
        planned["stages"] = stages
    if left is not None:  # tells plans of different rests apart
        listed = [[*sample, times] for sample, times in sorted(left.samples.items())]
        decided["rest"] = hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]
    return decided


def plan_id(
    known: Mapping[str, Any], datasets: Sequence[IndexedDataset], rows: Sequence[Buffer], *, resolved: bool = True
) -> str:
    """The id of a plan, by the fields of `PlanFacts` that `OF_ID` names. Neither settings on which no pack depends nor
    where the shards are count: a state of one plan continues with its equal. ``rows`` are ``[packs + 1]`` int64, where
    packs begin, and of each row its source in `Sources`, piece and sizes; of a plan in bands, the `rows_digest` of
    each. In plans of before ``plan.datasets`` was not ``resolved``: its names counted."""
    planned, held = known["decided"]["plan"], dict(known)
    short = {os.path.basename(place) for each in datasets for place in each.names - {each.name}}
    if resolved:  # of names that change with the place, what they say
        config, named = from_mapping(PlanConfig, planned, where="plan"), dict[str, Any]()
        if not planned["datasets"].keys() <= short:
            named["datasets"] = [asdict(share) for share in shares_of(datasets, config)]
        if config.stages:
            weights = stage_weights(datasets, config).tolist()
            named["stages"] = [[it.tokens, *each] for it, each in zip(config.stages, weights, strict=True)]
        held["decided"] = known["decided"] | {"plan": planned | named}
    return rows_digest(rows, json.dumps([held, *map(_content, datasets)], sort_keys=True).encode())[:32]


OF_ID = ("fingerprint", "decided", "packs", "samples", "max_data_parallel", "epoch_ends", "drops")


def _content(dataset: IndexedDataset) -> dict[str, Any]:
    """What a data set holds, wherever it is."""
    names = ("bytes", "index_uuid", "media_uuid")
    shards = [(it.name, *(it.identity[name] for name in names if name in it.identity)) for it in dataset.shards]
    return {"split": dataset.split, "subflavors": dict(dataset.subflavors), "shards": shards}


def _tables(
    sources: Sources, packs: OrderedPacks, drawn: AllSamples | Band, schema: pa.Schema, begin: int
) -> Iterator[pa.Table]:
    """The rows of some packs, of which `begin` is the first of the plan, one row group at a time."""
    names, samples = tuple(_CONTENT.names), packs.samples
    parts, at = drawn.content(names)
    if sum(table.nbytes for table in parts) > LARGEST_NARROW:
        parts = [table.cast(_CONTENT) for table in parts]
    content = pa.concat_tables(parts).combine_chunks()
    del parts
    for first, stop in pairwise([*packs.row_groups, packs.costs.size]):
        low, high = int(packs.offsets[first]), int(packs.offsets[stop])
        rows = packs.order[low:high]
        dataset, shard, row = sources.place(samples.source[rows])
        taken = content.take(pa.array(at[rows]))
        columns = {
            "pack": begin + np.repeat(np.arange(first, stop), np.diff(packs.offsets[first : stop + 1])),
            "dataset": dataset,
            "shard": shard,
            "row": row,
            "length": samples.sizes.length[rows],
            "second": samples.sizes.second[rows],
            "piece": samples.piece[rows],
            "cost": packs.of_samples[rows].sum(axis=1),
            "vision_cost": packs.of_samples[rows, 0],
            **{name: taken.column(name).cast(schema.field(name).type) for name in names},
        }
        columns |= {name: getattr(samples.sizes, name)[rows] for name in plan_file.LIMITED if name in schema.names}
        if samples.sizes.text_tokens is not None:
            columns["text_tokens"] = samples.sizes.text_tokens[rows]
        yield pa.table({name: columns[name] for name in schema.names}, schema=schema)
