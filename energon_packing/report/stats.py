"""Statistics of samples: distributions, shares and drops, with error bars where sampled; packings side by side, what to
set, and what the readers of a run would have."""

import dataclasses
import math
import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from energon_packing.config import RunConfig
from energon_packing.drops import unwished
from energon_packing.families.geometry import MOST_PATCHES
from energon_packing.kinds.conversations import row_limits
from energon_packing.offline.index import MODALITIES, SHAPE
from energon_packing.offline.samples import Sizes, costs, holds
from energon_packing.packing.balance import Order, simulate_steps
from energon_packing.packing.constraints import PackLimits
from energon_packing.packing.whole_list import pack_lengths_flat
from energon_packing.report.stats_samples import StatsSamples
from energon_packing.thd.alignment import check_multiple

Z = 1.959964
"""Half the width of a 95 % interval, in standard errors."""
SHARE_BINS = 10
QUANTITIES: Mapping[str, tuple[str, str]] = {
    "tokens": ("Tokens", "tokens per sample"),
    "trained_share": ("Trained share", "targets per token of a sample"),
    "turns": ("Turns", "turns per sample"),
    "stills": ("Images", "images per sample"),
    "videos": ("Videos", "videos per sample"),
    "frames": ("Frames", "sampled video frames per sample"),
    "pixels": ("Pixels", "source pixels of images and frames per sample"),
    "patches": ("Patches", "rows of vision input per sample"),
}
"""What is counted in a sample: its title and its unit."""
SIMULATED = 40_000
"""Samples that pass through a window at most; they are drawn at random from all."""
PLANNED = 1_000_000
"""Samples that are packed at once at most, as a plan does, which takes a microsecond or less for each."""
NEGLIGIBLE_FILL = 0.002
"""A window that fills rows by no more than this less than the best is good enough."""
NEGLIGIBLE_LOSS = 0.005
"""Share of tokens in samples longer than a row that a recommended ``seq_length`` may lose."""
PADDED = 4
"""Samples of a padded micro-batch, with which packed rows are compared."""
HELPS = 1.05
"""Packing helps where its rows are that many times as full."""
RANKS = 8
"""Data-parallel ranks for which sorting by cost is judged."""
BALANCE_WINDOW = 64
SEQ_LENGTHS = (4096, 8192, 16384, 32768)
WINDOWS = (64, 256, 1024)


