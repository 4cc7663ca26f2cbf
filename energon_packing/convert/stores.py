"""What goes where in the data set, one class per layout: shards and their pieces, and the index of each WebDataset.

The samples of a conversion in reading order, in a file: what the second half needs to know about each.

The media of a conversion in a file, not in memory: earlier checks by place, and distinct media by name.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import orjson

from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.layout import (
    MEDIA_DIRECTORY,
    TEXT_DIRECTORY,
    IndexWriter,
    PartRow,
    SampleRow,
    media_names,
    open_scratch,
    subflavors_of,
    write_metadataset,
)
from energon_packing.convert.media_checks import Stamp
from energon_packing.convert.media_files import MediaFile
from energon_packing.convert.shards import ShardPiece, StoredFile
from energon_packing.convert.tensor_files import TensorFile
from energon_packing.errors import UserError


@dataclass(kw_only=True, slots=True)
class PlannedFile:
    """A media file of a sample that is stored next to its record."""

    name: str
    path: str
    stamp: Stamp
    metadata: tuple[str, str] | None


@dataclass(kw_only=True, slots=True)
class PlannedSamples:
    """Good records of one chunk.

    Attributes:
        spool, offset: where their JSON begins: number of the spool file, bytes.
        keys: final.
        sizes: bytes of the JSON of each.
        splits: of each, as an index.
        files: number of a record -> its distinct files; monolithic layout only.
    """

    spool: int
    offset: int
    keys: Sequence[str]
    sizes: Sequence[int]
    splits: list[int]
    files: dict[int, list[PlannedFile]] = field(default_factory=dict)


class SamplePlan:
    """A file of `PlannedSamples`, written first and read back once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("wb")

    def add(self, samples: PlannedSamples) -> None:
        """Appends samples."""
        # A pickle that this process wrote a moment ago into its own directory.
        pickle.dump(samples, self._stream, pickle.HIGHEST_PROTOCOL)

    def read(self, moved: Mapping[int, int]) -> Generator[PlannedSamples, None, None]:
        """Yields the samples again.

        Args:
            moved: number of a sample -> the split that it has moved to.
        """
        self._stream.flush()
        before = 0
        with self._path.open("rb") as stream:
            while True:
                try:
                    samples: PlannedSamples = pickle.load(stream)
                except EOFError:
                    return
                for number, split in moved.items():
                    if before <= number < before + len(samples.keys):
                        samples.splits[number - before] = split
                before += len(samples.keys)
                yield samples

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()


MediaRow = tuple[StoredFile, tuple[str, str] | None]
"""A file, and its type and content in Energon's table of media; None for tensors."""
_MOST_RECENT = 50_000


