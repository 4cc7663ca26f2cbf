"""Statistics of samples: distributions, shares and drops, with error bars where sampled; packings side by side, what to
set, and what the readers of a run would have."""

import dataclasses
import itertools
import math
import os.path
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from energon_packing.config import ParallelConfig, RunConfig
from energon_packing.drops import over_budget, unwished
from energon_packing.errors import UserError
from energon_packing.families.geometry import MOST_PATCHES
from energon_packing.kinds.conversations import row_limits
from energon_packing.offline.index import MODALITIES, SHAPE
from energon_packing.offline.samples import Samples, Sizes, holds, joined, of_pieces
from energon_packing.packing.balance import step_efficiency
from energon_packing.packing.constraints import Constraints, Size
from energon_packing.packing.model_cost import SQUARES
from energon_packing.packing.online import LEAST, sliding_packs
from energon_packing.packing.whole_list import pack_lengths_flat
from energon_packing.report.stats_samples import StatsSamples
from energon_packing.sample_kind import kind_of_config
from energon_packing.thd.alignment import check_multiple

Z = 1.959964  # half the width of a 95 % interval, in standard errors
FEW = 30  # counts below it say little about how many more there are
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
STREAM = 2000  # samples that a replicate draws at most
REPLICATES = 24
SETTLED = 8  # so many windows of samples pass before what a window chooses from is what it will be
SHOWN = 1e-4  # the last digit that is shown of a share
PLANNED = 1_000_000
"""Samples that are packed at once at most, as a plan does, which takes a microsecond or less for each."""
LONGEST_ROW = 1 << 20
NEGLIGIBLE_FILL = 0.002  # a window that fills rows by no more than this less than the best is good enough
NEGLIGIBLE_LOSS = 0.005  # share of tokens that recommended rows may lose
PADDED = 4  # samples of a padded micro-batch, with which packed rows are compared
HELPS = 1.05  # packing helps where its rows are that many times as full
BALANCE_WINDOW = 64
BLOCKS = 20  # of so many packs, steps of ranks are simulated
WINDOWS = (64, 256, 1024)


