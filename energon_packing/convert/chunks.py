"""The files that a conversion reads, pieces of them, and records: what its first process and its workers exchange."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from energon_packing.errors import SampleRejected, UserError, read_again, said_of_system
from energon_packing.remote_files import digest, file_digest, listed, matches, remote_address, shown, status


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberBytes:
    """The place of a file in a tar: path of the tar, name of the member, bytes before its content and of it."""

    path: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        return read_again(self.path, self._read)

    def _read(self) -> bytes:
        with open(self.path, "rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of records."""

    path: Path  # where it is on this machine, once it is fetched
    name: str  # its path in reports, relative to the directory that was named; unique in a conversion
    origin: int  # index into `ConvertConfig.sources`
    size: int = 0  # bytes
    address: str | None = None  # of a file in an object store; None for one of this machine

    @property
    def place(self) -> str:
        """The address, or the absolute path."""
        return self.address or str(self.path.absolute())


@dataclass(kw_only=True, slots=True)  # made for every record; a frozen one takes four times as long
class RawRecord:
    """One record as it is in its file."""

    source: SourceFile
    number: int  # line of a JSON Lines file, from 1; index in an array, from 0
    where: str  # ``name:line`` or ``name[index]``, for a reader
    value: Any  # value and error: the parsed JSON, or None and why it could not be parsed
    error: SampleRejected | None = None
    # Of a record in a tar, the files beside it, by each name that it may use.
    members: Mapping[str, MemberBytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # names of oddities of the form in which the file holds it


LINES = ("lines", "text")
Form = Literal["lines", "text", "array", "object", "rows", "cells", "samples", "yielded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Records of one file that follow each other, to be parsed elsewhere."""

    source: SourceFile
    # How the records are written: ``text`` is a document per line, ``rows`` are those of a table, ``cells`` those of
    # CSV and TSV, ``samples`` those of a tar, ``yielded`` those that a reader made.
    form: Form
    # start and end: their bytes in the file, unpacked; the brackets of an array are left out. Of a table, its rows; of
    # a tar, nothing but progress.
    start: int = 0
    end: int = 0
    first: int = 0  # number of the first record: line of a JSON Lines file, from 1; index in an array, from 0
    # In place of records, why the one at `first` and all that follow cannot be told apart.
    error: SampleRejected | None = None
    position: int = -1  # bytes of the file up to the end of the chunk, where they are not `end`; for progress alone
    path: Path | None = None  # of the file that holds the bytes; None for the source itself, which is not compressed
    samples: tuple[tuple[str, tuple[MemberBytes, ...]], ...] = ()  # name of each sample of a tar, and its members
    yielded: tuple[bytes, ...] = ()  # the pickle of each record that a reader made

    def where(self, number: int) -> str:
        """Where the record of this number is, for a reader."""
        return f"{self.source.name}:{number}" if self.form in LINES else f"{self.source.name}[{number}]"

    def record(self, number: int, value: Any, note: str = "", **more: Any) -> RawRecord:
        """The record of this number; the note follows its place."""
        return RawRecord(source=self.source, number=number, where=self.where(number) + note, value=value, **more)

    def broken(self, number: int, detail: str, reason: str = "bad_json", note: str = "") -> RawRecord:
        """The record of this number, which cannot be read."""
        return self.record(number, None, note, error=SampleRejected(reason, f"{self.where(number)}{note}: {detail}"))


def one_line(error: BaseException) -> str:
    """The message of an exception, short and without line breaks."""
    return " ".join((str(error) or type(error).__name__).split())[:300]


_SMALLEST_CHUNK, _LARGEST_CHUNK = 1 << 12, 1 << 19
_SHORT, _LONG = 0.05, 0.5
"""Seconds for a chunk below which chunks grow, and above which they shrink. Media take far longer than text."""


ChunkBytes = Callable[[], int]


class ChunkSize:
    """Bytes of the next chunk: few at first, then what takes a worker a moment. A `ChunkBytes`."""

    size = _SMALLEST_CHUNK

    def __call__(self) -> int:
        return self.size

    def learn(self, seconds: float) -> None:
        wanted = 2 * self.size if seconds < _SHORT else self.size // 2 if seconds > _LONG else self.size
        self.size = min(max(wanted, _SMALLEST_CHUNK), _LARGEST_CHUNK)


JSON_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson"})
TEXT_SUFFIX = ".txt"
"""Of files whose lines are documents; they are read only where they are named, never in a directory."""
TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TAR_SUFFIX = ".tar"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_SUFFIXES = tuple(
    {*TABLE_SUFFIXES, TAR_SUFFIX, ".tgz"}
    | {suffix + packed for suffix in (*JSON_SUFFIXES, *DELIMITERS, TAR_SUFFIX) for packed in ("", *COMPRESSIONS)}
)
_KINDS = "JSON, JSON Lines, CSV, TSV, Parquet, Arrow or tar"
_ARCHIVES = frozenset({".zip", ".7z", ".rar", ".bz2", ".xz", ".lz4"})
_EMPTY = "is empty; it should hold conversations as a JSON array or as JSON Lines"
_OF_DATASETS = frozenset({"dataset_info.json", "state.json", "dataset_dict.json"})
"""Beside the tables of a saved Hugging Face data set; they hold no records."""


def suffix_of(path: Path) -> tuple[str, str | None]:
    """The suffix of a file's content, lower case, and how the file is compressed: None, ``gzip`` or ``zstd``."""
    if (suffix := path.suffix.lower()) == ".tgz":
        return TAR_SUFFIX, "gzip"
    compression = COMPRESSIONS.get(suffix)
    return (Path(path.stem).suffix.lower() if compression else suffix), compression


def find_sources(
    sources: tuple[Path, ...], *, exclude: tuple[Path, ...] = (), notes: list[str] | None = None
) -> list[SourceFile]:
    """The files to read, each once, in a fixed order (as named; inside a directory, and of a pattern, by path).
    ``sources`` are files, directories, and patterns with ``*``, ``?`` or ``[...]`` (``**`` for any depth), ``exclude``
    directories whose content is never a source, such as the output; ``notes`` receives a sentence about what a
    directory holds that is not read, and about files that have two names. Raises UserError: a path is missing, a
    directory holds no file of records, a named file is empty."""
    shut = [path.absolute().resolve() for path in exclude]

    def is_shut(path: Path) -> bool:
        return any(path.resolve().is_relative_to(directory) for directory in shut)

    files: list[SourceFile] = []
    names: set[str] = set()
    places: set[str] = set()
    left: list[str] = []
    again: list[str] = []
    for origin, source in enumerate(sources):
        remote = remote_address(source) is not None
        for path, name, size in _found_remote(source, left) if remote else _found(source, is_shut, left):
            address = remote_address(path) if remote else None
            if (place := address or os.path.realpath(path)) in places:
                again.append(shown(path))
                continue
            places.add(place)
            known_as = name if name not in names else address or str(path)  # in reports, which are UTF-8
            known_as = known_as.encode("utf-8", "backslashreplace").decode()  # the name of a file may be any bytes
            files.append(SourceFile(path=path, name=known_as, origin=origin, size=size, address=address))
            names.add(name)
    for found, what, why in ((left, "not read", _LEFT), (again, "read once", _AGAIN)):
        if found and notes is not None:
            shown_ones = ", ".join(map(repr, sorted(found)[:_MOST_LISTED])) + ", ..." * (len(found) > _MOST_LISTED)
            notes.append(f"{what}: {shown_ones} ({len(found):,} in all), {why}")
    return files


_LEFT = (
    "a link out of the named directory or to nothing, or no regular file, or a table of text beside other files; name "
    "what is to be read"
)
_AGAIN = "named before, by another path, pattern or link"
_MOST_LISTED = 5


@lru_cache(maxsize=256)
def hub_blobs(root: Path) -> Path | None:
    """Where the links of a snapshot of the Hugging Face cache lead, whose files are all links: ``REPO/blobs`` for a
    resolved directory ``REPO/snapshots/REVISION`` or one in it; None for any other."""
    repository = next((path.parent for path in (root, *root.parents) if path.name == "snapshots"), None)
    return None if repository is None or not (repository / "blobs").is_dir() else repository / "blobs"


def _found_remote(source: Path, left: list[str]) -> list[tuple[Path, str, int]]:
    address, place = str(remote_address(source)), shown(source)
    with said_of_system(f"{place} cannot be read"):
        if (file := status(address)) is not None:
            if file.size == 0:
                raise UserError(f"{place} {_EMPTY}")
            return [(source, source.name, file.size)]
        if glob.has_magic(address):
            found = [(Path(it), it.rpartition("/")[2], file.size) for it in matches(address) if (file := status(it))]
        else:
            sizes = {Path(name): file.size for name, file in listed(address)}
            found = [
                (source / path, path.as_posix(), sizes[path])
                for path in sorted(sizes)
                if _has_records(path) and not (path.name in _OF_DATASETS and _is_saved_dataset(path.parent, sizes))
            ]
            found = _without_tables(found, left)
    if not found:
        raise UserError(f"{place} does not exist, or has no {_KINDS} file; name a file, or a directory of such files")
    return found


def _walk(source: Path, left: list[str]) -> Iterator[Path]:
    """The files with the suffix of records in a directory, also behind links that stay in it; others are ``left``."""
    root = source.resolve()
    allowed = [root, *filter(None, [hub_blobs(root)])]
    followed = {root}

    def leads_out(path: Path) -> bool:
        if any(path.resolve().is_relative_to(place) for place in allowed):
            return False
        left.append(str(path))
        return True

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror or error}") from error

    for directory, folders, names in os.walk(source, onerror=refuse, followlinks=True):
        for folder in sorted(folders):
            path = Path(directory, folder)
            if folder.startswith("."):
                folders.remove(folder)
            elif path.is_symlink():
                # What is not hidden is found at its own place.
                if leads_out(path) or (real := path.resolve()) in followed or not _is_hidden(real, root):
                    folders.remove(folder)
                else:
                    followed.add(real)
        for path in (Path(directory, name) for name in names if name.lower().endswith(_SUFFIXES)):
            if _has_records(path.relative_to(source)) and not leads_out(path):
                if path.is_file():
                    yield path
                else:
                    left.append(str(path))


def _found(source: Path, is_shut: Callable[[Path], bool], left: list[str]) -> list[tuple[Path, str, int]]:
    """The files of one source, their names in reports, and their bytes."""
    if not source.exists() and glob.has_magic(str(source)):
        matching = [path for path in sorted(map(Path, glob.glob(str(source), recursive=True))) if not is_shut(path)]
        if not matching:
            raise UserError(f"{source} matches no file; name a {_KINDS} file, or a directory of such files")
        return [
            (path, f"{match.name}/{name}" if match.is_dir() else name, size)
            for match in matching
            for path, name, size in _found(match, is_shut, left)
        ]
    if source.is_dir():
        found = [
            (path, path.relative_to(source).as_posix(), path.stat().st_size)
            for path in sorted(_walk(source, left))
            if not (path.name in _OF_DATASETS and _is_saved_dataset(path.parent, path.parent.iterdir()))
            and not is_shut(path)
        ]
        if not found:
            why = f" ({left[-1]!r} leads out of it, or is no file)" if left else ""
            raise UserError(f"{source} has no {_KINDS} file{why}; name the file of conversations")
        return _without_tables(found, left)
    if source.is_file():
        if source.suffix.lower() in _ARCHIVES:
            raise UserError(f"{source} is an archive of a kind that is not read; unpack it, and name its files")
        if (size := source.stat().st_size) == 0:
            raise UserError(f"{source} {_EMPTY}")
        return [(source, source.name, size)]
    what = "is neither a file nor a directory" if source.exists() else "does not exist"
    raise UserError(f"{source} {what}; name a {_KINDS} file, or a directory of such files")


def _without_tables(found: list[tuple[Path, str, int]], left: list[str]) -> list[tuple[Path, str, int]]:
    """The files of a directory. A table of text beside conversations describes them (an author's metadata.csv, a
    labels.tsv), and is ``left``."""
    others = [entry for entry in found if suffix_of(entry[0])[0] not in DELIMITERS]
    left += [shown(path) for path, *_ in set(found).difference(others)] if others else []
    return others or found


def _has_records(path: Path) -> bool:
    """Whether a file with this path in a named directory is read: its suffix says so, and no part of it is hidden."""
    return path.name.lower().endswith(_SUFFIXES) and not _is_hidden(path)


def _is_hidden(path: Path, root: Path = Path()) -> bool:
    return path.is_relative_to(root) and any(part.startswith(".") for part in path.relative_to(root).parts)


def _is_saved_dataset(directory: Path, files: Iterable[Path]) -> bool:
    """Whether `datasets.Dataset.save_to_disk`, or that of a dictionary of data sets, has written a directory that holds
    these files (others may be among them)."""
    beside = [path.name for path in files if path.parent == directory]
    return "dataset_dict.json" in beside or ("state.json" in beside and any(n.endswith(".arrow") for n in beside))


def source_digest(source: SourceFile) -> str:
    """SHA-256 of a file, hexadecimal."""
    with said_of_system(f"{source.place} cannot be read"):
        return file_digest(source.path) if source.address is None else digest(source.address)
