"""A reader of the user's own: ``--reader MODULE:GENERATOR`` turns each source into records, or into `Conversation`s.

It runs once per source, in the process that finds records, and its records go to the workers from there. So it needs
not know of workers, and the data set does not depend on their number, if the generator yields the same records again.
"""

import hashlib
import inspect
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from energon_packing.conversation import Conversation
from energon_packing.convert.chunks import Chunk, ChunkBytes, RawRecord, SourceFile, one_line
from energon_packing.errors import ConfigError, SampleRejected, UserError
from energon_packing.registry import named_object
from energon_packing.remote_files import file_digest
from energon_packing.stored_record import is_too_deep

_MOST = 1024  # records of a chunk


def load_reader(name: str) -> Callable[[Path], Iterable[Any]]:
    """Returns the generator that MODULE:GENERATOR names; raises `ConfigError` if there is none."""
    reader = named_object(name, "--reader")
    if not callable(reader):
        raise ConfigError(f"--reader {name} is {reader!r:.60}; name a function that takes a path and yields records")
    return reader


def reader_options(name: str) -> dict[str, str]:
    """What decides the records, for the fingerprint of a conversion: the name, and the digest of the module's file."""
    module = inspect.getmodule(load_reader(name))
    code = Path(file).read_bytes() if (file := getattr(module, "__file__", None)) else b""
    return {"reader": name, "reader_code": hashlib.sha256(code).hexdigest()[:16]}


def find_yielded(source: SourceFile, name: str, chunk_bytes: ChunkBytes, digests: dict[str, str]) -> Iterator[Chunk]:
    """Divides what a reader makes of a file into chunks; see `sources.find_chunks`. Raises UserError: the reader fails,
    or yields what cannot be sent to a worker."""
    held: list[bytes] = []
    first = size = 0
    try:
        for value in load_reader(name)(source.path):
            held.append(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
            size += len(held[-1])
            if len(held) >= _MOST or size >= chunk_bytes():
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
    for number, record in enumerate(chunk.yielded, chunk.first):
        if len(record) > max_record_bytes:
            yield chunk.broken(number, f"the record has more than {max_record_bytes} bytes", "record_too_large")
            continue
        try:
            value = pickle.loads(record)
            if is_too_deep(value):
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
