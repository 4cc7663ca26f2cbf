"""Finds records in JSON arrays and JSON Lines files, and parses them, one `RawRecord` per record, broken ones included.

One process divides the files into chunks (`find_chunks`), any number of others parse them (`read_chunk`). A file is
never held in memory as a whole: a 2 GB array takes as much memory as its largest record.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from energon_packing.convert.json_array import iterate_array
from energon_packing.convert.json_values import parse_json, parse_quickly
from energon_packing.errors import SampleRejected, UserError

SUFFIXES = frozenset({".json", ".jsonl", ".ndjson"})
_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_AT_ONCE = 1 << 22
"""Bytes of lines that are read at once; a chunk has more only if it has a longer line."""


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


@dataclass(kw_only=True, slots=True)  # made for every record; a frozen one takes four times as long
class RawRecord:
    """One record as it is in its file.

    Attributes:
        source: the file.
        number: line of a JSON Lines file, from 1; index in an array, from 0.
        where: ``name:line`` or ``name[index]``, for a reader.
        value: the parsed JSON; None if `error` is set.
        error: why it could not be parsed.
    """

    source: SourceFile
    number: int
    where: str
    value: Any
    error: SampleRejected | None = None


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


Form = Literal["lines", "array", "object"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Records of one file that follow each other, to be parsed elsewhere.

    Attributes:
        source: the file.
        form: how the records are written.
        start, end: their bytes in the file; the brackets of an array are left out.
        first: number of the first record: line of a JSON Lines file, from 1; index in an array, from 0.
        error: in place of records, why the one at `first` and all that follow cannot be told apart.
    """

    source: SourceFile
    form: Form
    start: int
    end: int
    first: int
    error: SampleRejected | None = None


