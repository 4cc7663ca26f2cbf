"""Finds records in files and parses them, one `RawRecord` per record, broken ones included.

One process divides the files into chunks (`find_chunks`), any number of others parse them (`read_chunk`). A file is
never held in memory as a whole: a 2 GB array takes as much memory as its largest record. A compressed file is unpacked
to the disk first. JSON is read here; tables and tars have files of their own.
"""

import gzip
import hashlib
import io
import json
import os
import pickle
import sys
import traceback
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO

from energon_packing.conversation import Conversation
from energon_packing.convert import chunks
from energon_packing.convert.chunks import Chunk, ChunkBytes, Form, RawRecord, SourceFile, one_line, suffix_of
from energon_packing.convert.config import load_reader
from energon_packing.convert.json_text import DigestingReader, iterate_array, parse_json, parse_quickly
from energon_packing.convert.tables import find_cells, find_rows, read_cells, read_rows
from energon_packing.convert.tars import find_samples, read_samples
from energon_packing.errors import FULL, SampleRejected, UserError, said_of_system
from energon_packing.remote_files import file_digest
from energon_packing.stored_record import is_too_deep

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_AT_ONCE = 1 << 22  # Bytes of lines that are read at once; a chunk has more only if it has a longer line
_LARGEST_RATIO = 200
"""Text of conversations shrinks to a tenth, records that repeat each other to a hundredth; a bomb to a thousandth."""
_ALWAYS_ALLOWED = 64 << 20
_BLOCK = 1 << 16
_LARGEST_WINDOW = 1 << 27


def find_chunks(
    source: SourceFile, *, max_record_bytes: int, chunk_bytes: ChunkBytes, digests: dict[str, str], scratch: Path
) -> Iterator[Chunk]:
    """Divides a file into chunks, which end with a record at ``chunk_bytes``; where they begin and end has no influence
    on their records. ``max_record_bytes`` is the longest line, and the longest element of an array in characters;
    ``digests`` receives the SHA-256 of the file by its place; ``scratch`` is for the copy of a compressed file, which
    chunks refer to (`unpacked`). Raises UserError: the file cannot be opened, or the package that unpacks or reads it
    is not installed; OSError: there is no room for the unpacked copy."""
    suffix, compression = suffix_of(source.path)
    try:
        if compression is None:
            digests[source.place] = yield from _found(source, suffix, max_record_bytes, chunk_bytes)
            return
        copy = replace(source, path=unpacked(scratch, source), size=0)
        damage = _unpack(source, compression, copy.path)
        if (size := copy.path.stat().st_size) or damage is None:
            for chunk in _found(copy, suffix, max_record_bytes, chunk_bytes, damage):
                yield replace(chunk, source=source, path=copy.path, position=source.size * chunk.end // max(size, 1))
        if damage is not None and (suffix != chunks.TAR_SUFFIX or not size):
            yield Chunk(source=source, form="lines", error=damage)
        digests[source.place] = file_digest(source.path)
    except OSError as problem:
        if problem.errno in FULL:
            raise  # the unpacked copy
        raise UserError(f"{source.path} cannot be read: {problem.strerror or problem}") from problem


def unpacked(scratch: Path, source: SourceFile) -> Path:
    """Where the unpacked copy of a compressed source is."""
    return scratch / "unpacked" / hashlib.sha256(os.fsencode(source.path)).hexdigest()


def _unpack(source: SourceFile, compression: str, target: Path) -> SampleRejected | None:
    """Unpacks a file as far as it goes; returns why the rest cannot be unpacked."""
    target.parent.mkdir(exist_ok=True)
    with source.path.open("rb") as packed, target.open("wb") as copy:
        blocks, damage = _unpacking(packed, compression, source.name)
        try:
            for block in blocks:
                if copy.tell() + len(block) > _ALWAYS_ALLOWED + _LARGEST_RATIO * packed.tell():
                    detail = f"unpacks to more than {_LARGEST_RATIO} times its size; unpack it if this is meant"
                    return SampleRejected("corrupt_source", f"{source.name}: {detail}")
                copy.write(block)
        except damage as error:
            return SampleRejected("corrupt_source", f"{source.name}: cannot be unpacked further: {one_line(error)}")
    return None


def _unpacking(
    packed: BinaryIO, compression: str, name: str
) -> tuple[Iterator[bytes], tuple[type[BaseException], ...]]:
    """The unpacked bytes in blocks, and the exceptions that mean damage."""
    if compression == "gzip":
        stream = gzip.GzipFile(fileobj=packed, mode="rb")
        return iter(lambda: stream.read1(_BLOCK), b""), (gzip.BadGzipFile, EOFError, zlib.error)
    try:
        import zstandard
    except ImportError as error:
        fix = "run pip install '.[convert]' in the checkout, or unpack the file"
        raise UserError(f"{name} is compressed with zstd, which needs the package zstandard; {fix}") from error
    return _frames(packed, zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)), (zstandard.ZstdError, EOFError)