class MediaTable:
    """Kept by the process that knows the order of the records."""

    def __init__(self, path: Path, *, one_store: bool) -> None:
        """
        Args:
            path: file to make; not needed after the conversion.
            one_store: whether the names are those of one store, so that each content has one name.
        """
        self._one_store = one_store
        self._database = open_scratch(path)
        self._database.execute("CREATE TABLE checks (place TEXT PRIMARY KEY, entry TEXT) WITHOUT ROWID")
        self._database.execute(
            "CREATE TABLE media (digest TEXT PRIMARY KEY, name TEXT, path TEXT, size INTEGER, changed INTEGER,"
            " checked INTEGER, kind TEXT, content TEXT)"
        )
        self._recent: set[str] = set()
        self.files = 0
        """Distinct files so far."""

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def remember(self, checks: Iterable[tuple[str, str]]) -> None:
        """Keeps the place and the entry of files that were checked."""
        self._database.executemany("INSERT OR REPLACE INTO checks VALUES (?, ?)", checks)

    def recall(self, places: list[str]) -> list[str | None]:
        """The entry of each place; None where there is none."""
        found = (
            self._database.execute("SELECT entry FROM checks WHERE place = ?", (place,)).fetchone() for place in places
        )
        return [None if row is None else row[0] for row in found]

    def add(self, file: MediaFile | TensorFile, stamp: Stamp) -> None:
        """Adds a file that a record names; one with a content that is there already adds nothing.

        Raises:
            UserError: the store has the content under another extension, so that Energon could not tell them apart.
        """
        if file.name in self._recent:
            return
        if len(self._recent) >= _MOST_RECENT:
            self._recent.clear()
        self._recent.add(file.name)
        digest = file.name.partition(".")[0]
        values = (digest, file.name, file.path, *stamp, *(media_metadata(file) or (None, None)))
        before = self._database.total_changes
        self._database.execute("INSERT OR IGNORE INTO media VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        if self._database.total_changes > before:
            self.files += 1
            return
        name, path = self._database.execute("SELECT name, path FROM media WHERE digest = ?", (digest,)).fetchone()
        if name != file.name and self._one_store:
            raise UserError(f"{path} and {file.path} hold the same bytes; give both the same extension")

    def rows(self) -> Generator[MediaRow, None, None]:
        """The distinct files in the order in which they were added."""
        query = "SELECT name, path, size, changed, checked, kind, content FROM media ORDER BY rowid"
        with closing(self._database.execute(query)) as found:
            for name, path, size, changed, checked, kind, content in found:
                stamp = Stamp(size, changed, checked)
                yield stored_file(name, name, path, stamp), None if kind is None else (kind, content)


def stored_file(member: str, name: str, path: str, stamp: Stamp) -> StoredFile:
    """A file to store as a member.

    Args:
        member: name in the tar.
        name: in a media store; begins with the digest of the content.
        path: of the file.
        stamp: of its check.
    """
    return StoredFile(name=member, path=path, digest=name.partition(".")[0], stamp=stamp)


def media_metadata(file: MediaFile | TensorFile) -> tuple[str, str] | None:
    """Type and content of a file in the table of ``energon prepare --media-metadata-by-extension``.

    Energon would decode every file again, and omits a whole shard if one file fails. As in Energon's own table, sizes
    are those of the stored pixels, before EXIF or container rotation; the records hold the displayed sizes.

    Returns:
        None for a tensor: Energon has no metadata for it, and the records hold its shape.
    """
    if isinstance(file, TensorFile):
        return None
    if file.kind == "image":
        image = {
            "width": file.stored_width,
            "height": file.stored_height,
            "format": file.format,
            "mode": file.mode,
        }
        return "image", orjson.dumps(image).decode()
    video = {
        "video_duration": file.duration,
        "video_num_frames": file.frames,
        "video_fps": file.fps,
        "video_width": file.stored_width,
        "video_height": file.stored_height,
    }
    return "av", orjson.dumps(video).decode()


Pieces = Generator[tuple[Path, ShardPiece], None, None]
"""Pieces of shards to write, and the directory of each."""
_PIECE_BYTES = 32 << 20
_PIECE_SAMPLES = 2048
_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredShards:
    """The final size of a store: bytes of media and of records (without tar headers), and the number of tars."""

    media_bytes: int
    record_bytes: int
    shards: int


class SampleStore(Protocol):
    """Stores samples in one layout."""

    def pieces(self, plan: Iterable[PlannedSamples]) -> Pieces:
        """Divides all samples into pieces of shards, and adds the rows of the index."""

    def finish(self, splits: list[str], identity: bytes) -> StoredShards:
        """Completes the indexes; called after all pieces are there."""


class _Tars:
    """The tars of one prefix: which one is open, and what has been put into them."""

    def __init__(self, directory: Path, prefix: str, first: int) -> None:
        """
        Args:
            directory: where they are.
            prefix: letters, digits, ``_``.
            first: number of the first tar in the data set.
        """
        self._directory = directory
        self._prefix = prefix
        self._first = first
        self.counts: dict[str, int] = {}
        """Name of each tar -> number of samples."""
        self.bytes = 0
        """Bytes in the open tar, without tar headers."""
        self._piece: ShardPiece | None = None

    @property
    def number(self) -> int:
        """Number of the open tar in the data set."""
        return self._first + len(self.counts) - 1

    def sample(self) -> tuple[ShardPiece, int]:
        """The piece for the next sample, which begins here, and the sample's index in its tar."""
        if self._piece is None:
            self._piece = ShardPiece(name=f"{self._prefix}-{len(self.counts):06d}.tar")
            self.counts[self._piece.name] = self.bytes = 0
        index = self.counts[self._piece.name]
        self.counts[self._piece.name] += 1
        self._piece.begin_sample()
        return self._piece, index

    def samples_in_tar(self) -> int:
        """Samples in the open tar; 0 if none is open."""
        return 0 if self._piece is None else self.counts[self._piece.name]

    def full_piece(self) -> Pieces:
        """Yields the open piece if it is large."""
        piece = self._piece
        if piece is not None and (piece.end - piece.start >= _PIECE_BYTES or len(piece.offsets) >= _PIECE_SAMPLES):
            self._piece = piece.next_piece()
            yield self._directory, piece

    def close(self) -> Pieces:
        """Yields the last piece of the open tar, if there is one."""
        if self._piece is not None:
            self._piece.last = True
            yield self._directory, self._piece
            self._piece = None


class _Rows:
    """Rows of an index, added a few thousand at a time."""

    def __init__(self, index: IndexWriter) -> None:
        self._index = index
        self.samples: list[SampleRow] = []
        self.parts: list[PartRow] = []
        self.media: list[tuple[str, str, str]] = []

    def add(self, row: SampleRow) -> None:
        """Adds the row of a sample after those of its parts.

        The rows of all tables are written after a fixed number of samples: SQLite gives out pages in that order.
        """
        self.samples.append(row)
        if len(self.samples) == _ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes the rows."""
        self._index.add(self.samples, self.parts, self.media)
        self.samples, self.parts, self.media = [], [], []


class _RecordStore:
    """Samples in tars of their split."""

    def __init__(self, config: ConvertConfig, directory: Path, counts: Mapping[str, int], stack: ExitStack) -> None:
        """
        Args:
            config: options of the conversion.
            directory: of the WebDataset.
            counts: samples of each split.
            stack: closes the index.
        """
        directory.mkdir(exist_ok=True)
        self._config = config
        self._index = IndexWriter(directory)
        stack.callback(self._index.close)
        self._tars: list[_Tars] = []
        first = 0
        for split, count in counts.items():
            self._tars.append(_Tars(directory, split, first))
            first += -(-count // config.samples_per_shard)
        self.record_bytes = 0
        self.media_bytes = 0

    def pieces(self, plan: Iterable[PlannedSamples]) -> Pieces:
        """See `SampleStore`."""
        rows = _Rows(self._index)
        for planned in plan:
            offset, spool = planned.offset, planned.spool
            for number, (key, size, split) in enumerate(zip(planned.keys, planned.sizes, planned.splits, strict=True)):
                tars = self._tars[split]
                if tars.samples_in_tar() >= self._config.samples_per_shard:
                    yield from tars.close()
                piece, index = tars.sample()
                tar, start = tars.number, piece.end
                content = piece.add_record(f"{key}.json", size, spool, offset)
                rows.parts.append((tar, index, "json", content, size))
                offset += size
                if planned.files and number in planned.files:
                    self._add_files(piece, (tar, index), key, planned, number, rows)
                rows.add((tar, key, index, start, piece.end - start))
                yield from tars.full_piece()
            self.record_bytes += offset - planned.offset
        for tars in self._tars:
            yield from tars.close()
        rows.flush()

    def _add_files(
        self, piece: ShardPiece, place: tuple[int, int], key: str, planned: PlannedSamples, number: int, rows: _Rows
    ) -> None:
        files = planned.files[number]
        for file, suffix in zip(files, media_names("monolithic", [file.name for file in files]), strict=True):
            content = piece.add_file(stored_file(key + suffix, file.name, file.path, file.stamp))
            rows.parts.append((*place, suffix[1:], content, file.stamp.size))
            if file.metadata is not None:
                rows.media.append((key + suffix, *file.metadata))
            self.media_bytes += file.stamp.size

    def finish_index(self, splits: list[str], identity: bytes) -> int:
        """Completes the index; returns the number of tars."""
        shards = {name: count for tars in self._tars for name, count in tars.counts.items()}
        subflavors = subflavors_of(self._config.format)
        self._index.finish(shards, splits, identity=identity, subflavors=subflavors)
        self._index.describe_records()
        return len(shards)


class PolylithicStore:
    """Records in ``text``, each distinct media file once in ``media``, in the order of first mention."""

    def __init__(
        self, config: ConvertConfig, media: MediaTable, counts: Mapping[str, int], build: Path, stack: ExitStack
    ) -> None:
        """
        Args:
            config: options of the conversion.
            media: the distinct media.
            counts: samples of each split.
            build: directory of the data set.
            stack: closes the indexes.
        """
        self._config = config
        self._media = media
        self._build = build
        self._text = _RecordStore(config, build / TEXT_DIRECTORY, counts, stack)
        self._tars = _Tars(build / MEDIA_DIRECTORY, "media", 0)
        self._media_bytes = 0
        self._media_index: IndexWriter | None = None
        if media.files:
            (build / MEDIA_DIRECTORY).mkdir()
            self._media_index = IndexWriter(build / MEDIA_DIRECTORY)
            stack.callback(self._media_index.close)

    def pieces(self, plan: Iterable[PlannedSamples]) -> Pieces:
        """See `SampleStore`."""
        yield from self._text.pieces(plan)
        if self._media_index is None:
            return
        rows = _Rows(self._media_index)
        tars = self._tars
        for file, metadata in self._media.rows():
            if tars.samples_in_tar() and tars.bytes >= self._config.media_shard_bytes:
                yield from tars.close()
            piece, index = tars.sample()
            tar, start = tars.number, piece.end
            content = piece.add_file(file)
            tars.bytes += file.size
            self._media_bytes += file.size
            digest, _, extension = file.name.partition(".")
            rows.parts.append((tar, index, extension, content, file.size))
            if metadata is not None:
                rows.media.append((file.name, *metadata))
            rows.add((tar, digest, index, start, piece.end - start))
            yield from tars.full_piece()
        yield from tars.close()
        rows.flush()

    def finish(self, splits: list[str], identity: bytes) -> StoredShards:
        """Completes both indexes and writes the metadataset that joins the data sets."""
        shards = self._text.finish_index(splits, sha256(identity + b"text").digest())
        if self._media_index is not None:
            self._media_index.finish(self._tars.counts, ["media"], identity=sha256(identity + b"media").digest())
        subflavors = subflavors_of(self._config.format)
        write_metadataset(self._build, splits, with_media=self._media_index is not None, subflavors=subflavors)
        return StoredShards(
            media_bytes=self._media_bytes,
            record_bytes=self._text.record_bytes,
            shards=shards + len(self._tars.counts),
        )


class MonolithicStore:
    """Each sample's record and media together in one WebDataset."""

    def __init__(self, config: ConvertConfig, counts: Mapping[str, int], build: Path, stack: ExitStack) -> None:
        """
        Args:
            config: options of the conversion.
            counts: samples of each split.
            build: directory of the data set.
            stack: closes the index.
        """
        self._samples = _RecordStore(config, build, counts, stack)

    def pieces(self, plan: Iterable[PlannedSamples]) -> Pieces:
        """See `SampleStore`."""
        return self._samples.pieces(plan)

    def finish(self, splits: list[str], identity: bytes) -> StoredShards:
        """Completes the index of the one data set."""
        shards = self._samples.finish_index(splits, identity)
        return StoredShards(
            media_bytes=self._samples.media_bytes, record_bytes=self._samples.record_bytes, shards=shards
        )
