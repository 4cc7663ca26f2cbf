"""The media of a conversion in a file, not in memory: earlier checks by place, and distinct media by name."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from pathlib import Path

import orjson

from energon_packing.convert.media_checks import Stamp
from energon_packing.convert.media_files import MediaFile
from energon_packing.convert.scratch_database import open_scratch
from energon_packing.convert.shards import StoredFile
from energon_packing.convert.tensor_files import TensorFile
from energon_packing.errors import UserError

MediaRow = tuple[StoredFile, tuple[str, str] | None]
"""A file, and its type and content in Energon's table of media; None for tensors."""
_MOST_RECENT = 50_000


class MediaTable:
    """Kept by the process that knows the order of the records."""

    def __init__(self, path: Path, *, one_store: bool) -> None:
        """
        Args:
            path: file to make; not needed after the conversion.
            one_store: whether the names are those of one store, so that each content has one name.
        """
        self._one_store = one_store
        self._database = open_scratch(path)
        self._database.execute("CREATE TABLE checks (place TEXT PRIMARY KEY, entry TEXT) WITHOUT ROWID")
        self._database.execute(
            "CREATE TABLE media (digest TEXT PRIMARY KEY, name TEXT, path TEXT, size INTEGER, changed INTEGER,"
            " checked INTEGER, kind TEXT, content TEXT)"
        )
        self._recent: set[str] = set()
        self.files = 0
        """Distinct files so far."""

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def remember(self, checks: Iterable[tuple[str, str]]) -> None:
        """Keeps the place and the entry of files that were checked."""
        self._database.executemany("INSERT OR REPLACE INTO checks VALUES (?, ?)", checks)

    def recall(self, places: list[str]) -> list[str | None]:
        """The entry of each place; None where there is none."""
        found = (
            self._database.execute("SELECT entry FROM checks WHERE place = ?", (place,)).fetchone() for place in places
        )
        return [None if row is None else row[0] for row in found]

    def add(self, file: MediaFile | TensorFile, stamp: Stamp) -> None:
        """Adds a file that a record names; one with a content that is there already adds nothing.

        Raises:
            UserError: the store has the content under another extension, so that Energon could not tell them apart.
        """
        if file.name in self._recent:
            return
        if len(self._recent) >= _MOST_RECENT:
            self._recent.clear()
        self._recent.add(file.name)
        digest = file.name.partition(".")[0]
        values = (digest, file.name, file.path, *stamp, *(media_metadata(file) or (None, None)))
        before = self._database.total_changes
        self._database.execute("INSERT OR IGNORE INTO media VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        if self._database.total_changes > before:
            self.files += 1
            return
        name, path = self._database.execute("SELECT name, path FROM media WHERE digest = ?", (digest,)).fetchone()
        if name != file.name and self._one_store:
            raise UserError(f"{path} and {file.path} hold the same bytes; give both the same extension")

    def rows(self) -> Generator[MediaRow, None, None]:
        """The distinct files in the order in which they were added."""
        query = "SELECT name, path, size, changed, checked, kind, content FROM media ORDER BY rowid"
        with closing(self._database.execute(query)) as found:
            for name, path, size, changed, checked, kind, content in found:
                stamp = Stamp(size, changed, checked)
                yield stored_file(name, name, path, stamp), None if kind is None else (kind, content)


def stored_file(member: str, name: str, path: str, stamp: Stamp) -> StoredFile:
    """A file to store as a member.

    Args:
        member: name in the tar.
        name: in a media store; begins with the digest of the content.
        path: of the file.
        stamp: of its check.
    """
    return StoredFile(name=member, path=path, digest=name.partition(".")[0], stamp=stamp)


def media_metadata(file: MediaFile | TensorFile) -> tuple[str, str] | None:
    """Type and content of a file in the table of ``energon prepare --media-metadata-by-extension``.

    Energon would decode every file again, and omits a whole shard if one file fails. As in Energon's own table, sizes
    are those of the stored pixels, before EXIF or container rotation; the records hold the displayed sizes.

    Returns:
        None for a tensor: Energon has no metadata for it, and the records hold its shape.
    """
    if isinstance(file, TensorFile):
        return None
    if file.kind == "image":
        image = {
            "width": file.stored_width,
            "height": file.stored_height,
            "format": file.format,
            "mode": file.mode,
        }
        return "image", orjson.dumps(image).decode()
    video = {
        "video_duration": file.duration,
        "video_num_frames": file.frames,
        "video_fps": file.fps,
        "video_width": file.stored_width,
        "video_height": file.stored_height,
    }
    return "av", orjson.dumps(video).decode()
