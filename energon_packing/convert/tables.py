"""Rows of Parquet and Arrow files, as Hugging Face's `datasets` and others write them; one record per row.

A worker reads forward through a file, a batch at a time, and turns only its own rows into Python objects. So memory
does not grow with the file, and a skipped row costs little. A process keeps one file open between chunks, until it
reads another one or its work ends.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from energon_packing.convert.chunks import Chunk, RawRecord, SourceFile, one_line
from energon_packing.convert.json_text import parse_json
from energon_packing.errors import SampleRejected, UserError

_BATCH_BYTES = 1 << 20
_MOST_ROWS = 1024
_CONTENT = "corrupt_source"


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"{path} holds rows in the format {_kind(path)}, which needs the package pyarrow; run pip install "
            "'.[convert]', or save the records as JSON Lines"
        ) from error
    return pyarrow


def _kind(path: Path) -> str:
    return "Parquet" if path.suffix.lower() == ".parquet" else "Arrow"


class _Table:
    """A file of rows in parts, row groups of Parquet or batches of Arrow, read forward in batches.

    ``parts`` are the rows and bytes of each. A damaged file raises ValueError or OSError.
    """

    def __init__(self, path: Path) -> None:
        self._arrow = _pyarrow(path)
        self._source = self._arrow.memory_map(str(path))
        self._file: Any = None  # of Parquet
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._at = self._part = 0  # number of the batch's first row, and of the part that reading began with
        if _kind(path) == "Parquet":
            import pyarrow.parquet

            self._file = pyarrow.parquet.ParquetFile(self._source, pre_buffer=False)
            groups = map(self._file.metadata.row_group, range(self._file.num_row_groups))
            self.parts = [(group.num_rows, group.total_byte_size) for group in groups]
        else:
            self.parts = [(batch.num_rows, batch.nbytes) for batch in self._from(0)]
        self._starts = [0, *accumulate(rows for rows, _ in self.parts)]

    def _from(self, part: int) -> Iterator[Any]:
        """The batches of a row group of Parquet, or of Arrow all from a batch on."""
        if self._file is not None:
            rows, size = self.parts[part]
            most = max(1, min(_MOST_ROWS, _BATCH_BYTES * rows // max(size, 1)))
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
                self._batch = next(self._batches, None)
            while self._batch is not None and row >= self._at + self._batch.num_rows:
                self._at += self._batch.num_rows
                self._batch = next(self._batches, None)
            if self._batch is None:
                raise ValueError("the file ends before its last row")
            first = row - self._at
            count = min(end - row, self._batch.num_rows - first)
            yield row, self._batch.slice(first, count)
            row += count


@lru_cache(maxsize=1)
def _opened(path: Path, size: int, changed: int) -> _Table:
    """The file that this process reads rows of; size and time stamp tell a replaced file from the one before."""
    return _Table(path)


def close_table() -> None:
    """Lets go of the file that this process reads rows of, if there is one."""
    _opened.cache_clear()


def find_rows(source: SourceFile, chunk_bytes: Callable[[], int]) -> Iterator[Chunk]:
    """Divides a file into chunks of rows; see `sources.find_chunks`."""
    total = source.path.stat().st_size
    first = seen = 0
    try:
        parts = _Table(source.path).parts
    except (ValueError, OSError, OverflowError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
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
        for first, batch in _opened(source.path, status.st_size, status.st_mtime_ns).rows(row, chunk.end):
            yield from _records(chunk, first, batch, max_record_bytes)
            row = first + batch.num_rows
    except (ValueError, OSError, OverflowError) as error:
        # The same rows for every division into chunks: a chunk ends with its part of the file at the latest, and within
        # a part nothing can be read from the first damaged batch on.
        close_table()
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
    """The rows of a batch, as JSON would hold them, and the warnings of each.

    A struct has the fields of all rows, so a null in it stands for a field that this row lacks (`_present`). A column
    that Python cannot express, such as a date after the year 9999, is its text.

    Raises:
        ValueError, OverflowError: a column has neither, or the file is damaged.
    """
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
    return _is_json(array.type)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_json(kind: Any) -> bool:
    """Whether values are the text of JSON: type `Json` of `datasets`."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def _present(kind: Any, free: bool, noted: list[str]) -> Callable[[Any], Any] | None:
    """What turns a value of an Arrow type into JSON's; None if nothing does.

    It leaves fields of structs out that are null: Arrow gives a struct the fields of all rows, so that the call
    ``{"x": 1}`` beside ``{"city": "Rome"}`` is ``{"x": 1, "city": null}``. Nulls in lists and in JSON text stay.
    ``noted`` grows when a null is dropped in a field of `_FREE`, of which a ``free`` value is part.
    """
    from pyarrow import types

    if _is_json(kind):
        return _json
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
