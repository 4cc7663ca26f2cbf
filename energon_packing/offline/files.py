"""Files that are there whole or not at all, Parquet files with small metadata of our own, and fields of JSON files that
anybody may have written. A path may be an address (`energon_packing.remote_files`).
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import os.path
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from energon_packing.errors import UserError, fault_of, read_again
from energon_packing.line_file import lock
from energon_packing.remote_files import RemoteReader, private_directory, read_range, remote_address, shown, store

MOST_BYTES = 1 << 30  # of a JSON file that is read
METADATA = b"energon_packing"  # key of our metadata in the schema of a file; the value is JSON

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    fix = "install it with: pip install '.[offline]' in the checkout"
    raise UserError(f"the offline road needs pyarrow ({error}); {fix}") from error


HOST = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())
"""Part of the name of a file that is being written, since several hosts may write to one directory."""


def remove_leftovers(directory: Path, name: str = "*") -> None:
    """Removes files that processes of this host were writing to `directory`, by any name or one, when they were killed.
    Containers may share the name of their host and not its processes, so a file that is locked stays too."""
    if remote_address(directory):
        directory, name = private_directory(), "*"
    for file in directory.glob(f".{name}.{HOST}.*"):
        try:  # one that ended and that nobody waited for is there for good in a container without an init
            lives = b") Z " not in Path(f"/proc/{file.suffix[1:]}/stat").read_bytes()
        except OSError:
            lives = False
        with contextlib.suppress(OSError):  # it is locked, or nobody can say
            if file.suffix[1:].isdigit() and not lives:
                with file.open("r+b") as opened:  # NFS locks only what may be written
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink(missing_ok=True)


def said(error: OSError) -> str:
    """What the system or a store says; ``No space left on device`` of a full disk, where pyarrow's words are longer."""
    return os.strerror(error.errno) if error.errno and fault_of(error) == "disk" else error.strerror or str(error)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to, and renames it to `path` if nothing was raised. For an address it is one
    in `private_directory`, which is stored then."""
    address = remote_address(path)
    own = path if address is None else private_directory() / hashlib.sha256(address.encode()).hexdigest()[:32]
    # Containers may share the name of their host, and have processes of the same number.
    aside = own.with_name(f".{own.name}.{HOST}.{os.urandom(4).hex()}.{os.getpid()}")
    try:
        # The lock ends with the process, and is on the file whatever opens it to write.
        with aside.open("wb") as held:
            with contextlib.suppress(OSError):  # some file systems lock nothing
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield aside
            with aside.open("rb") as written:
                os.fsync(written.fileno())
            if address is None:
                os.replace(aside, path)
            else:
                store(aside, address)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(directory: Path, byte: int = 0, *, wait: bool = True) -> Iterator[bool]:
    """Locks a directory among all commands that write to it, or a part of it that another `byte` stands for. The lock
    is a byte of one file, so nothing is left over when a process dies, and it holds on network file systems too.
    Without `wait` it gives whether this process has the lock. Stores have no locks: two commands that write one file
    there write the same, and the manifest last."""
    if remote_address(directory):
        yield True
        return
    with (directory / ".lock").open("r+b" if (directory / ".lock").exists() else "w+b") as file:
        try:
            lock(file, directory, wait=wait, byte=byte)
        except (BlockingIOError, PermissionError):
            yield False
            return
        yield True  # closing the file gives the lock back


class ParquetFile(pq.ParquetFile):
    """An open Parquet file of ours, or of anybody."""

    @property
    def described(self) -> dict[str, Any] | None:
        """Our metadata; None if they are damaged or the file is not ours."""
        try:
            value = json.loads((self.schema_arrow.metadata or {})[METADATA])
        except (KeyError, ValueError):
            return None
        return value if isinstance(value, dict) else None


def parquet_file(path: Path, *, size: int | None = None, **options: Any) -> ParquetFile:
    """Opens a Parquet file with pyarrow's `options`. Of one in a store, the end is read (`TAIL_BYTES`, and a footer
    that is larger), after the `size` was asked for if the caller does not know it; then each row group, or those of
    its columns that are asked for, in one piece. Raises OSError, pa.ArrowException: missing, unreadable, or no such
    file."""
    if (address := remote_address(path)) is None:
        path.stat()  # whose error names the file, as pyarrow's does not
        return ParquetFile(path, **options)
    return ParquetFile(pa.PythonFile(RemoteReader(address, size), "r"), pre_buffer=True, **options)


def write_table(path: Path, schema: pa.Schema, tables: Iterable[pa.Table], metadata: Mapping[str, Any]) -> None:
    """Writes tables of one schema, each as a row group. `metadata` is for `read_metadata`: anything that JSON can
    express. Raises OSError: the disk is full or read-only; nothing is left behind."""
    described = schema.with_metadata({METADATA: json.dumps(metadata, sort_keys=True).encode()})
    with (
        replacing(path) as aside,
        aside.open("wb") as sink,  # which is closed on a full disk, too; a writer leaves its own open
        # Without checksums a flipped bit would be another number.
        pq.ParquetWriter(sink, described, compression="zstd", write_page_checksum=True) as writer,
    ):
        for table in tables:
            writer.write_table(table.cast(described))


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    with replacing(path) as aside:
        aside.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_json(file: Path, kind: Any, *, version: int, what: str, remedy: str) -> Any:
    """Returns what `write_json` wrote, as `read_as` reads it. Its ``format`` must be `version`; messages say `what` the
    file or its directory is, such as ``an index``, and that the command `remedy` makes another one. Raises UserError:
    it is missing, damaged, or of another version."""
    try:
        if len(text := read_again(shown(file), lambda: _read(file))) > MOST_BYTES:
            raise ValueError("it is too large")
        content = json.loads(text)
    except FileNotFoundError as error:
        why = f"is not {what} (it has no {file.name}); make one with 'energon-packing {remedy}'"
        raise UserError(f"{shown(file.parent)} {why}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{shown(file)} cannot be read ({error}); {remedy} again") from error
    if not isinstance(content, dict) or content.get("format") != version:
        raise UserError(f"{shown(file)} is not {what} of format {version}; {remedy} again with this version")
    try:
        return read_as(kind, content)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{shown(file)} is damaged ({error}); {remedy} again") from error


def _read(file: Path) -> bytes:
    if (address := remote_address(file)) is not None:
        return read_range(address, 0, MOST_BYTES + 1)  # one answer, of one object
    with file.open("rb") as stream:  # read() takes as much memory as is asked for
        return stream.read(min(os.fstat(stream.fileno()).st_size, MOST_BYTES) + 1)


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Our metadata of a file; None if the file is missing, damaged or not ours."""
    try:
        with read_again(shown(path), lambda: parquet_file(path)) as file:
            return file.described
    except (OSError, ValueError, pa.ArrowException):
        return None


