"""The index of data sets: lengths and positions of every source sample, one Parquet file per shard.

::

    INDEX/index.json                 data sets, their shards, and the fingerprint of the encoder
    INDEX/<data set>/<shard>.parquet one row per sample, in the order of the shard

Nothing in it depends on ``seq_length``, alignment, policy or blend, so plans that differ in these share an index.
"""

import contextlib
import json
import os.path
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa

from energon_packing.config import to_mapping
from energon_packing.config.setting import before, marked
from energon_packing.conversation import PairCounts
from energon_packing.convert.layout import TEXT_DIRECTORY
from energon_packing.drops import DroppedSample, FrequentDrops
from energon_packing.energon.data_identity import HEADER_BYTES
from energon_packing.errors import UserError, is_machines
from energon_packing.offline.data_paths import INDEX_FILE
from energon_packing.offline.files import Amount, Count, InnerPath, Name, differing, parquet_file, read_json, write_json
from energon_packing.packing.model_cost import SQUARES
from energon_packing.remote_files import check_remote, exists, present, remote_address, shown
from energon_packing.sample_kind import KINDS, AnyRun, kind_of_subflavors

FORMAT = 2  # 2 counts turns, images, videos, frames and pixels too
MODALITIES = ("text", "image", "video", "image and video")
DEFAULT_KIND = "conversations"  # of data sets that `convert` marked as none
MEDIA = pa.list_(
    pa.struct(
        [
            pa.field("name", pa.string()),  # as the record names it
            pa.field("shard", pa.int32()),  # number in `IndexedDataset.media_shards`
            pa.field("offset", pa.int64()),  # of its first byte in the tar
            pa.field("size", pa.int64()),  # bytes
        ]
    )
)
SCHEMA = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("offset", pa.int64()),  # of the record's first byte in the tar
        pa.field("size", pa.int32()),  # bytes of the record
        pa.field("length", pa.int32()),  # tokens; of the chosen answer of a preference pair
        pa.field("second", pa.int32()),  # tokens of the rejected answer, a segment of its own; 0 if it is no pair
        pa.field("targets", pa.int32()),  # tokens that are learned, of all segments
        pa.field("images", pa.int32()),  # as `Measured.images`: tiles and frames where the family cuts media into them
        pa.field("patches", pa.int64()),  # rows of vision input
        pa.field("turns", pa.int32()),
        pa.field("stills", pa.int32()),  # images that the conversation shows, whatever the family makes of them
        pa.field("videos", pa.int32()),
        pa.field("frames", pa.int32()),  # sampled, of all videos
        pa.field("pixels", pa.int64()),  # of all images and sampled frames, as they are in the source
        pa.field("media", MEDIA),  # files that rendering reads
        pa.field("reason", pa.string()),  # why the sample is dropped at any seq_length; null if it is not
        pa.field("detail", pa.string()),
    ]
)
"""Columns of a shard's file. A dropped sample has a length of 0, or its length if that is why it is dropped, and the
turns, images and videos of its record.

Other kinds of sample have further columns (`schema_of`); their ``length`` counts what their rows are made of.
"""
COLUMNS = ("length", "second", "targets", "images", "patches", "turns", "stills", "videos", "frames", "pixels")
"""Those of a sample's sizes."""
SHAPE = ("height", "width")
"""Columns of families that pad images (those of `MOST_PATCHES`); see `shape_of`. Indexes of before lack them, and
`SQUARES`, which conversations have."""
COUNTS = ("samples", "dropped", "tokens", "pairs", "unwanted")  # the fields of `IndexedShard` that are counts


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaFile:
    """Where a file that a sample shows lies."""

    name: str  # as the record names it
    shard: int  # number of its tar in `IndexedDataset.media_shards`; -1 for the media that were copied beside packs
    offset: int  # offset, size: of its first byte, and its bytes
    size: int


def _is_identity(values: Mapping[str, Any]) -> bool:
    uuids = (values["index_uuid"], values.get("media_uuid", ""))
    return isinstance(values["bytes"], int) and all(isinstance(uuid, str) for uuid in uuids)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedShard:
    """A measured shard."""

    name: InnerPath  # of the tar, relative to the data set
    samples: Count  # samples, dropped: rows of its file, and how many of them have a reason
    dropped: Count
    tokens: Count  # of all samples that are not dropped
    # what the tar was when it was measured: its size, the time of its last change, and the identifiers of the index of
    # its data set and, if its media are in a data set of their own, of theirs
    identity: Annotated[Mapping[str, Any], _is_identity]
    # pairs, unwanted: as in `PairCounts`, dropped ones included; 0 in indexes of versions that did not count
    pairs: Count = 0
    unwanted: Count = 0
    set_aside: bool = False  # whether nobody could measure it: its rows say no more than that


