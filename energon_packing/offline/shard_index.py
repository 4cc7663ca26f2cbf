"""Positions of records and media in the tars of a WebDataset, from the index that Energon keeps beside them."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from energon_packing.convert.layout import INFO_FILE, META_DIRECTORY
from energon_packing.errors import UserError
from energon_packing.remote_files import index_file, metadata_text, shown

RECORD_PART = "json"
"""Part of a sample that holds its record."""
# As Energon divides a member's name into the sample's key and the part: at the first dot of the last component.
_KEY_AND_PART = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_RECORDS = f"""
    SELECT s.sample_key, p.content_byte_offset, p.content_byte_size FROM samples s
    LEFT JOIN sample_parts p
        ON p.tar_file_id = s.tar_file_id AND p.sample_index = s.sample_index AND p.part_name = '{RECORD_PART}'
    WHERE s.tar_file_id = ? ORDER BY s.sample_index
"""
_POSITION = """
    SELECT p.tar_file_id, p.content_byte_offset, p.content_byte_size FROM samples s
    JOIN sample_parts p ON p.tar_file_id = s.tar_file_id AND p.sample_index = s.sample_index
    WHERE s.sample_key = ? AND p.part_name = ?
"""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a file lies.

    Attributes:
        shard: number of its tar in the data set.
        offset: of its first byte in the tar.
        size: bytes.
    """

    shard: int
    offset: int
    size: int


class ShardIndex:
    """``.nv-meta`` of a WebDataset, opened to read.

    Args:
        root: directory of the data set, here or in an object store (`energon_packing.remote_files`).

    Raises:
        UserError: it has no index that can be read.
    """

    def __init__(self, root: Path) -> None:
        meta = root / META_DIRECTORY
        self.root = root
        self.uuid = self.uuid_of(root)
        try:
            counts = json.loads(metadata_text(root, INFO_FILE))["shard_counts"]
            place = quote(str(index_file(root)))  # "#", "?" and "%" would end or change the path
            self._database = sqlite3.connect(f"file:{place}?mode=ro&immutable=1", uri=True)
            self._database.execute("SELECT 1 FROM sample_parts LIMIT 1")
        except (OSError, KeyError, ValueError, TypeError, sqlite3.Error) as error:
            raise UserError(f"{shown(meta)} cannot be read ({error}); run 'energon prepare {shown(root)}'") from error
        self.shards: tuple[str, ...] = tuple(counts)
        """Names of the tars, in the order of their numbers."""
        self.samples: dict[str, int] = {name: int(count) for name, count in counts.items()}
        """Name of each tar -> number of samples."""

    @staticmethod
    def uuid_of(root: Path) -> str:
        """The identifier of a data set's index.

        Raises:
            UserError: it cannot be read.
        """
        file = root / META_DIRECTORY / "index.uuid"
        try:
            return metadata_text(root, file.name).strip()
        except (OSError, ValueError) as error:
            raise UserError(f"{shown(file)} cannot be read ({error}); run 'energon prepare {shown(root)}'") from error

    def records(self, shard: str) -> Iterator[tuple[str, int | None, int | None]]:
        """Key of each sample of a tar, in order, with offset and bytes of its record; None if it has no record."""
        yield from self._database.execute(_RECORDS, (self.shards.index(shard),))

    def position(self, name: str) -> Position | None:
        """Where the file of a name lies; None if the data set has none."""
        parts = _KEY_AND_PART.match(name)
        row = self._database.execute(_POSITION, parts.groups()).fetchone() if parts else None
        return None if row is None else Position(*row)

    def media_metadata(self, name: str) -> Any:
        """Energon's metadata of an image or video.

        Raises:
            KeyError: it has none for this name.
            RuntimeError: it has none at all.
        """
        from megatron.energon.media.metadata import deserialize_media_metadata

        try:
            row = self._database.execute(
                "SELECT metadata_type, metadata_json FROM media_metadata WHERE entry_key = ?", (name,)
            ).fetchone()
        except sqlite3.Error as error:
            raise RuntimeError(f"{self.root} has no media metadata") from error
        if row is None:
            raise KeyError(name)
        return deserialize_media_metadata(*row)

    def close(self) -> None:
        """Closes the database."""
        self._database.close()
