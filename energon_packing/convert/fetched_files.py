"""Images and videos of object stores, copied to the working directory of the conversion, where they are files.

The directory takes as much room as the distinct ones of them, until the data set is published.
"""

from __future__ import annotations

import errno
import os
from hashlib import sha256
from pathlib import Path

from energon_packing.convert.media_files import is_address, is_path
from energon_packing.errors import SampleRejected, UserError
from energon_packing.remote_files import RemoteFile, fetch, status, within

FETCHED = "fetched"
"""Name of the directory."""
_MOST_RECENT = 20_000
_OF_ONE_FILE = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENAMETOOLONG, errno.EISDIR)


class FetchedFiles:
    """Copies files, in one directory for all workers."""

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        """
        Args:
            directory: made when it is needed.
            max_bytes: largest file; a larger one is not copied.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._recent: dict[str, str] = {}

    def place(self, reference: str, root: str) -> str:
        """The copy of one file.

        Args:
            reference: the path in the record, relative to the root, or an address below it.
            root: address of a directory.

        Raises:
            SampleRejected: ``remote_media``, ``media_outside_root``, ``missing_media``, ``media_too_large``.
            UserError: the store does not answer; the file may be in order.
            OSError: there is no room for the copy.
        """
        if is_address(reference) and not reference.startswith(f"{root.rstrip('/')}/"):
            raise SampleRejected("remote_media", f"{reference[:80]!r} is not in {root}; store it there")
        if not reference or "\0" in reference or not is_path(reference):
            raise SampleRejected("missing_media", f"{reference!r} is not a path")
        try:
            if (address := within(root, reference)) is None:
                raise SampleRejected("media_outside_root", f"{reference!r} leads out of the media root {root}")
            if address in self._recent:
                return self._recent[address]
            if (file := status(address)) is None:
                raise SampleRejected("missing_media", f"{reference!r} does not exist in {root}")
            if file.size > self._max_bytes:
                detail = f"{reference!r}: {file.size} bytes, more than the limit of {self._max_bytes}"
                raise SampleRejected("media_too_large", detail)
            found = self._copied(address, file)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            why = f"{reference!r} of {root} cannot be read: {error.strerror or error}"
            if error.errno in _OF_ONE_FILE:
                raise SampleRejected("missing_media", why) from error
            raise UserError(f"{why}; start again with --resume when the store answers") from error
        if len(self._recent) >= _MOST_RECENT:
            self._recent.clear()
        self._recent[address] = found
        return found

    def _copied(self, address: str, file: RemoteFile) -> str:
        digest = sha256(address.encode()).hexdigest()[:32]
        path = self._directory / digest[:2] / digest[2:] / address.rpartition("/")[2]
        try:
            there = os.stat(path)
        except FileNotFoundError:
            there = None
        # One of an interrupted conversion has the time of its original.
        if there is None or (there.st_size, there.st_mtime_ns) != (file.size, file.changed):
            fetch(address, path)
        return str(path)
