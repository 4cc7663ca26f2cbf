"""The data sets that offline commands read: parts with their shards, the positions of records and media in their tars
from the index that Energon keeps, and the bytes there.
"""

import contextlib
import functools
import itertools
import json
import os
import os.path
import re
import sqlite3
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from megatron.energon import CrudeSample
from megatron.energon.cache import FileStore

from energon_packing.convert.layout import INFO_FILE, MEDIA_AUX, META_DIRECTORY
from energon_packing.errors import UserError, read_again
from energon_packing.offline.index import DEFAULT_KIND
from energon_packing.remote_files import PIECE_BYTES, describe, index_file, meta_text, read_range, remote_address, shown
from energon_packing.sample_kind import KINDS, kind_of_subflavors
from energon_packing.validate.looks.data import REMOTE, DataLooks, look_at_data

MOST_OPEN = 128  # open tars of one process. Opening one costs some microseconds, so a small number does no harm
MOST_EXPECTED, MOST_BYTES = 4096, 1 << 28
"""Files, and their bytes, that the kernel is told to read before they are asked for."""
_NEAR = 1 << 16  # bytes between two pieces that count as following each other
THREADS = 16  # requests to object stores that one process has under way
PACKS_AHEAD, MOST_AHEAD = 8, 1 << 26
"""Packs for which a process reads ahead from object stores, with the next one; it begins none while it holds that many
bytes for others."""
GAP = 1 << 18
"""Bytes between two ranges that are read in one request: at 100 MB/s a twelfth of the 30 ms that one more takes."""
Place = tuple[Path, int, int]
"""A file, and the first byte and the bytes of a range in it."""


@functools.lru_cache(maxsize=1 << 14)
def inside(root: Path, name: str) -> Path:
    """The path of a shard that a file of ours names; a UserError if the name leaves its directory, as no file of ours
    does."""
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise UserError(f"{name!r} is not a name of a shard in {root}; measure and plan again")
    return root / name


@dataclass(slots=True, eq=False)
class _Piece:
    """A range of a file that is read in one request."""

    owner: Any  # pack that needs it
    address: str
    start: int
    stop: int
    left: int  # bytes that are still to be handed out
    future: "Future[bytes]"