def rows_file(shard: str) -> str:
    """Name of a shard's file in its data set's directory of the index; two shards never share one: "a/b.tar" and
    "a_b.tar" are two."""
    return f"{shard.removesuffix('.tar').replace('%', '%25').replace('/', '%2F')}.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedDataset:
    """A measured part of a data set."""

    name: InnerPath  # of its directory in the index, unique there
    path: Name  # as it was given to ``measure``, absolute
    split: Name  # that its shards have
    # root, media_root: directories of its shards, and of those that hold its media; the same for a monolithic data set
    root: Name
    media_root: Name
    media_shards: tuple[InnerPath, ...]  # names of the latter, whose positions `MEDIA` counts
    shards: tuple[IndexedShard, ...]  # in order
    subflavors: Mapping[str, Any] = field(default_factory=dict)  # of its samples, such as limits of its own
    # its share of the samples in the blend of the metadataset at ``path``; None if that has no weights
    weight: Amount | None = None
    repetitions: Amount | None = None  # how often an epoch of that metadataset has each sample; None if it does not say
    # the split that ``measure`` was asked for: a metadataset may give parts of it another one. Empty in older indexes
    # where nothing says it, and in older plans
    asked: Name = ""
    # `media_state` of each when it was measured; an empty text for one that was not there. Older indexes have none
    media_states: tuple[str, ...] = ()

    @property
    def records(self) -> tuple[tuple[str, str], ...]:
        """What its records are, wherever they lie: of each shard, the identifier of its index, and its name there."""
        return tuple((shard.identity["index_uuid"], shard.name) for shard in self.shards)

    @property
    def names(self) -> set[str]:
        """By which a user may mean it: in the index, and its places."""
        above = {os.path.dirname(self.root)} if os.path.basename(self.root) == TEXT_DIRECTORY else set()
        return {self.name, self.path, self.root, *above}

    @property
    def asked_split(self) -> str:
        """For which it was measured."""
        return self.asked or self.split

    @property
    def of_metadataset(self) -> bool:
        """Whether a metadataset names it."""
        return self.path not in (self.root, os.path.dirname(self.root))


OF_PART = ("path", "split", "root", "media_root", "subflavors", "weight", "repetitions")
"""What a data set of an index has from its `energon_packing.offline.source.SourcePart`."""


def pair_counts(datasets: Iterable[IndexedDataset]) -> PairCounts:
    """What `measure` counted in these data sets."""
    shards = (shard for dataset in datasets for shard in dataset.shards)
    return sum((PairCounts(samples=it.samples, pairs=it.pairs, unwanted=it.unwanted) for it in shards), PairCounts())


def schema_of(schema: pa.Schema, kind: str, *more: str) -> pa.Schema:
    """Returns the columns of an index or a plan of some kind of sample; see `SampleKind.more_columns` and `SHAPE`."""
    names = (*KINDS.find(kind).more_columns, *more)
    return pa.schema([*schema, *(pa.field(name, pa.int64() if name in SQUARES else pa.int32()) for name in names)])