class DigestingReader:
    """Reads a file and computes the SHA-256 of all of it on the way."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.position = 0
        """Bytes read so far."""

    def read(self, size: int) -> bytes:
        """Reads up to ``size`` bytes; fewer at the end only."""
        return self._take(self._stream.read(size))

    def readline(self, size: int) -> bytes:
        """Reads to the end of the line, at most ``size`` bytes."""
        return self._take(self._stream.readline(size))

    def _take(self, block: bytes) -> bytes:
        self._digest.update(block)
        self.position += len(block)
        return block

    def hexdigest(self) -> str:
        """Reads what is left and returns the digest of the file."""
        while self.read(1 << 20):
            pass
        return self._digest.hexdigest()


def find_chunks(
    source: SourceFile,
    *,
    max_record_bytes: int,
    chunk_bytes: Callable[[], int],
    digest: Callable[[str], None] = lambda found: None,
) -> Iterator[Chunk]:
    """Divides a file into chunks; where they begin and end has no influence on their records.

    Args:
        source: the file.
        max_record_bytes: longest line, and longest element of an array in characters.
        chunk_bytes: how large the next chunk should be; it ends with a record.
        digest: called once with the SHA-256 of the file.

    Raises:
        UserError: the file cannot be opened.
    """
    try:
        with source.path.open("rb") as stream:
            form, start, error = _look(source, stream, max_record_bytes)
            stream.seek(0)
            reader = DigestingReader(stream)
            if error is not None:
                yield Chunk(source=source, form=form, start=0, end=0, first=0, error=error)
            else:
                reader.read(start)
                yield from _FIND[form](source, reader, max_record_bytes, chunk_bytes)
            digest(reader.hexdigest())
    except OSError as problem:
        raise UserError(f"{source.path} cannot be read: {problem.strerror or problem}") from problem


def _look(source: SourceFile, stream: BinaryIO, max_record_bytes: int) -> tuple[Form, int, SampleRejected | None]:
    """The form of a file, where its text begins, and why there is none to read."""
    head = stream.read(3)
    if head[:2] in _UTF16_BOMS:
        return "lines", 0, SampleRejected("bad_json", f"{source.name}:1: the file is UTF-16; save it as UTF-8")
    start = len(_BOM) if head == _BOM else 0
    stream.seek(start)
    first = _first_character(stream)
    stream.seek(start)
    if first == b"":
        return "lines", 0, SampleRejected("empty_file", f"{source.name}: the file is empty")
    if first == b"[":
        return "array", start, None
    if source.path.suffix.lower() == ".json" and not _has_whole_line(stream, max_record_bytes):
        return "object", start, None
    return "lines", start, None


def _find_lines(
    source: SourceFile, reader: DigestingReader, max_record_bytes: int, chunk_bytes: Callable[[], int]
) -> Iterator[Chunk]:
    number = 1
    start = reader.position
    while block := reader.read(chunk_bytes()):
        lines = block.count(b"\n")
        # A line of any length is passed over in pieces, never held.
        while not block.endswith(b"\n") and (block := reader.readline(1 << 18)):
            lines += block.endswith(b"\n")
        yield Chunk(source=source, form="lines", start=start, end=reader.position, first=number)
        number += lines
        start = reader.position


def _find_elements(
    source: SourceFile, reader: DigestingReader, max_record_bytes: int, chunk_bytes: Callable[[], int]
) -> Iterator[Chunk]:
    before = reader.position
    wanted = chunk_bytes()
    start: int | None = None
    first = end = number = 0
    error: SampleRejected | None = None
    for number, element in enumerate(iterate_array(reader, max_element=max_record_bytes, places=True)):
        if element.last:
            where = f"{source.name}[{number}]"
            error = SampleRejected("bad_json", f"{where}: {element.error}; nothing after it was read")
            break
        if start is None:
            start, first = element.start, number
        end = element.end
        if end - start >= wanted:
            yield Chunk(source=source, form="array", start=before + start, end=before + end, first=first)
            start, wanted = None, chunk_bytes()
    if start is not None:
        yield Chunk(source=source, form="array", start=before + start, end=before + end, first=first)
    if error is not None:
        yield Chunk(source=source, form="array", start=before + end, end=before + end, first=number, error=error)


def _find_object(
    source: SourceFile, reader: DigestingReader, max_record_bytes: int, chunk_bytes: Callable[[], int]
) -> Iterator[Chunk]:
    start = reader.position
    size = len(reader.read(max_record_bytes + 1))
    error: SampleRejected | None = None
    if size > max_record_bytes:
        detail = f"one JSON object of more than {max_record_bytes} bytes; expected an array of records or JSON Lines"
        error = SampleRejected("record_too_large", f"{source.name}[0]: {detail}")
    yield Chunk(source=source, form="object", start=start, end=start + size, first=0, error=error)


_FIND = {"lines": _find_lines, "array": _find_elements, "object": _find_object}


def read_chunk(chunk: Chunk, *, max_record_bytes: int) -> Iterator[RawRecord]:
    """Yields every record of a chunk in order; a broken one has `RawRecord.error` set.

    Raises:
        UserError: the file cannot be read.
    """
    source = chunk.source
    if chunk.error is not None:
        where = source.name if chunk.form == "lines" else f"{source.name}[{chunk.first}]"
        yield RawRecord(source=source, number=chunk.first, where=where, value=None, error=chunk.error)
        return
    try:
        with source.path.open("rb") as stream:
            stream.seek(chunk.start)
            if chunk.form == "lines":
                yield from _read_lines(chunk, stream, max_record_bytes)
                return
            text = stream.read(chunk.end - chunk.start)
    except OSError as error:
        raise UserError(f"{source.path} cannot be read: {error.strerror or error}") from error
    if chunk.form == "object":
        yield _parsed(source, 0, text)
        return
    # The search for chunks has checked the length of each element.
    text = b"[%b]" % text
    if (values := parse_quickly(text)) is not None:
        for number, value in enumerate(values, chunk.first):
            yield RawRecord(source=source, number=number, where=f"{source.name}[{number}]", value=value)
        return
    elements = iterate_array(io.BytesIO(text), max_element=sys.maxsize)
    for number, element in enumerate(elements, chunk.first):
        where = f"{source.name}[{number}]"
        if element.error is None:
            yield RawRecord(source=source, number=number, where=where, value=element.value)
        else:
            yield _broken(source, number, where, element.error)


def read_records(source: SourceFile, *, max_record_bytes: int, chunk_bytes: int = 1 << 18) -> Iterator[RawRecord]:
    """Yields every record of a file in order; a broken one has `RawRecord.error` set, and reading continues if it can.

    A JSON array that breaks off yields one error at that place, because later elements cannot be separated.

    Raises:
        UserError: the file cannot be read.
    """
    for chunk in find_chunks(source, max_record_bytes=max_record_bytes, chunk_bytes=lambda: chunk_bytes):
        yield from read_chunk(chunk, max_record_bytes=max_record_bytes)


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


def _read_lines(chunk: Chunk, stream: BinaryIO, max_record_bytes: int) -> Iterator[RawRecord]:
    source, left = chunk.source, chunk.end - chunk.start
    number = chunk.first - 1
    if left <= min(_AT_ONCE, max_record_bytes):
        lines = stream.read(left).split(b"\n")  # half of the time of reading them one by one
        for number, line in enumerate(lines, chunk.first):
            if line and not line.isspace():
                yield _parsed(source, number, line, line=True)
        return
    while left > 0 and (line := stream.readline(min(left, max_record_bytes + 1))):
        left -= len(line)
        number += 1
        if len(line) > max_record_bytes:
            while left > 0 and line and not line.endswith(b"\n"):
                line = stream.readline(min(left, 1 << 20))
                left -= len(line)
            detail = f"the line is longer than {max_record_bytes} bytes"
            yield _broken(source, number, f"{source.name}:{number}", detail, reason="record_too_large")
        elif not line.isspace():
            yield _parsed(source, number, line.removesuffix(b"\n"), line=True)


def _parsed(source: SourceFile, number: int, text: bytes, *, line: bool = False) -> RawRecord:
    where = f"{source.name}:{number}" if line else f"{source.name}[{number}]"
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        return _broken(source, number, where, _one_line(error))
    return RawRecord(source=source, number=number, where=where, value=value)


def _broken(source: SourceFile, number: int, where: str, detail: str, *, reason: str = "bad_json") -> RawRecord:
    error = SampleRejected(reason, f"{where}: {detail}")
    return RawRecord(source=source, number=number, where=where, value=None, error=error)


def _one_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return " ".join(text.split())[:300]
