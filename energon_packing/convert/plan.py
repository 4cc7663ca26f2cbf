"""The samples of a conversion in reading order, in a file: what the second half needs to know about each."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from energon_packing.convert.media_checks import Stamp


@dataclass(kw_only=True, slots=True)
class PlannedFile:
    """A media file of a sample that is stored next to its record."""

    name: str
    path: str
    stamp: Stamp
    metadata: tuple[str, str] | None


@dataclass(kw_only=True, slots=True)
class PlannedSamples:
    """Good records of one chunk.

    Attributes:
        spool, offset: where their JSON begins: number of the spool file, bytes.
        keys: final.
        sizes: bytes of the JSON of each.
        splits: of each, as an index.
        files: number of a record -> its distinct files; monolithic layout only.
    """

    spool: int
    offset: int
    keys: Sequence[str]
    sizes: Sequence[int]
    splits: list[int]
    files: dict[int, list[PlannedFile]] = field(default_factory=dict)


class SamplePlan:
    """A file of `PlannedSamples`, written first and read back once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("wb")

    def add(self, samples: PlannedSamples) -> None:
        """Appends samples."""
        # A pickle that this process wrote a moment ago into its own directory.
        pickle.dump(samples, self._stream, pickle.HIGHEST_PROTOCOL)

    def read(self, moved: Mapping[int, int]) -> Generator[PlannedSamples, None, None]:
        """Yields the samples again.

        Args:
            moved: number of a sample -> the split that it has moved to.
        """
        self._stream.flush()
        before = 0
        with self._path.open("rb") as stream:
            while True:
                try:
                    samples: PlannedSamples = pickle.load(stream)
                except EOFError:
                    return
                for number, split in moved.items():
                    if before <= number < before + len(samples.keys):
                        samples.splits[number - before] = split
                before += len(samples.keys)
                yield samples

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()