def _frames(packed: BinaryIO, unpacker: Any) -> Iterator[bytes]:
    """The bytes of frames of zstd; raises EOFError where the file ends within one, which a stream reader ignores."""
    frame, left = None, b""
    while block := left or packed.read(1 << 10):  # which may unpack to 32 MiB
        frame = frame or unpacker.decompressobj()
        yield frame.decompress(block)
        frame, left = (None, frame.unused_data) if frame.eof else (frame, b"")
    if frame is not None:
        raise EOFError("the file ends within a frame")


def _found(
    source: SourceFile, suffix: str, most: int, chunk_bytes: ChunkBytes, damage: SampleRejected | None = None
) -> Generator[Chunk, None, str]:
    """Yields the chunks of a file that is not compressed; returns its digest."""
    if suffix in chunks.TABLE_SUFFIXES or suffix == chunks.TAR_SUFFIX:
        of_tar = suffix == chunks.TAR_SUFFIX
        yield from find_samples(source, chunk_bytes, damage) if of_tar else find_rows(source, chunk_bytes)
        return file_digest(source.path)
    with source.path.open("rb") as stream:
        form, start, error = _look(source, stream, suffix, most)
        stream.seek(0)
        reader = DigestingReader(stream)
        reader.read(start)
        if error is not None:
            yield Chunk(source=source, form=form, error=error)
        else:
            yield from _FIND[form](source, reader, most, chunk_bytes)
        return reader.hexdigest()


def _look(source: SourceFile, stream: BinaryIO, suffix: str, most: int) -> tuple[Form, int, SampleRejected | None]:
    """The form of a file, where its text begins, and why there is none to read."""
    head = stream.read(3)
    if head[:2] in _UTF16_BOMS:
        return "lines", 0, SampleRejected("bad_json", f"{source.name}:1: the file is UTF-16; save it as UTF-8")
    start = len(_BOM) if head == _BOM else 0
    stream.seek(start)
    first = b""
    while not first and (block := stream.read(4096)):
        first = block.lstrip(b" \t\r\n")[:1]
    stream.seek(start)
    if first == b"":
        return "lines", 0, SampleRejected("empty_file", f"{source.name}: the file is empty")
    if suffix == chunks.TEXT_SUFFIX:
        line = b""
        while first == b"{" and not line:
            line = stream.readline(most).strip()
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(line), dict):
                why = f"of a {chunks.TEXT_SUFFIX} file each line would be trained as a document; rename it to .jsonl"
                raise UserError(f"{source.name} holds JSON Lines, and {why}")
        return "text", start, None
    if suffix in chunks.DELIMITERS:
        return "cells", start, None
    if first == b"[":
        return "array", start, None
    return "object" if suffix == ".json" and not _has_whole_line(stream, most) else "lines", start, None


def _find_lines(
    source: SourceFile, reader: DigestingReader, most: int, chunk_bytes: ChunkBytes, form: Form = "lines"
) -> Iterator[Chunk]:
    number, start = 1, reader.position
    while block := reader.read(chunk_bytes()):
        lines = block.count(b"\n")
        # A line of any length is passed over in pieces, never held.
        while not block.endswith(b"\n") and (block := reader.read(1 << 18, line=True)):
            lines += block.endswith(b"\n")
        yield Chunk(source=source, form=form, start=start, end=reader.position, first=number)
        number += lines
        start = reader.position


