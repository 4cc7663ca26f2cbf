"""Tar shards, written so that the same input produces the same bytes."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from energon_packing.convert.media_files import MediaFile, open_regular
from energon_packing.convert.tensor_files import TensorFile
from energon_packing.errors import UserError


class ShardWriter:
    """Writes members to ``<prefix>-000000.tar`` and so on, and begins the next shard when one is full."""

    def __init__(self, directory: Path, prefix: str, *, max_samples: int | None = None, max_bytes: int | None = None):
        """
        Args:
            directory: where the shards go; made if missing.
            prefix: letters, digits, ``_``.
            max_samples: samples of a shard.
            max_bytes: a shard that holds this many bytes is full; it may exceed them by its last sample.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._prefix = prefix
        self._max_samples = max_samples
        self._max_bytes = max_bytes
        self._tar: tarfile.TarFile | None = None
        self._samples_in_shard = 0
        self._bytes_in_shard = 0
        self.shards: dict[str, int] = {}
        """Shard name -> number of samples."""
        self.bytes = 0
        """Bytes of all members, without tar headers."""

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def begin_sample(self) -> None:
        """Begins a sample; call it before adding members. A sample never spans two shards."""
        full = self._max_samples is not None and self._samples_in_shard >= self._max_samples
        full |= self._max_bytes is not None and self._bytes_in_shard >= self._max_bytes
        if self._tar is None or full:
            self.close()
            name = f"{self._prefix}-{len(self.shards):06d}.tar"
            # USTAR: no extension records, so a member's offset is its header's, which Energon's index relies on.
            self._tar = tarfile.TarFile(self._directory / name, "w", format=tarfile.USTAR_FORMAT)
            self.shards[name] = 0
            self._samples_in_shard = self._bytes_in_shard = 0
        self._samples_in_shard += 1
        self.shards[next(reversed(self.shards))] += 1

    def add_bytes(self, name: str, content: bytes) -> None:
        """Adds a member to the current sample."""
        self._add(name, len(content), io.BytesIO(content))

    def add_media(self, name: str, media: MediaFile | TensorFile) -> None:
        """Copies a checked file into the current sample and verifies that it has not changed since the check.

        Raises:
            UserError: the file changed or vanished after it was checked.
        """
        changed = UserError(f"{media.path} changed while the conversion ran; start it again when nobody writes to it")
        try:
            with open_regular(Path(media.path)) as stream:
                reader = _HashingReader(stream)
                self._add(name, media.size, reader)
        except OSError as error:
            raise changed from error
        if reader.hexdigest()[:32] != media.name.split(".")[0]:
            raise changed

    def _add(self, name: str, size: int, stream: BinaryIO | _HashingReader) -> None:
        assert self._tar is not None, "begin_sample() was not called"
        member = tarfile.TarInfo(name)  # time, owner and group stay 0
        member.size = size
        member.mode = 0o644
        self._tar.addfile(member, stream)
        self._bytes_in_shard += size
        self.bytes += size

    def close(self) -> None:
        """Ends the current shard."""
        if self._tar is not None:
            self._tar.close()
            self._tar = None


class _HashingReader:
    """A stream that computes the SHA-256 of what is read from it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(size)
        self._hash.update(block)
        return block

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
