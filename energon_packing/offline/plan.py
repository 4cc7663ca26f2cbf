"""The plan: a Parquet file, or several, that hold, in global order, which samples every pack of a run has.

One row per sample, or per piece of a split sample. The rows of a pack are adjacent, and in the order of its row; no row
group splits a pack. A plan holds all that reading its samples needs, so its index may be deleted. Its metadata
(`energon_packing.offline.files.read_metadata`) have the fields of `PlanFacts`.

A plan that is made in several bands (`energon_packing.offline.bands`) is a directory::

    PLAN/_plan.json            the fields of `PlanFacts`, put last: without it the plan is not complete
    PLAN/part-00000.parquet    the rows of a band; its metadata have the digest of its `PlanPart`, and its row groups
    PLAN/_sources.parquet      the shards of all data sets, read when one is asked for

``PLAN.drops.jsonl`` beside it names every sample that is in no pack, and why: after the id of its plan, one JSON object
per line, as in the ledger of an online run, with the place of the sample::

    {"plan": "9f86d081884c7d659a2feaa0c55ad015", "digest": "2c26b46b68ffc68ff99b453c1d304134..."}
    {"dropped": "c", "reason": "oversize", "detail": "5120 tokens; ...", "setting": "packing.seq_length",
     "dataset": "charts", "shard": "shard_0.tar", "row": 17}
"""

import bisect
import functools
import hashlib
import io
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from energon_packing.conversation import PairCounts
from energon_packing.errors import UserError, read_again
from energon_packing.offline.files import METADATA, Amount, Count, Name, parquet_file, read_as, read_metadata, replacing
from energon_packing.offline.index import COUNTS, MEDIA, IndexedDataset, IndexedShard, MediaFile, kind_of, schema_of
from energon_packing.offline.samples import Drop, Sources
from energon_packing.packing.constraints import Size
from energon_packing.packing.dynamic_context import StepSamples
from energon_packing.packing.model_cost import CONSTANTS
from energon_packing.remote_files import check_remote, exists, make_directory, open_file, remote_address, shown

