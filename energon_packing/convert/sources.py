"""Finds records in files and parses them, one `RawRecord` per record, broken ones included.

One process divides the files into chunks (`find_chunks`), any number of others parse them (`read_chunk`). A file is
never held in memory as a whole: a 2 GB array takes as much memory as its largest record. JSON is read here, plain or
compressed; tables and tars have files of their own.
"""

from __future__ import annotations

import errno
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from energon_packing.convert.chunks import (
    Chunk,
    DigestingReader,
    Form,
    RawRecord,
    SourceFile,
    UnpackingReader,
    broken,
    one_line,
)
from energon_packing.convert.json_text import iterate_array, parse_json, parse_quickly
from energon_packing.convert.source_list import TABLE_SUFFIXES, TAR_SUFFIX, TEXT_SUFFIX, content_digest, suffix_of
from energon_packing.convert.tables import find_rows, read_rows
from energon_packing.convert.tars import UnpackedCopy, find_samples, read_samples, unpacked_tar
from energon_packing.errors import SampleRejected, UserError

_LINES = ("lines", "text")
_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_LARGEST_UNPACKED = 8 << 20
"""Bytes of a compressed file that are looked at to tell its form, and kept beside the longest record."""
_AT_ONCE = 1 << 22
"""Bytes of lines that are read at once; a chunk has more only if it has a longer line."""


def find_chunks(
    source: SourceFile,
    *,
    max_record_bytes: int,
    chunk_bytes: Callable[[], int],
    digest: Callable[[str], None] = lambda found: None,
    scratch: Path | None = None,
) -> Iterator[Chunk]:
    """Divides a file into chunks; where they begin and end has no influence on their records.

    Args:
        source: the file.
        max_record_bytes: longest line, and longest element of an array in characters.
        chunk_bytes: how large the next chunk should be; it ends with a record.
        digest: called once with the SHA-256 of the file.
        scratch: directory for the unpacked copy of a compressed tar, which chunks refer to (`unpacked_tar`); None keeps
            it as long as this iterator lives.

    Raises:
        UserError: the file cannot be opened.
        OSError: there is no room for the unpacked copy.
    """
    suffix, compression = suffix_of(source.path)
    reader: Reader
    try:
        if suffix in TABLE_SUFFIXES and compression is None:
            yield from find_rows(source, chunk_bytes)
            digest(content_digest(source.path))
            return
        if suffix == TAR_SUFFIX and compression is None:
            yield from find_samples(source, chunk_bytes)
            digest(content_digest(source.path))
            return
        with source.path.open("rb") as stream:
            if suffix == TAR_SUFFIX and compression is not None:
                unpacking = UnpackingReader(DigestingReader(stream), compression, source.name, keep=0)
                with tempfile.TemporaryDirectory() if scratch is None else nullcontext(str(scratch)) as directory:
                    with UnpackedCopy(unpacking, unpacked_tar(Path(directory), source)) as copy:
                        yield from find_samples(source, chunk_bytes, copy)
                    digest(unpacking.hexdigest())
                return
            if compression is None:
                form, start, error = _look(source, stream, suffix, max_record_bytes)
                stream.seek(0)
                reader = DigestingReader(stream)
            else:
                form, start, error = _look_inside(source, stream, suffix, compression, max_record_bytes)
                stream.seek(0)
                # An element is bounded in characters, of up to four bytes; while it is read, up to a byte for each
                # character that is held is read ahead.
                keep = max_record_bytes * (1 if form in _LINES else 5) + _LARGEST_UNPACKED
                reader = UnpackingReader(DigestingReader(stream), compression, source.name, keep=keep)
            if error is not None:
                yield Chunk(source=source, form=form, start=0, end=0, first=0, error=error)
            else:
                reader.read(start)
                yield from _unpacked(_FIND[form](source, reader, max_record_bytes, chunk_bytes), source, reader)
            digest(reader.hexdigest())
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the unpacked copy of a tar
        raise UserError(f"{source.path} cannot be read: {problem.strerror or problem}") from problem


Reader = DigestingReader | UnpackingReader


def _unpacked(chunks: Iterator[Chunk], source: SourceFile, reader: Reader) -> Iterator[Chunk]:
    """Chunks of a compressed file with their bytes, and its damage as a last one; others as they are."""
    if isinstance(reader, DigestingReader):
        yield from chunks
        return
    for chunk in chunks:
        if chunk.error is None:
            chunk = replace(chunk, content=reader.cut(chunk.start, chunk.end), position=reader.packed_position)
        yield chunk
    if reader.error is not None:
        yield Chunk(source=source, form="lines", start=0, end=0, first=0, error=reader.error)


def _look_inside(
    source: SourceFile, stream: BinaryIO, suffix: str, compression: str, max_record_bytes: int
) -> tuple[Form, int, SampleRejected | None]:
    """`_look` at the beginning of a compressed file."""
    reader = UnpackingReader(DigestingReader(stream), compression, source.name, keep=0)
    head = reader.read(min(_LARGEST_UNPACKED, max_record_bytes))
    if reader.error is not None and not head:
        return "lines", 0, reader.error
    return _look(source, io.BytesIO(head), suffix, max_record_bytes)


def _look(
    source: SourceFile, stream: BinaryIO, suffix: str, max_record_bytes: int
) -> tuple[Form, int, SampleRejected | None]:
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
    if suffix == TEXT_SUFFIX:
        return "text", start, None
    if first == b"[":
        return "array", start, None
    if suffix == ".json" and not _has_whole_line(stream, max_record_bytes):
        return "object", start, None
    return "lines", start, None


