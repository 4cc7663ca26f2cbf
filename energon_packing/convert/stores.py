"""What goes where in the data set: the planned samples, the distinct media, and the pieces of shards made of both."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.layout import (
    MEDIA_DIRECTORY,
    TEXT_DIRECTORY,
    IndexWriter,
    media_names,
    open_scratch,
    write_metadataset,
)
from energon_packing.convert.layouts.layout import SUBFLAVORS
from energon_packing.convert.media_files import Stamp, StoredMedia
from energon_packing.convert.shards import ShardPiece, StoredFile
from energon_packing.errors import UserError

Pieces = Generator[tuple[Path, ShardPiece], None, None]
"""Pieces of shards to write, and the directory of each."""
_PIECE_BYTES = 32 << 20
_PIECE_SAMPLES = 2048


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
    files: dict[int, list[StoredFile]] = field(default_factory=dict)


class SamplePlan:
    """A file of `PlannedSamples`, written first and read back once."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("w+b")

    def add(self, samples: PlannedSamples) -> None:
        """Appends samples."""
        # A pickle that this process wrote a moment ago into its own directory.
        pickle.dump(samples, self._stream, pickle.HIGHEST_PROTOCOL)

    def read(self, moved: Mapping[int, int]) -> Generator[PlannedSamples, None, None]:
        """Yields the samples again; ``moved`` is number of a sample -> the split that it has moved to."""
        end = self._stream.tell()
        self._stream.seek(0)
        before = 0
        while self._stream.tell() < end:
            samples: PlannedSamples = pickle.load(self._stream)
            for number, split in moved.items():
                if before <= number < before + len(samples.keys):
                    samples.splits[number - before] = split
            before += len(samples.keys)
            yield samples

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()