FORMAT = 1
ROW_GROUP, LEAST_ROWS, MOST_GROUPS = 1 << 16, 1 << 12, 1 << 12
"""Rows of a row group, up to the end of the pack that crosses this number, and as few as make so many groups: each of
thousands of readers reads a group for every pack, and all of them the list of groups."""
ROUNDING = 1e-9
"""Of ``per_epoch`` in the summary, which has 12 digits, and of what is planned, see `energon_packing.offline.blend`."""
OPEN = 4  # files of bands that an open plan keeps
CACHED = 2  # row groups that an open plan keeps: a range of packs seldom touches more
SCHEMA = pa.schema(
    [
        pa.field("pack", pa.int64()),  # global position
        pa.field("dataset", pa.int16()),  # number in `Plan.datasets`
        pa.field("shard", pa.int32()),  # number in `IndexedDataset.shards`
        pa.field("row", pa.int32()),  # of the shard's file in the index: the sample's number in its shard
        pa.field("key", pa.string()),  # of the source sample; a piece is called KEY#PIECE
        pa.field("offset", pa.int64()),  # of the record's first byte in the tar
        pa.field("size", pa.int32()),  # bytes of the record
        pa.field("length", pa.int32()),  # tokens, as packed; of the chosen answer of a preference pair
        pa.field("second", pa.int32()),  # tokens of the rejected answer; 0 if it is no pair
        pa.field("piece", pa.int16()),  # number of the piece of a split sample; -1 if it is whole
        pa.field("cost", pa.int64()),  # of vision and language together
        pa.field("vision_cost", pa.int64()),  # of vision alone
        pa.field("media", MEDIA),  # of the source sample
    ]
)
"""Columns of a plan of conversations; see `schema_of`."""
COSTS = ("cost", "vision_cost")  # those that plans of before lack
LIMITED = ("images", "patches")  # of each sample, in plans for dynamic context parallelism, whose rows are made later
SIZES = ("length", "second", *COSTS, *LIMITED, "dataset", "shard", "row", "piece")
"""Of each sample, what its row depends on where ranks share it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSample:
    """A row of a plan; see `SCHEMA`."""

    dataset: int
    shard: int
    row: int
    key: str
    offset: int
    size: int
    length: int
    second: int
    piece: int
    media: tuple[MediaFile, ...]
    text_tokens: int = 0
    cost: int | None = None
    vision_cost: int = 0

    @property
    def name(self) -> str:
        """The key by which the online loader knows the sample: ``KEY``, or ``KEY#PIECE``."""
        return self.key if self.piece < 0 else f"{self.key}#{self.piece}"

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment."""
        return (self.length, self.second) if self.second else (self.length,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the sample must have when it is packed: tokens of each segment; of a clip, patches and text tokens."""
        return (*self.segment_lengths, self.text_tokens) if self.text_tokens else self.segment_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPack:
    """One pack: its global position, and its samples in the order of its row."""

    number: int
    samples: tuple[PlannedSample, ...]

    def differences(self, stored: Any) -> Iterator[str]:
        """How a stored pack differs from its rows in the plan."""
        names, expected = ([each.key for each in stored.samples], [each.name for each in self.samples])
        if names != expected:
            at = next((at for at, pair in enumerate(zip(names, expected, strict=False)) if pair[0] != pair[1]), None)
            count = f"it has {len(names)} samples, the plan {len(expected)}"
            yield count if at is None else f"its sample {at} is {names[at]}, in the plan it is {expected[at]}"
            return
        for at, own in zip(stored.order, stored.sizes(), strict=True):
            if own != self.samples[at].sizes:
                yield f"sample {names[at]} has {own} tokens, in the plan it has {self.samples[at].sizes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPart:
    """A file of a plan in bands."""

    first: Count  # its first pack
    rows: Count
    bytes: Count
    # SHA-256 of what the id covers (`energon_packing.offline.planner.rows_digest`), and of what `hashed` adds
    digest: Name
    content: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """What the metadata of a plan say."""

    # digest of what the plan holds: rows and their order, the settings that decided them, and the content of the
    # sources, wherever they are
    id: Name
    config: Mapping[str, Any]  # the whole `RunConfig` as a mapping
    fingerprint: Mapping[str, str]  # of the encoder, from the index
    # what the packs depend on besides the samples: row length, alignment, limits, policy, blend, seed
    decided: Mapping[str, Any]
    datasets: tuple[IndexedDataset, ...]  # the sources, with the identity of every shard
    packs: Count  # packs, samples: number of packs, and of rows
    samples: Count
    max_data_parallel: Count  # steps are balanced for every data-parallel size that divides this
    epoch_ends: tuple[Count, ...]  # for each epoch, the number of packs up to its end
    row_groups: tuple[Count, ...]  # number of the first pack of each row group; none of a plan in bands
    drops: Mapping[str, int] = field(default_factory=dict)  # number of dropped source samples by reason
    # figures for readers; see `energon_packing.offline.planner`
    summary: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[PlanPart, ...] = ()  # of a plan in bands
    sources: Name = ""  # `sources_digest` of a plan in bands

    @property
    def kind(self) -> str:
        """What its samples are."""
        return kind_of(self.datasets)

    @property
    def splits(self) -> set[str]:
        """For which `measure` was asked; empty where a plan of several splits was made before that was noted."""
        held = {dataset.split for dataset in self.datasets}
        return {dataset.asked for dataset in self.datasets} - {""} or (held if len(held) == 1 else set())

    def roots(self, *, records: bool) -> list[str]:
        """Directories and addresses that reading the plan's rows needs: of the media that they show, or with `records`
        of the records and of all media that these name, which may be cut off. Plans of before do not count rows; their
        media count if they have a directory of their own, or if there are any and only one data set."""
        places = []
        counts = self.summary.get("datasets") or [{"per_epoch": 1}] * len(self.datasets)
        used = [(each, it) for each, it in zip(self.datasets, counts, strict=False) if it.get("rows", it["per_epoch"])]
        alone = len(used) == 1 and any(map(self.summary.get, ("patches", "text_tokens")))
        for each, told in used:
            if records:
                places += [each.root, each.media_root]
            elif told.get("rows_with_media", alone or each.media_root != each.root):
                places.append(each.media_root)
        return places

    @property
    def stages(self) -> int:
        """Stages of the plan, each an epoch of its own; 0 if it has whole passes over its blend."""
        return len(self.decided["plan"].get("stages", ()))

    @property
    def epochs(self) -> int:
        """Whole passes over the blend, or stages; a plan of the rest of a run has an epoch more, which comes first."""
        return self.stages or int(self.decided["plan"]["epochs"])

    @property
    def ended(self) -> list[list[Any]]:
        """For each epoch or stage, the number of packs up to its end, and how many permutations of each data set these
        have: ``[packs, [D]]``. Of a plan that goes on from another one, that comes first; see `Blend.ended`. Plans of
        before do not know it of stages."""
        held = self.summary.get("datasets", [{"per_epoch": 0.0}] * len(self.datasets))
        often = [0.0 if self.stages else each["per_epoch"] for each in held]
        rows = ([end, [number * each for each in often]] for number, end in enumerate(self.epoch_ends, 1))
        return [*self.summary.get("ended", rows)]

    @property
    def unfinished(self) -> str | None:
        """The first data set that the plan ends in the middle of, with how often its samples occur; None if each is
        gone through a whole number of times, so that the plan may begin again. Stages never do."""
        if self.stages:
            return "its stages"
        datasets = self.summary.get("datasets", ())
        rounding = ROUNDING * self.epochs
        if all(each["per_epoch"] == round(each["per_epoch"], 6) for each in datasets):  # plans of before had 6 digits
            rounding = min(1e-6 * self.epochs, 1e-3)
        for each in datasets:
            turns = each.get("turns", each["per_epoch"] * self.epochs)
            if turns and (not round(turns) or abs(turns - round(turns)) > rounding):
                return f"{each['name']} ({turns:.4g} times)"
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back, and raises KeyError, TypeError or ValueError for others."""
        if not self.parts:
            said = {name: value for name, value in asdict(self).items() if name not in ("parts", "sources")}
            return {"format": FORMAT, **said}
        short = [replace(each, shards=(), media_shards=(), media_states=()) for each in self.datasets]
        counts = [[len(getattr(each, name)) for name in OF_SHARDS] for each in self.datasets]
        return {"format": FORMAT, **asdict(replace(self, datasets=tuple(short))), "shards": counts}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PlanFacts":
        """Facts from `to_json`. Raises KeyError, TypeError, ValueError: a field is missing or has another form."""
        facts = read_as(cls, values)
        read_as(tuple[Amount | None, ...], [facts.decided[name] for name in facts.decided if name.startswith("max_")])
        read_as(tuple[Count, ...], [facts.decided[name] for name in ("seq_length", "multiple", "reserved")])
        read_as(Amount, facts.decided.get("token_cost", 0))
        read_as(tuple[Mapping, Mapping], [facts.config[name] for name in ("encoder", "packing")])
        shares = [(each["name"], each["per_epoch"]) for each in facts.summary.get("datasets", ())]
        read_as(tuple[tuple[str, Amount], ...], shares)
        ended = read_as(tuple[tuple[Count, tuple[Amount, ...]], ...], facts.summary.get("ended", []))
        if {len(each) for each in (shares, *(turns for _, turns in ended)) if each} - {len(facts.datasets)}:
            raise ValueError("its summary is of other data sets")
        read_as(PairCounts, facts.summary.get("pair_counts", {}))
        read_as(tuple[Name, Count], facts.decided.get("extends", ["", 0]))
        planned = read_as(Mapping, facts.decided["plan"])
        epochs, _ = read_as(tuple[Count, Count], (planned["epochs"], planned["seed"]))
        epochs = len(read_as(tuple[Mapping, ...], planned.get("stages", []))) or epochs
        if not epochs or len(facts.epoch_ends) - epochs not in (0, 1) or not facts.max_data_parallel:
            raise ValueError(f"{len(facts.epoch_ends)} epochs end, and it has {epochs}")
        if len({kind_of([each]) for each in facts.datasets}) > 1:
            raise ValueError("its data sets are of several kinds")
        firsts = tuple(part.first for part in facts.parts) or facts.row_groups
        for places in ((*firsts, facts.packs), (0, *facts.epoch_ends)):
            ascends = all(first < stop for first, stop in pairwise(places))
            if not ascends or (places[0], places[-1]) != (0, facts.packs):
                raise ValueError(f"its {facts.packs} packs cannot be divided at {places[:8]}")
        return facts


OF_SHARDS = ("shards", "media_shards", "media_states")
SOURCES = pa.schema([("name", pa.string()), *((name, pa.int64()) for name in COUNTS), ("identity", pa.string())])
"""Columns of the shards of a plan in bands: of each data set its shards, names of its media shards, their states."""
MANIFEST, SOURCES_FILE = "_plan.json", "_sources.parquet"


def sources_digest(table: pa.Table) -> str:
    """SHA-256 of the rows of `SOURCES_FILE`, hexadecimal."""
    return hashlib.sha256(json.dumps(table.to_pylist()).encode()).hexdigest()


@functools.lru_cache(maxsize=2)
def _sources(path: Path, identifier: str, rows: int) -> pa.Table:
    """What `planner.write_sources` wrote. Raises UserError: it is missing, damaged, or of another plan."""
    file = path / SOURCES_FILE
    try:

        def read() -> tuple[Any, pa.Table]:
            with parquet_file(file, page_checksum_verification=True) as opened:
                return opened.described, opened.read(use_threads=False).cast(SOURCES)

        known, table = read_again(shown(file), read)
        if known is None or known.get("id") != identifier or len(table) != rows:
            raise ValueError("it is of another plan")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{shown(file)}, of the plan, cannot be read ({error}); make the plan again.") from error
    return table


@dataclass(frozen=True, slots=True)
class _Stored(Sequence[Any]):
    """Some rows of `_sources` with these arguments, which are read when one is asked for: shards, or names."""

    of: tuple[Path, str, int]
    span: range
    shards: bool

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(len(self))[at]]
        return self._items(self.span[at : at + 1 or None])[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items(self.span))

    def _items(self, span: range) -> list[Any]:
        rows = _sources(*self.of).slice(span.start, len(span)).to_pylist()
        try:
            if self.shards:
                return [read_as(IndexedShard, row | {"identity": json.loads(row["identity"])}) for row in rows]
            return [read_as(Name, row["name"]) for row in rows]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{shown(self.of[0])} is damaged ({error}); make the plan again.") from error


def read_facts(path: Path) -> dict[str, Any] | None:
    """What the metadata or the manifest of a plan say; None if there is none that can be read."""
    try:
        if not exists(path / MANIFEST):
            # A file that is not there is not waited for, though its directory may be empty.
            return read_metadata(path) if remote_address(path) or exists(path) else None
        with read_again(path, lambda: open_file(path / MANIFEST)) as file:
            found = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def part_path(path: Path, number: int) -> Path:
    """A file of a plan in bands."""
    return path / f"part-{number:05}.parquet"


def copy_plan(plan: "Plan", target: Path) -> None:
    """Copies a plan and its drops, if they are there, byte for byte. Raises OSError."""
    drops = drops_path(plan.path)
    files = [(drops, drops_path(target))] if exists(drops) else []
    if plan.facts.parts:
        make_directory(target)
        names = [part_path(target, at).name for at in range(len(plan.facts.parts))]
        files += [(plan.path / name, target / name) for name in (*names, SOURCES_FILE, MANIFEST)]
    else:
        files.append((plan.path, target))
    for source, aim in files:
        with replacing(aim) as aside, open_file(source) as read, aside.open("wb") as written:
            shutil.copyfileobj(read, written)


class Group(NamedTuple):
    """A row group: its part, its number there, and the packs ``[first, stop)``."""

    part: int
    number: int
    first: int
    stop: int


class Plan:
    """An open plan. May be used by several processes after a fork: a file is opened by the process that reads
    first."""

    def __init__(self, path: Path, facts: PlanFacts) -> None:
        self.path = path
        self.facts = facts
        self._firsts = [part.first for part in facts.parts] or [0]
        parts = ((part_path(path, at), part.bytes, f'"digest": "{part.digest}"') for at, part in enumerate(facts.parts))
        # Of each file its bytes, if they are known, and what its metadata have. Not all of those of a whole plan are
        # parsed: they may name 100,000 shards.
        self._files: list[tuple[Path, int | None, str]] = [*parts] or [(path, None, f'"id": "{facts.id}"')]
        self._opened = functools.lru_cache(maxsize=OPEN)(self._opened_part)
        self._group = functools.lru_cache(maxsize=CACHED)(self._group_of)
        self._numbers = functools.lru_cache(maxsize=4 * CACHED)(self._numbers_of)
        self._costs = functools.lru_cache(maxsize=MOST_GROUPS)(self._costs_of)  # 16 bytes a pack

    @classmethod
    def open(cls, path: str | Path) -> "Plan":
        """Reads the metadata only. Raises UserError: the file is missing, damaged, no plan, or of another version."""
        check_remote("the plan", path)
        file, place = Path(path), shown(path)
        metadata = read_facts(file)
        if metadata is None and not exists(file):
            if exists(file / MANIFEST):
                raise UserError(f"{shown(file / MANIFEST)} is damaged; make the plan again, with --force.")
            if exists(part_path(file, 0)):
                raise UserError(f"{place} is not complete; run 'energon-packing plan' again with the same arguments.")
            raise UserError(f"There is no plan {place}; make one with 'energon-packing plan'.")
        if metadata is None or metadata.get("format") != FORMAT or "epoch_ends" not in metadata:
            raise UserError(f"{place} is damaged, or not a plan of format {FORMAT}; make it again with this version.")
        try:
            facts = PlanFacts.from_json(metadata)
            if facts.parts:
                counts = read_as(tuple[tuple[Count, Count, Count], ...], metadata["shards"])
                facts = replace(facts, datasets=_stored_datasets(file, facts, counts))
            return cls(file, facts)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{place} has damaged metadata ({error!r}); make the plan again.") from error

    def __len__(self) -> int:
        return self.facts.packs

    def sources(self) -> pa.Table:
        """What `write_sources` wrote, of a plan in bands. Raises UserError: it is missing, damaged, or of another."""
        rows = sum(len(getattr(each, name)) for each in self.facts.datasets for name in OF_SHARDS)
        return _sources(self.path, self.facts.id, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.path, self.facts)  # a copy opens the file for itself

    def packs(self, start: int, stop: int) -> list[PlannedPack]:
        """The packs ``[start, stop)``; reads the row groups that hold them and no others. Raises UserError: the range
        leaves the plan, or the file is damaged."""
        samples: dict[int, list[PlannedSample]] = {}
        for table, packs in map(self._group, self.groups(start, stop)):
            begin, end = np.searchsorted(packs, [start, stop]).tolist()
            for row in table.slice(begin, end - begin).to_pylist():
                samples.setdefault(row["pack"], []).append(_sample(row))
        return [PlannedPack(number=number, samples=tuple(some)) for number, some in samples.items()]

    def costs(self, start: int, stop: int) -> np.ndarray:
        """Vision and language of each of the packs ``[start, stop)``, ``[stop - start, 2]`` int64; of plans of before
        by `CONSTANTS`, without vision. Raises as `packs`."""
        groups = self.groups(start, stop)
        found = [self._costs(each)[max(start - each.first, 0) : stop - each.first] for each in groups]
        return np.concatenate([np.zeros((0, 2), np.int64), *found])

    def _costs_of(self, group: Group) -> np.ndarray:
        table = self._read(group, ["pack", "length", "second", *COSTS])
        columns = {each: table.column(each).to_numpy() for each in table.schema.names}
        vision, cost = columns.get("vision_cost", 0), columns.get("cost")
        if cost is None:
            lengths = columns["length"].astype(np.int64), columns["second"].astype(np.int64)
            cost = sum(CONSTANTS.costs(Size(segment_lengths=lengths)))
        begins = np.flatnonzero(np.diff(columns["pack"], prepend=-1))
        return np.stack([np.add.reduceat(each, begins) for each in np.broadcast_arrays(vision, cost - vision)], axis=1)

    def hold(self, groups: int) -> None:
        """Keeps so many row groups that were read."""
        self._group = functools.lru_cache(maxsize=groups)(self._group_of)

    def sizes(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """What the samples of some packs have, pack after pack: `SIZES` ``[rows, len(SIZES)]`` int64, and the place of
        each in its pack, with the pack's place in `numbers`, ``[rows, 2]`` int64. Raises as `packs`."""
        found, places = [np.zeros((0, len(SIZES)), np.int64)], [np.zeros((0, 2), np.int64)]
        for at, number in enumerate(numbers):
            (group,) = self.groups(number, number + 1)
            packs, table = self._numbers(group)
            first, stop = np.searchsorted(packs, [number, number + 1]).tolist()
            found.append(table[first:stop])
            places.append(np.stack([np.arange(stop - first), np.full(stop - first, at)], axis=1))
        return np.concatenate(found), np.concatenate(places)

    def sample(self, number: int, place: int) -> PlannedSample:
        """The sample at a place of a pack. Raises as `packs`."""
        (group,) = self.groups(number, number + 1)
        table, packs = self._group(group)
        (row,) = table.slice(int(np.searchsorted(packs, number)) + place, 1).to_pylist()
        return _sample(row)

    def _numbers_of(self, group: Group) -> tuple[np.ndarray, np.ndarray]:
        table = self._read(group, ["pack", *SIZES])
        if missing := [name for name in SIZES if name not in table.schema.names or table.column(name).null_count]:
            raise UserError(f"{shown(self.path)} is damaged (a row lacks its {missing[0]}); make the plan again.")
        values = np.stack([table.column(name).to_numpy().astype(np.int64) for name in SIZES], axis=1)
        if (values[:, :-1] < 0).any():
            raise UserError(f"{shown(self.path)} is damaged (a row has a number below 0); make the plan again.")
        return table.column("pack").to_numpy(), values

    def groups(self, start: int, stop: int) -> list[Group]:
        """The row groups that hold the packs ``[start, stop)``. Raises as `packs`."""
        if not 0 <= start <= stop <= len(self):
            raise UserError(f"packs {start} to {stop} are not in {shown(self.path)}, which has {len(self)}")
        if start == stop:
            return []
        found = []
        low, high = (bisect.bisect(self._firsts, each) - 1 for each in (start, stop - 1))
        for part in range(low, high + 1):
            end = (*self._firsts[part + 1 : part + 2], len(self))[0]
            firsts = self.facts.row_groups or self._again(part, functools.partial(self._opened, part))[1]
            begin, last = (bisect.bisect(firsts, each) - 1 for each in (max(start, firsts[0]), min(stop, end) - 1))
            stops = (*firsts[1:], end)
            found += [Group(part, at, firsts[at], stops[at]) for at in range(begin, last + 1)]
        return found

    def tables(self, columns: list[str] | None = None, start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """All rows, or those of the row groups with the packs ``[start, stop)``, one row group at a time; compared with
        the data sets if no columns are named."""
        for group in self.groups(start, len(self) if stop is None else stop):
            yield self._read(group, columns) if columns else self._group_of(group)[0]

    def _group_of(self, group: Group) -> tuple[pa.Table, np.ndarray]:
        """A row group, and the pack of each of its rows; a UserError if a row is not in the data sets, or the packs are
        others than the metadata say."""
        table = self._read(group, None)
        try:
            names = table.schema.names
            fields = rows_schema(self.facts.kind, self.facts.decided)
            schema = pa.schema([each for each in fields if each.name in names or each.name not in COSTS])
            wrong = wrong_rows(table.cast(schema), self.facts.datasets, group.first, group.stop)
        except (pa.ArrowException, ValueError) as error:
            wrong = str(error)
        if wrong:
            raise UserError(f"{shown(self.path)} is damaged ({wrong}); make the plan again.")
        return table, table.column("pack").to_numpy()

    def _opened_part(self, number: int) -> tuple[pq.ParquetFile, tuple[int, ...]]:
        """A file, and the first pack of each of its row groups."""
        path, size, mark = self._files[number]
        file = parquet_file(path, size=size, page_checksum_verification=True)
        known = (file.schema_arrow.metadata or {}).get(METADATA, b"")
        if mark.encode() not in known:
            fix = f"bring back the plan {self.facts.id}, or start again"
            raise UserError(f"{shown(path)} was replaced by another plan since this run began; {fix}.")
        if not self.facts.parts:
            return file, self.facts.row_groups
        firsts = read_as(tuple[Count, ...], json.loads(known)["row_groups"])
        end = (*self._firsts[number + 1 :], len(self))[0]
        ascends = all(first < stop for first, stop in pairwise((*firsts, end)))
        if firsts[:1] != (self._firsts[number],) or not ascends or len(firsts) != file.num_row_groups:
            raise ValueError("its row groups do not hold its packs")
        return file, firsts

    def _again[Value](self, part: int, read: Callable[[], Value]) -> Value:
        path, *_ = self._files[part]
        try:
            return read_again(path, read, self._opened.cache_clear)
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise UserError(f"{shown(path)} cannot be read ({error}); make the plan again.") from error

    def _read(self, group: Group, columns: list[str] | None) -> pa.Table:
        # Without threads: a loader's worker is a fork, and has a core of its own.
        how: dict[str, Any] = {"columns": columns, "use_threads": False}
        return self._again(group.part, lambda: self._opened(group.part)[0].read_row_group(group.number, **how))


def _stored_datasets(path: Path, facts: PlanFacts, counts: Sequence[Sequence[int]]) -> tuple[IndexedDataset, ...]:
    """The data sets of a plan in bands, with the shards that its own file has."""
    ends = np.cumsum([0, *itertools.chain.from_iterable(counts)]).tolist()
    spans = itertools.starmap(range, pairwise(ends))
    stored: Any = functools.partial(_Stored, (path, facts.id, ends[-1]))
    pairs = zip(facts.datasets, counts, strict=True)
    return tuple(replace(it, **{name: stored(next(spans), name == "shards") for name in OF_SHARDS}) for it, _ in pairs)


def _sample(row: Mapping[str, Any]) -> PlannedSample:
    media = tuple(MediaFile(**each) for each in row["media"] or ())
    return PlannedSample(**{name: row[name] for name in row if name not in ("pack", *LIMITED)} | {"media": media})


def step_samples(table: np.ndarray, packs: np.ndarray, groups: np.ndarray, token: float, limits: Any) -> StepSamples:
    """Samples with `SIZES` ``[N, len(SIZES)]``, in packs ``[N]``, of data sets in these groups (a number each), under
    the limits of packs, to be shared out."""
    columns = dict(zip(SIZES, table.T, strict=True))
    lengths = np.stack([columns["length"], columns["second"]], axis=1)
    costs = {name: columns[name] for name in LIMITED} | {"segments": 1 + (lengths[:, 1] > 0)}
    return StepSamples(
        lengths=lengths,
        vision=columns["vision_cost"],
        language=columns["cost"] - columns["vision_cost"],
        packs=packs,
        groups=groups[columns["dataset"]],
        sources=np.unique(table[:, -4:], axis=0, return_inverse=True)[1].reshape(-1),
        token=token,
        limited={name: (costs[name], most) for name, most in limits.limited.items()},
    )


def wrong_rows(table: pa.Table, datasets: Sequence[IndexedDataset], first: int, stop: int) -> str | None:
    """Why rows cannot be those of the packs ``[first, stop)`` of these data sets; None if they can."""
    numbers = [name for name in table.schema.names if name != "media"]
    if missing := [name for name in numbers if table.column(name).null_count]:
        return f"a row lacks its {missing[0]}"
    columns = {name: table.column(name).to_numpy().astype(np.int64) for name in numbers if name != "key"}
    packs = columns["pack"]
    steps = np.diff(packs)
    if not (packs.size and packs[0] == first and packs[-1] == stop - 1 and ((steps == 0) | (steps == 1)).all()):
        return f"its packs from {first} to {stop - 1} are not all there, in order"
    media = table.column("media").combine_chunks()
    files = media.flatten()
    owner = np.repeat(columns["dataset"], pc.fill_null(pc.list_value_length(media), 0).to_numpy(zero_copy_only=False))
    if files.null_count or any(files.field(at).null_count for at in range(files.type.num_fields)):
        return "a file of a sample lacks its place"
    most = np.array([len(dataset.shards) for dataset in datasets])
    most_media = np.array([len(dataset.media_shards) for dataset in datasets])
    small = dict.fromkeys(columns.keys() - {"pack", "dataset", "piece"}, 0) | {"piece": -1}
    inside = (columns["dataset"] >= 0) & (columns["dataset"] < most.size)
    if not inside.all() or not (columns["shard"] < most[columns["dataset"]]).all():
        return "a row names a shard that no data set has"
    if any((columns[name] < least).any() for name, least in small.items()):
        return "a row has a number below 0"
    places = {name: files.field(name).to_numpy(zero_copy_only=False) for name in ("shard", "offset", "size")}
    if any((values < 0).any() for values in places.values()) or not (places["shard"] < most_media[owner]).all():
        return "a file of a sample lies in a shard that its data set lacks"
    return None


def rows_schema(kind: str, decided: Mapping[str, Any]) -> pa.Schema:
    """Columns of a plan of a kind of sample, by what decided its packs."""
    return schema_of(SCHEMA, kind, *(LIMITED if decided.get("token_cost") else ()))


def drops_path(plan: Path) -> Path:
    """Where the drops of a plan are."""
    return plan.with_name(f"{plan.name.removesuffix('.parquet')}.drops.jsonl")


def hashed(tables: Iterable[pa.Table], digest: Any) -> Iterator[pa.Table]:
    """The row groups of a plan; what its id does not cover goes into the digest, whatever the buffers are."""
    for table in tables:
        media = table.column("media").combine_chunks()
        files, counts = media.flatten(), pc.fill_null(pc.list_value_length(media), 0)
        costs = {*COSTS, *LIMITED} & {*table.schema.names}
        places = [table.column(name) for name in ("key", "offset", "size", *sorted(costs))]
        for column in (*places, counts, *map(files.field, range(files.type.num_fields))):
            if pa.types.is_string(column.type):
                digest.update("".join(column.to_pylist()).encode())
                column = pc.cast(pc.binary_length(column), pa.int32())
            digest.update(np.ascontiguousarray(column.to_numpy(zero_copy_only=False)).data)
        yield table


def digest_of(metadata: Mapping[str, Any] | None) -> Any:
    """A digest of a plan's metadata as they are in the file, whatever this version reads of them; for `hashed`."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(metadata)), sort_keys=True).encode())


class DropsFile:
    """The drops of a plan that is being made. `head` is what the first line says in the end: the id of the plan, and
    the digest of its rows and settings."""

    def __init__(self, file: IO[str], sources: Sources) -> None:
        self._file, self._sources, self.head = file, sources, ("0" * 32, "0" * 64)

    def write_head(self) -> None:
        self._file.seek(0)
        self._file.write(json.dumps({"plan": self.head[0], "digest": self.head[1]}) + "\n")

    def add(self, drops: Sequence[Drop]) -> None:
        """Writes some drops. Raises OSError."""
        places = self._sources.place(np.array([drop.source for drop in drops], dtype=np.int64))
        for drop, number, at, row in zip(drops, *(each.tolist() for each in places), strict=True):
            dataset = self._sources.datasets[number]
            entry: dict[str, Any] = {"dropped": drop.key, "reason": drop.reason, "detail": drop.detail}
            entry |= {"setting": drop.setting} if drop.setting else {}
            entry |= {"dataset": dataset.name, "shard": dataset.shards[at].name, "row": row}
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")


@contextmanager
def written_drops(plan: Path, sources: Sources) -> Iterator[DropsFile]:
    """Writes the drops of a plan aside. They take their place at the end, if the plan could be written."""
    with replacing(drops_path(plan)) as aside, aside.open("w", encoding="utf-8") as file:
        made = DropsFile(file, sources)
        made.write_head()
        yield made
        made.write_head()


def read_drops(
    plan: Path, identifier: str, *, path: Path | None = None, digest: str | None = None
) -> Iterator[dict[str, Any]]:
    """The drops of a plan with this id, or those at another `path`; a UserError if the file is missing, damaged or of
    another plan, or has another `digest` than this one."""
    path = path or drops_path(plan)
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8") as file:
            head = json.loads(file.readline())
            if head.get("plan") != identifier:
                raise UserError(f"{shown(path)} has the drops of another plan; make the plan again.")
            if digest is not None and head.get("digest", digest) != digest:  # plans of before have none
                raise UserError(f"{shown(plan)} has other rows or settings than were written; make the plan again.")
            for line in file:
                entry = json.loads(line)
                if not isinstance(entry, dict) or not isinstance(entry.get("dropped"), str):
                    raise ValueError(f"a line names no sample: {line[:80]!r}")
                yield entry
    except (OSError, ValueError, AttributeError) as error:
        what = f"{shown(path)}, the drops of the plan, cannot be read ({error})"
        raise UserError(f"{what}; make the plan again.") from error
