"""Which samples of indexes fit a pack, what becomes of the others, and why a sample is dropped.

``packing.oversize`` and ``encoder.limits.when_over`` may cut, split or resize what fits no pack, which takes the sample
itself: a planner is given a function that measures it again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from energon_packing.config import to_mapping
from energon_packing.config.setting import before, length_free_of
from energon_packing.errors import ConfigError, PackingError, UserError
from energon_packing.offline.files import differing
from energon_packing.offline.index import SHAPE, Index, IndexedDataset, IndexedShard, differing_lengths, kind_of
from energon_packing.packing.constraints import Size, shape_of
from energon_packing.packing.model_cost import SQUARES
from energon_packing.sample_kind import AnyRun, kind_of_config

AnyLimits = Any  # `PackLimits`, or the limits of another kind of sample with the same properties and methods


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of N samples."""

    length: np.ndarray  # ``[N]`` int32, tokens; of the chosen answer of a preference pair
    second: np.ndarray  # ``[N]`` int32, tokens of the rejected answer, 0 if the sample is no pair
    images: np.ndarray  # ``[N]`` int32, tiles counted one by one
    patches: np.ndarray  # ``[N]`` int64, rows of vision input
    # ``[N]`` int32, of clips, whose ``length`` is their patches; None for conversations
    text_tokens: np.ndarray | None = None
    height: np.ndarray | None = None  # height, width: ``[N]`` int64, see `shape_of`; None where no limit counts them
    width: np.ndarray | None = None
    # patch_squares, window_squares, visual: ``[N]`` int64, see `squares_of`; None where no cost counts them
    patch_squares: np.ndarray | None = None
    window_squares: np.ndarray | None = None
    visual: np.ndarray | None = None

    def __len__(self) -> int:
        return int(self.length.size)

    @property
    def tokens(self) -> np.ndarray:
        """``[N]`` int64, of all segments."""
        return self.length.astype(np.int64) + self.second

    @property
    def segment_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Twice ``[N]`` int64, as limits take them."""
        return self.length.astype(np.int64), self.second.astype(np.int64)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Those that are there, in order."""
        return {each.name: of for each in fields(self) if (of := getattr(self, each.name)) is not None}

    def take(self, indices: np.ndarray | slice) -> "Sizes":
        """The sizes of some of the samples."""
        return Sizes(**{name: column[indices] for name, column in self.columns.items()})

    def at(self, index: int) -> Size:
        """The sizes of one sample."""
        length, second, *rest = (int(column[index]) for column in self.columns.values())
        more = dict(zip([*self.columns][2:], rest, strict=True))
        return Size(segment_lengths=(length, second) if second else (length,), **more)

    def costs(self, limits: AnyLimits) -> dict[str, np.ndarray]:
        """For each limited name, what each sample costs, ``[N]`` int64."""
        return {name: cost.astype(np.int64) for name, (cost,) in limits.costs([self]).items()}


