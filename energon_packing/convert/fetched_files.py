"""Images and videos of object stores, copied to the working directory of the conversion, where they are files."""

from __future__ import annotations

from pathlib import Path

from energon_packing.convert.media_files import is_address, is_path
from energon_packing.errors import SampleRejected, UserError, fault_of
from energon_packing.remote_files import local_copy, status, within

FETCHED = "fetched"
"""Name of their directory, in the working directory of the conversion."""
_MOST_RECENT = 20_000


class FetchedFiles:
    """Copies images and videos of object stores to one directory for all workers, where they are files.

    It takes as much room as the distinct ones of them, until the data set is published.
    """

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
            # One of an interrupted conversion has the time of its original.
            copy = str(local_copy(address, self._directory))
        except OSError as error:
            fault, why = fault_of(error), f"{reference!r} of {root} cannot be read: {error.strerror or error}"
            if fault == "disk":
                raise
            if fault == "file":
                raise SampleRejected("missing_media", why) from error
            raise UserError(f"{why}; start again with --resume when the store answers") from error
        if len(self._recent) >= _MOST_RECENT:
            self._recent.clear()
        self._recent[address] = copy
        return copy
