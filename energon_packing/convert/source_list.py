"""The files of records that a conversion reads: named ones, and those in directories and patterns."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from energon_packing.convert.chunks import SourceFile
from energon_packing.errors import UserError
from energon_packing.remote_files import digest, listed, matches, remote_address, shown, status

JSON_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson"})
TEXT_SUFFIX = ".txt"
"""Of files whose lines are documents; they are read only where they are named, never in a directory."""
TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})
TAR_SUFFIX = ".tar"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_SHORT = {".tgz": ".tar.gz"}
_SUFFIXES = tuple(
    {*TABLE_SUFFIXES, TAR_SUFFIX, *_SHORT}
    | {suffix + compression for suffix in (*JSON_SUFFIXES, TAR_SUFFIX) for compression in ("", *COMPRESSIONS)}
)
_KINDS = "JSON, JSON Lines, Parquet, Arrow or tar"
_OF_DATASETS = frozenset({"dataset_info.json", "state.json", "dataset_dict.json"})
"""Beside the tables of a saved Hugging Face data set; they hold no records."""


def suffix_of(path: Path) -> tuple[str, str | None]:
    """The suffix of a file's content, lower case, and how the file is compressed: None, ``gzip`` or ``zstd``."""
    suffix = path.suffix.lower()
    path = path.with_suffix(_SHORT[suffix]) if suffix in _SHORT else path
    compression = COMPRESSIONS.get(path.suffix.lower())
    return (Path(path.stem).suffix.lower() if compression else suffix), compression


def find_sources(sources: tuple[Path, ...], *, exclude: tuple[Path, ...] = ()) -> list[SourceFile]:
    """The files to read, in a fixed order (as named; inside a directory, and of a pattern, by path).

    Args:
        sources: files, directories, and patterns with ``*``, ``?`` or ``[...]`` (``**`` for any depth).
        exclude: directories whose content is never a source, such as the output.

    Raises:
        UserError: a path is missing, a directory holds no file of records, a named file is empty.
    """
    shut = [path.absolute().resolve() for path in exclude]
    files: list[SourceFile] = []
    names: set[str] = set()
    for origin, source in enumerate(sources):
        remote = remote_address(source) is not None
        for path, name, size in _found_remote(source) if remote else _found(source, shut):
            address = remote_address(path) if remote else None
            known_as = name if name not in names else address or str(path)
            # Reports are UTF-8, and the name of a file may be any bytes.
            known_as = known_as.encode("utf-8", "backslashreplace").decode()
            files.append(SourceFile(path=path, name=known_as, origin=origin, size=size, address=address))
            names.add(name)
    return files


def _found_remote(source: Path) -> list[tuple[Path, str, int]]:
    """`_found` for an address."""
    address = shown(source)
    try:
        if (file := status(address)) is not None:
            if file.size == 0:
                raise UserError(f"{address} is empty; it should hold conversations as a JSON array or as JSON Lines")
            return [(source, source.name, file.size)]
        if glob.has_magic(address):
            files = [(each, each.rpartition("/")[2], status(each)) for each in matches(address)]
            found = [(Path(each), name, file.size) for each, name, file in files if file is not None]
        else:
            sizes = {Path(name): file.size for name, file in listed(address)}
            found = [
                (source / path, path.as_posix(), sizes[path])
                for path in sorted(sizes)
                if _has_records(path) and not (path.name in _OF_DATASETS and _is_saved_dataset(path.parent, sizes))
            ]
    except OSError as error:
        raise UserError(f"{address} cannot be read: {error.strerror or error}") from error
    if not found:
        raise UserError(f"{address} does not exist, or has no {_KINDS} file; name a file, or a directory of such files")
    return found


def _found(source: Path, shut: list[Path]) -> list[tuple[Path, str, int]]:
    """The files of one source, their names in reports, and their bytes."""
    if not source.exists() and glob.has_magic(str(source)):
        found_matches = sorted(Path(match) for match in glob.glob(str(source), recursive=True))
        found_matches = [path for path in found_matches if not _is_shut(path.resolve(), shut)]
        if not found_matches:
            raise UserError(f"{source} matches no file; name a {_KINDS} file, or a directory of such files")
        return [
            (path, f"{match.name}/{name}" if match.is_dir() else name, size)
            for match in found_matches
            for path, name, size in _found(match, shut)
        ]
    if source.is_dir():
        root = source.resolve()
        paths = {path.relative_to(source): path for path in _named_like_records(source)}
        found = [
            (path, name.as_posix(), path.stat().st_size)
            for name, path in sorted(paths.items(), key=lambda each: each[1])
            if _has_records(name)
            and path.is_file()
            and not (path.name in _OF_DATASETS and _is_saved_dataset(path.parent, path.parent.iterdir()))
            and path.resolve().is_relative_to(root)
            and not _is_shut(path.resolve(), shut)
        ]
        if not found:
            suffixes = ".json, .jsonl, .ndjson, .parquet, .arrow or .tar"
            raise UserError(f"{source} has no {suffixes} file; name the file of conversations")
        return found
    if source.is_file():
        if (size := source.stat().st_size) == 0:
            raise UserError(f"{source} is empty; it should hold conversations as a JSON array or as JSON Lines")
        return [(source, source.name, size)]
    if source.exists():
        raise UserError(f"{source} is neither a file nor a directory")
    raise UserError(f"{source} does not exist; name a {_KINDS} file, or a directory of such files")


def _named_like_records(root: Path) -> Iterator[Path]:
    """The files below a directory whose suffix is one of records; there may be millions of images beside them."""
    for directory, _, names in os.walk(root):
        for name in names:
            if name.lower().endswith(_SUFFIXES):
                yield Path(directory, name)


def _has_records(path: Path) -> bool:
    """Whether a file with this path in a named directory is read: its suffix says so, and no part of it is hidden."""
    suffix, compression = suffix_of(path)
    table = compression is None and suffix in TABLE_SUFFIXES
    read = table or suffix == TAR_SUFFIX or suffix in JSON_SUFFIXES
    return read and not any(part.startswith(".") for part in path.parts)


def _is_shut(real: Path, shut: list[Path]) -> bool:
    return any(real.is_relative_to(directory) for directory in shut)


def _is_saved_dataset(directory: Path, files: Iterable[Path]) -> bool:
    """Whether `datasets.Dataset.save_to_disk`, or that of a dictionary of data sets, has written a directory.

    Args:
        directory: of the data set.
        files: all of them, and perhaps others.
    """
    beside = [path.name for path in files if path.parent == directory]
    return "dataset_dict.json" in beside or ("state.json" in beside and any(n.endswith(".arrow") for n in beside))


def source_digest(source: SourceFile) -> str:
    """SHA-256 of a file, hexadecimal."""
    if source.address is not None:
        try:
            return digest(source.address)
        except OSError as error:
            raise UserError(f"{source.address} cannot be read: {error.strerror or error}") from error
    return content_digest(source.path)


def content_digest(path: Path) -> str:
    """SHA-256 of a file of this machine, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
