"""Copies on this machine of source files that are in an object store or packed."""

from __future__ import annotations

import errno
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from energon_packing.convert.chunks import SourceFile
from energon_packing.convert.sources import unpacked
from energon_packing.errors import UserError
from energon_packing.remote_files import fetch

FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (*FULL, errno.EROFS, errno.EIO, errno.EFBIG)
"""Error numbers of a disk that takes no more."""


def copy_of(source: SourceFile, scratch: Path) -> SourceFile:
    """A source as a file of this machine: itself, or where the copy of one in an object store will be."""
    if source.address is None:
        return source
    digest = sha256(source.address.encode()).hexdigest()[:32]
    return replace(source, path=scratch / "sources" / digest / source.path.name)


def fetch_source(source: SourceFile) -> None:
    """Makes the copy of a source in an object store.

    Raises:
        OSError: this machine's disk takes no more.
        UserError: the store does not give it.
    """
    if source.address is None:
        return
    try:
        fetch(source.address, source.path)
    except OSError as error:
        if error.errno in UNWRITABLE and error.errno != errno.EIO:
            raise
        raise UserError(f"{source.address} cannot be read: {error.strerror or error}") from error


def delete_copies(source: SourceFile, scratch: Path) -> None:
    """Deletes the copies of a source that has been read."""
    unpacked(scratch, source).unlink(missing_ok=True)
    if source.address is not None:
        source.path.unlink(missing_ok=True)
