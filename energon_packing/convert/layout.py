"""The files of a converted data set, and what Energon needs to open it.

Polylithic (text and media apart)::

    DIR/dataset.yaml            MetadatasetV2: splits -> text, with the media store as auxiliary data set ``media``
    DIR/text/<split>-000000.tar members ``<key>.json``
    DIR/text/.nv-meta/
    DIR/media/media-000000.tar  members ``<media name>``, each file once
    DIR/media/.nv-meta/

Monolithic (one WebDataset)::

    DIR/<split>-000000.tar      members ``<key>.json``, ``<key>.<i>.<extension>``
    DIR/.nv-meta/

Both also hold `conversion.json`, `rejects.jsonl` and `warnings.jsonl`.

Energon's own preparation of ``.nv-meta`` opens every tar again, takes the memory of its imports (500 MB), and writes
rows in the order in which its processes finish, with the time and a random identifier. Here the same tables are written
in one pass, in the order of the samples; the tests compare them with Energon's.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml

from energon_packing import remote_files
from energon_packing.conversation import PairCounts
from energon_packing.convert.config import Layout
from energon_packing.convert.fields import near_name
from energon_packing.convert.layouts.layout import SUBFLAVORS
from energon_packing.errors import UserError

if TYPE_CHECKING:
    import sqlite3

MEDIA_AUX = "media"
"""Name of the auxiliary data set that a cooker of a polylithic data set receives as keyword argument."""

TEXT_DIRECTORY = "text"
MEDIA_DIRECTORY = "media"
DATASET_FILE = "dataset.yaml"
META_DIRECTORY = remote_files.META_DIRECTORY
INFO_FILE = ".info.json"
LINT_FILE = "lint.yaml"
"""Describes the records to `energon info` and `energon lint`, whose ``--dataset-config`` takes it."""


def place_of(path: str) -> Any:
    """A path of this machine, or a place in a store by its ``msc://`` address, with the same methods."""
    if "://" not in path:
        return Path(path)
    from megatron.energon.epathlib import EPath

    return EPath(path)


def dataset_entry(path: str | Path) -> str:
    """The path of a data set to pass to `megatron.energon.get_train_dataset`: ``DIR/dataset.yaml`` of a polylithic data
    set, the directory of a WebDataset, or the file itself. Raises UserError: the path does not exist or is not a data
    set. ``path`` is a directory made by `convert`, any prepared Energon WebDataset, a metadataset YAML file, or the
    ``msc://`` address of one of them."""
    place = place_of(str(path))
    if place.is_file():
        if place.name.endswith((".yaml", ".yml")):
            return str(path)
        raise UserError(f"{path} is a file, but not .yaml; name the directory that 'energon-packing convert' wrote")
    if (place / DATASET_FILE).is_file():
        return str(place / DATASET_FILE)
    if (place / META_DIRECTORY / INFO_FILE).is_file():
        return str(path)
    if not place.is_dir():
        raise UserError(f"{path} does not exist; name the directory that 'energon-packing convert' wrote")
    if (place / META_DIRECTORY).is_dir():
        raise UserError(f"{path} is only partly prepared (.nv-meta lacks {INFO_FILE}); run 'energon prepare {path}'")
    lacks = f"it has neither {DATASET_FILE} nor {META_DIRECTORY}"
    raise UserError(f"{path} is not a data set ({lacks}); make one with 'energon-packing convert'")


def write_metadataset(
    directory: Path, splits: Iterable[str], *, with_media: bool, subflavors: Mapping[str, str] = SUBFLAVORS
) -> None:
    """Writes ``dataset.yaml`` of a polylithic data set; its paths are relative, so the directory can be moved."""
    references = {  # made anew for each split: YAML would write a shared one as an alias
        split: {"path": f"./{TEXT_DIRECTORY}", "split_part": split, "subflavors": dict(subflavors)}
        | ({"aux": {MEDIA_AUX: f"./{MEDIA_DIRECTORY}"}} if with_media else {})
        for split in splits
    }
    content = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": references}
    (directory / DATASET_FILE).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def media_names(layout: Layout, names: list[str]) -> list[str]:
    """The names that a record stores for its media, one per mention (``<digest>.<extension>``). Polylithic records use
    the names of the media store as they are. Monolithic records use ``.<i>.<extension>``, to which Energon's
    `PrimaryFileStore` adds the sample's key; `i` counts the distinct files of the record."""
    if layout == "polylithic":
        return names
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return [f".{order[name]}.{name.rsplit('.', 1)[1]}" for name in names]