MOST = 1 << 62  # of any number in a JSON file
Count = Annotated[int, lambda value: 0 <= value <= MOST]
Amount = Annotated[float, lambda value: 0 <= value <= MOST]
Name = Annotated[str, lambda name: "\0" not in name and not re.search("[\ud800-\udfff]", name)]
"""A text that a file can be called."""
InnerPath = Annotated[Name, lambda path: path and not os.path.isabs(path) and ".." not in PurePosixPath(path).parts]
"""Of a file below a directory."""


def read_as(kind: Any, value: Any) -> Any:
    """Returns a value of a JSON file that anybody may have written as a dataclass, or another type. Fields that the
    dataclass lacks are left out; those that the file lacks have their defaults. Raises TypeError, ValueError: it is
    something else."""
    return _reader(kind)(value)


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        fields = [(field.name, _reader(hints[field.name])) for field in dataclasses.fields(kind)]
        return lambda values: kind(**{name: read(values[name]) for name, read in fields if name in values})
    if origin is Annotated:
        of_any = _reader(inner[0])
        return lambda value: _checked(of_any(value), *inner[1:])
    if origin is tuple and inner[1] is ...:
        each = _reader(inner[0])
        listed = _typed(list)
        return lambda values: tuple(map(each, listed(values)))
    if origin is tuple:
        places = [_reader(each) for each in inner]
        return lambda values: tuple(read(value) for read, value in zip(places, values, strict=True))
    if origin in (Union, UnionType):  # or None
        given = _reader(inner[0])
        return lambda value: None if value is None else given(value)
    if origin is Literal:
        return lambda value: _checked(value, lambda it: it in inner)
    return _PLAIN.get(kind, _typed(dict))


def _checked(value: Any, *good: Callable[[Any], Any]) -> Any:
    if not all(test(value) for test in good):
        raise TypeError(f"{value!r:.80} cannot be there")
    return value


def _typed(*kinds: type) -> Callable[[Any], Any]:
    return lambda value: _checked(value, lambda it: type(it) in kinds)


_amount = _typed(int, float)
_PLAIN: dict[Any, Callable[[Any], Any]] = {each: _typed(each) for each in (str, int, bool)}
_PLAIN[float] = lambda value: float(_amount(value))


@contextlib.contextmanager
def writing(path: Path, again: str) -> Iterator[None]:
    """Raises UserError if a part of an index or a packed directory cannot be written; the command `again` goes on with
    what is missing."""
    try:
        yield
    except OSError as error:
        what, instead = f"{shown(path)} cannot be written ({said(error)})", "make room or choose another --out"
        if remote_address(path) and fault_of(error) == "disk":
            made, instead = f"as it is made in {private_directory()}", "make room or point TMPDIR elsewhere"
            what = f"{shown(path)}, {made} first, cannot be written ({said(error)})"
        then = f"then run 'energon-packing {again}' again: it continues with the shards that are missing"
        raise UserError(f"{what}; {instead}, {then}") from error


def differing(
    stored: Mapping[str, Any], own: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> list[tuple[str, Any, Any]]:
    """Compares the settings that a stored file was made with to those of a run. A setting that the file lacks is one
    that the version that wrote it did not have: it was made with the default, which `defaults` have of settings that
    may be newer than the file; one without any is None. Returns every name whose values differ, in order, with both
    values; those of a section have its name before a dot."""
    stored, own = ({**_flat(defaults or {}), **_flat(each)} for each in (stored, own))
    pairs = ((name, stored.get(name), own.get(name)) for name in sorted({*stored, *own}))
    return [(name, before, now) for name, before, now in pairs if before != now]


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return flat