def kind_of(datasets: Iterable[IndexedDataset]) -> str:
    """Returns the kind of the samples of these data sets, a name in `KINDS`. Raises UserError: they are of several
    kinds."""
    paths: dict[str, str] = {}
    for each in datasets:
        kind = kind_of_subflavors(each.subflavors)
        paths.setdefault(DEFAULT_KIND if kind is None else kind.name, each.path)
    if len(paths) > 1:
        (kind_a, path_a), (kind_b, path_b) = sorted(paths.items())[:2]
        raise UserError(f"{path_a} holds {kind_a} and {path_b} {kind_b}; make an index and a plan of each.")
    return next(iter(paths), DEFAULT_KIND)


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """A measured index on disk; `encoder` is the section of the configuration, and `fingerprint` what lengths and
    targets depend on, by name."""

    directory: Path = Path()
    datasets: tuple[IndexedDataset, ...] = ()
    encoder: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: str | Path) -> "Index":
        """Reads ``index.json``. Raises UserError: there is no index, or not one that this version reads."""
        check_remote("the index", directory)
        file = Path(directory) / INDEX_FILE
        index: Index = read_json(file, cls, version=FORMAT, what="an index", remedy="measure")
        splits = Counter(path for path, _ in {(it.path, it.asked_split) for it in index.datasets})
        known = (  # older entries tell it of a data set, and where all parts of a metadataset have one split
            replace(it, asked=it.split) if not it.asked and (splits[it.path] == 1 or not it.of_metadataset) else it
            for it in index.datasets
        )
        return replace(index, directory=file.parent, datasets=tuple(known))

    def save(self) -> None:
        """Writes ``index.json``, whole or not at all."""
        content = {name: value for name, value in asdict(self).items() if name != "directory"}
        write_json(self.directory / INDEX_FILE, {"format": FORMAT, **content})

    def rows(self, dataset: IndexedDataset, shard: IndexedShard, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a shard, with some of the columns of `SCHEMA` or all. Raises UserError: the file is missing,
        damaged, of another measurement, unreadable, or has another number of rows than it should."""
        path = self.directory / dataset.name / rows_file(shard.name)
        place, again = shown(path), "run 'energon-packing measure' again"
        try:
            file = parquet_file(path, page_checksum_verification=True)
            found = file.described
        except (OSError, pa.ArrowException) as error:
            if is_machines(error):
                raise UserError(f"{place} cannot be read ({error}); see to the storage") from error
            found = None
        if found is None or found.get("identity") != dict(shard.identity):
            raise UserError(f"{place} is {'damaged or of another shard' if exists(path) else 'missing'}; {again}")
        if (found.get("fingerprint") == "") != shard.set_aside:
            what = f"{dataset.root}/{shard.name} was {'measured' if shard.set_aside else 'set aside'}"
            raise UserError(f"{what} after its index was written; {again}")
        lacks = {*(columns or ())} - {*found.get("columns", ())}
        for some, what in ((SHAPE, "heights and widths of images"), (SQUARES, "squares of patches")):
            if lacks & {*some}:
                how = f"{again} with packing.cost_model set" if some is SQUARES else again
                raise UserError(f"{place} has no {what}; {how}")
        try:
            table = file.read(columns and list(columns))
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{place} cannot be read ({error}); {again}") from error
        if table.num_rows != shard.samples:
            raise UserError(f"{place} has {table.num_rows} rows, {shard.samples} are expected; {again}")
        return table


def differing_lengths(stored: Mapping[str, Any], own: Mapping[str, Any], run: AnyRun) -> list[tuple[str, Any, Any]]:
    """Compares two fingerprints of `measure.measuring_fingerprint`; see `differing`. `run` is of the samples' kind."""
    older = before(run.encoder)
    defaults = older | {f"encoder.{name}": value for name, value in (to_mapping(type(run.encoder)()) | older).items()}
    defaults |= {f"packing.{name}": getattr(type(run.packing)(), name) for name in marked(run.packing, "newer")}
    # What such a setting means where it is the default is not in files that lack it.
    held = {f"packing.{name}": value for name, value in before(run.packing).items()}
    defaults |= {name: value for name, value in held.items() if own.get(name) == value}
    return differing(_parsed(stored), _parsed(own), defaults)


def _parsed(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    parsed = dict(fingerprint)
    for name in parsed:
        with contextlib.suppress(TypeError, ValueError):  # of a file that somebody changed
            parsed[name] = json.loads(parsed[name]) if name.startswith("encoder.") else parsed[name]
    return parsed


def modality_of(row: Mapping[str, Any]) -> str:
    """One of `MODALITIES` for a row of an index; empty for a clip, or a record that could not be read."""
    return MODALITIES[(row["stills"] > 0) + 2 * (row["videos"] > 0)] if row["turns"] else ""


def frequent_drops(index: Index) -> FrequentDrops:
    """Which drops of an index must be told."""
    frequent = FrequentDrops("measured")
    for dataset in index.datasets:
        for shard in dataset.shards:
            columns = ["turns", "stills", "videos"]
            rows = index.rows(dataset, shard, [*columns, *(("key", "reason", "detail") if shard.dropped else ())])
            read: Counter[tuple[str, str]] = Counter()
            for each in rows.group_by(columns).aggregate([([], "count_all")]).to_pylist():
                read[dataset.path, modality_of(each)] += each["count_all"]
            bad = rows.filter(rows.column("reason").is_valid()).to_pylist() if shard.dropped else []
            frequent.add(read, [dropped_row(row, dataset.path) for row in bad])
    return frequent


def dropped_row(row: Mapping[str, Any], data: str) -> DroppedSample:
    """A row with a reason as an entry of a ledger."""
    detail = row["detail"] or ""
    return DroppedSample(key=row["key"], reason=row["reason"], detail=detail, data=data, modality=modality_of(row))


def shard_status(path: Path) -> tuple[int, int, str]:
    """Bytes of a shard, here or in an object store, the time of its last change in nanoseconds, and what the store
    calls the version of its content, if it says that. Raises OSError: it cannot be looked at."""
    if (address := remote_address(path)) is None:
        here = path.stat()
        return here.st_size, here.st_mtime_ns, ""
    there = present(address)
    return there.size, there.changed, there.version


def media_state(path: Path) -> tuple[str, int]:
    """What tells a shard of media from another one, as `energon_packing.energon.data_identity` does: its size and, on
    this machine, its first header, or its version; and the time of its last change. Raises OSError as `shard_status`.
    """
    size, changed, version = shard_status(path)
    if remote_address(path) is not None:
        return f"{size} bytes" + (f", version {version}" if version else ""), changed
    with path.open("rb", buffering=0) as file:
        return f"{size} bytes, first header {zlib.crc32(file.read(HEADER_BYTES)):08x}", changed


def is_same(now: str, before: str) -> bool:
    """Whether two states of a shard of media are one; of an object, older indexes have no version."""
    return now == before or now.partition(", version ")[0] == before
