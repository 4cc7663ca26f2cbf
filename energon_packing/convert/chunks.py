"""Files of records, pieces of them, and single records: what the process that finds them and its workers exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from energon_packing.errors import SampleRejected


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberBytes:
    """The place of a file in a tar.

    Attributes:
        path: of the tar.
        name: of the member.
        offset, size: of its content, bytes.
    """

    path: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """The content."""
        with open(self.path, "rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of records.

    Attributes:
        path: where it is, or will be once it is fetched.
        name: its path in reports, relative to the directory that was named; unique in a conversion.
        origin: index into `ConvertConfig.sources`.
        size: bytes.
        address: of a file in an object store; None for one of this machine.
    """

    path: Path
    name: str
    origin: int
    size: int = 0
    address: str | None = None

    @property
    def place(self) -> str:
        """The address, or the absolute path."""
        return self.address or str(self.path.absolute())


@dataclass(kw_only=True, slots=True)  # made for every record; a frozen one takes four times as long
class RawRecord:
    """One record as it is in its file.

    Attributes:
        source: the file.
        number: line of a JSON Lines file, from 1; index in an array, from 0.
        where: ``name:line`` or ``name[index]``, for a reader.
        value: the parsed JSON; None if `error` is set.
        error: why it could not be parsed.
        members: of a record in a tar, the files beside it, by each name that it may use.
        warnings: names of oddities of the form in which the file holds it.
    """

    source: SourceFile
    number: int
    where: str
    value: Any
    error: SampleRejected | None = None
    members: Mapping[str, MemberBytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


Form = Literal["lines", "text", "array", "object", "rows", "samples"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Records of one file that follow each other, to be parsed elsewhere.

    Attributes:
        source: the file.
        form: how the records are written: ``text`` is a document per line, ``rows`` are those of a table, ``samples``
            those of a tar.
        start, end: their bytes in the file, unpacked; the brackets of an array are left out. Of a table, its rows; of a
            tar, nothing but progress.
        first: number of the first record: line of a JSON Lines file, from 1; index in an array, from 0.
        position: bytes of the file up to the end of the chunk, where they are not `end`; for progress alone.
        path: of the file that holds the bytes; None for the source itself, which is not compressed.
        samples: name of each sample of a tar, and its members.
        error: in place of records, why the one at `first` and all that follow cannot be told apart.
    """

    source: SourceFile
    form: Form
    start: int
    end: int
    first: int
    error: SampleRejected | None = None
    position: int = -1
    path: Path | None = None
    samples: tuple[tuple[str, tuple[MemberBytes, ...]], ...] = ()


def broken(source: SourceFile, number: int, where: str, detail: str, *, reason: str = "bad_json") -> RawRecord:
    """A record that cannot be read."""
    error = SampleRejected(reason, f"{where}: {detail}")
    return RawRecord(source=source, number=number, where=where, value=None, error=error)


def one_line(error: BaseException) -> str:
    """The message of an exception, short and without line breaks."""
    text = str(error) or type(error).__name__
    return " ".join(text.split())[:300]


_SMALLEST_CHUNK, _LARGEST_CHUNK = 1 << 12, 1 << 19
_SHORT, _LONG = 0.05, 0.5
"""Seconds for a chunk below which chunks grow, and above which they shrink. Media take far longer than text."""


class ChunkSize:
    """Bytes of the next chunk: few at first, then what takes a worker a moment."""

    def __init__(self) -> None:
        self._bytes = _SMALLEST_CHUNK

    def __call__(self) -> int:
        return self._bytes

    def learn(self, seconds: float) -> None:
        """Takes note of how long a chunk took."""
        if seconds < _SHORT:
            self._bytes = min(2 * self._bytes, _LARGEST_CHUNK)
        elif seconds > _LONG:
            self._bytes = max(self._bytes // 2, _SMALLEST_CHUNK)