def _find_elements(source: SourceFile, reader: DigestingReader, most: int, chunk_bytes: ChunkBytes) -> Iterator[Chunk]:
    before, wanted = reader.position, chunk_bytes()
    start: int | None = None
    first = end = number = 0
    error: SampleRejected | None = None
    for number, element in enumerate(iterate_array(reader, max_element=most)):
        if element.last:
            detail = f"{element.error}; {_unread(source, before + end, number)}"
            error = SampleRejected("truncated_array", f"{source.name}[{number}]: {detail}")
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
    if not source.size:  # of a compressed file, nobody knows how much there was
        return "nothing after it was read"
    left = max(source.size - at, 0)
    guess = f", about {max(round(left * records / at), 1):,} records" if records else ""
    return f"nothing after it was read ({left:,} bytes{guess})"


def _find_object(source: SourceFile, reader: DigestingReader, most: int, chunk_bytes: ChunkBytes) -> Iterator[Chunk]:
    start, size = reader.position, len(reader.read(most + 1))
    error: SampleRejected | None = None
    if size > most:
        detail = f"one JSON object of more than {most} bytes; expected an array of records or JSON Lines"
        error = SampleRejected("record_too_large", f"{source.name}[0]: {detail}")
    yield Chunk(source=source, form="object", start=start, end=start + size, first=0, error=error)


_FIND: dict[Form, Callable[[SourceFile, DigestingReader, int, ChunkBytes], Iterator[Chunk]]] = {
    "lines": _find_lines,
    "text": partial(_find_lines, form="text"),
    "array": _find_elements,
    "object": _find_object,
    "cells": find_cells,
}

_MOST_YIELDED = 1024  # records of a chunk


def find_yielded(source: SourceFile, name: str, chunk_bytes: ChunkBytes, digests: dict[str, str]) -> Iterator[Chunk]:
    """Divides what a reader makes of a file into chunks; see `find_chunks`. It runs in the process that finds records,
    so that a reader needs not know of workers, and the data set does not depend on their number, if it yields the same
    records again. Raises UserError: the reader fails, or yields what cannot be sent to a worker."""
    held: list[bytes] = []
    first = size = 0
    try:
        for value in load_reader(name)(source.path):
            held.append(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
            size += len(held[-1])
            if len(held) >= _MOST_YIELDED or size >= chunk_bytes():
                yield Chunk(source=source, form="yielded", first=first, position=0, yielded=tuple(held))
                first, size, held = first + len(held), 0, []
    except Exception as error:  # of code that is not ours
        of_reader = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
        at = f", at {Path(of_reader[0].filename).name}:{of_reader[0].lineno}" if of_reader else ""
        why = f"after {first + len(held)} records{at}: {type(error).__name__}: {one_line(error)}"
        raise UserError(f"--reader {name} failed on {source.name} {why}") from error
    empty = None if first or held else SampleRejected("empty_file", f"{source.name}: the reader yields no record")
    yield Chunk(source=source, form="yielded", first=first, position=source.size, yielded=tuple(held), error=empty)
    digests[source.place] = file_digest(source.path)


def read_yielded(chunk: Chunk, *, max_record_bytes: int) -> Iterator[RawRecord]:
    """Yields every record of a chunk that a reader made."""
    for number, record in enumerate(chunk.yielded, chunk.first):
        if len(record) > max_record_bytes:
            yield chunk.broken(number, f"the record has more than {max_record_bytes} bytes", "record_too_large")
            continue
        try:
            if is_too_deep(value := pickle.loads(record)):
                raise SampleRejected("too_deep", "objects and lists of the record lie too deep inside each other")
            yield chunk.record(number, value if isinstance(value, Conversation) else _plain(value))
        except SampleRejected as error:
            yield chunk.broken(number, error.detail, error.reason)


def _plain(value: Any) -> Any:
    """A record of JSON's values and bytes, tuples as lists; raises ``bad_json`` for any other."""
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, str | bool | int | float | bytes):
        return value
    raise SampleRejected("bad_json", f"the record holds a {type(value).__name__}; yield JSON's values, and bytes")


