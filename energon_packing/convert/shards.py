"""Tar shards: one process says what is in them, any process writes them, and the same input gives the same bytes."""

import hashlib
import os
import pickle
import tarfile
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from energon_packing.convert import layout
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.keys import Positions
from energon_packing.convert.layout import IndexWriter, media_names, open_scratch, write_metadataset
from energon_packing.convert.layouts.layout import SUBFLAVORS
from energon_packing.convert.media_files import Stamp, StoredMedia, open_regular
from energon_packing.errors import UserError, fault_of, read_again

BLOCK = tarfile.BLOCKSIZE
_LONGEST_NAME = 100
_LARGEST_SIZE = 8**11 - 1


def _by_tarfile(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)  # time, owner and group stay 0
    member.size = size
    member.mode = 0o644
    # USTAR: no extension records, so a member's offset is its header's, which Energon's index relies on.
    return member.tobuf(tarfile.USTAR_FORMAT)


_TEMPLATE = _by_tarfile("a", 0)
_FIXED_SUM = sum(_TEMPLATE[100:124] + _TEMPLATE[136:148] + _TEMPLATE[156:]) + 8 * ord(" ")
"""Of all but name, size and the checksum itself, which counts its own eight bytes as spaces."""
_PADDING = tuple(b"\0" * (-length % BLOCK) for length in range(BLOCK))


def header(name: str, size: int) -> bytes:
    """The header of a member of ``size`` bytes, byte for byte what `tarfile` writes for it. `tarfile` takes 25
    microseconds for it, and most of its 512 bytes are the same for all members of a shard."""
    encoded = name.encode("utf-8")
    if len(encoded) > _LONGEST_NAME or size > _LARGEST_SIZE or name.startswith("/") or name.endswith("/"):
        return _by_tarfile(name, size)
    length = b"%011o\0" % size
    checksum = b"%06o\0 " % (_FIXED_SUM + sum(encoded) + sum(length))
    name_field = encoded.ljust(_LONGEST_NAME, b"\0")
    return b"".join((name_field, _TEMPLATE[100:124], length, _TEMPLATE[136:148], checksum, _TEMPLATE[156:]))


def padding(size: int) -> bytes:
    """The zeros after a content of ``size`` bytes."""
    return _PADDING[size % BLOCK]


def ending(size: int) -> bytes:
    """What follows the last member of a tar whose members take ``size`` bytes."""
    end = 2 * BLOCK
    return b"\0" * (end + -(size + end) % tarfile.RECORDSIZE)


_BUFFER = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A checked media file to store."""

    name: str  # of the member; in a media store, it begins with the digest of the content
    path: str
    stamp: Stamp
    metadata: tuple[str, str] | None  # type and content in Energon's table of media; None for what Energon has none for
    digest: str  # the first 32 hexadecimal digits of its SHA-256

    @classmethod
    def of(cls, file: StoredMedia, stamp: Stamp) -> Self:
        digest = file.name.partition(".")[0]
        return cls(name=file.name, path=file.path, stamp=stamp, metadata=file.metadata, digest=digest)


RecordPlace = tuple[str, int, int, int]
"""Name of a member, its bytes, number of the spool file that holds it, and offset there."""


@dataclass(kw_only=True, slots=True)
class ShardPiece:
    """Members of one tar that follow each other. Where they begin is known, so pieces may be written in any order."""

    name: str  # of the tar
    start: int = 0  # bytes of the tar before the piece
    first: int = 0  # samples of the tar before the piece
    records: list[RecordPlace] = field(default_factory=list)  # each begins a sample
    # Number of a record -> media files that follow it; -1: before the first record.
    files: dict[int, list[StoredFile]] = field(default_factory=dict)
    offsets: array[int] = field(default_factory=lambda: array("Q"))  # where each sample begins in the tar
    end: int = 0  # bytes of the tar up to the end of the piece
    content: int = 0  # bytes of its members, without headers
    last: bool = False  # whether nothing follows in the tar

    def add(self, size: int) -> int:
        """Makes room for a member with a content of ``size`` bytes; returns where that begins in the tar."""
        begin = self.end + BLOCK
        self.end += BLOCK + size + -size % BLOCK
        self.content += size
        return begin


def spool_file(scratch: Path, number: int) -> Path:
    """The file of the worker of a number for the JSON of good records, in the working directory of a conversion."""
    return scratch / f"records-{number}"


def _opened_at(path: Path, place: int) -> BinaryIO:
    stream = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=_BUFFER)
    stream.seek(place)
    return stream


def _member(file: StoredFile) -> Iterator[bytes]:
    """The pieces of a checked file's member; what fails in passing is read again. Raises `UserError`: it has changed
    since the check, which may show in its time stamp or else shows in its digest; or it cannot be read."""
    at, size, place = 0, file.stamp.size, os.path.dirname(file.path)

    def read() -> Any:
        stream.seek(at)
        return stream.read(min(size - at, _BUFFER))

    yield header(file.name, size)
    changed = UserError(f"{file.path} changed while the conversion ran; start it again when nobody writes to it")
    try:
        with read_again(place, lambda: open_regular(file.path)) as stream:
            trusted = file.stamp.settled and file.stamp.same_file(os.fstat(stream.fileno()))
            digest = hashlib.sha256()
            while at < size and (block := read_again(place, read)):
                yield block
                at += len(block)
                if not trusted:
                    digest.update(block)
            same = digest.hexdigest()[:32] == file.digest
            if trusted:
                same = file.stamp.same_file(os.fstat(stream.fileno()))
    except OSError as error:
        if fault_of(error) == "file":
            raise changed from error
        raise UserError(f"{file.path} cannot be read: {error.strerror or error}; add --resume afterwards") from error
    if at < size or not same:
        raise changed
    yield padding(size)


@dataclass(frozen=True, slots=True)
class Writing:
    """A `energon_packing.executors.work.Work`: writes pieces of shards, each with its directory. ``scratch`` is where
    the files that hold the records are, see `spool_file`."""

    queued: ClassVar = 2
    scratch: Path

    def begin(self) -> None:
        """Nothing to open."""

    def do(self, task: tuple[Path, ShardPiece]) -> None:
        """Writes a piece of a tar, and of Energon's index of its samples (``.tar.idx``); raises as `_member` does."""
        directory, piece = task
        path = directory / piece.name
        spools: dict[int, BinaryIO] = {}
        with ExitStack() as stack:
            tar = stack.enter_context(_opened_at(path, piece.start))
            for file in piece.files.get(-1, ()):
                tar.writelines(_member(file))
            for number, (name, size, spool, offset) in enumerate(piece.records):
                if spool not in spools:
                    spools[spool] = stack.enter_context(spool_file(self.scratch, spool).open("rb", buffering=_BUFFER))
                spools[spool].seek(offset)  # mostly within the buffer
                if len(content := spools[spool].read(size)) < size:
                    raise UserError(f"{spools[spool].name} ends too early; all workers must see the same files")
                tar.write(b"".join((header(name, size), content, padding(size))))
                for file in piece.files.get(number, ()):
                    tar.writelines(_member(file))
            if piece.last:
                tar.write(ending(piece.end))
        offsets = array("Q", [*piece.offsets, piece.end] if piece.last else piece.offsets)
        with _opened_at(path.with_suffix(".tar.idx"), piece.first * offsets.itemsize) as index:
            index.write(offsets.tobytes())

    def name(self, task: tuple[Path, ShardPiece]) -> str:
        return f"writing {task[1].name}"


