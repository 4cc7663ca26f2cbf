"""What statistics are made from: the sizes of samples, from an index, a plan, or a data set measured in part."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from energon_packing.config import RunConfig
from energon_packing.conversation import PairCounts
from energon_packing.convert.layout import TEXT_DIRECTORY, counted_pairs
from energon_packing.drops import DroppedSample, FrequentDrops, unwished
from energon_packing.errors import UserError
from energon_packing.executors.work import Progress
from energon_packing.offline.index import COLUMNS, Index, dropped_row, frequent_drops, kind_of, modality_of, pair_counts
from energon_packing.offline.plan import Plan, read_drops
from energon_packing.offline.samples import Remeasured, check_measured_alike
from energon_packing.packing.model_cost import SQUARES
from energon_packing.sample_kind import KINDS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StatsSamples:
    """Sizes of N usable samples, and why the others were dropped."""

    path: str
    kind: Literal["data set", "index", "plan"]
    total: int  # samples of the data, dropped ones included; of a plan, those of the data sets that it reads
    measured: int  # how many of them were looked at; less than ``total`` if they were drawn at random
    datasets: tuple[str, ...]
    dataset: np.ndarray  # ``[N]`` int64, the data set of each sample
    # name -> ``[N]`` int64; a plan has ``length`` and ``second`` only, an index also its `SampleKind.more_columns`
    columns: Mapping[str, np.ndarray]
    drops: tuple[Mapping[str, int], ...] = ()  # for each data set, the dropped samples by reason
    # ``[N]`` int64, its place there, dropped ones counted; empty for a plan
    place: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    # ``[data sets]`` int64, samples of each, dropped ones and those not measured included; empty for a plan
    counts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    # ``[data sets]`` float64, how many samples of each an epoch has, by weights or repetitions of a metadataset; None
    # where there are none. Where there are weights, an epoch is as many samples as there are
    mix: np.ndarray | None = None
    # measures some of the N samples again, by ascending number, as a run does; None for a plan
    remeasure: Callable[[RunConfig, np.ndarray], Sequence[Remeasured]] | None = None
    # of the ``measured`` samples; nothing where nobody counted
    pair_counts: PairCounts = field(default_factory=PairCounts)
    # figures of a plan, of all epochs; of one its samples ``dropped`` and ``read`` as the budget counts; ``steps`` of
    # the batch that it was made with; else None
    planned: Mapping[str, Any] | None = None
    frequent: FrequentDrops = field(default_factory=FrequentDrops)
    family: str = ""  # `VisionFamily.name` of the encoder that measured; empty for clips

    @property
    def tokens(self) -> np.ndarray:
        """``[N]`` int64, of both answers of a preference pair."""
        return self.columns["length"] + self.columns["second"]

    @property
    def whole(self) -> bool:
        """Whether all samples were looked at."""
        return self.measured == self.total

    @property
    def dropped(self) -> Counter[str]:
        """Dropped samples by reason."""
        return sum((Counter(each) for each in self.drops), Counter())


def mix_of(parts: Sequence[Any], counts: np.ndarray) -> np.ndarray | None:
    """`StatsSamples.mix` of parts of a metadataset that have `counts` ``[data sets]`` samples."""
    if all(part.weight is None and part.repetitions in (None, 1) for part in parts):
        return None
    if any(part.weight is not None for part in parts):
        weights = np.array([part.weight or 0.0 for part in parts])
        return weights * counts.sum() / weights.sum()
    return counts * [1.0 if part.repetitions is None else part.repetitions for part in parts]


def samples_of_index(index: Index, path: str, run: Any = None, needed: Collection[str] = ()) -> StatsSamples:
    """All samples of an index, with the columns ``needed`` and those that the cost of a run's model needs. Raises
    `UserError`: a file of it is missing or damaged, or has no such columns, or it holds nothing."""
    kind = KINDS.find(kind_of(index.datasets))
    costs = set() if run is None else kind.cost(run).needed
    columns = (*COLUMNS, *kind.more_columns, *sorted({*costs, *needed}))
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*columns, "dataset", "place")}
    drops: list[Counter[str]] = [Counter() for _ in index.datasets]
    total = 0
    for number, dataset in enumerate(index.datasets):
        first = total
        for shard in dataset.shards:
            table = index.rows(dataset, shard, [*columns, "reason"])
            reason = table.column("reason")
            kept = np.flatnonzero(reason.is_null().to_numpy())
            drops[number].update(reason.drop_null().to_pylist())
            for name in columns:
                parts[name].append(table.column(name).to_numpy()[kept].astype(np.int64))
            parts["dataset"].append(np.full(kept.size, number, dtype=np.int64))
            parts["place"].append(kept + total - first)
            total += table.num_rows
    if total == 0:
        raise UserError(f"{path} holds no samples; measure a data set that has some")

    def remeasure(run: RunConfig, numbers: np.ndarray) -> Sequence[Remeasured]:
        from energon_packing.offline.packs import SampleRemeasurer

        check_measured_alike(index, index, run)
        rows = []
        for number, dataset in enumerate(index.datasets):
            starts = np.cumsum([0, *(shard.samples for shard in dataset.shards)])
            own = samples.place[numbers[samples.dataset[numbers] == number]]
            for shard, (low, high) in zip(dataset.shards, pairwise(starts), strict=True):
                if (here := own[(own >= low) & (own < high)] - low).size:
                    rows.append((dataset, shard, here.tolist()))
        return [each for shard in SampleRemeasurer(None, [index.directory], run=run)(rows) for each in shard]

    counts = np.array([sum(shard.samples for shard in each.shards) for each in index.datasets])
    samples = StatsSamples(
        path=path,
        kind="index",
        total=total,
        measured=total,
        datasets=dataset_names(index.datasets),
        dataset=np.concatenate(parts["dataset"]),
        place=np.concatenate(parts["place"]),
        columns={name: np.concatenate(parts[name]) for name in columns},
        drops=tuple(drops),
        frequent=frequent_drops(index),
        counts=counts,
        mix=mix_of(index.datasets, counts),
        remeasure=remeasure,
        pair_counts=pair_counts(index.datasets),
        family=str(index.fingerprint.get("family", "")),
    )
    return samples


def samples_of_plan(plan: Plan) -> StatsSamples:
    """The samples that a plan packs, each once and with the tokens of all of its pieces, and those that it drops.
    Raises `UserError`: the plan or its drops are damaged."""
    facts, datasets, place = plan.facts, plan.facts.datasets, ["dataset", "shard", "row"]
    rows = pa.concat_tables(plan.tables([*place, "piece", "length", "second"]))
    once = rows.group_by([*place, "piece"]).aggregate([("length", "min"), ("second", "min")])  # of all epochs
    kept = once.group_by(place).aggregate([("length_min", "sum"), ("second_min", "sum")])
    names = ("dataset", "length_min_sum", "second_min_sum")
    dataset, length, second = (kept.column(name).to_numpy().astype(np.int64) for name in names)
    told = facts.summary.get("datasets") or [{"per_epoch": 1.0, "dropped": {}}] * len(datasets)
    times = [each["per_epoch"] for each in told]  # 0: the plan does not read it
    drops = [Counter(each["dropped"] if often else ()) for each, often in zip(told, times, strict=True)]
    sizes = [sum(shard.samples for shard in it.shards) * bool(often) for it, often in zip(datasets, times, strict=True)]
    frequent = FrequentDrops("planned")
    paths = {it.name: it.path for it, often in zip(datasets, times, strict=True) if often}
    for it, size in zip(datasets, sizes, strict=True):
        frequent.add({(it.path, ""): size}, ())
    each_once = {  # of a sample whose pieces have several drops, one
        (drop.get("dataset"), drop.get("shard"), drop.get("row", drop["dropped"])): drop
        for drop in read_drops(plan.path, facts.id)
    }
    for drop in each_once.values():
        if path := paths.get(drop.get("dataset", "")):
            entry = DroppedSample(key=drop["dropped"], reason=drop["reason"], detail=drop["detail"], data=path)
            frequent.add({}, [entry])
    counted = [unwished(*each) for each in zip(drops, sizes, strict=True)]  # as the planner asks the budget
    fill, aligned = (float(facts.summary[name]) for name in ("fill", "aligned_fill"))
    batch = facts.config.get("training", {}).get("global_batch_size", 1)
    planned = {
        **{name: int(facts.decided[name]) for name in ("seq_length", "multiple")},
        **{"fill": fill, "aligned_fill": aligned},
        **{"packs": facts.packs, "rows": facts.samples, "epochs": facts.epochs, "stages": facts.stages},
        "dropped": sum(often * lost.total() for often, (lost, _) in zip(times, counted, strict=True)),
        "read": sum(often * size for often, (_, size) in zip(times, counted, strict=True)),
        "global_batch_size": batch,
        "mix": {"datasets": dataset_names(datasets), "parts": facts.summary.get("mix", ())},
        **{"alignment": aligned - fill, "tail": 1 - aligned, "steps": facts.packs // int(batch)},
    }
    return StatsSamples(
        path=str(plan.path),
        kind="plan",
        total=sum(sizes),
        measured=sum(sizes),
        datasets=dataset_names(datasets),
        dataset=dataset,
        columns={"length": length, "second": second},
        drops=tuple(drops),
        pair_counts=pair_counts(datasets),
        planned=planned,
        frequent=frequent,
    )


def samples_of_dataset(
    path: str, split: str, run: RunConfig, *, most: int, seed: int = 0, progress: Progress = lambda *_: None
) -> StatsSamples:
    """Measures up to ``most`` samples of a data set in this process, drawn at random without replacement. Raises
    `UserError`: the data set or the processor cannot be used, or it holds nothing."""
    from energon_packing.offline.measure import ShardMeasurer
    from energon_packing.offline.source import source_parts  # needs Energon, which statistics of a plan do not

    parts = source_parts(path, split)
    counted_pairs(Path(part.root) for part in parts).check(path, run.packing.pairs)
    measurer = ShardMeasurer(run)
    shards = [(number, shard) for number, part in enumerate(parts) for shard in part.shards]
    of_shards = [measurer.index_of(parts[number].root).samples[shard] for number, shard in shards]
    starts = np.cumsum([0, *of_shards])
    total = int(starts[-1])
    if total == 0:
        raise UserError(f"{path} holds no samples in its split {split!r}")
    drawn = np.sort(np.random.default_rng(seed).choice(total, min(most, total), replace=False))
    progress("sample", 0, drawn.size)
    rows: list[tuple[int, ...]] = []
    drops: list[Counter[str]] = [Counter() for _ in parts]
    frequent = FrequentDrops("measured")
    done, columns = 0, (*COLUMNS, *SQUARES)
    firsts: dict[int, int] = {}
    for place, (number, shard) in enumerate(shards):
        low, high = np.searchsorted(drawn, starts[place : place + 2])
        wanted = (drawn[low:high] - starts[place]).tolist()
        first, part = firsts.setdefault(number, int(starts[place])), parts[number]
        for at, row in zip(wanted, measurer.rows(part, shard, set(wanted)) if wanted else (), strict=True):
            done += 1
            progress("sample", done, drawn.size)
            dropped = [] if row["reason"] is None else [dropped_row(row, part.path)]
            frequent.add({(part.path, modality_of(row)): 1}, dropped)
            if dropped:
                drops[number][row["reason"]] += 1
            else:
                rows.append((number, starts[place] + at - first, *(row[name] for name in columns)))
    table = np.array(rows, dtype=np.int64).reshape(-1, 2 + len(columns))

    def remeasure(run: RunConfig, numbers: np.ndarray) -> Sequence[Remeasured]:
        from energon_packing.offline.packs import outcomes

        encoder = measurer.kind.task_encoder(run)
        places = np.array([firsts[number] + place for number, place in table[numbers, :2].tolist()])
        found: list[Remeasured] = []
        for (number, shard), (low, high) in zip(shards, pairwise(starts), strict=True):
            if wanted := set((places[(places >= low) & (places < high)] - low).tolist()):
                for some in measurer.cooked(parts[number], shard, wanted):
                    found += [outcomes(encoder, sample) for _, sample, _ in some]
        return found

    counts = np.bincount([number for number, _ in shards], of_shards, len(parts)).astype(np.int64)
    return StatsSamples(
        path=path,
        kind="data set",
        total=total,
        measured=int(drawn.size),
        datasets=dataset_names(parts),
        dataset=table[:, 0],
        place=table[:, 1],
        columns={name: table[:, 2 + at] for at, name in enumerate(columns)},
        drops=tuple(drops),
        frequent=frequent,
        counts=counts,
        mix=mix_of(parts, counts),
        remeasure=remeasure,
        pair_counts=measurer.pair_counts,
        family=measurer.fingerprint.get("family", ""),
    )


def dataset_names(datasets: Sequence[Any]) -> tuple[str, ...]:
    """The last parts of the paths of data sets, or of parts of one, that tell them from each other. Each has a
    ``path``, which the user named, and the ``root`` of its shards; of a polylithic one, that is a level
    below it, in ``text``."""
    roots = [
        each.root.removesuffix(f"/{TEXT_DIRECTORY}")
        if each.path != each.root and each.root.rpartition("/")[0]
        else each.root
        for each in datasets
    ]
    for count in range(1, 32):
        names = ["/".join(Path(root).parts[-count:]) for root in roots]
        if len(set(names)) == len(set(roots)):
            break
    return tuple(f"{name} ({at})" if names.count(name) > 1 else name for at, name in enumerate(names))