def stats_report(
    samples: StatsSamples,
    run: RunConfig,
    *,
    seq_lengths: Sequence[int] = (),
    multiples: Sequence[int] = (),
    windows: Sequence[int] = (),
    ranks: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Statistics, packings side by side, and a recommendation. The first packing is the run's own; compared with it are
    by default `WINDOWS`. Raises `ConfigError`: a ``seq_length`` is not a multiple of the alignment."""
    nothing = None
    if samples.planned is not None:  # what it dropped has no lengths there, so that no other settings can be judged
        nothing = "What a plan drops is not in it; `energon-packing stats INDEX` compares settings."
    elif "text_tokens" in samples.columns:
        nothing = "Rows of clips have limits of their own; `energon-packing plan` makes them."
    windows = windows or (WINDOWS if run.packing.policy == "window" else ())  # others take minutes
    choices: dict[str, Any] = {"seq_lengths": seq_lengths, "multiples": multiples, "windows": windows}
    compared = [] if nothing else [*packings(samples, run, **choices, ranks=ranks, seed=seed)]
    advice = {"settings": {}, "reasons": [nothing]} if nothing else recommendation(samples, run, compared, ranks)
    weights = samples.mix is not None
    return {
        **statistics(samples),
        "global_batch_size": (samples.planned or {}).get("global_batch_size", run.training.global_batch_size),
        "run": {"oversize": run.packing.oversize, "ranks": ranks, "workers": run.data.workers, "weights": weights},
        "plan": samples.planned,
        "packing": [{name: value for name, value in row.items() if name not in ("fills", "part")} for row in compared],
        "recommendation": advice,
    }


def statistics(samples: StatsSamples) -> dict[str, Any]:
    """Describes samples. Returns plain values. ``pairs``, ``unwanted``: of the measured samples, see `PairCounts`.
    ``quantities``: for each of `QUANTITIES` that the source has, ``mean``, ``sum``, percentiles and a ``histogram``;
    ``modalities`` and ``datasets``: shares of samples and tokens; ``drops``: by reason; ``warnings``: about frequent
    ones. Where only a random part was measured, ``sum`` is an estimate for all samples, and each ``error`` is half the
    width of its 95 % confidence interval; otherwise an error is 0."""
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


def ratio(samples: StatsSamples, part: np.ndarray, of: np.ndarray, *, most: float | None = None) -> tuple[float, float]:
    """The sum of `part` ``[N]`` divided by that of `of`, and half the width of its 95 % interval. Where `part` is a
    share of `of`, `most` is the most that a sample has of either if none was measured that has any."""
    total, count = max(float(of.sum()), 1e-9), int(np.count_nonzero(of))
    value, n = float(part.sum()) / total, samples.measured
    error = _student(count) * math.sqrt(float(np.square(part - value * of).sum()) * count / max(count - 1, 1)) / total
    error = max(error, value) if count < 3 else error  # that two are equal says little
    if most is not None:
        seldom = min((part, of - part), key=np.count_nonzero)
        if (count := int(np.count_nonzero(seldom))) < min(FEW, np.count_nonzero(of) / 2):
            size = float(seldom.sum()) / count if count else most
            error = min(max(error, _more(count) * size / total), 1.0)
    return value, error * math.sqrt(1 - n / samples.total)


def _student(count: int) -> float:
    """Half the width of a 95 % interval of a mean, in standard errors (Student's t, as Fisher expands it)."""
    less = 1 / max(count - 1, 1)
    return Z + 2.3723 * less + 2.8225 * less**2 + 2.5558 * less**3


def _more(count: float) -> float:
    """How many more than were counted Wilson's 95 % interval has at most; none counted bounds them by 3."""
    return Z * Z / 2 + Z * math.sqrt(count + Z * Z / 4) if count else 3.0


def _quantity(samples: StatsSamples, array: np.ndarray) -> dict[str, Any]:
    if array.size == 0:
        return {"samples": 0, "histogram": []}
    # Dropped samples count as nothing, so that the estimate includes how many of them there are.
    all_of_them = np.concatenate([array, np.zeros(samples.measured - array.size)]) if not samples.whole else array
    marks = (5, 50, 95, 99)
    return {
        "samples": int(array.size),
        "mean": float(array.mean()),
        "mean_error": ratio(samples, array, np.ones(array.size))[1],
        **{f"p{mark}": float(value) for mark, value in zip(marks, np.percentile(array, marks), strict=True)},
        **{f"p{mark}_error": _mark_error(samples, array, mark) for mark in marks},
        "largest": float(array.max()) if samples.whole else None,  # of those not measured, nobody knows it
        "sum": float(array.sum()) * (samples.total / samples.measured),
        "sum_error": ratio(samples, all_of_them, np.ones(all_of_them.size))[1] * samples.total,
        "histogram": _histogram(samples, array),
    }


def _mark_error(samples: StatsSamples, array: np.ndarray, mark: int) -> float | None:
    """How far the further end of a percentile's 95 % interval is, from the samples' order; None beyond them."""
    if samples.whole:
        return 0.0
    half = Z * math.sqrt(mark / 100 * (1 - mark / 100) / array.size * (1 - samples.measured / samples.total))
    low, high = mark / 100 - half - 1 / array.size, mark / 100 + half + 1 / array.size
    if low < 0 or high > 1:
        return None
    value, ends = np.percentile(array, mark), np.percentile(array, [100 * low, 100 * high])
    return float(np.abs(ends - value).max())


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
    """A share of samples, and how far the further end of its 95 % interval is (Wilson's, finite population)."""
    share, error = count / samples.measured, 0.0
    if not samples.whole:
        n = samples.measured * (samples.total - 1) / max(samples.total - samples.measured, 1)
        rare = min(count, samples.measured - count) / samples.measured
        error = (rare + _more(rare * n * (1 - rare)) / n) / (1 + Z * Z / n) - rare if rare else min(3 / n, 1.0)
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
    own, count, tokens = samples.tokens * members, int(members.sum()), samples.tokens
    absent, most = np.zeros(samples.measured - tokens.size), int(tokens.max(initial=1))
    group: dict[str, Any] = {
        "name": name,
        **_counted(samples, count),
        "samples": round(count * samples.total / samples.measured),
        "tokens": round(int(own.sum()) * samples.total / samples.measured),
        "tokens_error": ratio(samples, np.append(own, absent), np.ones(samples.measured))[1] * samples.total,
    }
    figures = {"token_share": (own, tokens, most), "mean_tokens": (own, members, None)}
    if "targets" in samples.columns:
        figures["trained_share"] = (samples.columns["targets"] * members, own, most)
    for figure, (part, of, largest) in figures.items():
        group[figure], group[f"{figure}_error"] = ratio(samples, part, of, most=largest)
    group["dropped"] = round(sum(drops.values()) * samples.total / samples.measured)
    return group


def packings(
    samples: StatsSamples,
    run: RunConfig,
    *,
    seq_lengths: Sequence[int] = (),
    multiples: Sequence[int] = (),
    windows: Sequence[int] = (),
    ranks: int = 1,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Packs the samples as the run does, and under every combination of other settings. ``windows`` are samples held
    online, besides the run's; a plan is added to each combination where all samples were measured and each is read as
    often: of a part, nobody knows how full the rows of all are. Each of the ``ranks`` that share the data has
    ``data.workers`` readers. Raises ConfigError: a ``seq_length`` is not a multiple of the alignment.

    Yields settings; ``too_long`` and ``over_limit``, samples that fit no row as they are; ``lost``, the share of
    tokens that no row has; ``fill``, ``alignment`` and ``tail``, shares of all tokens of all rows in a run that repeats
    its data; ``packs`` and ``steps`` of an epoch of it; ``end_packs``, how many more there are where an epoch ends and
    all readers pack what they hold (the run's own row only). Each has an error, such as ``fill_error``: half the width
    of its 95 % interval. ``dropped`` of ``read``: samples measured, and pieces of them, that no row has. ``fills``: of
    each replicate; ``part``: how much of their variance the error of drawing is."""
    own = run.packing.seq_length, run.parallel.multiple
    for row, multiple in dict.fromkeys([own, *itertools.product(seq_lengths or own[:1], multiples or own[1:])]):
        # Sequence parallelism alone needs every multiple.
        parallel = ParallelConfig(tensor_parallel=multiple, sequence_parallel=True)
        parallel = run.parallel if multiple == own[1] else parallel
        packing = dataclasses.replace(run.packing, seq_length=row)
        dealt = Dealt(samples, dataclasses.replace(run, packing=packing, parallel=parallel))
        readers = min(ranks * max(run.data.workers, 1), max(round(dealt.epoch), 1))
        planned = [None] if samples.whole and dealt.alike and len(dealt.kept) <= PLANNED else []
        for window in (*dict.fromkeys([run.packing.window, *sorted(windows)]), *planned):
            is_own = (row, multiple, window) == (*own, run.packing.window)
            yield _packed(samples, dealt, window, readers, ranks if is_own else 0, seed)


def recommendation(
    samples: StatsSamples, run: RunConfig, found: Sequence[Mapping[str, Any]], ranks: int = 1
) -> dict[str, Any]:
    """Settings that suit the samples better than the run's, each with its reason, from the rows of `packings`, of which
    the first is the run's own. Rows are compared by the share of their tokens that are real and by the tokens that no
    row has; how much memory a row needs is not known here. Rows that are fuller within their error are no reason."""
    rows = [row for row in found if (row["window"], row["multiple"]) == (run.packing.window, run.parallel.multiple)]
    rows = [row for row in rows if row["fill"] > 0]
    if not rows:
        other = "Limits of a row leave all samples out." if samples.tokens.size else "All samples are dropped."
        longer_ones = any(row["too_long"] for row in found)
        reason = "No sample fits a row of the run's alignment; raise --seq-length." if longer_ones else other
        return {"settings": {}, "reasons": [reason]}
    own, best = found[0], _best_length(rows)
    same = [row for row in found if (row["seq_length"], row["multiple"]) == (best["seq_length"], best["multiple"])]
    online = sorted((row for row in same if row["window"] is not None), key=lambda row: row["window"])
    top = max(row["fill"] for row in online)
    chosen = best
    if top > best["fill"] + NEGLIGIBLE_FILL:
        good = (row for row in online if row["fill"] >= top - NEGLIGIBLE_FILL and _is_fuller(row, best))
        chosen = next(good, best)
    plan = next((row for row in same if row["window"] is None), best)
    even, ordered = (own.get(name, 0.0) for name in ("efficiency", "sorted_efficiency"))
    oversize, row = run.packing.oversize, best["seq_length"]
    loses, parted, shares = best["lost"] > NEGLIGIBLE_LOSS, best["lost"], {row: best["lost"]}
    # Those of an index may be many, and its data elsewhere.
    if loses and oversize != "split" and samples.kind == "data set" and 0 < own["dropped"] <= STREAM:
        packing = dataclasses.replace(run.packing, oversize="split", seq_length=row)
        parted = Dealt(samples, dataclasses.replace(run, packing=packing)).lost_share(samples)[0]
    as_they_are = dataclasses.replace(samples, remeasure=None)
    while min(shares.values()) > NEGLIGIBLE_LOSS and max(shares) < LONGEST_ROW:
        packing = dataclasses.replace(run.packing, seq_length=2 * max(shares))
        dealt = Dealt(as_they_are, dataclasses.replace(run, packing=packing))
        shares[packing.seq_length] = dealt.lost_share(samples)[0]
    least = max(NEGLIGIBLE_LOSS, min(shares.values()))
    longer, share = next(each for each in shares.items() if each[1] <= least)
    splits = parted < best["lost"] / 2
    drops, read = unwished(samples.dropped, samples.measured)
    gone, read = drops.total() + own["dropped"], read - samples.tokens.size + own["read"]
    balances = ordered > even + 0.02 and run.packing.balance_window == 1
    helps = "helps" if chosen["fill"] >= HELPS * chosen["padded"] else "hardly helps"
    settings = {
        "packing.seq_length": row if row != own["seq_length"] else None,
        "packing.window": chosen["window"] if chosen["window"] != run.packing.window else None,
        "packing.oversize": "split" if splits else None,
        "packing.balance_window": BALANCE_WINDOW if balances else None,
    }
    hope = f"rows of {longer} would lose at most {share:.2%}" if longer > row else "no longer row is known to lose less"
    reasons = {
        f"Packing {helps}: packed rows are {_percent(chosen, 'fill')} full, micro-batches of {PADDED} samples padded "
        f"to the longest {_percent(chosen, 'padded')}, and rows of one sample {_percent(chosen, 'alone')}.": True,
        f"packing.seq_length={row}: rows are {_percent(best, 'fill')} full, and {_percent(best, 'lost')} of the tokens "
        "are in none. Longer rows need more memory, which is not measured here.": row != own["seq_length"],
        f"packing.window={chosen['window']}: rows are {_percent(chosen, 'fill')} full, and with {best['window']} "
        f"{_percent(best, 'fill')}.": chosen is not best,
        f"packing.oversize=split: {_percent(best, 'lost')} of the tokens are in no row; of split samples it is "
        f"{parted:.2%}.": splits,
        f"{_percent(best, 'lost')} of the tokens are in no row; {hope}.": loses,
        "packing.oversize=raise: the run stops at the first sample that fits no row.": (
            oversize == "raise" and own["dropped"] > 0
        ),
        f"{gone / max(read, 1):.1%} of the samples would be dropped, more than packing.drop_budget="
        f"{run.packing.drop_budget:g} allows: the run would stop. Correct the data or raise the budget.": (
            # Weights decide what a run drops of each data set.
            samples.mix is None and over_budget(gone, read, run.packing.drop_budget, looks=not samples.whole)
        ),
        f"A plan (`energon-packing plan`) fills rows to {_percent(plan, 'fill')}, since it sees all samples at once.": (
            plan["fill"] > chosen["fill"] + 2 * NEGLIGIBLE_FILL and _is_fuller(plan, chosen)
        ),
        f"packing.max_patches_per_pack={MOST_PATCHES.get(samples.family)} holds where none is set: the vision encoder "
        "masks all patches of a pack against each other.": (
            samples.family in MOST_PATCHES and run.packing.max_patches_per_pack is None
        ),
        f"packing.balance_window={BALANCE_WINDOW}: packs differ in cost, so {ranks} ranks would compute for {even:.1%} "
        f"of a step of a pack each; with packs sorted by cost it is {ordered:.1%}.": balances,
    }
    return {
        "settings": {name: value for name, value in settings.items() if value is not None},
        "reasons": [reason for reason, holds in reasons.items() if holds],
    }


def _percent(row: Mapping[str, Any], name: str) -> str:
    error = row[f"{name}_error"]
    if error and not row[name]:
        return f"at most {error:.2%}"
    return f"{row[name]:.2%}" + (f" \u00b1{error:.2%}" if error >= 5e-5 else "")


def _is_fuller(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Beyond chance. Replicates pack the same samples, so that what they have in common does not count."""
    if len(row["fills"]) != len(other["fills"]):
        return bool(row["fill"] - other["fill"] > math.hypot(row["fill_error"], other["fill_error"]))
    more = np.subtract(row["fills"], other["fills"])
    chance = more.std(ddof=more.size > 1) * math.sqrt(row["part"] + 1 / more.size)
    return bool(more.mean() > _student(REPLICATES) * chance)


def _best_length(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The run's own rows, which come first, or the shortest that lose hardly any tokens where its own do not, or are
    fuller than these; else those that waste least."""
    good = [row for row in rows if row["lost"] <= NEGLIGIBLE_LOSS]
    if not good:
        used = [row["fill"] * (1 - row["lost"]) for row in rows]
        return rows[0] if max(used) <= used[0] + 5 * NEGLIGIBLE_FILL else rows[int(np.argmax(used))]
    top = max(row["fill"] for row in good)
    full = [row for row in good if row["fill"] >= top - 5 * NEGLIGIBLE_FILL]
    best = min(full, key=lambda row: row["seq_length"])
    return best if rows[0] not in full and (rows[0] not in good or _is_fuller(best, rows[0])) else rows[0]


def _sizes(samples: StatsSamples) -> Sizes:
    names = ("length", "second", "images", "patches", *SHAPE, *SQUARES)
    empty = np.zeros(samples.dataset.size, dtype=np.int64)
    return Sizes(**{name: samples.columns.get(name, empty) for name in names})


def _packed(
    samples: StatsSamples, dealt: "Dealt", window: int | None, readers: int, ranks: int, seed: int
) -> dict[str, Any]:
    run, kept, scale = dealt.run, dealt.kept, samples.total / samples.measured
    lost, lost_error = dealt.lost_share(samples)
    found: dict[str, Any] = {
        **{"seq_length": run.packing.seq_length, "multiple": dealt.limits.multiple, "window": window},
        **{"lost": lost, "lost_error": lost_error, "dropped": dealt.drops, "read": len(kept) + dealt.drops},
    }
    for name, which in (("too_long", dealt.too_long), ("over_limit", dealt.over)):
        counted = _counted(samples, int(which.sum()))
        found |= {name: round(counted["samples"] * scale), f"{name}_error": math.ceil(counted["error"] * samples.total)}
    names = ("fill", "alignment", "tail", "packs", "padded", "alone")
    if not len(kept):
        nothing = dict.fromkeys((*names, *(f"{name}_error" for name in names), "steps", "steps_error", "part"), 0)
        return found | nothing | {"fills": []}
    whole = not window or (samples.whole and dealt.alike and samples.measured <= STREAM)
    made = [*dealt.replicates(window, whole, seed, readers)]
    figures = np.array([each for each, _ in made])
    figures[:, 3] *= dealt.epoch
    if samples.whole:  # how many tokens there are is known
        figures[:, 3] = dealt.tokens / (figures[:, 0] * run.packing.seq_length)
    # A replicate has as many samples as were measured, or as a stream has.
    part = min(1.0, dealt.drawn / samples.measured) * (1 - samples.measured / samples.total)
    sure = _student(REPLICATES) * math.sqrt(part + 1 / len(made)) * bool(window)
    spread = sure * figures.std(axis=0, ddof=len(made) > 1)
    spread[:3] = np.maximum(spread[:3], SHOWN if window else 0)
    for name, value, error in zip(names, figures.mean(axis=0).tolist(), spread.tolist(), strict=True):
        found |= {name: value, f"{name}_error": error}
    found |= {"packs": round(found["packs"]), "fills": figures[:, 0].tolist(), "part": part}
    cost = np.concatenate([cost for _, cost in made])
    found |= {f"steps{end}": found[f"packs{end}"] / run.training.global_batch_size for end in ("", "_error")}
    if ranks:
        room = found["fill"] * run.packing.seq_length
        more = [dealt.at_the_end(run.packing.window, readers, room, [seed, at]) for at in range(REPLICATES)]
        error = _student(REPLICATES) * float(np.std(more, ddof=1)) * math.sqrt(readers * (1 + readers / REPLICATES))
        found |= {"end_packs": max(round(readers * float(np.mean(more))), 0), "end_packs_error": error}
    if ranks > 1:
        for name, size in (("", 1), ("sorted_", BALANCE_WINDOW)):
            found[f"{name}efficiency"] = round(efficiency(cost, ranks, size, seed), 4)
    return found


def efficiency(costs: np.ndarray, ranks: int, window: int, seed: int) -> float:
    """Share of their steps in which ranks compute, where each draws its packs from `costs` and sorts `window` of them
    at a time, in `energon_packing.packing.balance.serpentine_order`."""
    steps = np.random.default_rng(seed).choice(costs.astype(np.float64), size=(ranks, BLOCKS * BALANCE_WINDOW))
    for block, start in enumerate(range(0, steps.shape[1], window)):
        part = np.sort(steps[:, start : start + window], axis=1)
        steps[:, start : start + window] = part[:, :: -1 if block % 2 else 1]
    return step_efficiency(steps)


class Dealt:
    """What rows of a run hold, and streams of it as the run reads them: in random order, by the weights of the data
    sets. ``limits`` are of a row, ``cost`` is of a sample, ``kept`` the samples that fit one and the pieces of others,
    ``drops`` how many samples and pieces are dropped; ``too_long`` and ``over`` say which of the N samples are too long
    for a row, and which are over another limit of it; ``lost`` ``[N]`` are the tokens of each that no row has."""

    def __init__(self, samples: StatsSamples, run: RunConfig) -> None:
        """Raises `ConfigError`, `UserError`: no row has this length, or samples have to be cut and cannot."""
        row, sizes, kind, measured = run.packing.seq_length, _sizes(samples), kind_of_config(run), samples.measured
        check_multiple("seq_length", row, run.parallel.multiple)
        limits = row_limits(run.packing, row, run.parallel.multiple, samples.family)
        if run.packing.dummy_image:
            limits = kind.task_encoder(run).limits
        self.cost = kind.cost(run)
        self.run, self.limits = run, dataclasses.replace(limits, padded_pixels=None)
        fits = holds(self.limits, sizes)
        whole, over = np.flatnonzero(fits), np.flatnonzero(~fits)
        kept = Samples(source=whole, piece=np.full(whole.size, -1, dtype=np.int16), sizes=sizes.take(whole))
        self.drops = over.size
        if over.size and kind.changes_samples(run) and samples.remeasure is not None:
            if not run.encoder.processor:
                changes = f"packing.oversize={run.packing.oversize} or encoder.limits changes {over.size} samples"
                fix = "give --config, or --set encoder.processor=path/or/name."
                raise UserError(f"{changes}, which needs a processor; {fix}")
            found = zip(over.tolist(), samples.remeasure(run, over), strict=True)
            made = [(at, number, size) for at, each in found for number, size in each.items()]
            good = [(at, part, size) for at, part, size in made if isinstance(size, Size) and self.limits.holds(size)]
            kept, self.drops = joined(kept, of_pieces(kept, good)), len(made) - len(good)
        self.kept, self.tokens_of = kept, kept.sizes.tokens
        self.lost = np.maximum(samples.tokens - np.bincount(kept.source, self.tokens_of, len(sizes)), 0)
        self.too_long = np.asarray(self.limits.too_long(sizes))
        self.over = ~fits & ~self.too_long
        self.pieces = np.bincount(kept.source, minlength=measured)  # dropped samples are last, and have none
        self.starts = np.cumsum(self.pieces) - self.pieces
        drops = [np.full(sum(each.values()), number) for number, each in enumerate(samples.drops)]
        dataset = np.concatenate([samples.dataset, *drops]).astype(np.int64)
        mix = np.full(1, float(samples.total)) if samples.mix is None else samples.mix
        of = dataset if samples.mix is not None else np.zeros_like(dataset)
        self.share = (mix / np.maximum(np.bincount(of, minlength=mix.size), 1))[of]
        self.epoch, self.whole = float(mix.sum()), samples.whole
        self.alike = bool(np.ptp(self.share) < 1e-9 * self.share.max())
        self.tokens = float(np.bincount(kept.source, self.tokens_of, measured) @ self.share)
        self.drawn = max(1, min(measured, int(STREAM * measured / max(len(kept), measured))))
        self.share /= self.share.sum()

    def lost_share(self, samples: StatsSamples) -> tuple[float, float]:
        """Share of the tokens read that no row has, and its error."""
        often = self.share[: samples.tokens.size] * samples.measured
        return ratio(samples, self.lost * often, samples.tokens * often, most=2 * self.limits.tokens)

    def _stream(self, random: np.random.Generator, drawn: np.ndarray, least: int) -> np.ndarray:
        """Numbers of pieces of the samples `drawn`, in random order, `least` or more; those of one are neighbours. The
        shuffle buffer mixes passes of fewer samples than it has."""
        often = -(-least // max(int(self.pieces[drawn].sum()), 1))
        numbers = np.concatenate([random.permutation(drawn) for _ in range(often)])
        if (buffer := self.run.data.shuffle_buffer) > drawn.size:
            held, numbers = numbers[:buffer], np.append(numbers[buffer:], numbers[:buffer])
            for at, place in enumerate(random.integers(0, held.size, numbers.size).tolist()):
                held[place], numbers[at] = numbers[at], held[place]
        count = self.pieces[numbers]
        return np.repeat(self.starts[numbers] - np.cumsum(count) + count, count) + np.arange(count.sum())

    def _share_of(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Numbers of a reader's samples, each once where there are enough."""
        again = not self.alike or np.count_nonzero(self.share) < count
        return random.choice(self.share.size, count, bool(again), self.share)

    def replicates(
        self, window: int | None, whole: bool, seed: int, readers: int
    ) -> Iterator[tuple[list[float], np.ndarray]]:
        """Of each fill, alignment, tail, packs per sample, and the fill of padded micro-batches and of rows of one
        sample; and the cost of each pack. Without a window, of a plan of all; else of one of so many readers, whose
        window holds a share of few samples several times. Each goes on with what the one before still held: a window
        that begins empty has too good a choice until several times its samples have passed (rows of halves: 97 % full
        at first, 87 % in the end)."""
        row, limits, held = self.run.packing.seq_length, self.limits, np.arange(0)
        own = round(self.epoch / readers if self.epoch >= LEAST * readers else self.epoch)
        few = own < min(window or 0, self.share.size)
        for number in range(REPLICATES if window else 1):
            random = np.random.default_rng([seed, number])
            drawn = np.arange(self.share.size)
            if few:
                drawn, held = self._share_of(random, own), held[:0]
            elif not whole:
                drawn = random.choice(self.share.size, self.drawn, p=self.share)
            if not self.pieces[drawn].any():  # of very few
                drawn = np.arange(self.share.size)
            stream = self._stream(random, drawn, 1)
            tokens, passing = self.tokens_of[stream], (window or 0) * (1 if number and not few else SETTLED)
            if window:
                least = max(tokens.size, STREAM // 4) + passing + window - held.size
                stream = np.append(held, self._stream(random, drawn, least))
            sizes = self.kept.sizes.take(stream)
            costs_of = sum(self.cost.costs(sizes))
            packs = [*self.packs(stream, window, steady=True, once=self.whole or few)]
            held = np.delete(stream, np.concatenate(packs)) if packs else held
            if window:
                ends = np.cumsum([len(pack) for pack in packs])
                packs = packs[np.searchsorted(ends, passing) + 1 :] or packs
            order = np.concatenate(packs)
            of_pack = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
            cost = np.bincount(of_pack, costs_of[order].astype(np.float64))
            units: Any = limits.length_units(sizes)
            real, aligned = int(sizes.tokens[order].sum()), int(units[order].sum()) * limits.multiple
            several = np.resize(random.permutation(tokens), (-(-tokens.size // PADDED), PADDED))
            padded = float(several.sum() / (PADDED * several.max(axis=1).sum()))
            room = len(packs) * row
            shares = (real / room, (aligned - real) / room, 1 - aligned / room)
            need = float(tokens.sum()) / drawn.size / (row * shares[0])
            yield [*shares, need, padded, float(tokens.mean()) / row], cost

    def at_the_end(self, window: int, readers: int, room: float, seed: Sequence[int]) -> float:
        """Packs that a reader makes of a short epoch beyond those that its tokens fill, `room` tokens in each."""
        random = np.random.default_rng([*seed, 1])
        own = max(1, min(round(self.epoch / readers), SETTLED * window))
        stream = self._stream(random, self._share_of(random, own), 1)
        packs = [*self.packs(stream, window, steady=False, once=False)]
        return len(packs) - float(self.tokens_of[stream].sum()) / room

    def packs(self, stream: np.ndarray, window: int | None, *, steady: bool, once: bool) -> Iterable[np.ndarray]:
        """Packs of a stream in turn, of a number `once` in each; if `steady`, those made before it has ended."""
        limits, packing, sizes = self.limits, self.run.packing, self.kept.sizes.take(stream)
        numbers = stream if once else np.arange(stream.size)  # of a part, what comes again stands for others
        units: Any = limits.length_units(sizes)
        limited = Constraints(costs=sizes.costs(limits), limits=limits.limited)
        if window is None:
            pairs = {name: (cost, limits.limited[name]) for name, cost in limited.costs.items()}
            return pack_lengths_flat(units, limits.units, "best_fit", constraints=pairs)
        return sliding_packs(numbers, units, limits.units, limited, window=window, policy=packing.policy, steady=steady)


def reader_figures(path: str, split: str, run: RunConfig, samples: StatsSamples, data_parallel: int) -> dict[str, Any]:
    """Deals a data set to the readers of a run, as the run does. Returns plain values: ``data_parallel``, ``workers``,
    and for each of ``datasets`` and for ``all`` of them ``share`` and ``token_share`` of the mix, and the tokens that a
    reader has in an epoch: ``mean_tokens``, ``least_tokens`` and ``most_tokens``. The last two are None unless all
    samples were measured. Raises UserError: as `build_dataset` and `source_parts`."""
    from energon_packing.energon.loader import build_dataset
    from energon_packing.energon.reader_shares import dealt_shares
    from energon_packing.offline.source import source_parts

    run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=path, split=split))
    dealt = dealt_shares(build_dataset(run, world_size=data_parallel))
    shares = {os.path.abspath(name): share for name, share in dealt}
    readers = data_parallel * max(run.data.workers, 1)
    parts = source_parts(path, split)
    scale = samples.total / samples.measured
    dropped = [sum(each.values()) for each in samples.drops]
    counts = np.bincount(samples.dataset, minlength=len(parts)) + dropped  # those measured
    tokens = np.bincount(samples.dataset, samples.tokens, len(parts)) * scale
    given = np.zeros((len(parts), readers))
    mix = samples.counts if samples.mix is None else samples.mix
    for number, part in enumerate(parts):
        repetitions = 1.0 if part.repetitions is None else part.repetitions
        share = shares.get(part.root)
        own = samples.dataset == number
        if share is None or not samples.whole:
            each = share is not None and share.reader_of is None
            given[number] = tokens[number] * repetitions / (1 if each else readers)
        else:
            own_tokens = share.amounts(samples.place[own], samples.tokens[own], readers)
            given[number] = own_tokens * repetitions / share.copies
    of_tokens = mix * tokens / np.maximum(counts * scale, 1)
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