class _RemotePieces:
    """Reads pieces of files in object stores, where a thousand records take no longer than one: what is announced, by
    threads and neighbours in one request; else more than is asked for, where pieces follow each other. What fails in
    a thread is read once more when it is asked for, and fails there."""

    def __init__(self) -> None:
        self._address = ""
        self._start = 0
        self._ahead = b""
        self._end = -1  # of the piece before
        self.process, self.held = os.getpid(), 0
        self._pieces: dict[str, list[_Piece]] = {}
        self._looks: dict[tuple[Path, Any], Future[Any]] = {}

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(THREADS)
        # Where any process ends, too, before it waits for threads: they would read all that the store was asked for.
        end = Finalize(self, pool.shutdown, kwargs={"wait": False, "cancel_futures": True}, exitpriority=0)
        threading._register_atexit(end)  # type: ignore[attr-defined]
        return pool

    def start(self, owner: Any, places: Iterable[Place]) -> None:
        """Reads ranges for `owner`, those that are not under way for another one, with which it shares them then. Each
        is handed out once; name it twice for two."""
        joined: list[tuple[str, int, int, int]] = []
        for path, begin, size in sorted(places):
            if (address := remote_address(path)) is None:
                continue
            while size > 0 and (piece := self._find(address, begin)):
                part = min(size, piece.stop - begin)
                if owner is not None:  # else it is what a pack needs now, for which it was read
                    piece.owner, piece.left = owner, piece.left + part
                begin, size = begin + part, size - part
            if size <= 0:
                continue
            other, first, stop, left = joined[-1] if joined else ("", 0, 0, 0)
            end = max(stop, begin + size)
            if address == other and begin - stop <= GAP and end - first <= PIECE_BYTES:
                joined[-1] = address, first, end, left + size
            else:
                edges = itertools.pairwise([*range(begin, begin + size, PIECE_BYTES), begin + size])
                joined += ((address, *edge, edge[1] - edge[0]) for edge in edges)
        for address, first, stop, left in joined:
            future = self._pool.submit(read_range, address, first, stop - first)
            self._pieces.setdefault(address, []).append(_Piece(owner, address, first, stop, left, future))
            self.held += stop - first

    def ready(self, places: Iterable[Place]) -> bool:
        """Whether these ranges have been read, and more may be."""
        pieces = [self._find(address, at) for path, at, _ in places if (address := remote_address(path))]
        done = all(each is None or (each.future.done() and not each.future.exception()) for each in pieces)
        return done and self.held < MOST_AHEAD

    def forget(self, of: Callable[[Any], bool]) -> None:
        """Drops what was read for some owners, and not asked for."""
        for piece in [each for some in self._pieces.values() for each in some if of(each.owner)]:
            self._drop(piece)

    def look(self, path: Path, look: Callable[[Path], Any]) -> None:
        """Asks for what `looked` will return."""
        if remote_address(path) is not None and (path, look) not in self._looks:
            self._looks[path, look] = self._pool.submit(look, path)

    def looked[Found](self, path: Path, look: Callable[[Path], Found]) -> Found:
        """What `look` says of a file. Raises as it."""
        with contextlib.suppress(Exception):  # also where nobody asked
            return cast(Found, self._looks.pop((path, look)).result())
        return read_again(path, functools.partial(look, path))

    def read(self, address: str, offset: int, size: int) -> bytes:
        """As many of these bytes as there are. Raises OSError: they cannot be read."""
        parts = []
        while size > 0 and (piece := self._find(address, offset)):
            part = b""
            with contextlib.suppress(Exception):
                part = piece.future.result()[offset - piece.start :][:size]
            piece.left -= len(part)
            if piece.left <= 0 or not part:
                self._drop(piece)
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts if size <= 0 else [*parts, self._read_now(address, offset, size)])

    def _find(self, address: str, offset: int) -> _Piece | None:
        return next((each for each in self._pieces.get(address, ()) if each.start <= offset < each.stop), None)

    def _drop(self, piece: _Piece) -> None:
        (some := self._pieces[piece.address]).remove(piece)
        if not some:
            del self._pieces[piece.address]
        piece.future.cancel()
        self.held -= piece.stop - piece.start

    def _read_now(self, address: str, offset: int, size: int) -> bytes:
        follows = address == self._address and 0 <= offset - self._end <= _NEAR
        start = offset - self._start
        if address != self._address or start < 0 or start + size > len(self._ahead):
            self._ahead = read_range(address, offset, max(size, PIECE_BYTES) if follows else size)
            self._address, self._start, start = address, offset, 0
        self._end = offset + size
        return self._ahead[start : start + size]


class TarFiles:
    """Open tars, the least recently used closed first; of tars in object stores, pieces are read
    (`energon_packing.remote_files`). Not for several threads; a fork has descriptors and threads of its own."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._remote = _RemotePieces()
        self.expected: deque[Place] = deque(maxlen=MOST_EXPECTED)

    @property
    def remote(self) -> _RemotePieces:
        """The pieces of files in object stores."""
        if self._remote.process != os.getpid():  # whose threads are not in this fork
            self._remote = _RemotePieces()
        return self._remote

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Returns `size` bytes of `path` from byte `offset` on. Raises UserError: the file is missing, unreadable, or
        ends before that."""
        try:
            content = self.content(path, offset, size)
        except OSError as error:
            raise UserError(f"{shown(path)} cannot be read: {error.strerror or error}; put the shard back") from error
        if len(content) != size:
            raise UserError(f"{shown(path)} ends before byte {offset + size}; the shard changed since it was measured")
        return content

    def content(self, path: Path, offset: int, size: int) -> bytes:
        """As many of these bytes as there are. Raises OSError: they cannot be read."""
        if (address := remote_address(path)) is not None:
            return self.remote.read(address, offset, size)
        return read_again(path, lambda: self._some(path, offset, size), lambda: self._forget(path))

    def expect(self) -> None:
        """Lets the kernel, or threads, read what is `expected`, places of media, in the order of the files, several at
        a time."""
        room = MOST_BYTES
        some = [place for place in sorted(self.expected) if place[2] <= room and (room := room - place[2]) >= 0]
        self.expected.clear()
        self.remote.forget(lambda owner: owner is None)
        self.remote.start(None, some)
        for path, offset, size in some:
            if remote_address(path) is None:
                with contextlib.suppress(OSError):  # reading it tells more
                    os.posix_fadvise(self._descriptor(path), offset, size, os.POSIX_FADV_WILLNEED)

    def _some(self, path: Path, offset: int, size: int) -> bytes:
        content = more = os.pread(self._descriptor(path), size, offset)
        while more and len(content) < size:  # a signal, or a file system that reads less at a time
            more = os.pread(self._descriptor(path), size - len(content), offset + len(content))
            content += more
        return content

    def _forget(self, path: Path) -> None:
        """Closes a file that failed; the next read opens it again."""
        if (descriptor := self._open.pop(path, None)) is not None:
            os.close(descriptor)

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            while len(self._open) >= MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(path)
        return self._open[path]