def open_scratch(path: Path) -> sqlite3.Connection:
    """Opens a new database, written once, in one transaction without a journal: a partial one is thrown away."""
    # Nobody else opens it, so that it needs no locks, which network file systems may lack.
    import sqlite3  # who only reads a data set does without

    database = sqlite3.connect(f"file:{quote(str(path))}?nolock=1", uri=True, isolation_level=None)
    for pragma in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE", "cache_size = -16384"):
        database.execute(f"PRAGMA {pragma}")
    database.execute("BEGIN")
    return database


SampleRow = tuple[int, str, int, int, int]
"""Number of the shard, key, index in the shard, bytes before it and of it in the tar."""
PartRow = tuple[int, int, str, int, int]
"""Number of the shard, index of the sample, name of the part, bytes before its content and of it."""
_FORMAT_OF_VERSION = "7.4.1"
_ROWS = 4096
_NO_TIME = "1970-01-01 00:00:00"
# As Energon 7 writes them. SQLite keeps these texts, spaces included.
_LINE = "\n" + 16 * " "
_COLUMNS = {
    "samples": "tar_file_id INTEGER NOT NULL; sample_key TEXT NOT NULL UNIQUE; sample_index INTEGER NOT NULL; "
    "byte_offset INTEGER; byte_size INTEGER",
    "sample_parts": "tar_file_id INTEGER; sample_index INTEGER; part_name TEXT; content_byte_offset INTEGER; "
    "content_byte_size INTEGER",
    "media_metadata": "entry_key TEXT PRIMARY KEY; metadata_type TEXT NOT NULL; metadata_json TEXT NOT NULL",
    "media_filters": "filter_id INTEGER PRIMARY KEY AUTOINCREMENT; strategy TEXT NOT NULL; patterns TEXT; "
    "created_at_utc TEXT DEFAULT CURRENT_TIMESTAMP; UNIQUE(strategy, patterns)",
}
_TABLES = tuple(
    f"{_LINE}CREATE TABLE IF NOT EXISTS {name} ({_LINE}    {columns.replace('; ', f',{_LINE}    ')}{_LINE}){_LINE}"
    for name, columns in _COLUMNS.items()
)
_INDEXES = (
    "CREATE INDEX IF NOT EXISTS idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index)",
    "CREATE INDEX IF NOT EXISTS idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset)",
    "CREATE INDEX IF NOT EXISTS idx_sample_parts_full ON sample_parts(tar_file_id, sample_index, part_name, "
    "content_byte_offset, content_byte_size)",
)


def energon_version() -> str:
    """The version as Energon states it; where it is not installed, the one whose format is written here."""
    import importlib.metadata  # reads mail headers, whose parsers cost every command that only reads a data set

    try:
        return importlib.metadata.version("megatron-energon")
    except importlib.metadata.PackageNotFoundError:
        return _FORMAT_OF_VERSION


