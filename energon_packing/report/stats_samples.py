"""What statistics are made from: the sizes of samples, from an index, a plan, or a random sample of a data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from energon_packing.conversation import PairCounts
from energon_packing.convert.layout import TEXT_DIRECTORY
from energon_packing.drops import DroppedSample, FrequentDrops
from energon_packing.errors import UserError
from energon_packing.offline.index import Index, frequent_drops, kind_of, pair_counts
from energon_packing.offline.plan import Plan, read_drops
from energon_packing.sample_kind import KINDS

COLUMNS = ("length", "second", "targets", "images", "patches", "turns", "stills", "videos", "frames", "pixels")
"""Columns of an index that statistics read."""
PLAN_COLUMNS = ("length", "second", "dataset", "pack")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StatsSamples:
    """Sizes of N usable samples, and why the others were dropped.

    Attributes:
        path: as the user named it.
        kind: what it is.
        total: samples of the data, dropped ones included; of a plan, the rows that it packs and its drops.
        measured: how many of them were looked at; less than ``total`` if they were drawn at random.
        datasets: names of the data sets.
        dataset: ``[N]`` int64, the data set of each sample.
        place: ``[N]`` int64, its place there, dropped ones counted; empty for a plan.
        columns: name -> ``[N]`` int64; a plan has ``length`` and ``second`` only, an index also the
            `SampleKind.more_columns` of its kind.
        drops: for each data set, the dropped samples by reason.
        pack: ``[N]`` int64, the pack of each sample; plans only.
        pair_counts: of the ``measured`` samples; nothing where nobody counted.
        planned: seq_length, multiple and packs of a plan; None otherwise.
        frequent: which drops must be told.
    """

    path: str
    kind: Literal["data set", "index", "plan"]
    total: int
    measured: int
    datasets: tuple[str, ...]
    dataset: np.ndarray
    columns: Mapping[str, np.ndarray]
    drops: tuple[Mapping[str, int], ...] = ()
    place: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    pack: np.ndarray | None = None
    pair_counts: PairCounts = field(default_factory=PairCounts)
    planned: Mapping[str, int] | None = field(default=None)
    frequent: FrequentDrops = field(default_factory=FrequentDrops)

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
        found: Counter[str] = Counter()
        for each in self.drops:
            found.update(each)
        return found


def samples_of_index(index: Index, path: str) -> StatsSamples:
    """All samples of an index.

    Raises:
        UserError: a file of it is missing or damaged, or it holds nothing.
    """
    columns = (*COLUMNS, *KINDS.find(kind_of(index.datasets)).more_columns)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in columns}
    owners: list[np.ndarray] = []
    places: list[np.ndarray] = []
    drops = []
    total = 0
    for number, dataset in enumerate(index.datasets):
        reasons: Counter[str] = Counter()
        before = total
        for shard in dataset.shards:
            table = index.rows(dataset, shard, [*columns, "reason"])
            reason = table.column("reason")
            kept = ~reason.is_valid().to_numpy()
            if not kept.all():
                reasons.update(each for each in reason.to_pylist() if each is not None)
            for name in columns:
                parts[name].append(table.column(name).to_numpy()[kept].astype(np.int64))
            owners.append(np.full(int(kept.sum()), number, dtype=np.int64))
            places.append(np.flatnonzero(kept) + total - before)
            total += table.num_rows
        drops.append(dict(reasons))
    if total == 0:
        raise UserError(f"{path} holds no samples; measure a data set that has some")
    return StatsSamples(
        path=path,
        kind="index",
        total=total,
        measured=total,
        datasets=dataset_names(index.datasets),
        dataset=np.concatenate(owners),
        place=np.concatenate(places),
        columns={name: np.concatenate(arrays) for name, arrays in parts.items()},
        drops=tuple(drops),
        frequent=frequent_drops(index),
        pair_counts=pair_counts(index.datasets),
    )


def samples_of_plan(plan: Plan) -> StatsSamples:
    """All rows of a plan: samples and pieces of split ones, as often as it packs them.

    Raises:
        UserError: the plan or its drops are damaged.
    """
    parts: dict[str, list[np.ndarray]] = {name: [] for name in PLAN_COLUMNS}
    for table in plan.tables(list(PLAN_COLUMNS)):
        for name in PLAN_COLUMNS:
            parts[name].append(table.column(name).to_numpy().astype(np.int64))
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    drops: list[Counter[str]] = [Counter() for _ in plan.facts.datasets]
    frequent = FrequentDrops("planned")
    paths = [dataset.path for dataset in plan.facts.datasets]
    frequent.add({(paths[at], ""): count for at, count in enumerate(np.bincount(columns["dataset"]).tolist())}, ())
    names = {dataset.name: number for number, dataset in enumerate(plan.facts.datasets)}
    for drop in read_drops(plan.path, plan.facts.id):
        at = names.get(drop.get("dataset", ""), 0)
        drops[at][drop["reason"]] += 1
        entry = DroppedSample(key=drop["dropped"], reason=drop["reason"], detail=drop["detail"], data=paths[at])
        frequent.add({(paths[at], ""): 1}, [entry])
    total = columns["length"].size + sum(each.total() for each in drops)
    decided = plan.facts.decided
    return StatsSamples(
        path=str(plan.path),
        kind="plan",
        total=total,
        measured=total,
        datasets=dataset_names(plan.facts.datasets),
        dataset=columns["dataset"],
        columns={name: columns[name] for name in ("length", "second")},
        drops=tuple(dict(each) for each in drops),
        pack=columns["pack"],
        pair_counts=pair_counts(plan.facts.datasets),
        planned={
            "seq_length": int(decided["seq_length"]),
            "multiple": int(decided["multiple"]),
            "packs": len(plan),
        },
        frequent=frequent,
    )


class Rooted(Protocol):
    """A data set, or a part of one, as far as its name goes."""

    @property
    def path(self) -> str:
        """What the user named."""

    @property
    def root(self) -> str:
        """Directory of its shards."""


def dataset_names(datasets: Sequence[Rooted]) -> tuple[str, ...]:
    """Short names of data sets, unique."""
    return unique_names([_directory(each) for each in datasets])


def _directory(part: Rooted) -> str:
    """The directory of a data set; the shards of a polylithic one lie a level below it, in ``text``."""
    parent, _, last = part.root.rpartition("/")
    return parent if parent and last == TEXT_DIRECTORY and part.path != part.root else part.root


def unique_names(roots: Sequence[str]) -> tuple[str, ...]:
    """The last parts of each path that tell it from all others."""
    count = 1
    while count < 32:
        names = ["/".join(Path(root).parts[-count:]) for root in roots]
        if len(set(names)) == len(set(roots)):
            break
        count += 1
    return tuple(f"{name} ({at})" if names.count(name) > 1 else name for at, name in enumerate(names))