class MediaTable:
    """The distinct media of a conversion by name, in a file, not in memory; kept by the process that knows the order of
    the records."""

    def __init__(self, path: Path, *, one_store: bool) -> None:
        """
        Args:
            path: file to make; not needed after the conversion.
            one_store: whether the names are those of one store, so that each content has one name.
        """
        self._one_store = one_store
        self._database = open_scratch(path)
        self._database.execute(
            "CREATE TABLE media (digest TEXT PRIMARY KEY, name TEXT, path TEXT, size INTEGER, changed INTEGER,"
            " checked INTEGER, kind TEXT, content TEXT)"
        )
        self.files = 0
        """Distinct files so far."""

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def add(self, file: StoredMedia, stamp: Stamp) -> None:
        """Adds a file that a record names; one with a content that is there already adds nothing.

        Raises:
            UserError: the store has the content under another extension, so that Energon could not tell them apart.
        """
        digest = file.name.partition(".")[0]
        values = (digest, file.name, file.path, *stamp, *(file.metadata or (None, None)))
        query = "INSERT OR IGNORE INTO media VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        if self._database.execute(query, values).rowcount:
            self.files += 1
            return
        name, path = self._database.execute("SELECT name, path FROM media WHERE digest = ?", (digest,)).fetchone()
        if name != file.name and self._one_store:
            raise UserError(f"{path} and {file.path} hold the same bytes; give both the same extension")

    def rows(self) -> Generator[StoredFile, None, None]:
        """Yields the distinct files in the order in which they were added."""
        query = "SELECT name, path, size, changed, checked, kind, content FROM media ORDER BY rowid"
        with closing(self._database.execute(query)) as found:
            for name, path, size, changed, checked, kind, content in found:
                metadata = None if kind is None else (kind, content)
                yield StoredFile(name=name, path=path, stamp=Stamp(size, changed, checked), metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredShards:
    """The final size of a store: bytes of media and of records (without tar headers), and the number of tars."""

    media_bytes: int
    record_bytes: int
    shards: int


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
        """Returns the piece for the next sample, which begins here, and the sample's index in its tar."""
        if self._piece is None:
            self._piece = ShardPiece(name=f"{self._prefix}-{len(self.counts):06d}.tar")
            self.counts[self._piece.name] = self.bytes = 0
        index = self.counts[self._piece.name]
        self.counts[self._piece.name] += 1
        self._piece.offsets.append(self._piece.end)
        return self._piece, index

    def samples_in_tar(self) -> int:
        """Returns the samples in the open tar; 0 if none is open."""
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


class SampleStore:
    """Stores samples in the layout of a conversion: records with each distinct media file once in another WebDataset,
    in the order of first mention (polylithic), or each sample's record and media together (monolithic)."""

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
        self._config, self._media, self._build, self._stack = config, media, build, stack
        self._subflavors = SUBFLAVORS if config.own_layout is None else config.own_layout.subflavors
        self._apart = config.layout == "polylithic"
        directory = build / TEXT_DIRECTORY if self._apart else build
        self._index = self._opened(directory)
        self._splits: list[_Tars] = []
        first = 0
        for split, count in counts.items():
            self._splits.append(_Tars(directory, split, first))
            first += -(-count // config.samples_per_shard)
        self._media_tars = _Tars(build / MEDIA_DIRECTORY, "media", 0)
        self._media_index = self._opened(build / MEDIA_DIRECTORY) if self._apart and media.files else None
        self._record_bytes = self._media_bytes = 0

    def _opened(self, directory: Path) -> IndexWriter:
        directory.mkdir(exist_ok=True)
        index = IndexWriter(directory)
        self._stack.callback(index.close)
        return index

    def pieces(self, plan: Iterable[PlannedSamples]) -> Pieces:
        """Divides all samples into pieces of shards, and adds the rows of the index."""
        for planned in plan:
            offset = planned.offset
            for number, (key, size, split) in enumerate(zip(planned.keys, planned.sizes, planned.splits, strict=True)):
                tars = self._splits[split]
                named: list[StoredFile] = []
                if number in planned.files:
                    files = planned.files[number]
                    suffixes = media_names("monolithic", [file.name for file in files])
                    named = [replace(file, name=key + suffix) for file, suffix in zip(files, suffixes, strict=True)]
                if tars.samples_in_tar() >= self._config.samples_per_shard:
                    yield from tars.close()
                yield from self._put(tars, self._index, key, named, (f"{key}.json", size, planned.spool, offset))
                offset += size
            self._record_bytes += offset - planned.offset
        for tars in self._splits:
            yield from tars.close()
        if (media_index := self._media_index) is None:
            return
        tars = self._media_tars
        for file in self._media.rows():
            if tars.samples_in_tar() and tars.bytes >= self._config.media_shard_bytes:
                yield from tars.close()
            yield from self._put(tars, media_index, file.name.partition(".")[0], [file])
        yield from tars.close()

    def _put(
        self,
        tars: _Tars,
        index: IndexWriter,
        key: str,
        files: Sequence[StoredFile],
        record: tuple[str, int, int, int] | None = None,
    ) -> Pieces:
        """Adds a sample: its record, if it has one, and its files."""
        piece, number = tars.sample()
        start = piece.end
        if record is not None:
            index.parts.append((tars.number, number, "json", piece.add_record(*record), record[1]))
        for file in files:
            size = file.stamp.size
            index.parts.append((tars.number, number, file.name[len(key) + 1 :], piece.add_file(file), size))
            if file.metadata is not None:
                index.media.append((file.name, *file.metadata))
            tars.bytes += size
            self._media_bytes += size
        index.add((tars.number, key, number, start, piece.end - start))
        yield from tars.full_piece()

    def finish(self, splits: list[str], identity: bytes) -> StoredShards:
        """Completes the indexes, and the metadataset that joins two data sets; called after all pieces are there."""
        shards = {name: count for tars in self._splits for name, count in tars.counts.items()}
        own = sha256(identity + b"text").digest() if self._apart else identity
        self._index.finish(shards, splits, identity=own, subflavors=self._subflavors)
        self._index.describe_records()
        if self._media_index is not None:
            media = sha256(identity + b"media").digest()
            self._media_index.finish(self._media_tars.counts, ["media"], identity=media)
        if self._apart:
            with_media = self._media_index is not None
            write_metadataset(self._build, splits, with_media=with_media, subflavors=self._subflavors)
        return StoredShards(
            media_bytes=self._media_bytes,
            record_bytes=self._record_bytes,
            shards=len(shards) + len(self._media_tars.counts),
        )