class IndexWriter:
    """Writes ``.nv-meta`` of the WebDataset in a directory while its shards are written."""

    def __init__(self, directory: Path) -> None:
        self._meta = directory / META_DIRECTORY
        self._meta.mkdir(parents=True)
        self._database = open_scratch(self._meta / "index.sqlite")
        self._samples: list[SampleRow] = []
        self.parts: list[PartRow] = []
        self.media: list[tuple[str, str, str]] = []
        """Name of an entry in the data set, its type and content, see `media_files.MediaFile.metadata`."""
        for table in _TABLES:
            self._database.execute(table)

    def add(self, row: SampleRow) -> None:
        """Adds the row of a sample, after those of its parts. The rows of all tables are written after a fixed number
        of samples: SQLite gives out pages in that order."""
        self._samples.append(row)
        if len(self._samples) == _ROWS:
            self._flush()

    def _flush(self) -> None:
        for table, rows in (("samples", self._samples), ("sample_parts", self.parts), ("media_metadata", self.media)):
            values = ", ".join("?" * (3 if table == "media_metadata" else 5))
            self._database.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({values})", rows)
            rows.clear()

    def finish(
        self,
        shards: Mapping[str, int],
        splits: Iterable[str],
        *,
        identity: bytes,
        subflavors: Mapping[str, str] = SUBFLAVORS,
        with_records: bool = False,
    ) -> None:
        """Completes the index, and writes the splits and the description of the data set. ``shards`` (name -> number of
        samples) are in the order of their numbers; names begin with their split. `index.uuid` is made of ``identity``,
        16 bytes or more that depend on the content; ``with_records`` says whether the samples hold records."""
        self._flush()
        self._database.execute(
            "INSERT INTO media_filters (strategy, patterns, created_at_utc) VALUES ('EXTENSION', '', ?)", (_NO_TIME,)
        )
        for index in _INDEXES:
            self._database.execute(index)
        self._database.execute("COMMIT")
        self.close()
        (self._meta / "index.uuid").write_text(str(uuid.UUID(bytes=identity[:16], version=4)), encoding="utf-8")
        info = {"energon_version": energon_version(), "shard_counts": dict(shards)}
        (self._meta / INFO_FILE).write_text(json.dumps(info, indent=2), encoding="utf-8")
        parts = {split: shard_ranges([name for name in shards if name.startswith(f"{split}-")]) for split in splits}
        self._write_yaml("split.yaml", {"split_parts": parts, "exclude": []})
        content = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "subflavors": dict(subflavors)}
        self._write_yaml("dataset.yaml", content)
        if with_records:  # a second description, of these as text: Energon's tools take no crude samples
            sample_type = {"__module__": "megatron.energon", "__class__": "TextSample"}
            self._write_yaml(LINT_FILE, {"sample_type": sample_type, "field_map": {"text": "json"}})

    def _write_yaml(self, name: str, content: object) -> None:
        (self._meta / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def close(self) -> None:
        self._database.close()


def shard_ranges(names: list[str]) -> list[str]:
    """Shard names with consecutive numbers as Energon abbreviates them: ``train-{000000..000012}.tar``; a range never
    spans numbers with different counts of digits."""
    ranges = []
    for _, group in groupby(names, key=len):
        first, *others = (name.removesuffix(".tar").rsplit("-", 1) for name in group)
        number = f"{{{first[1]}..{others[-1][1]}}}" if others else first[1]
        ranges.append(f"{first[0]}-{number}.tar")
    return ranges


CONVERSION_VERSION = 7  # Changes whenever the format of a conversion's files changes; part of the fingerprint

CONVERSION_FILE = remote_files.CONVERSION_FILE
REJECTS_FILE = "rejects.jsonl"
UNREAD_REASONS = ("truncated_array", "corrupt_source")
"""Reasons that may stand for more than one record: nothing after the place could be read."""
WARNINGS_FILE = "warnings.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport:
    """The counts of one conversion; ``read == written + sum(rejected.values())``.

    Attributes:
        out: directory of the data set.
        entry: what `megatron.energon.get_train_dataset` takes.
        read: records found, broken ones included.
        written: samples of the data set.
        rejected: reason -> number of records.
        warnings: name -> number of records that were accepted although odd.
        ignored_columns: name of a column, or of a field as ``messages[].name``, that nothing reads -> ``records``, the
            number of written samples whose record fills it, and ``did_you_mean`` if the name is near one that is read.
        notes: sentences about files of the sources that were not read, or have two names.
        layouts: source -> name of a layout -> number of samples whose record has it.
        first_rejects: reason -> the first record that was rejected for it, and why.
        splits: name -> number of samples.
        pairs: samples with a chosen and a rejected answer.
        unwanted: samples whose label says that the answer is unwanted (``--kto-label``).
        images, videos, tensors: number of media that samples name, including repetitions.
        media_files: distinct media, by content.
        media_bytes, record_bytes: bytes of media and of JSON records in the data set, without tar headers.
        shards: number of tar files.
        seconds: wall time; not in the JSON form, which is the same in every run.
        dry_run: True if nothing was written; the numbers are those that a conversion would have.
        skipped: True if `resume` found the conversion finished.
        fingerprint: version, digests of the sources, and the options that decide the content.
    """

    out: str
    entry: str
    layout: str
    read: int
    written: int
    rejected: dict[str, int]
    warnings: dict[str, int]
    splits: dict[str, int]
    images: int
    videos: int
    media_files: int
    media_bytes: int
    record_bytes: int
    shards: int
    seconds: float = 0.0
    skipped: bool = False
    dry_run: bool = False
    pairs: int = 0
    unwanted: int = 0
    tensors: int = 0
    notes: list[str] = field(default_factory=list)
    layouts: dict[str, dict[str, int]] = field(default_factory=dict)
    first_rejects: dict[str, str] = field(default_factory=dict)
    ignored_columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)

    @property
    def pair_counts(self) -> PairCounts:
        """What a run must be told how to train."""
        return PairCounts(samples=self.written, pairs=self.pairs, unwanted=self.unwanted)

    @property
    def reject_share(self) -> float:
        """Rejected records divided by records read."""
        return sum(self.rejected.values()) / self.read if self.read else 0.0

    def too_many_rejects(self, most: float) -> bool:
        """Whether more records were rejected than a share of at most 1, or a number above 1, allows."""
        return self.reject_share > most if most <= 1 else sum(self.rejected.values()) > most

    def samples_of_layouts(self) -> dict[str, int]:
        """Returns name of a layout -> number of samples, of all sources together."""
        return dict(sorted(sum(map(Counter, self.layouts.values()), Counter()).items()))

    def to_json(self) -> dict[str, Any]:
        """JSON form, as in `conversion.json`."""
        return {name: value for name, value in asdict(self).items() if name != "seconds"}

    def ignored_lines(self) -> list[str]:
        """Returns a sentence about each ignored column; those with names near one that is read come first."""
        return [
            f"ignored_column {name!r} in {ignored['records']:,} sample{'s' * (ignored['records'] > 1)}: "
            "nothing reads it" + (f"; did you mean {ignored['did_you_mean']!r}?" if "did_you_mean" in ignored else "")
            for name, ignored in sorted(self.ignored_columns.items(), key=lambda each: "did_you_mean" not in each[1])
        ]

    def write(self, directory: Path) -> None:
        """Writes `conversion.json`."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False)
        # A column's name may hold half of a character; in JSON its escape is what Python writes for it, too.
        (directory / CONVERSION_FILE).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def ignored_entries(counts: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Returns `ConversionReport.ignored_columns` of counts, by name."""
    return {
        name: {"records": counts[name]} | ({"did_you_mean": meant} if (meant := near_name(name)) else {})
        for name in sorted(counts)
    }


