"""Streams records from JSON arrays and JSON Lines files, one `RawRecord` per record, including broken ones.

A file is never held in memory as a whole: a 2 GB array takes as much memory as its largest record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from energon_packing.convert.json_array import iterate_array
from energon_packing.errors import SampleRejected, UserError

SUFFIXES = frozenset({".json", ".jsonl", ".ndjson"})
_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of records.

    Attributes:
        path: where it is.
        name: its path in reports, relative to the directory that was named; unique in a conversion.
        origin: index into `ConvertConfig.sources`.
    """

    path: Path
    name: str
    origin: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRecord:
    """One record as it is in its file.

    Attributes:
        source: the file.
        number: line of a JSON Lines file, from 1; index in an array, from 0.
        where: ``name:line`` or ``name[index]``, for a reader.
        value: the parsed JSON; None if `error` is set.
        error: why it could not be parsed.
        position: bytes of the file read so far, for progress.
    """

    source: SourceFile
    number: int
    where: str
    value: Any
    error: SampleRejected | None = None
    position: int = 0


def find_sources(sources: tuple[Path, ...], *, exclude: tuple[Path, ...] = ()) -> list[SourceFile]:
    """The files to read, in a fixed order (as named; inside a directory by path).

    Args:
        sources: files and directories.
        exclude: directories whose content is never a source, such as the output.

    Raises:
        UserError: a path is missing, a directory holds no JSON file, a named file is empty.
    """
    shut = [path.absolute().resolve() for path in exclude]
    files: list[SourceFile] = []
    names: set[str] = set()
    for origin, source in enumerate(sources):
        if source.is_dir():
            found = sorted(path for path in source.rglob("*") if _is_source(path, source, shut))
            if not found:
                raise UserError(f"{source} has no .json, .jsonl or .ndjson file; name the file of conversations")
            pairs = [(path, path.relative_to(source).as_posix()) for path in found]
        elif source.is_file():
            if source.stat().st_size == 0:
                raise UserError(f"{source} is empty; it should hold conversations as a JSON array or as JSON Lines")
            pairs = [(source, source.name)]
        elif source.exists():
            raise UserError(f"{source} is neither a file nor a directory")
        else:
            raise UserError(f"{source} does not exist; name a JSON or JSON Lines file, or a directory of such files")
        for path, name in pairs:
            files.append(SourceFile(path=path, name=name if name not in names else str(path), origin=origin))
            names.add(name)
    return files


def _is_source(path: Path, root: Path, shut: list[Path]) -> bool:
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        return False
    if any(part.startswith(".") for part in path.relative_to(root).parts):
        return False
    real = path.resolve()
    return real.is_relative_to(root.resolve()) and not any(real.is_relative_to(directory) for directory in shut)


def content_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_records(source: SourceFile, *, max_record_bytes: int) -> Iterator[RawRecord]:
    """Yields every record of a file in order; a broken one has `RawRecord.error` set, and reading continues if it can.

    A JSON array that breaks off yields one error at that place, because later elements cannot be separated.

    Raises:
        UserError: the file cannot be opened.
    """
    try:
        with source.path.open("rb") as stream:
            yield from _read_stream(source, stream, max_record_bytes)
    except OSError as error:
        raise UserError(f"{source.path} cannot be read: {error.strerror or error}") from error


def _read_stream(source: SourceFile, stream: BinaryIO, max_record_bytes: int) -> Iterator[RawRecord]:
    head = stream.read(3)
    if head[:2] in _UTF16_BOMS:
        yield _broken(source, 0, f"{source.name}:1", "the file is UTF-16; save it as UTF-8", 0)
        return
    start = len(_BOM) if head == _BOM else 0
    stream.seek(start)
    first = _first_character(stream)
    stream.seek(start)
    if first == b"":
        yield _broken(source, 0, source.name, "the file is empty", 0, reason="empty_file")
    elif first == b"[":
        stream.seek(start)
        yield from _read_array(source, stream, max_record_bytes)
    elif source.path.suffix.lower() == ".json" and not _has_whole_line(stream, max_record_bytes):
        stream.seek(start)
        yield from _read_object(source, stream, max_record_bytes)
    else:
        stream.seek(start)
        yield from _read_lines(source, stream, max_record_bytes)


def _first_character(stream: BinaryIO) -> bytes:
    while block := stream.read(4096):
        if stripped := block.lstrip(b" \t\r\n"):
            return stripped[:1]
    return b""


def _has_whole_line(stream: BinaryIO, limit: int) -> bool:
    """Whether one of the first two lines is a complete JSON object: JSON Lines in a file with the suffix ``.json``.

    Two lines are checked because the first may be broken; in an indented object neither is complete.
    """
    lines = 0
    while lines < 2 and (line := stream.readline(limit)):
        if not line.strip():
            continue
        lines += 1
        try:
            if isinstance(json.loads(line), dict):
                return True
        except (ValueError, RecursionError):
            continue
    return False


def _read_array(source: SourceFile, stream: BinaryIO, max_record_bytes: int) -> Iterator[RawRecord]:
    for number, element in enumerate(iterate_array(stream, max_element=max_record_bytes)):
        where = f"{source.name}[{number}]"
        if element.error is None:
            yield RawRecord(source=source, number=number, where=where, value=element.value, position=stream.tell())
        else:
            lost = "; nothing after it was read" if element.last else ""
            yield _broken(source, number, where, element.error + lost, stream.tell())


def _read_object(source: SourceFile, stream: BinaryIO, max_record_bytes: int) -> Iterator[RawRecord]:
    where = f"{source.name}[0]"
    text = stream.read(max_record_bytes + 1)
    if len(text) > max_record_bytes:
        detail = f"one JSON object of more than {max_record_bytes} bytes; expected an array of records or JSON Lines"
        yield _broken(source, 0, where, detail, len(text), reason="record_too_large")
        return
    yield _parsed(source, 0, where, text, stream.tell())


def _read_lines(source: SourceFile, stream: BinaryIO, max_record_bytes: int) -> Iterator[RawRecord]:
    number = 0
    while line := stream.readline(max_record_bytes + 1):
        number += 1
        where = f"{source.name}:{number}"
        if len(line) > max_record_bytes:
            while line and not line.endswith(b"\n"):
                line = stream.readline(1 << 20)
            detail = f"the line is longer than {max_record_bytes} bytes"
            yield _broken(source, number, where, detail, stream.tell(), reason="record_too_large")
        elif line.strip():
            yield _parsed(source, number, where, line, stream.tell())


def _parsed(source: SourceFile, number: int, where: str, text: bytes, position: int) -> RawRecord:
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return _broken(source, number, where, _one_line(error), position)
    return RawRecord(source=source, number=number, where=where, value=value, position=position)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _broken(
    source: SourceFile, number: int, where: str, detail: str, position: int, *, reason: str = "bad_json"
) -> RawRecord:
    error = SampleRejected(reason, f"{where}: {detail}")
    return RawRecord(source=source, number=number, where=where, value=None, error=error, position=position)


def _one_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return " ".join(text.split())[:300]