_READ: dict[Form, Callable[..., Iterator[RawRecord]]]
_READ = {"samples": read_samples, "rows": read_rows, "yielded": read_yielded}


def read_chunk(chunk: Chunk, *, max_record_bytes: int, columns: Mapping[str, str] = {}) -> Iterator[RawRecord]:
    """Yields every record of a chunk in order; a broken one has `RawRecord.error` set. `columns`: see `ColumnMap`.
    Raises UserError: the file cannot be read."""
    source = chunk.source
    if chunk.error is not None:
        where = source.name if chunk.form in chunks.LINES else chunk.where(chunk.first)
        yield RawRecord(source=source, number=chunk.first, where=where, value=None, error=chunk.error)
        return
    with said_of_system(f"{source.path} cannot be read"):
        if (read := _READ.get(chunk.form)) is not None:
            yield from read(chunk, max_record_bytes=max_record_bytes)
            return
        with (chunk.path or source.path).open("rb") as stream:
            stream.seek(chunk.start)
            if chunk.form in chunks.LINES:
                yield from _read_lines(chunk, stream, max_record_bytes)
                return
            if chunk.form == "cells":
                yield from read_cells(chunk, stream, max_record_bytes, columns)
                return
            text = stream.read(chunk.end - chunk.start)
    if chunk.form == "object":
        yield _parsed(chunk, 0, text)
        return
    # The search for chunks has checked the length of each element.
    text = b"[%b]" % text
    if (values := parse_quickly(text)) is not None:
        yield from (chunk.record(number, value) for number, value in enumerate(values, chunk.first))
        return
    for number, element in enumerate(iterate_array(io.BytesIO(text), max_element=sys.maxsize), chunk.first):
        wrong = element.error
        yield chunk.record(number, element.value) if wrong is None else chunk.broken(number, wrong)


def _has_whole_line(stream: BinaryIO, limit: int) -> bool:
    """Whether one of the first two lines is a complete JSON object: JSON Lines in a file with the suffix ``.json``. The
    first may be broken; in an indented object neither is complete."""
    for line in islice(filter(bytes.strip, iter(lambda: stream.readline(limit), b"")), 2):
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(line), dict):
                return True
    return False


def _read_lines(chunk: Chunk, stream: BinaryIO, max_record_bytes: int) -> Iterator[RawRecord]:
    left = chunk.end - chunk.start
    parsed = _document if chunk.form == "text" else _parsed
    if left <= min(_AT_ONCE, max_record_bytes):
        # Half of the time of reading them one by one.
        for number, line in enumerate(stream.read(left).split(b"\n"), chunk.first):
            if line and not line.isspace():
                yield parsed(chunk, number, line)
        return
    for number in count(chunk.first):
        if left <= 0 or not (line := stream.readline(min(left, max_record_bytes + 1))):
            return
        left -= len(line)
        if len(line) > max_record_bytes:
            while left > 0 and line and not line.endswith(b"\n"):
                line = stream.readline(min(left, 1 << 20))
                left -= len(line)
            yield chunk.broken(number, f"the line is longer than {max_record_bytes} bytes", "record_too_large")
        elif not line.isspace():
            yield parsed(chunk, number, line.removesuffix(b"\n"))


def _document(chunk: Chunk, number: int, line: bytes) -> RawRecord:
    """A line of a text file, as a record of the layout ``text``; Hugging Face's reader of text files has the same."""
    try:
        return chunk.record(number, {"text": line.removesuffix(b"\r").decode("utf-8")})
    except UnicodeDecodeError as error:
        return chunk.broken(number, f"the line is not UTF-8: {error.reason}", "bad_text")


def _parsed(chunk: Chunk, number: int, text: bytes) -> RawRecord:
    try:
        return chunk.record(number, parse_json(text))
    except (ValueError, RecursionError) as error:
        return chunk.broken(number, one_line(error))
