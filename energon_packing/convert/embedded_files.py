"""Images and videos whose bytes are in the record or beside it: Parquet cells, ``data:`` addresses, members of tars.

They are written to the working directory of the conversion, named by their content, and are files from there on. The
directory takes as much room as the distinct ones of them, until the data set is published.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes

from energon_packing.convert.fetched_files import FETCHED, FetchedFiles
from energon_packing.convert.media_files import resolve_media
from energon_packing.convert.record_media import EmbeddedBytes
from energon_packing.errors import SampleRejected

_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,5}")
_LONG_AGO = 1  # seconds; nothing else writes these files, so their time stamps need not say when


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


class EmbeddedFiles:
    """Makes files of embedded bytes, in one directory for all workers."""

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        """
        Args:
            directory: made if it is missing; files of object stores are put beside it.
            max_bytes: largest file.
        """
        directory.mkdir(exist_ok=True)
        self._directory = directory.resolve()
        self._max_bytes = max_bytes
        self._fetched = FetchedFiles(self._directory.with_name(FETCHED), max_bytes=max_bytes)

    def place(self, reference: str | EmbeddedBytes, root: Path | str, members: Mapping[str, MemberBytes]) -> str:
        """The file of one image or video of a record.

        Args:
            reference: a path, a ``data:`` address, or bytes.
            root: of paths: a directory, or the address of one.
            members: files beside the record in its tar, by each name that it may use; a record with any has no root.

        Raises:
            SampleRejected: ``corrupt_media`` for an address that cannot be decoded, ``media_too_large``, and the
                reasons of `resolve_media`.
            UserError: see `FetchedFiles.place`.
        """
        if isinstance(reference, EmbeddedBytes):
            return self._store(reference.content, reference.name)
        if reference.startswith("data:"):
            return self._store(*_decoded(reference, self._max_bytes))
        if reference in members:
            member = members[reference]
            self._check(member.size)
            return self._store(member.read(), member.name)
        if members:
            raise SampleRejected("missing_media", f"{reference!r} is not in the sample; it has: {_names(members)}")
        return self._fetched.place(reference, root) if isinstance(root, str) else resolve_media(reference, root)

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise SampleRejected("media_too_large", f"{size} bytes in the record; the limit is {self._max_bytes}")

    def _store(self, content: bytes, name: str) -> str:
        self._check(len(content))
        suffix = os.path.splitext(name)[1]
        suffix = suffix.lower() if _SUFFIX.fullmatch(suffix) else ""
        path = self._directory / (hashlib.sha256(content).hexdigest() + suffix)
        if not path.exists():
            part = self._directory / f".{socket.gethostname()}-{os.getpid()}"
            part.write_bytes(content)
            os.utime(part, (_LONG_AGO, _LONG_AGO))
            os.rename(part, path)
        return str(path)


def _names(members: Mapping[str, MemberBytes]) -> str:
    return ", ".join(sorted({member.name for member in members.values()})[:20])


def _decoded(address: str, max_bytes: int) -> tuple[bytes, str]:
    """Content and a name of a ``data:`` address (RFC 2397)."""
    head, comma, data = address[len("data:") :].partition(",")
    if not comma:
        raise SampleRejected("corrupt_media", "a data: address has no comma, so it holds no data")
    kind, *options = head.split(";")
    name = "x." + kind.rpartition("/")[2].lower()
    if "base64" not in (option.strip().lower() for option in options):
        try:
            return unquote_to_bytes(data), name
        except UnicodeEncodeError as error:
            raise SampleRejected("corrupt_media", "a data: address holds half of a character") from error
    if len(data) // 4 * 3 > max_bytes + 3:
        raise SampleRejected("media_too_large", f"a data: address of {len(data)} characters; the limit is {max_bytes}")
    try:
        # Blanks and line breaks are allowed; anything else that is not base64 is damage.
        return base64.b64decode("".join(data.split()), validate=True), name
    except (binascii.Error, ValueError) as error:
        raise SampleRejected("corrupt_media", f"a data: address is not base64: {error}") from error