Pieces = Generator[tuple[Path, ShardPiece], None, None]  # Pieces of shards to write, and the directory of each
_PIECE_BYTES = 32 << 20
_PIECE_SAMPLES = 2048


@dataclass(kw_only=True, slots=True)
class PlannedSamples:
    """Good records of one chunk."""

    spool: int  # spool and offset: where their JSON begins: number of the spool file, bytes
    offset: int
    keys: Sequence[str]  # final
    sizes: Sequence[int]  # bytes of the JSON of each
    positions: Positions  # of each, shape [n]; they decide its split
    splits: list[int] = field(default_factory=list)  # of each, as an index; filled in when the plan is read
    # Number of a record -> its distinct files; monolithic layout only.
    files: dict[int, list[StoredFile]] = field(default_factory=dict)


class SamplePlan:
    """A file of `PlannedSamples`, written first and read back once."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("w+b")

    def add(self, samples: PlannedSamples) -> None:
        # A pickle that this process wrote a moment ago into its own directory.
        pickle.dump(samples, self._stream, pickle.HIGHEST_PROTOCOL)

    def read(self, split_of: Callable[[Positions], NDArray[np.int64]]) -> Generator[PlannedSamples, None, None]:
        """Yields the samples again, with their splits."""
        end = self._stream.tell()
        self._stream.seek(0)
        while self._stream.tell() < end:
            samples: PlannedSamples = pickle.load(self._stream)
            samples.splits = split_of(samples.positions).tolist()
            yield samples

    def close(self) -> None:
        self._stream.close()


class MediaTable:
    """The distinct media of a conversion by name, in a file, not in memory; kept by the process that knows the order of
    the records. In ``one_store``, each content has one name."""

    def __init__(self, path: Path, *, one_store: bool) -> None:
        self._one_store = one_store
        self._named: dict[str, list[StoredFile]] = {}  # digest -> the same content with other extensions
        self._database = open_scratch(path)
        self._database.execute(
            "CREATE TABLE media (digest TEXT PRIMARY KEY, name TEXT, path BLOB, size INTEGER, changed INTEGER,"
            " checked INTEGER, kind TEXT, content TEXT)"
        )
        self.files = 0  # distinct files so far

    def close(self) -> None:
        self._database.close()

    def add(self, file: StoredMedia, stamp: Stamp) -> int:
        """Adds a file that a record names; one with a content that is there already adds nothing, or another name.
        Returns the bytes that a store grows by."""
        digest = file.name.partition(".")[0]
        values = (digest, file.name, os.fsencode(file.path), *stamp, *(file.metadata or (None, None)))
        if self._database.execute("INSERT OR IGNORE INTO media VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values).rowcount:
            self.files += 1
            return stamp.size
        names = {each.name for each in self._named.get(digest, ())}
        names.update(*self._database.execute("SELECT name FROM media WHERE digest = ?", (digest,)))
        if not self._one_store or file.name in names:
            return 0
        self._named.setdefault(digest, []).append(StoredFile.of(file, stamp))
        return stamp.size

    def rows(self) -> Generator[list[StoredFile], None, None]:
        """Yields the distinct files in the order in which they were added, each with those of the same content but
        another extension: one sample of the store holds them all, because its key is their digest."""
        query = "SELECT digest, name, path, size, changed, checked, kind, content FROM media ORDER BY rowid"
        with closing(self._database.execute(query)) as found:
            for digest, name, path, *stamp, kind, content in found:
                checked: Any = {"stamp": Stamp(*stamp), "metadata": None if kind is None else (kind, content)}
                first = StoredFile(name=name, path=os.fsdecode(path), digest=digest, **checked)
                yield [first, *self._named.get(digest, ())]


class _Tars:
    """The tars of one prefix: which one is open, and what has been put into them. ``first`` is the number of the first
    one in the data set."""

    def __init__(self, directory: Path, prefix: str, first: int) -> None:
        self._directory, self._prefix, self._first = directory, prefix, first
        self.counts: dict[str, int] = {}  # name of each tar -> number of samples
        self.bytes = 0  # in the open tar, without tar headers
        self._piece: ShardPiece | None = None

    @property
    def number(self) -> int:
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
        return 0 if self._piece is None else self.counts[self._piece.name]

    def full_piece(self) -> Pieces:
        piece = self._piece
        if piece is not None and (piece.end - piece.start >= _PIECE_BYTES or len(piece.offsets) >= _PIECE_SAMPLES):
            first = piece.first + len(piece.offsets)
            self._piece = ShardPiece(name=piece.name, start=piece.end, first=first, end=piece.end)
            yield self._directory, piece

    def close(self) -> Pieces:
        if self._piece is not None:
            self._piece.last = True
            yield self._directory, self._piece
            self._piece = None


class SampleStore:
    """Stores samples in the layout of a conversion: records with each distinct media file once in another WebDataset,
    in the order of first mention (polylithic), or each sample's record and media together (monolithic)."""

    def __init__(self, config: ConvertConfig, media: MediaTable, counts: Mapping[str, int], build: Path) -> None:
        """``counts`` are the samples of each split, ``build`` is the directory of the data set."""
        self._config, self._media, self.build = config, media, build
        self._subflavors = SUBFLAVORS if config.own_layout is None else config.own_layout.subflavors
        self._apart = config.layout == "polylithic"
        directory = build / layout.TEXT_DIRECTORY if self._apart else build
        self._index = IndexWriter(directory)
        self._splits: list[_Tars] = []
        first = 0
        for split, count in counts.items():
            self._splits.append(_Tars(directory, split, first))
            first += -(-count // config.samples_per_shard)
        self._media_tars = _Tars(build / layout.MEDIA_DIRECTORY, "media", 0)
        self._media_index = IndexWriter(build / layout.MEDIA_DIRECTORY) if self._apart and media.files else None

    def close(self) -> None:
        for index in filter(None, (self._index, self._media_index)):
            index.close()

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
        for tars in self._splits:
            yield from tars.close()
        if (media_index := self._media_index) is None:
            return
        tars = self._media_tars
        for files in self._media.rows():
            if tars.samples_in_tar() and tars.bytes >= self._config.media_shard_bytes:
                yield from tars.close()
            yield from self._put(tars, media_index, files[0].digest, files)
        yield from tars.close()

    def _put(
        self, tars: _Tars, index: IndexWriter, key: str, files: Sequence[StoredFile], record: RecordPlace | None = None
    ) -> Pieces:
        piece, number = tars.sample()
        start = piece.end
        if record is not None:
            piece.records.append(record)
            index.parts.append((tars.number, number, "json", piece.add(record[1]), record[1]))
        for file in files:
            size = file.stamp.size
            piece.files.setdefault(len(piece.records) - 1, []).append(file)
            index.parts.append((tars.number, number, file.name[len(key) + 1 :], piece.add(size), size))
            if file.metadata is not None:
                index.media.append((file.name, *file.metadata))
            tars.bytes += size
        index.add((tars.number, key, number, start, piece.end - start))
        yield from tars.full_piece()

    def finish(self, splits: list[str], identity: bytes) -> int:
        """Completes the indexes, and the metadataset that joins both, after all pieces; returns the number of tars."""
        shards = {name: count for tars in self._splits for name, count in tars.counts.items()}
        own = sha256(identity + b"text").digest() if self._apart else identity
        self._index.finish(shards, splits, identity=own, subflavors=self._subflavors, with_records=True)
        if self._media_index is not None:
            self._media_index.finish(self._media_tars.counts, ["media"], identity=sha256(identity + b"media").digest())
        if self._apart:
            write_metadataset(self.build, splits, with_media=self._media_index is not None, subflavors=self._subflavors)
        return len(shards) + len(self._media_tars.counts)