def stats_report(
    samples: StatsSamples,
    run: RunConfig,
    *,
    seq_lengths: Sequence[int] = (),
    multiples: Sequence[int] = (),
    windows: Sequence[int] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """Statistics, packings side by side, and a recommendation. What is compared is by default `SEQ_LENGTHS`, the run's
    alignment and `WINDOWS`. Raises `ConfigError`: a ``seq_length`` is not a multiple of the alignment."""
    choices = {"seq_lengths": seq_lengths or SEQ_LENGTHS, "windows": windows or WINDOWS}
    choices["multiples"] = multiples or (run.parallel.multiple,)
    if samples.planned is not None:  # what it dropped has no lengths there, so that no other settings can be judged
        why = "What a plan drops is not in it; `energon-packing stats INDEX` compares settings."
        none = {"packing": [], "recommendation": {"settings": {}, "reasons": [why]}}
        return {**statistics(samples), "plan": planned_packing(samples.planned, run), **none}
    compared = list(packings(samples, run, **{name: sorted(set(each)) for name, each in choices.items()}, seed=seed))
    return {
        **statistics(samples),
        "global_batch_size": run.training.global_batch_size,
        "plan": None,
        "packing": compared,
        "recommendation": recommendation(samples, run, compared),
    }


def statistics(samples: StatsSamples) -> dict[str, Any]:
    """Describes samples.

    Returns:
        Plain values. ``pairs``, ``unwanted``: of the measured samples, see `PairCounts`. ``quantities``: for each of
        `QUANTITIES` that the source has, ``mean``, ``sum``, percentiles and a ``histogram``; ``modalities`` and
        ``datasets``: shares of samples and tokens; ``drops``: by reason; ``warnings``: about frequent ones. Where only
        a random part was measured, ``sum`` is an estimate for all samples, and each ``error`` is half the width of its
        95 % confidence interval; otherwise an error is 0.
    """
    values = {**samples.columns, "tokens": samples.tokens}
    if "targets" in values:
        values |= {"trained_share": values["targets"] / np.maximum(samples.tokens, 1)}
    return {
        "path": samples.path,
        "kind": samples.kind,
        "samples": samples.total,
        "measured": samples.measured,
        "pairs": samples.pair_counts.pairs,
        "unwanted": samples.pair_counts.unwanted,
        "quantities": {name: _quantity(samples, values[name]) for name in QUANTITIES if name in values},
        "modalities": _modalities(samples),
        "datasets": [
            _group(samples, name, samples.dataset == number, samples.drops[number] if samples.drops else {})
            for number, name in enumerate(samples.datasets)
        ],
        "drops": [
            {"reason": reason, **_counted(samples, count), "samples": round(count * samples.total / samples.measured)}
            for reason, count in samples.dropped.most_common()
        ],
        "warnings": samples.frequent.news(final=True),
    }


def mean_error(samples: StatsSamples, array: np.ndarray) -> float:
    """Half the width of a 95 % interval of a mean over usable samples."""
    if samples.whole or array.size < 2:
        return 0.0
    return Z * float(array.std(ddof=1)) * math.sqrt((1 - samples.measured / samples.total) / array.size)


def _quantity(samples: StatsSamples, array: np.ndarray) -> dict[str, Any]:
    if array.size == 0:
        return {"samples": 0, "histogram": []}
    # Dropped samples count as nothing, so that the estimate includes how many of them there are.
    all_of_them = np.concatenate([array, np.zeros(samples.measured - array.size)]) if not samples.whole else array
    marks = (5, 50, 95, 99)
    return {
        "samples": int(array.size),
        "mean": float(array.mean()),
        "mean_error": mean_error(samples, array),
        "deviation": float(array.std()),
        "smallest": float(array.min()),
        **{f"p{mark}": float(value) for mark, value in zip(marks, np.percentile(array, marks), strict=True)},
        "largest": float(array.max()),
        "sum": float(array.sum()) * (samples.total / samples.measured),
        "sum_error": mean_error(samples, all_of_them) * samples.total,
        "histogram": _histogram(samples, array),
    }


def _histogram(samples: StatsSamples, array: np.ndarray) -> list[dict[str, Any]]:
    """Bins ``[from, below)``: powers of two with a bin for 0, or tenths for a share."""
    edges: list[float]
    if array.dtype.kind == "f":
        edges = [number / SHARE_BINS for number in range(SHARE_BINS + 1)]
        counts = np.bincount(np.minimum((array * SHARE_BINS).astype(int), SHARE_BINS - 1), minlength=SHARE_BINS)
    else:
        # frexp is exact for integers below 2**53: 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3.
        counts = np.bincount(np.frexp(array.astype(np.float64))[1])
        edges = [0, *(1 << power for power in range(counts.size))]
    first, last = np.flatnonzero(counts)[[0, -1]]
    return [
        {"from": edges[number], "below": edges[number + 1]} | _counted(samples, int(counts[number]))
        for number in range(int(first), int(last) + 1)
    ]


def _counted(samples: StatsSamples, count: int) -> dict[str, Any]:
    """A share of all samples, with half the width of its 95 % interval (Wilson's, for a finite population)."""
    share, error = count / samples.measured, 0.0
    if not samples.whole:
        n = samples.measured * (samples.total - 1) / max(samples.total - samples.measured, 1)
        error = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return {"samples": count, "share": share, "error": error}


def _modalities(samples: StatsSamples) -> list[dict[str, Any]]:
    if "stills" not in samples.columns:
        return []
    number = (samples.columns["stills"] > 0) + 2 * (samples.columns["videos"] > 0)
    dropped = samples.frequent.by_modality()
    return [
        _group(samples, name or "unknown", number == place, {name: dropped[name]})
        for place, name in enumerate((*MODALITIES, ""))
        if dropped[name] or (number == place).any()
    ]


def _group(samples: StatsSamples, name: str, members: np.ndarray, drops: Mapping[str, int]) -> dict[str, Any]:
    own, count = int(samples.tokens[members].sum()), int(members.sum())
    group: dict[str, Any] = {
        "name": name,
        **_counted(samples, count),
        "samples": round(count * samples.total / samples.measured),
        "tokens": round(own * samples.total / samples.measured),
        "token_share": own / max(int(samples.tokens.sum()), 1),
        "mean_tokens": own / max(count, 1),
    }
    if "targets" in samples.columns:
        group["trained_share"] = int(samples.columns["targets"][members].sum()) / max(own, 1)
    group["dropped"] = round(sum(drops.values()) * samples.total / samples.measured)
    return group


def packings(
    samples: StatsSamples,
    run: RunConfig,
    *,
    seq_lengths: Sequence[int],
    multiples: Sequence[int],
    windows: Sequence[int],
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Packs the samples under every combination of settings.

    Args:
        windows: samples held online; a whole-list plan is added to each combination.

    Yields:
        Settings; ``oversize`` (samples that fit no row) and ``lost`` (their share of tokens); ``fill``, ``alignment``
        and ``tail`` (shares of all tokens of all rows); ``packs`` and ``steps`` per epoch; ``error``: half the width of
        the 95 % interval of ``fill``, ``packs_error``: of ``packs``.

    Raises:
        ConfigError: a ``seq_length`` is not a multiple of the alignment.
    """
    sizes = _sizes(samples)
    for seq_length in seq_lengths:
        for multiple in multiples:
            check_multiple("seq_length", seq_length, multiple)
            limits = row_limits(run.packing, seq_length, multiple, samples.family)
            fits = holds(limits, sizes)
            for window in (*windows, None):
                yield _packed(samples, sizes, fits, limits, window, run.training.global_batch_size, seed)


def planned_packing(planned: Mapping[str, float], run: RunConfig) -> dict[str, Any]:
    """The packs that a plan has, of all of its epochs; ``steps`` are those of the run's batch, or else of the plan's
    own, and ``dropped`` and ``read`` samples of an epoch, as ``packing.drop_budget`` counts them."""
    of_run = run.training.global_batch_size
    batch = int(planned["global_batch_size"]) if of_run == type(run.training)().global_batch_size else of_run
    shares = _shares(planned["fill"], planned["aligned_fill"], 1)
    return {**planned, **shares, "global_batch_size": batch, "steps": int(planned["packs"]) // batch}


def _shares(tokens: float, aligned: float, room: float) -> dict[str, float]:
    """What the tokens of all rows are: of samples, of their alignment, or of a row's tail."""
    return {"fill": tokens / room, "alignment": (aligned - tokens) / room, "tail": 1 - aligned / room}


def recommendation(samples: StatsSamples, run: RunConfig, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings that suit the samples, each with its reason, from the rows of `packings`.

    Rows are compared by the share of their tokens that are real and by the tokens that would be lost; how much memory
    a row needs is not known here.
    """
    rows = [row for row in found if row["window"] is not None and row["fill"] > 0]
    if not rows:
        return {"settings": {}, "reasons": ["No sample fits a row of any of these lengths; raise --seq-length."]}
    best = _best_length(rows)
    same = [row for row in found if (row["seq_length"], row["multiple"]) == (best["seq_length"], best["multiple"])]
    windows = sorted((row for row in same if row["window"] is not None), key=lambda row: row["window"])
    top = max(row["fill"] for row in windows)
    chosen = next(row for row in windows if row["fill"] >= top - NEGLIGIBLE_FILL)
    planned = max((row["fill"] for row in same if row["window"] is None), default=0.0)
    even, ordered = (chosen.get(name, 0.0) for name in ("efficiency", "sorted_efficiency"))
    clips = "text_tokens" in samples.columns  # nothing splits one
    splits = best["lost"] > NEGLIGIBLE_LOSS and not clips
    oversize = "split" if splits else run.packing.oversize
    drops, read = unwished(samples.dropped, samples.measured)
    too_long = 0 if oversize in ("split", "truncate") else best["oversize"] * samples.measured / samples.total
    dropped = (drops.total() + too_long) / max(read, 1)
    balances = ordered > even + 0.02
    fitting = samples.tokens[samples.tokens <= best["seq_length"]]
    drawn = np.resize(np.random.default_rng(0).permutation(fitting), (-(-fitting.size // PADDED), PADDED))
    padded = float(drawn.sum() / (PADDED * drawn.max(axis=1).sum()))
    helps = "helps" if chosen["fill"] >= HELPS * padded else "hardly helps"
    settings = {
        "packing.seq_length": best["seq_length"],
        "packing.window": chosen["window"],
        **({"packing.oversize": "split"} if splits else {}),
        **({"packing.balance_window": BALANCE_WINDOW} if balances else {}),
    }
    reasons = {
        f"Packing {helps}: packed rows are {chosen['fill']:.1%} full, micro-batches of {PADDED} samples padded to the "
        f"longest {padded:.1%}, and rows of one sample {chosen['fill'] / chosen['samples_per_pack']:.1%}.": True,
        f"packing.seq_length={best['seq_length']}: rows are {chosen['fill']:.2%} full, and {best['lost']:.2%} of the "
        "tokens are in samples that are longer than a row. Longer rows need more memory, which is not measured "
        "here.": True,
        f"packing.window={chosen['window']}: the largest window compared ({windows[-1]['window']}) fills rows to "
        f"{windows[-1]['fill']:.2%}; a smaller one delays samples less.": True,
        f"packing.oversize=split: {best['lost']:.2%} of the tokens would be dropped with their samples. Splitting "
        "keeps them.": splits,
        "Fill, packs and steps are those without samples that are longer than a row; with packing.oversize="
        f"{oversize} a run has them too, and so more packs and steps.": (
            best["oversize"] and oversize != "drop" and not clips
        ),
        f"{dropped:.1%} of the samples would be dropped, more than packing.drop_budget={run.packing.drop_budget:g} "
        "allows: the run would stop. Correct the data or raise the budget.": dropped > run.packing.drop_budget,
        f"A plan (`energon-packing plan`) fills rows to {planned:.2%}, since it sees all samples at once.": (
            planned > top + 2 * NEGLIGIBLE_FILL
        ),
        f"packing.max_patches_per_pack={MOST_PATCHES.get(samples.family)} holds where none is set: the vision encoder "
        "masks all patches of a pack against each other.": (
            samples.family in MOST_PATCHES and run.packing.max_patches_per_pack is None
        ),
        f"packing.balance_window={BALANCE_WINDOW}: packs differ in cost, so {RANKS} ranks would compute for {even:.1%} "
        f"of a step; with packs sorted by cost it is {ordered:.1%}.": balances,
    }
    return {"settings": settings, "reasons": [reason for reason, holds in reasons.items() if holds]}


def _best_length(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The shortest rows that lose hardly any tokens and fill as well as others; else those that waste least."""
    rows = [row for row in rows if row["multiple"] == min(each["multiple"] for each in rows)]
    good = [row for row in rows if row["lost"] <= NEGLIGIBLE_LOSS]
    if not good:
        return max(rows, key=lambda row: row["fill"] * (1 - row["lost"]))
    top = max(row["fill"] for row in good)
    full = (row for row in good if row["fill"] >= top - 5 * NEGLIGIBLE_FILL)
    return min(full, key=lambda row: (row["seq_length"], -row["fill"]))


def _sizes(samples: StatsSamples) -> Sizes:
    empty = np.zeros(samples.dataset.size, dtype=np.int64)
    columns = {name: samples.columns.get(name, empty) for name in ("length", "second", "images", "patches", *SHAPE)}
    return Sizes(**columns, text_tokens=samples.columns.get("text_tokens"))


def _packed(
    samples: StatsSamples, sizes: Sizes, fits: np.ndarray, limits: PackLimits, window: int | None, batch: int, seed: int
) -> dict[str, Any]:
    scale, tokens = samples.total / samples.measured, sizes.tokens
    found: dict[str, Any] = {
        "seq_length": limits.tokens,
        "multiple": limits.multiple,
        "window": window,
        "oversize": round(int((~fits).sum()) * scale),
        "lost": float(tokens[~fits].sum() / max(int(tokens.sum()), 1)),
    }
    if not fits.any():
        zeros = ("fill", "alignment", "tail", "error", "packs", "packs_error", "steps", "samples_per_pack")
        return found | dict.fromkeys(zeros, 0)
    random = np.random.default_rng(seed)
    kept = np.flatnonzero(fits)
    most = PLANNED if window is None else SIMULATED
    whole = samples.whole and kept.size <= most
    # Shuffled, as the loader does. A small random part stands for all of the data: it is drawn from again and again.
    count = kept.size if whole else min(most, max(round(kept.size * scale), 1))
    drawn = random.permutation(kept) if whole else random.choice(kept, count, replace=kept.size < count)
    part = sizes.take(drawn)
    units: Any = limits.length_units(part)
    groups = pack_lengths_flat(
        units,
        limits.units,
        "best_fit" if window is None else "window",
        constraints={name: (cost, limits.limited[name]) for name, cost in costs(limits, part).items()},
        window=window or SIMULATED,
    )
    offsets = groups.offsets
    packs = offsets.size - 1
    if not whole and window is not None:  # the last packs of a stream are emptier than those of a long one
        packs = max(1, int(np.searchsorted(offsets[:-1], count - window, side="right")))
    order = groups.order[: int(offsets[packs])]
    of_pack = np.repeat(np.arange(packs), np.diff(offsets[: packs + 1]))
    real, cost = (np.bincount(of_pack, each[order].astype(np.float64), packs) for each in (part.tokens, part.cost))
    aligned = int(units[order].sum()) * limits.multiple
    shares = _shares(int(part.tokens[order].sum()), aligned, packs * limits.tokens)
    # As many rows as the tokens of all samples need at this fill.
    rows = float(tokens[kept].sum()) * scale / (shares["fill"] * limits.tokens)
    all_tokens = np.concatenate([tokens[kept], np.zeros(samples.measured - kept.size)])
    relative = 0.0 if samples.whole else mean_error(samples, all_tokens) / max(float(all_tokens.mean()), 1e-9)
    error = 0.0 if whole else Z * float(real.std() / limits.tokens) / math.sqrt(packs)
    made = packs if whole else round(rows)
    found |= {
        **shares,
        "error": error,
        "packs": made,
        "packs_error": round(rows * math.hypot(relative, error / shares["fill"])),
        "steps": made // batch,
        "samples_per_pack": order.size / packs,
        "cost_spread": float(cost.std() / cost.mean()),
    }
    if window is not None and packs >= 4 * RANKS:
        for name, size in (("efficiency", 1), ("sorted_efficiency", BALANCE_WINDOW)):
            in_turn: Order = "none" if size == 1 else "serpentine"
            steps = simulate_steps(cost, ranks=RANKS, window=size, order=in_turn, seed=seed)
            found[name] = round(steps.efficiency, 4)
    return found


def reader_figures(path: str, split: str, run: RunConfig, samples: StatsSamples, data_parallel: int) -> dict[str, Any]:
    """Deals a data set to the readers of a run, as the run does.

    Returns:
        Plain values: ``data_parallel``, ``workers``, and for each of ``datasets`` and for ``all`` of them ``share`` and
        ``token_share`` of the mix, and the tokens that a reader has in an epoch: ``mean_tokens``, ``least_tokens`` and
        ``most_tokens``. The last two are None unless all samples were measured.

    Raises:
        UserError: as `build_dataset` and `source_parts`.
    """
    from energon_packing.energon.loader import build_dataset
    from energon_packing.energon.reader_shares import dealt_shares
    from energon_packing.offline.source import source_parts

    run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=path, split=split))
    shares = dict(dealt_shares(build_dataset(run, world_size=data_parallel)))
    shares = {os.path.abspath(name): share for name, share in shares.items()}
    readers = data_parallel * max(run.data.workers, 1)
    parts = source_parts(path, split)
    scale = samples.total / samples.measured
    dropped = [sum(each.values()) for each in samples.drops]
    counts = (np.bincount(samples.dataset, minlength=len(parts)) + dropped) * scale
    tokens = np.bincount(samples.dataset, samples.tokens, len(parts)) * scale
    given = np.zeros((len(parts), readers))
    mix = np.zeros(len(parts))
    for number, part in enumerate(parts):
        repetitions = 1.0 if part.repetitions is None else part.repetitions
        mix[number] = counts[number] * repetitions if part.weight is None else part.weight
        share = shares.get(part.root)
        own = samples.dataset == number
        if share is None or not samples.whole:
            each = share is not None and share.reader_of is None
            given[number] = tokens[number] * repetitions / (1 if each else readers)
        else:
            own_tokens = share.amounts(samples.place[own], samples.tokens[own], readers)
            given[number] = own_tokens * repetitions / share.copies
    of_tokens = mix * tokens / np.maximum(counts, 1)
    shares_of_tokens = of_tokens / max(of_tokens.sum(), 1e-9)
    rows = [*zip(samples.datasets, mix / mix.sum(), shares_of_tokens, given, strict=True)]
    *datasets, together = (
        {
            "name": name,
            "share": float(part_of_mix),
            "token_share": float(part_of_tokens),
            "mean_tokens": float(each.mean()),
            "least_tokens": float(each.min()) if samples.whole else None,
            "most_tokens": float(each.max()) if samples.whole else None,
        }
        for name, part_of_mix, part_of_tokens, each in (*rows, ("all", 1.0, 1.0, given.sum(axis=0)))
    )
    return {"data_parallel": data_parallel, "workers": run.data.workers, "datasets": datasets, "all": together}