RECORD_PART = "json"  # part of a sample that holds its record
# As Energon divides a member's name into the sample's key and the part: at the first dot of the last component.
_KEY_AND_PART = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_RECORDS = f"""
    SELECT s.sample_key, p.content_byte_offset, p.content_byte_size FROM samples s
    LEFT JOIN sample_parts p
        ON p.tar_file_id = s.tar_file_id AND p.sample_index = s.sample_index AND p.part_name = '{RECORD_PART}'
    WHERE s.tar_file_id = ? ORDER BY s.sample_index
"""
_POSITION = """
    SELECT p.tar_file_id, p.content_byte_offset, p.content_byte_size FROM samples s
    JOIN sample_parts p ON p.tar_file_id = s.tar_file_id AND p.sample_index = s.sample_index
    WHERE s.sample_key = ? AND p.part_name = ?
"""


class Position(NamedTuple):
    """Where a file lies: number of its tar in the data set, its first byte there, and its bytes."""

    shard: int
    offset: int
    size: int


def has_moved(root: Path) -> bool:
    """Whether a data set or metadataset is not at its path here, though no file system is missing: the last directory
    that is left of the path holds something. Raises OSError: it cannot be looked at."""
    if remote_address(root) is not None or os.path.isfile(root):
        return False
    left = real = os.path.realpath(root)
    while True:
        try:
            with os.scandir(left) as entries:
                return left != real and next(entries, None) is not None
        except (FileNotFoundError, NotADirectoryError):
            left = os.path.dirname(left)
        except PermissionError:  # it may be an empty mount point
            return False


def check_there(roots: Iterable[str]) -> None:
    """Raises UserError: a data set has moved, so waiting for it is vain, or its place cannot be looked at."""
    for root in map(Path, dict.fromkeys(roots)):
        try:
            moved = read_again(root, functools.partial(has_moved, root))
        except OSError as error:
            raise UserError(f"{shown(root)} cannot be read ({error}); restore it") from error
        if moved:
            raise UserError(f"{shown(root)} is not there; restore it, or measure and plan the data set where it is now")