def _find_lines(
    source: SourceFile,
    reader: Reader,
    max_record_bytes: int,
    chunk_bytes: Callable[[], int],
    form: Form = "lines",
) -> Iterator[Chunk]:
    number = 1
    start = reader.position
    while block := reader.read(chunk_bytes()):
        lines = block.count(b"\n")
        # A line of any length is passed over in pieces, never held.
        while not block.endswith(b"\n") and (block := reader.readline(1 << 18)):
            lines += block.endswith(b"\n")
        yield Chunk(source=source, form=form, start=start, end=reader.position, first=number)
        number += lines
        start = reader.position


def _find_elements(
    source: SourceFile, reader: Reader, max_record_bytes: int, chunk_bytes: Callable[[], int]
) -> Iterator[Chunk]:
    before = reader.position
    wanted = chunk_bytes()
    start: int | None = None
    first = end = number = 0
    error: SampleRejected | None = None
    for number, element in enumerate(iterate_array(reader, max_element=max_record_bytes, places=True)):
        if element.last:
            where = f"{source.name}[{number}]"
            error = SampleRejected(
                "truncated_array", f"{where}: {element.error}; {_unread(source, before + end, number)}"
            )
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


def _unread(source: SourceFile, at: int, records: int) -> str:
    """Says how much of an array was not read, from this byte on; so many records lie before it."""
    if suffix_of(source.path)[1] is not None:  # how much there is, unpacked, is not known
        return "nothing after it was read"
    left = max(source.path.stat().st_size - at, 0)
    guess = f", about {max(round(left * records / at), 1):,} records" if records else ""
    return f"nothing after it was read ({left:,} bytes{guess})"


def _find_object(
    source: SourceFile, reader: Reader, max_record_bytes: int, chunk_bytes: Callable[[], int]
) -> Iterator[Chunk]:
    start = reader.position
    size = len(reader.read(max_record_bytes + 1))
    error: SampleRejected | None = None
    if size > max_record_bytes:
        detail = f"one JSON object of more than {max_record_bytes} bytes; expected an array of records or JSON Lines"
        error = SampleRejected("record_too_large", f"{source.name}[0]: {detail}")
    yield Chunk(source=source, form="object", start=start, end=start + size, first=0, error=error)


_FIND: dict[Form, Callable[[SourceFile, Reader, int, Callable[[], int]], Iterator[Chunk]]] = {
    "lines": _find_lines,
    "text": partial(_find_lines, form="text"),
    "array": _find_elements,
    "object": _find_object,
}


def read_chunk(chunk: Chunk, *, max_record_bytes: int) -> Iterator[RawRecord]:
    """Yields every record of a chunk in order; a broken one has `RawRecord.error` set.

    Raises:
        UserError: the file cannot be read.
    """
    source = chunk.source
    if chunk.error is not None:
        where = source.name if chunk.form in _LINES else f"{source.name}[{chunk.first}]"
        yield RawRecord(source=source, number=chunk.first, where=where, value=None, error=chunk.error)
        return
    if chunk.form == "samples":
        yield from read_samples(chunk, max_record_bytes=max_record_bytes)
        return
    if chunk.form == "rows":
        yield from read_rows(chunk, max_record_bytes=max_record_bytes)
        return
    try:
        with source.path.open("rb") if chunk.content is None else io.BytesIO(chunk.content) as stream:
            stream.seek(0 if chunk.content is not None else chunk.start)
            if chunk.form in _LINES:
                yield from _read_lines(chunk, stream, max_record_bytes)
                return
            text = stream.read(chunk.end - chunk.start)
    except OSError as error:
        raise UserError(f"{source.path} cannot be read: {error.strerror or error}") from error
    if chunk.form == "object":
        yield _parsed(source, 0, text, f"{source.name}[0]")
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
            yield broken(source, number, where, element.error)


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
    parsed = _document if chunk.form == "text" else _parsed_line
    number = chunk.first - 1
    if left <= min(_AT_ONCE, max_record_bytes):
        lines = stream.read(left).split(b"\n")  # half of the time of reading them one by one
        for number, line in enumerate(lines, chunk.first):
            if line and not line.isspace():
                yield parsed(source, number, line)
        return
    while left > 0 and (line := stream.readline(min(left, max_record_bytes + 1))):
        left -= len(line)
        number += 1
        if len(line) > max_record_bytes:
            while left > 0 and line and not line.endswith(b"\n"):
                line = stream.readline(min(left, 1 << 20))
                left -= len(line)
            detail = f"the line is longer than {max_record_bytes} bytes"
            yield broken(source, number, f"{source.name}:{number}", detail, reason="record_too_large")
        elif not line.isspace():
            yield parsed(source, number, line.removesuffix(b"\n"))


def _parsed_line(source: SourceFile, number: int, line: bytes) -> RawRecord:
    return _parsed(source, number, line, f"{source.name}:{number}")


def _document(source: SourceFile, number: int, line: bytes) -> RawRecord:
    """A line of a text file, as a record of the layout ``text``; Hugging Face's reader of text files has the same."""
    where = f"{source.name}:{number}"
    try:
        text = line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        return broken(source, number, where, f"the line is not UTF-8: {error.reason}", reason="bad_text")
    return RawRecord(source=source, number=number, where=where, value={"text": text})


def _parsed(source: SourceFile, number: int, text: bytes, where: str) -> RawRecord:
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        return broken(source, number, where, one_line(error))
    return RawRecord(source=source, number=number, where=where, value=value)
