"""Rows of Parquet and Arrow files, as Hugging Face's `datasets` and others write them, and of CSV and TSV, as records.

A worker reads forward through a file, a batch at a time, and turns only its own rows into Python objects. So memory
does not grow with the file, and a skipped row costs little. A process keeps one file open between chunks, until it
reads another one or its work ends.
"""

import csv
import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

from energon_packing.convert.chunks import DELIMITERS, Chunk, ChunkBytes, RawRecord, SourceFile, one_line, suffix_of
from energon_packing.convert.json_text import DigestingReader, parse_json
from energon_packing.convert.layouts.layout import ANSWER_COLUMNS, all_layouts
from energon_packing.errors import SampleRejected, UserError, is_machines

_BATCH_BYTES = 1 << 20
_MOST_ROWS = 1024
_CONTENT = "corrupt_source"
_DAMAGE = (ValueError, OSError, OverflowError, NotImplementedError, LookupError)
"""What Arrow and Python raise for a damaged file."""


def _is_damage(error: BaseException) -> bool:
    """Whether one of `_DAMAGE` is about the content: not about a file that is gone, nor about this machine."""
    return not (isinstance(error, FileNotFoundError | PermissionError) or is_machines(error))


def _kind(path: Path) -> str:
    return "Parquet" if path.suffix.lower() == ".parquet" else "Arrow"


_MOST_UNPACKED, _LARGEST_RATIO = 64 << 20, 200
"""Bytes that the pages of a row group may unpack to, and more for each that they take; as of a compressed source."""
_MOST_REPEATED = 64 << 20  # Bytes of a batch whose rows repeat entries of dictionaries, which take a few bits a row
_LARGEST_ROW = 1 << 30
_DICTIONARY = 2  # type of a page
_UNREADABLE = "the header of a page cannot be read"


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """A whole number of Thrift's compact protocol, and where it ends."""
    value = shift = 0
    while (byte := data[at]) > 127:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


def _fields(data: memoryview, at: int) -> tuple[dict[int, Any], int]:
    """The numbers and structs in a struct of Thrift's compact protocol, by their number, and where it ends: what the
    header of a Parquet page has besides truths and bytes (parquet.thrift, ``PageHeader``)."""
    found: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at, number, kind = at + 1, number + (head >> 4), head & 15
        if kind == 12:
            found[number], at = _fields(data, at)
        elif kind in (4, 5, 6, 8):
            value, at = _number(data, at)
            if kind == 8:
                at += value
            found[number] = -1 if value & 1 else value >> 1  # half of all checksums are below 0
        elif kind not in (1, 2):
            raise ValueError(_UNREADABLE)
    return found, at + 1


def _largest_entry(page: memoryview, size: int, count: int, column: Any) -> int:
    """Bytes of the largest entry of a dictionary, which unpacks to ``size``; ``size`` where that is not known."""
    import pyarrow

    codec = column.compression.lower()
    if column.physical_type != "BYTE_ARRAY":
        return size // count
    if codec not in ("uncompressed", "snappy", "gzip", "brotli", "zstd"):
        return size
    entries = page if codec == "uncompressed" else pyarrow.decompress(page, size, codec)
    entries, at, largest = memoryview(entries), 0, 0
    while at < size:
        length = int.from_bytes(entries[at : at + 4], "little")
        at, largest = at + 4 + length, max(largest, length)
    return largest


