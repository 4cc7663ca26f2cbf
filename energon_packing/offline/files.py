"""Files that are there whole or not at all, Parquet files with small metadata of our own, and fields of JSON files that
anybody may have written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import os.path
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from energon_packing.errors import UserError

METADATA = b"energon_packing"
"""Key of our metadata in the schema of a file; the value is JSON."""

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise UserError(
        f"the offline road needs pyarrow ({error}); install it with: pip install 'energon-packing[offline]'"
    ) from error


HOST = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())
"""Part of the name of a file that is being written, since several hosts may write to one directory."""


def remove_leftovers(directory: Path) -> None:
    """Removes files that processes of this host were writing to `directory` when they were killed.

    Containers may share the name of their host and not its processes, so a file that is locked stays too.
    """
    for file in directory.glob(f".*.{HOST}.*"):
        process = file.name.rpartition(".")[2]
        if process.isdigit() and not _lives(int(process)) and not _locked(file):
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def no_leftovers(*directories: Path) -> Iterator[None]:
    """Removes what other processes were writing when the work inside ended with an error, which kills them."""
    try:
        yield
    except BaseException:
        for directory in directories:
            with contextlib.suppress(OSError):  # what is raised already says more
                remove_leftovers(directory)
        raise


def _locked(file: Path) -> bool:
    """Whether a process, here or in another container or machine, is writing a file; True where nobody can say."""
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    try:
        said_of_it = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return True
    # One that ended and that nobody waited for: in a container without an init it is there for good.
    return not said_of_it.rpartition(b")")[2].lstrip().startswith(b"Z")


def said(error: OSError) -> str:
    """What the system says, such as ``No space left on device``; pyarrow's own words are longer."""
    return os.strerror(error.errno) if error.errno else str(error)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to, and renames it to `path` if nothing was raised."""
    aside = path.with_name(f".{path.name}.{HOST}.{os.getpid()}")
    try:
        # The lock ends with the process, and is on the file whatever opens it to write.
        with aside.open("wb") as held:
            with contextlib.suppress(OSError):  # some file systems lock nothing
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield aside
            with aside.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_table(
    path: Path, schema: pa.Schema, tables: Iterable[pa.Table], metadata: Mapping[str, Any], *, rows: int | None = None
) -> None:
    """Writes tables of one schema to `path`, one or more row groups each.

    Args:
        metadata: for `read_metadata`; anything that JSON can express.
        rows: rows of a row group at most; None leaves it to pyarrow, which then makes one per table.

    Raises:
        OSError: the disk is full or read-only; nothing is left behind.
    """
    described = schema.with_metadata({METADATA: json.dumps(metadata, sort_keys=True).encode()})
    with (
        replacing(path) as aside,
        # Without checksums a flipped bit would be another number.
        pq.ParquetWriter(aside, described, compression="zstd", write_page_checksum=True) as writer,
    ):
        for table in tables:
            writer.write_table(table.cast(described), row_group_size=rows)


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Our metadata of a file; None if the file is missing, damaged or not ours."""
    try:
        found = pq.read_schema(path).metadata or {}
        value = json.loads(found[METADATA])
    except (OSError, KeyError, ValueError, pa.ArrowException):
        return None
    return value if isinstance(value, dict) else None


def _checked(values: Mapping[str, Any], name: str, good: Callable[[Any], bool], what: str) -> Any:
    """Returns a field of a JSON file that anybody may have written, of the type that the program relies on.

    Raises:
        KeyError: it is missing.
        TypeError: it is something else.
    """
    value = values[name]
    if not good(value):
        raise TypeError(f"{name} is {value!r:.80}, which is no {what}")
    return value


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1 << 62


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_amount(value)


def text(values: Mapping[str, Any], name: str) -> str:
    """Returns a text; raises as `_checked`, and ValueError if no file can be called so."""
    value: str = _checked(values, name, lambda value: isinstance(value, str), "text")
    if "\0" in value:
        raise ValueError(f"{name} is {value!r:.80}, which is no name")
    value.encode()  # half of a character is a ValueError
    return value


def inner_path(values: Mapping[str, Any], name: str) -> str:
    """Returns the path of a file below a directory; raises as `text`, and ValueError if it leaves that directory."""
    value = text(values, name)
    if not value or os.path.isabs(value) or ".." in PurePosixPath(value).parts:
        raise ValueError(f"{name} is {value!r:.80}, which lies in no directory of ours")
    return value


def count(values: Mapping[str, Any], name: str) -> int:
    """Returns a whole number from 0 to 2**62; raises as `_checked`."""
    return int(_checked(values, name, _is_count, "count"))


def counts(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Returns a list of such numbers; raises as `_checked`."""
    return tuple(
        _checked(values, name, lambda value: isinstance(value, list) and all(map(_is_count, value)), "list of counts")
    )


def amount(values: Mapping[str, Any], name: str) -> float:
    """Returns a number of 0 or more; raises as `_checked`."""
    return float(_checked(values, name, _is_amount, "amount"))


def limit(values: Mapping[str, Any], name: str) -> int | float | None:
    """Returns a number of 0 or more, or None; raises as `_checked`."""
    value: int | float | None = _checked(values, name, lambda value: value is None or _is_amount(value), "limit")
    return value


def mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns an object; raises as `_checked`."""
    return dict(_checked(values, name, lambda value: isinstance(value, dict), "object"))


def unwritable(path: Path, error: OSError) -> UserError:
    """Returns the sentence about a part of a packed directory that cannot be written."""
    return UserError(
        f"{path} cannot be written ({error.strerror or error}); free space or choose another --out, then run "
        "'energon-packing pack' again: it continues with the shards that are missing"
    )


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns every name whose values differ, in order, with both values; a name that is missing counts as None."""
    names = sorted({*first, *second})
    return [(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]