def read_report(directory: Path) -> dict[str, Any] | None:
    """The content of a finished conversion's `conversion.json`; None if there is none or it is not ours."""
    try:
        address = remote_files.remote_address(file := directory / CONVERSION_FILE)
        value = json.loads(file.read_bytes() if address is None else remote_files.read(address))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and {"fingerprint", "written", "entry"} <= set(value) else None


def counted_pairs(places: Iterable[Path]) -> PairCounts:
    """What conversions counted in the data sets at these places, or parts of data sets, which lie a level below the
    report; all splits together, nothing where nobody counted."""
    reports: dict[Path, dict[str, Any]] = {}
    for place in places:
        if report := read_report(place):
            reports[place] = report
        elif place.name in (TEXT_DIRECTORY, MEDIA_DIRECTORY):
            reports[place.parent] = read_report(place.parent) or {}

    def total(name: str) -> int:
        return sum(count for report in reports.values() if isinstance(count := report.get(name), int))

    return PairCounts(samples=total("written"), pairs=total("pairs"), unwanted=total("unwanted"))


def fingerprint_difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first field that differs, as ``name: found, wanted``; None if all are equal."""
    for group in ("version", "sources", "options"):
        old, new = found.get(group), wanted[group]
        if old == new and (group != "sources" or [*old] == [*new]):
            continue
        if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
            splits = "up to 6, splits followed keys; they follow the content now"
            return f"{group} was {old!r} and is {new!r} now ({splits})"
        if old == new:
            return "the sources were named in another order"
        name = next(name for name in sorted({*old, *new}) if old.get(name) != new.get(name))
        if group == "sources":
            what = "is not named any more" if name not in new else "has changed" if name in old else "was not named"
            return f"source {name} {what}"
        return f"{name} was {old.get(name)!r} and is {new.get(name)!r} now"
    return None