def _rows_at_once(data: memoryview, group: Any) -> int:
    """How many rows of a row group may be decoded together, from the headers of its pages: what Parquet's reader does
    not ask before it takes the memory. Raises ValueError: the pages unpack to far more than their bytes explain."""
    unpacked = packed = 0
    repeated = 1.0  # bytes of a row, at most, that are entries of dictionaries
    for column in map(group.column, range(group.num_columns)):
        at = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
        end = at + column.total_compressed_size
        while at < end:
            header, at = _fields(data, at)
            kind, size, stored = header[1], header[2], header[3]
            if min(size, stored) < 0:
                raise ValueError(_UNREADABLE)
            unpacked, packed = unpacked + size, packed + stored
            if unpacked > _MOST_UNPACKED + _LARGEST_RATIO * packed:
                raise ValueError(f"pages of {packed} bytes unpack to {unpacked}, more than {_LARGEST_RATIO} times that")
            if kind == _DICTIONARY:
                of_row, count = column.num_values / max(group.num_rows, 1), max(header[7][1], 1)
                if of_row * size / count > _LARGEST_ROW:
                    raise ValueError("a row repeats one value until it has more than a gigabyte")
                repeated += of_row * _largest_entry(data[at : at + stored], size, count, column)
            at += stored
    return max(1, min(_MOST_ROWS, _BATCH_BYTES * group.num_rows // max(unpacked, 1), int(_MOST_REPEATED / repeated)))


class _Table:
    """A file of rows in parts, row groups of Parquet or batches of Arrow, read forward in batches. ``parts`` are the
    rows and bytes of each. A damaged file raises one of `_DAMAGE`: Arrow believes every offset of a file, so a batch is
    validated before anything looks at its values."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
        except ImportError as error:
            fix = "run pip install '.[convert]' in the checkout, or save the records as JSON Lines"
            needs = f"the format {_kind(path)}, which needs the package pyarrow"
            raise UserError(f"{path} holds rows in {needs}; {fix}") from error
        self._arrow: Any = pyarrow
        self._source = pyarrow.memory_map(str(path))
        self._file: Any = None  # of Parquet
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._valid = False  # whether the batch has been validated
        self._at = self._part = 0  # number of the batch's first row, and of the part that reading began with
        if _kind(path) == "Parquet":
            import pyarrow.parquet

            self._file = pyarrow.parquet.ParquetFile(self._source, pre_buffer=False)
            groups = map(self._file.metadata.row_group, range(self._file.num_row_groups))
            self.parts = [(group.num_rows, group.total_byte_size) for group in groups]
        else:
            self.parts = []
            for batch in self._from(0):
                batch.validate()  # the ends of its buffers; in full where its rows are read
                self.parts.append((batch.num_rows, batch.nbytes))
        self._starts = [0, *accumulate(rows for rows, _ in self.parts)]

    def _from(self, part: int) -> Iterator[Any]:
        """The batches of a row group of Parquet, or of Arrow all from a batch on."""
        if self._file is not None:
            self._source.seek(0)
            data = memoryview(self._source.read_buffer()).cast("B")  # a map of the file, not a copy
            try:
                most = _rows_at_once(data, self._file.metadata.row_group(part))
            except (IndexError, KeyError, TypeError) as error:
                raise ValueError(_UNREADABLE) from error
            return iter(self._file.iter_batches(batch_size=most, row_groups=[part]))
        self._source.seek(0)
        try:
            file = self._arrow.ipc.open_file(self._source)
        except self._arrow.ArrowInvalid:
            self._source.seek(0)
            return islice(self._arrow.ipc.open_stream(self._source), part, None)
        return map(file.get_batch, range(part, file.num_record_batches))

    def rows(self, start: int, end: int) -> Iterator[tuple[int, Any]]:
        """Yields the rows from ``start`` to ``end`` in batches, each with the number of its first row."""
        row = start
        while row < end:
            part = bisect_right(self._starts, row) - 1  # of several that begin there, empty ones, the last
            if self._batch is None or row < self._at or (self._file is not None and part != self._part):
                self._batches, self._part, self._at = self._from(part), part, self._starts[part]
                self._batch, self._valid = next(self._batches, None), False
            while self._batch is not None and row >= self._at + self._batch.num_rows:
                self._at += self._batch.num_rows
                self._batch, self._valid = next(self._batches, None), False
            if self._batch is None:
                raise ValueError("the file ends before its last row")
            if not self._valid:
                self._batch.validate(full=True)
                self._valid = True
            first = row - self._at
            count = min(end - row, self._batch.num_rows - first)
            yield row, self._batch.slice(first, count)
            row += count


@lru_cache(maxsize=1)
def opened_table(path: Path, size: int, changed: int) -> _Table:
    """The file that this process reads rows of, until the cache is cleared; size and time stamp tell a replaced one."""
    return _Table(path)


def find_rows(source: SourceFile, chunk_bytes: ChunkBytes) -> Iterator[Chunk]:
    """Divides a file into chunks of rows; see `sources.find_chunks`."""
    total = source.path.stat().st_size
    first = seen = 0
    try:
        parts = _Table(source.path).parts
    except _DAMAGE as error:
        if not _is_damage(error):
            raise
        detail = f"{source.name}: cannot be read as {_kind(source.path)}: {one_line(error)}"
        yield Chunk(source=source, form="rows", error=SampleRejected(_CONTENT, detail))
        return
    whole = sum(size for _, size in parts) or 1
    for rows, size in parts:
        row = 0
        while row < rows:
            left = min(rows - row, max(1, chunk_bytes() * rows // max(size, 1)))
            row += left
            position = min(total * (seen + size * row // rows) // whole, total)
            yield Chunk(source=source, form="rows", start=first, end=first + left, first=first, position=position)
            first += left
        seen += size
    if first == 0:
        empty = SampleRejected("empty_file", f"{source.name}: the table has no rows")
        yield Chunk(source=source, form="rows", error=empty)


def read_rows(chunk: Chunk, *, max_record_bytes: int) -> Iterator[RawRecord]:
    """Yields the record of every row of a chunk; rows that damage has made unreadable have an error each."""
    source, row = chunk.source, chunk.start
    try:
        status = source.path.stat()
        for first, batch in opened_table(source.path, status.st_size, status.st_mtime_ns).rows(row, chunk.end):
            yield from _records(chunk, first, batch, max_record_bytes)
            row = first + batch.num_rows
    except _DAMAGE as error:
        if not _is_damage(error):
            raise
        # The same rows for every division into chunks: a chunk ends with its part of the file at the latest, and within
        # a part nothing can be read from the first damaged batch on.
        opened_table.cache_clear()
        for number in range(row, chunk.end):
            yield chunk.broken(number, one_line(error), _CONTENT)


def _records(chunk: Chunk, first: int, batch: Any, max_record_bytes: int) -> Iterator[RawRecord]:
    if batch.nbytes <= max_record_bytes:
        for number, (value, warnings) in enumerate(zip(*_values(batch), strict=True), first):
            yield chunk.record(number, value, warnings=warnings)
    elif batch.num_rows == 1:
        yield chunk.broken(first, f"the row has more than {max_record_bytes} bytes", "record_too_large")
    else:
        for number in range(batch.num_rows):
            yield from _records(chunk, first + number, batch.slice(number, 1), max_record_bytes)


def _values(batch: Any) -> tuple[list[Any], list[tuple[str, ...]]]:
    """The rows of a batch, as JSON would hold them, and the warnings of each. A struct has the fields of all rows, so a
    null in it stands for a field that this row lacks (`_present`). A column that Python cannot express, such as a date
    after the year 9999, is its text. Raises ValueError, OverflowError: a column has neither, or the file is damaged."""
    rows: list[Any]
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):
        columns = [_column_values(column) for column in batch.columns]
        rows = [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
    dropped: set[int] = set()
    noted: list[str] = []
    for name, column in dict(zip(batch.schema.names, batch.columns, strict=True)).items():
        if _is_merged(column) and (present := _present(column.type, name in _FREE, noted)) is not None:
            for at, row in enumerate(rows):
                row[name] = present(row[name])
                if noted:
                    dropped.add(at)
                    noted.clear()
    return rows, [("null_fields_dropped",) if at in dropped else () for at in range(len(rows))]


_FREE = frozenset(("arguments", "tools", "extras"))
"""Columns and fields whose own fields have names of the data's choice; there a null that is dropped is worth a line."""


def _is_merged(array: Any) -> bool:
    """Whether `_present` would change a value of an array; looking takes Arrow far less time than going through all."""
    from pyarrow import types

    if types.is_struct(array.type):
        return any(child.null_count or _is_merged(child) for child in array.flatten())
    if _is_list(array.type):
        return _is_merged(array.flatten())
    return _is_json(array.type) or types.is_decimal(array.type)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_json(kind: Any) -> bool:
    """Whether values are the text of JSON: type `Json` of `datasets`."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def _present(kind: Any, free: bool, noted: list[str]) -> Callable[[Any], Any] | None:
    """What turns a value of an Arrow type into JSON's; None if nothing does. It leaves fields of structs out that are
    null: Arrow gives a struct the fields of all rows, so that the call ``{"x": 1}`` beside ``{"city": "Rome"}`` is
    ``{"x": 1, "city": null}``. Nulls in lists and in JSON text stay. ``noted`` grows when a null is dropped in a field
    of `_FREE`, of which a ``free`` value is part."""
    from pyarrow import types

    if _is_json(kind):
        return _json
    if types.is_decimal(kind):
        number = float if kind.scale > 0 else int
        return lambda value: None if value is None else number(value)
    if types.is_struct(kind):
        inner = {field.name: _present(field.type, free or field.name in _FREE, noted) for field in kind}

        def of_struct(value: Any) -> Any:
            if value is None:
                return None
            held = {}
            for name, part in value.items():
                if part is not None:
                    held[name] = part if (present := inner[name]) is None else present(part)
                elif free:
                    noted.append(name)
            return held

        return of_struct
    if _is_list(kind) and (entry := _present(kind.value_type, free, noted)) is not None:
        return lambda value: None if value is None else [entry(part) for part in value]
    return None


def _json(text: Any) -> Any:
    try:
        return text if text is None else parse_json(text.encode())
    except (ValueError, RecursionError):  # text that only claims to be JSON
        return text


def _column_values(column: Any) -> Any:
    try:
        return column.to_pylist()
    except (ValueError, OverflowError) as error:
        with suppress(ValueError, NotImplementedError):  # of Arrow: it has no text for values of this type
            return column.cast("string").to_pylist()
        raise error


_LISTS = frozenset(("messages", "conversations", "texts", "images", "videos", "history", "extras"))
"""Columns of lists and objects, which a cell holds as JSON text."""
_SPOKEN = frozenset(("prompt", "completion", *ANSWER_COLUMNS))
"""Columns of texts or messages; messages are JSON text there, too."""


def _cells(lines: Iterator[str], source: SourceFile) -> Iterator[list[str] | csv.Error]:
    """The rows of CSV or TSV that are not blank, the header too; one that breaks the rules of quotes is an error."""
    rows = csv.reader(lines, delimiter=DELIMITERS[suffix_of(Path(source.name))[0]], strict=True)
    while True:
        try:
            if row := next(rows):
                yield row
        except StopIteration:
            return
        except csv.Error as error:
            yield error


def find_cells(source: SourceFile, reader: DigestingReader, most: int, chunk_bytes: ChunkBytes) -> Iterator[Chunk]:
    """Divides a file of CSV or TSV into chunks of rows, whose cells may hold line breaks; see `sources.find_chunks`."""
    csv.field_size_limit(most)
    begun = reader.position

    def lines() -> Iterator[str]:
        while line := reader.read(most + 1, line=True):
            if reader.position - begun > most:
                raise ValueError(f"a row, or a quote that nothing closes, has more than {most} bytes")
            yield line.decode("utf-8", "surrogateescape")

    start, first, number, error = begun, 0, -1, ""
    try:
        for number, row in enumerate(_cells(lines(), source), -1):
            if number < 0 and (isinstance(row, csv.Error) or len(set(row)) < len(row)):
                is_damaged = isinstance(row, csv.Error)
                raise ValueError(f"the header {'is damaged' if is_damaged else 'names a column twice'}: {row}")
            if isinstance(row, csv.Error) and "unexpected end" in str(row):
                raise ValueError(f"a quote is never closed from byte {begun} on")
            begun = reader.position
            if number < 0:
                start = begun
            elif begun - start >= chunk_bytes():
                yield Chunk(source=source, form="cells", start=start, end=begun, first=first)
                start, first = begun, number + 1
    except ValueError as problem:
        error = str(problem)
    if begun > start:
        yield Chunk(source=source, form="cells", start=start, end=begun, first=first)
    if error:
        damage = SampleRejected(_CONTENT, f"{source.name}[{max(number, 0)}]: {error}; nothing after it was read")
        yield Chunk(source=source, form="cells", first=max(number, 0), error=damage)
    elif number < 0:
        empty = SampleRejected("empty_file", f"{source.name}: the table has no rows")
        yield Chunk(source=source, form="cells", error=empty)


def read_cells(chunk: Chunk, stream: BinaryIO, most: int, columns: Mapping[str, str]) -> Iterator[RawRecord]:
    """Yields the record of every row of a chunk of CSV or TSV: its cells by the names of the header, or null; lists and
    objects where the name for which that of the header stands in `columns` has them."""
    csv.field_size_limit(most)
    text = stream.read(chunk.end - chunk.start).decode("utf-8", "surrogateescape")
    stream.seek(0)
    names = next(_cells((line.decode("utf-8-sig", "surrogateescape") for line in stream), chunk.source))
    assert isinstance(names, list), "a file with a damaged header has no chunk of rows"
    header = [name or f"column {at}" for at, name in enumerate(names)]
    read_as = {theirs: name for name, theirs in columns.items()}
    for number, row in enumerate(_cells(io.StringIO(text, newline="\n"), chunk.source), chunk.first):
        if isinstance(row, csv.Error):
            yield chunk.broken(number, one_line(row), "bad_row")
        elif len(row) != len(header):
            yield chunk.broken(number, f"it has {len(row)} cells, and the header has {len(header)}", "bad_row")
        else:
            cells = zip(header, row, strict=True)
            yield chunk.record(number, {name: _cell(read_as.get(name, name), cell) for name, cell in cells})


def _cell(name: str, text: str) -> Any:
    lists = name in _LISTS or (text[:1] in "[{" and any(name in layout.lists for layout in all_layouts()))
    if text.startswith(("[", "{")) and (lists or name in _SPOKEN):
        with suppress(ValueError, RecursionError):
            value = parse_json(text.encode())
            messages = [value] if isinstance(value, dict) else value
            if lists or all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in messages):
                return value
    return text or None