class ShardIndex:
    """``.nv-meta`` of the WebDataset at `root`, here or in an object store, opened to read. Raises UserError: it has no
    index that can be read."""

    def __init__(self, root: Path) -> None:
        meta = root / META_DIRECTORY
        self.root = root
        self.uuid = self.uuid_of(root)
        try:
            counts = json.loads(meta_text(root, INFO_FILE))["shard_counts"]
            look = "SELECT 1 FROM sample_parts LIMIT 1"
            read_again(meta, lambda: self._database.execute(look), lambda: vars(self).pop("_database", None))
        except (OSError, KeyError, ValueError, TypeError, sqlite3.Error) as error:
            raise UserError(f"{shown(meta)} cannot be read ({error}); run 'energon prepare {shown(root)}'") from error
        self._numbers = {name: number for number, name in enumerate(counts)}
        self.shards: tuple[str, ...] = tuple(counts)
        """Names of the tars, in the order of their numbers."""
        self.samples: dict[str, int] = {name: int(count) for name, count in counts.items()}
        """Name of each tar -> number of samples."""

    @functools.cached_property
    def _database(self) -> sqlite3.Connection:
        os.stat(file := index_file(self.root))  # says more than SQLite where it is not there
        return sqlite3.connect(f"file:{quote(str(file))}?mode=ro&immutable=1", uri=True)  # "#" and "?" would end it

    @staticmethod
    def uuid_of(root: Path) -> str:
        """The identifier of a data set's index; a UserError if it cannot be read."""
        file = root / META_DIRECTORY / "index.uuid"
        try:
            return meta_text(root, file.name).strip()
        except (OSError, ValueError) as error:
            check_there([str(root)])
            raise UserError(f"{shown(file)} cannot be read ({error}); restore it, or run 'energon prepare'") from error

    def records(self, shard: str) -> Iterator[tuple[str, int | None, int | None]]:
        """Key of each sample of a tar, in order, with offset and bytes of its record; None if it has no record."""
        yield from self._database.execute(_RECORDS, (self._numbers[shard],))

    def position(self, name: str) -> Position | None:
        """Where the file of a name lies; None if the data set has none."""
        parts = _KEY_AND_PART.match(name)
        row = self._database.execute(_POSITION, parts.groups()).fetchone() if parts else None
        return None if row is None else Position(*row)

    def media_metadata(self, name: str) -> Any:
        """Energon's metadata of an image or video. Raises KeyError: it has none for this name; RuntimeError: it has
        none at all."""
        from megatron.energon.media.metadata import deserialize_media_metadata

        try:
            row = self._database.execute(
                "SELECT metadata_type, metadata_json FROM media_metadata WHERE entry_key = ?", (name,)
            ).fetchone()
        except sqlite3.Error as error:
            vars(self).pop("_database", None)  # what failed is opened anew
            raise RuntimeError(f"{shown(self.root)} has no media metadata") from error
        if row is None:
            raise KeyError(name)
        return deserialize_media_metadata(*row)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePart:
    """A directory of shards whose records are conversations or clips, and the directory of their media."""

    path: str  # that the user named; absolute, or an address. `root` and `media_root` may be addresses, too
    split: str
    root: str  # directory of the shards
    media_root: str  # directory of the shards with the media; `root` itself for a monolithic data set
    shards: tuple[str, ...]  # names of the part's tars, in order
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    weight: float | None = None  # weight, repetitions: that a metadataset gives it, see `Leaf`
    repetitions: float | None = None

    def sample(self, key: str, record: bytes, store: FileStore[bytes]) -> Any:
        """Cooks a record as the loader does; a bad one carries its problem."""
        known = {"__key__": key, "__restore_key__": (), "__subflavors__": dict(self.subflavors), "__sources__": ()}
        kind = kind_of_subflavors(self.subflavors) or KINDS.find(DEFAULT_KIND)
        return kind.cook(CrudeSample({**known, "json": record}), store)


def source_parts(path: str | Path, split: str, kind: str = DEFAULT_KIND) -> list[SourcePart]:
    """The parts of a data set that ``convert`` wrote, or of a metadataset of such data sets, here or in an object
    store. Raises UserError: something is missing or damaged, or the samples are not of that kind."""
    with _described(path) as (description, there):
        return _parts(description, there, remote_address(path) or os.path.abspath(path), split, kind)


def kind_of_data(path: str | Path, split: str) -> str:
    """What the samples of a data set are; conversations if it does not say."""
    with _described(path) as (description, _):
        looks = _looks(description, split)
    kinds = (kind_of_subflavors(inspected.subflavors) for _, inspected in looks.readable)
    return next((kind.name for kind in kinds if kind is not None), DEFAULT_KIND)