def holds(limits: AnyLimits, sizes: Sizes) -> np.ndarray:
    """``[N]`` bool: which samples fit a pack by themselves."""
    fits: np.ndarray = ~limits.too_long(sizes)
    for name, cost in sizes.costs(limits).items():
        # The masked clip after a clip that is alone has text tokens too.
        alone = limits.masked_units(sizes) * limits.multiple if name == "text_tokens" else 0
        fits &= cost + alone <= limits.limited[name]
    return fits & (limits.padded_pixels is None or np.prod([*shape_of(sizes).values()], axis=0) <= limits.padded_pixels)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sources:
    """Data sets in order. A *source* is a row of their shards' files, numbered from 0 through all of them."""

    datasets: tuple[IndexedDataset, ...]  # of all indexes
    indexes: tuple[Index, ...]  # the index of each of them; the fingerprints are equal
    # ``[shards + 1]`` int64: the first source of each shard of all data sets, and the number of sources
    starts: np.ndarray
    dataset: np.ndarray  # ``[shards]`` int16, the data set of each shard
    shard: np.ndarray  # ``[shards]`` int32, the number of each shard in its data set

    @classmethod
    def open(cls, directories: Sequence[str | Path], config: AnyRun, splits: Collection[str] = ()) -> "Sources":
        """The data sets of these indexes and `splits`, for a plan of this configuration. Raises UserError: there is no
        index or no data set, one is in two of them, or they hold several splits and none is named, or lack a named one;
        ConfigError: an index was measured with another encoder; names the setting."""
        indexes = [Index.open(each) for each in directories]
        if not any(index.datasets for index in indexes):
            raise UserError("There is nothing to plan: the index has no data sets; run 'energon-packing measure'.")
        kind = kind_of(dataset for index in indexes for dataset in index.datasets)
        if kind != kind_of_config(config).name:
            raise ConfigError(f"{directories[0]} is an index of {kind}; give the configuration that measured it.")
        for index in indexes:
            check_measured_alike(index, indexes[0], config)
        chosen = _of_splits(indexes, splits)
        datasets = [dataset for _, dataset in chosen]
        known: dict[Any, IndexedDataset] = {}
        for dataset in datasets:
            held = (*dataset.records, (dataset.root, dataset.split))
            if twin := next((it for each in held if (it := known.setdefault(each, dataset)) is not dataset), None):
                raise UserError(
                    f"{dataset.root} ({dataset.asked_split}) and {twin.root} ({twin.asked_split}) hold the same "
                    "samples, in two of the indexes or twice in one; name one of them, or remove one ('energon-packing "
                    "measure --remove')."
                )
        counts = [len(dataset.shards) for dataset in datasets]
        samples = [shard.samples for dataset in datasets for shard in dataset.shards]
        return cls(
            datasets=tuple(datasets),
            indexes=tuple(index for index, _ in chosen),
            starts=np.cumsum([0, *samples], dtype=np.int64),
            dataset=np.repeat(np.arange(len(datasets), dtype=np.int16), counts),
            shard=np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        )

    def __len__(self) -> int:
        return int(self.starts[-1])

    def shard_of(self, sources: np.ndarray | Sequence[int]) -> np.ndarray:
        """The shard of each source among those of all data sets, ``[N]``."""
        return np.searchsorted(self.starts, sources, side="right") - 1

    def place(self, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Data set int16, shard int32 and row int32 of each source, ``[N]``."""
        number = self.shard_of(sources)
        return self.dataset[number], self.shard[number], (sources - self.starts[number]).astype(np.int32)

    def table(self, number: int, columns: Sequence[str]) -> pa.Table:
        """The rows of a shard, by its number among those of all data sets. Raises UserError as `Index.rows`."""
        return self.indexes[int(self.dataset[number])].rows(*self.shard_at(number), columns)

    def shard_at(self, number: int) -> tuple[IndexedDataset, IndexedShard]:
        """A shard by its number among those of all data sets, and its data set."""
        dataset = self.datasets[int(self.dataset[number])]
        return dataset, dataset.shards[int(self.shard[number])]

    def ends_of(self, samples: "Samples") -> list[int]:
        """For each data set, the number of rows of `samples` up to its end."""
        stops = self.starts[np.searchsorted(self.dataset, np.arange(len(self.datasets)), side="right")]
        ends: list[int] = np.searchsorted(samples.source, stops).tolist()
        return ends


def _of_splits(indexes: Sequence[Index], splits: Collection[str]) -> list[tuple[Index, IndexedDataset]]:
    """The data sets of some splits, each with its index. Raises UserError: see `Sources.open`."""
    every = [(index, dataset) for index in indexes for dataset in index.datasets]
    held = {dataset.asked: dataset.path for _, dataset in every}
    listed = ", ".join(f"{split} ({path})" for split, path in sorted(held.items()))
    if "" in held:
        raise UserError(
            f"An older version measured {held['']} with several splits, and did not note for which of them; run "
            "'energon-packing measure' again, which reads only parts of another split anew."
        )
    if (not splits and len(held) > 1) or not held.keys() >= {*splits}:
        raise UserError(
            f"The indexes hold the splits {listed}; name the one to plan with --split (of `state convert`, with "
            "data.split), or each of several that are all to be trained on with a --split of its own, or measure "
            "another one."
        )
    return [each for each in every if not splits or each[1].asked in splits]


def check_measured_alike(index: Index, first: Index, config: AnyRun) -> None:
    """Raises `ConfigError`, `UserError`: the encoder of an index is not that of a configuration, or of `first`."""
    own_encoder, defaults = to_mapping(config.encoder), to_mapping(type(config.encoder)()) | before(config.encoder)
    for name, measured, own in differing(index.encoder, own_encoder, defaults):
        if name.partition(".")[0] not in length_free_of(config.encoder):
            what = f"was measured with encoder.{name}={measured!r}, the configuration has {own!r}"
            fix = "give the same configuration to 'energon-packing measure' and 'energon-packing plan'"
            raise ConfigError(f"{index.directory} {what}; {fix}.")
    for name, in_first, in_other in differing_lengths(first.fingerprint, index.fingerprint, config):
        what = f"{name} is {in_first!r} in one and {in_other!r} in the other"
        fix = "measure both with the same processor and configuration"
        raise UserError(f"{first.directory} and {index.directory} cannot share a plan: {what}; {fix}.")


Remeasured = Mapping[int, Size | tuple[str, str]]
"""What becomes of a sample under the limits of a pack: number of each piece of a split one (``KEY#0`` and so on), or -1
for the whole, -> its sizes, or reason and detail if it is dropped."""
RowsOfShard = tuple[IndexedDataset, IndexedShard, list[int]]
Remeasure = Callable[[Sequence[RowsOfShard]], Sequence[Sequence[Remeasured]]]
"""Measures rows of some shards again, under the limits of the run; for each shard, one result per row."""
_Kept = tuple[int, int, Size]  # source, number and sizes of a piece that is packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A sample, or a piece of one, that is in no pack."""

    source: int  # its number in `Sources`
    key: str  # of the sample; of a piece, ``KEY#PIECE``
    reason: str  # reason, detail: as in the ledger of an online run
    detail: str
    setting: str | None = None  # the setting that dropped it; None if it is dropped under every setting of a plan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """What can be packed: N samples and pieces, in the order of the sources. `source` ``[N]`` int64 is ascending;
    pieces of one sample share it. `piece` ``[N]`` int16 is -1 for a whole sample."""

    source: np.ndarray
    piece: np.ndarray
    sizes: Sizes

    def __len__(self) -> int:
        return int(self.source.size)

    def amounts(self, weights_by: str) -> np.ndarray:
        """What weights count of each row, ``[N]``: its tokens, or 1 of each sample, whose pieces count once."""
        firsts: np.ndarray = np.diff(self.source, prepend=-1) != 0
        return self.sizes.tokens if weights_by == "tokens" else firsts

    def take(self, indices: np.ndarray | slice) -> "Samples":
        """Some of the samples."""
        return Samples(source=self.source[indices], piece=self.piece[indices], sizes=self.sizes.take(indices))


def fitting_samples(
    sources: Sources,
    limits: AnyLimits,
    config: AnyRun,
    remeasure: Remeasure | None = None,
    shards: range | None = None,
) -> tuple[Samples, Samples, list[Drop]]:
    """Reads the sizes of all samples, or those of some shards, and keeps those that fit a pack. Those that do not, and
    that the configuration cuts, splits or resizes, go through `remeasure`, and what is kept of them is returned a
    second time by itself. Raises UserError: a sample does not fit under ``oversize: raise`` (names the first), or has
    to be measured again and there is no `remeasure`."""
    shards = range(len(sources.shard)) if shards is None else shards
    first = int(sources.starts[shards.start])
    sizes, dropped = _read_sizes(sources, shards, size_columns(limits, config))
    kept = np.ones(len(sizes), dtype=bool)
    kept[[drop.source - first for drop in dropped]] = False
    over = np.flatnonzero(kept & ~holds(limits, sizes))
    kept[over] = False
    samples, again = _whole(sizes, np.flatnonzero(kept), first), _whole(sizes, over[:0], first)
    if over.size and kind_of_config(config).changes_samples(config):
        if remeasure is None:
            raise UserError(
                f"{over.size} samples fit no pack, and packing.oversize or encoder.limits.when_over asks to change "
                "them, which needs the samples themselves; set packing.oversize=drop and when_over=[drop]."
            )
        pieces, refused = _measured_again(sources, first + over, remeasure, limits, config)
        again = of_pieces(again, pieces)
        samples = joined(samples, again)
    else:
        refused = [
            _refusal(source, row["key"], sizes.at(source - first), limits, config)
            for source, row in _rows_of(sources, first + over, ["key"]).items()
        ]
    return samples, again, sorted([*dropped, *refused], key=lambda drop: drop.source)


def shard_samples(
    sources: Sources, number: int, limits: AnyLimits, config: AnyRun, again: Samples, columns: Sequence[str]
) -> tuple[Samples, pa.Table]:
    """What `fitting_samples` keeps of a shard, read once more, and these columns of all its rows; ``again`` are those
    that were measured again."""
    types = size_columns(limits, config)
    table = sources.table(number, [*types, "reason", *columns])
    sizes = Sizes(**{name: table.column(name).to_numpy().astype(of, copy=False) for name, of in types.items()})
    kept = np.flatnonzero(table.column("reason").is_null().to_numpy() & holds(limits, sizes))
    own = slice(*np.searchsorted(again.source, sources.starts[number : number + 2]).tolist())
    return joined(_whole(sizes, kept, int(sources.starts[number])), again.take(own)), table.select(list(columns))


def _whole(sizes: Sizes, rows: np.ndarray, first: int) -> Samples:
    return Samples(source=first + rows, piece=np.full(rows.size, -1, dtype=np.int16), sizes=sizes.take(rows))


def size_columns(limits: AnyLimits, config: AnyRun) -> dict[str, type]:
    """The columns of an index that `Sizes` have under these limits, and of which numbers."""
    kind = kind_of_config(config)
    more = (*kind.more_columns, *(() if limits.padded_pixels is None else SHAPE), *sorted(kind.cost(config).needed))
    wide = {"patches", *SHAPE, *SQUARES}
    names = ("length", "second", "images", "patches", *more)
    return {name: np.int64 if name in wide else np.int32 for name in names}


def _read_sizes(sources: Sources, shards: range, types: Mapping[str, type]) -> tuple[Sizes, list[Drop]]:
    """Sizes of all sources of some shards, and those that are dropped at any row length."""
    first, stop = sources.starts[[shards.start, shards.stop]].tolist()
    columns = {name: np.zeros(stop - first, of) for name, of in types.items()}
    bad: list[int] = []
    for number, start in zip(shards, sources.starts[shards.start : shards.stop].tolist(), strict=True):
        table = sources.table(number, [*columns, "reason"])
        for name, column in columns.items():
            column[start - first : start - first + table.num_rows] = table.column(name).to_numpy()
        bad.extend((np.flatnonzero(table.column("reason").is_valid().to_numpy()) + start).tolist())
    rows = _rows_of(sources, np.array(bad, dtype=np.int64), ["key", "reason", "detail"])
    drops = [Drop(source=source, **row | {"detail": row["detail"] or ""}) for source, row in rows.items()]
    return Sizes(**columns), drops


def _by_shard(sources: Sources, wanted: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Some sources, ascending, of each shard that has any, with its number among those of all data sets."""
    number = sources.shard_of(wanted)
    firsts = np.flatnonzero(np.diff(number, prepend=-1))
    return list(zip(number[firsts].tolist(), np.split(wanted, firsts[1:]), strict=False))  # of none, one split


def _rows_of(sources: Sources, wanted: np.ndarray, columns: list[str]) -> dict[int, dict[str, str]]:
    """Some columns of some sources, by source; reads only the shards that hold them."""
    rows: dict[int, dict[str, str]] = {}
    for at, here in _by_shard(sources, wanted):
        table = sources.table(at, columns).take(here - sources.starts[at])
        rows.update(zip(here.tolist(), table.to_pylist(), strict=True))
    return rows


def _refusal(source: int, key: str, size: Size, limits: AnyLimits, config: AnyRun) -> Drop:
    """Why a sample fits no pack, in the words of the online loader; a UserError under ``oversize: raise``."""
    reason, setting = "oversize", "packing.seq_length"
    if limits.too_long(size):
        detail = limits.length_text(size, config.packing.seq_length)
    elif (detail := limits.exceeded(size)) is None:
        raise PackingError(f"a sample that fits a pack was refused: {size}")
    else:
        reason, setting = "over_limit", detail.rpartition(" ")[2].partition("=")[0]
    if config.packing.oversize == "raise":
        raise UserError(f"Sample {key} has {detail}. Raise the limit, or drop such samples with packing.oversize=drop.")
    return Drop(source=source, key=key, reason=reason, detail=detail, setting=setting)


def _measured_again(
    sources: Sources, over: np.ndarray, remeasure: Remeasure, limits: AnyLimits, config: AnyRun
) -> tuple[list[_Kept], list[Drop]]:
    rows, setting = _rows_of(sources, over, ["key"]), f"packing.oversize={config.packing.oversize}"
    shards = _by_shard(sources, over)
    kept: list[_Kept] = []
    dropped: list[Drop] = []
    asked = [(*sources.shard_at(at), (each - sources.starts[at]).tolist()) for at, each in shards]
    for (_, wanted), results in zip(shards, remeasure(asked), strict=True):
        for source, result in zip(wanted.tolist(), results, strict=True):
            for number, made in result.items():
                name = rows[source]["key"] + ("" if number < 0 else f"#{number}")
                if isinstance(made, tuple):
                    reason, detail = made
                    dropped.append(Drop(source=source, key=name, reason=reason, detail=detail, setting=setting))
                elif limits.holds(made):
                    kept.append((source, number, made))
                else:
                    dropped.append(_refusal(source, name, made, limits, config))
    return kept, dropped


def of_pieces(like: Samples, pieces: list[_Kept]) -> Samples:
    """Pieces (source, number and sizes of each), with columns as in `like`, which has no rows."""
    held, more = like.sizes.columns, [*like.sizes.columns][2:]
    rows = [(at, no, *(*it.segment_lengths, 0)[:2], *(getattr(it, name) for name in more)) for at, no, it in pieces]
    source, piece, *columns = np.array(rows, np.int64).reshape(-1, 2 + len(held)).T
    sizes = {name: made.astype(held[name].dtype) for name, made in zip(held, columns, strict=True)}
    return Samples(source=source, piece=piece.astype(np.int16), sizes=Sizes(**sizes))


def joined(*parts: Samples) -> Samples:
    """Samples in the order of the sources."""
    kept = [each for each in parts if len(each)] or parts[:1]
    if len(kept) == 1:
        return kept[0]
    held = [part.sizes.columns for part in kept]
    columns = {name: np.concatenate([each[name] for each in held]) for name in held[0]}
    source, piece = (np.concatenate([getattr(part, name) for part in kept]) for name in ("source", "piece"))
    made = Samples(source=source, piece=piece, sizes=Sizes(**columns))
    return made if (np.diff(source) > 0).all() else made.take(np.lexsort((piece, source)))