@contextmanager
def _described(path: str | Path) -> Iterator[tuple[str, Callable[[str], str]]]:
    """What `look_at_data` takes of a data set, and the place of a directory that it names. Of a remote one that is a
    copy of its description, in place of which errors name the address."""
    if (address := remote_address(path)) is None:
        yield str(path), str
        return
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch).resolve() / "data"
        root = address.rpartition("/")[0] if address.endswith((".yaml", ".yml")) else address

        def there(place: str) -> str:  # a metadataset may also name one of this machine
            relative = os.path.relpath(place, here)
            return place if relative.startswith("..") else root if relative == "." else f"{root}/{relative}"

        try:
            yield str(describe(address, here)), there
        except UserError as error:
            raise UserError(str(error).replace(str(here), address)) from error


def _parts(path: str, there: Callable[[str], str], named: str, split: str, kind: str) -> list[SourcePart]:
    """The parts of a data set whose description is on this machine, at `path`, and which is `there`; the user named it
    `named`."""
    looks = _looks(path, split)
    if not looks.whole:
        raise UserError(f"{path} is not on this machine; offline commands read shards by position from a local path")
    parts = []
    for leaf, inspected in looks.readable:
        own = kind_of_subflavors(inspected.subflavors)
        if own is not None and own.name != kind:
            raise UserError(f"{leaf.path} holds {own.name}, but {kind} are expected here; see docs/offline.md, 'Clips'")
        if own is None or leaf.joined:
            what = f"{leaf.path} does not hold {kind} that 'energon-packing convert' wrote"
            raise UserError(f"{what}; offline commands read no other records")
        if leaf.subset:
            what = f"takes a subset of {leaf.path}, and offline commands read data sets whole"
            fix = "make the part a split of its own with 'energon-packing convert --split'"
            raise UserError(f"{leaf.named_in or path} {what}; {fix}")
        media = leaf.aux.get(MEDIA_AUX, leaf.path)
        if REMOTE in media:
            raise UserError(f"{leaf.path} keeps its media as files in {media}; convert it again, into shards")
        parts.append(
            SourcePart(
                path=named,
                split=leaf.split,
                root=there(os.path.abspath(leaf.path)),
                media_root=there(os.path.abspath(media)),
                shards=inspected.names,
                subflavors=inspected.subflavors,
                weight=leaf.weight,
                repetitions=leaf.repetitions,
            )
        )
    return parts


def _looks(path: str, split: str) -> DataLooks:
    looks = look_at_data(path, split, {"data.path": "DATASET", "data.split": "--split"}, {})
    for look in looks.looks:
        if look.outcome == "error":
            raise UserError(f"{look.why}; {look.fix}")
    return looks


class IndexedMedia(FileStore[bytes]):
    """Looks up media of one sample in the index of their shards; for measuring, so nothing is read from a tar. A name
    that begins with a dot continues the key of the sample."""

    def __init__(self, index: ShardIndex, key: str) -> None:
        self._index, self._key = index, key

    def _full(self, name: str) -> str:
        return self._key + name if name.startswith(".") else name

    def position(self, name: str) -> Position | None:
        """Where the file lies; None if it is missing."""
        return self._index.position(self._full(name))

    def __getitem__(self, key: str) -> tuple[bytes, Any]:
        raise KeyError(f"{key} is not read while samples are measured")

    def get_path(self) -> str:
        """The directory of the media."""
        return str(self._index.root)

    def get_media_metadata(self, key: str) -> Any:
        return self._index.media_metadata(self._full(key))


class PositionedMedia(FileStore[bytes]):
    """Reads media of one sample at positions that are known: name -> tar, offset, bytes. `metadata` gives Energon's
    metadata of a name, for records that lack sizes."""

    def __init__(self, files: TarFiles, positions: Mapping[str, tuple[Path, int, int]], metadata: Any = None) -> None:
        self._files, self._positions, self._metadata = files, positions, metadata
        files.expected.extend(positions.values())  # of all samples of a pack, before the first of them is rendered

    def __getitem__(self, key: str) -> tuple[bytes, Any]:
        if self._files.expected:
            self._files.expect()
        path, offset, size = self._positions[key]
        return self._files.read(path, offset, size), None

    def get_path(self) -> str:
        """No single directory holds them."""
        return ""

    def get_media_metadata(self, key: str) -> Any:
        """Energon's metadata, for records that lack sizes."""
        if self._metadata is None:
            raise RuntimeError("no media metadata")
        return self._metadata(key)
