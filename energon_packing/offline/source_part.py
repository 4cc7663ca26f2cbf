"""The data sets that offline commands read: parts with their shards, and the samples in them, by position."""

from __future__ import annotations

import os.path
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.energon import CrudeSample
from megatron.energon.cache import FileStore

from energon_packing.convert.layout import MEDIA_AUX
from energon_packing.errors import UserError
from energon_packing.offline.index import Kind, kind_of_subflavors
from energon_packing.offline.kinds import KINDS
from energon_packing.offline.shard_index import Position, ShardIndex
from energon_packing.offline.tar_files import TarFiles
from energon_packing.remote_files import check_remote, describe, remote_address
from energon_packing.validate.looks.data import DataLooks, look_at_data
from energon_packing.validate.looks.leaves import REMOTE


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePart:
    """A directory of shards whose records are conversations or clips, and the directory of their media.

    Attributes:
        path: that the user named; absolute, or an address. `root` and `media_root` may be addresses, too.
        split: part of it.
        root: directory of the shards.
        media_root: directory of the shards with the media; `root` itself for a monolithic data set.
        shards: names of the part's tars, in order.
        subflavors: of its samples.
        weight, repetitions: that a metadataset gives it, see `Leaf`.
    """

    path: str
    split: str
    root: str
    media_root: str
    shards: tuple[str, ...]
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    weight: float | None = None
    repetitions: float | None = None

    def sample(self, key: str, record: bytes, store: FileStore[bytes]) -> Any:
        """Cooks a record as the loader does; a bad one carries its problem."""
        crude = CrudeSample(
            {
                "__key__": key,
                "__restore_key__": (),
                "__subflavors__": dict(self.subflavors),
                "__sources__": (),
                "json": record,
            }
        )
        return KINDS[kind_of_subflavors(self.subflavors) or "conversations"].cook(crude, store)


def source_parts(path: str | Path, split: str, kind: Kind = "conversations") -> list[SourcePart]:
    """The parts of a data set that ``convert`` wrote, or of a metadataset of such data sets.

    Args:
        path: of this machine, or in an object store (`energon_packing.remote_files`).
        split: part of it.

    Raises:
        UserError: something is missing or damaged, or the samples are not of that kind.
    """
    if (address := remote_address(path)) is None:
        return _parts(str(path), os.path.abspath(path), split, kind)
    with _copied(path, address) as (description, here):
        parts = _parts(description, address, split, kind)
    return [
        replace(part, root=_there(part.root, here, address), media_root=_there(part.media_root, here, address))
        for part in parts
    ]


def kind_of_data(path: str | Path, split: str) -> Kind:
    """What the samples of a data set are; conversations if it does not say.

    Raises:
        UserError: it is missing or damaged.
    """
    if (address := remote_address(path)) is None:
        found = _looks(str(path), split)
    else:
        with _copied(path, address) as (description, _):
            found = _looks(description, split)
    kinds = (kind_of_subflavors(inspected.subflavors) for _, inspected in found.readable)
    return next((kind for kind in kinds if kind is not None), "conversations")


@contextmanager
def _copied(path: str | Path, address: str) -> Iterator[tuple[str, Path]]:
    """A copy of the description of a remote data set: what `look_at_data` takes, and the directory in place of the
    address, which errors name instead.

    Raises:
        UserError: the storage cannot be read.
    """
    check_remote("DATASET", Path(path), "copy the data set with the storage's own tool, and name the local path")
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch).resolve() / "data"
        try:
            yield str(describe(address, here)), here
        except UserError as error:
            raise UserError(str(error).replace(str(here), address)) from error


def _there(path: str, here: Path, address: str) -> str:
    """The address of a directory whose description was copied; a metadataset may also name one of this machine."""
    root = address.rpartition("/")[0] if address.endswith((".yaml", ".yml")) else address
    relative = os.path.relpath(path, here)
    return path if relative.startswith("..") else root if relative == "." else f"{root}/{relative}"


def _parts(path: str, named: str, split: str, kind: Kind) -> list[SourcePart]:
    """The parts of a data set whose description is on this machine.

    Args:
        path: of the description.
        named: what the user named.
    """
    found = _looks(path, split)
    if not found.whole:
        raise UserError(f"{path} is not on this machine; offline commands read shards by position from a local path")
    parts = []
    for leaf, inspected in found.readable:
        own = kind_of_subflavors(inspected.subflavors)
        if own is not None and own != kind:
            raise UserError(f"{leaf.path} holds {own}, but {kind} are expected here; see docs/offline.md, 'Clips'")
        if own is None or leaf.joined:
            raise UserError(
                f"{leaf.path} does not hold {kind} that 'energon-packing convert' wrote; offline commands read "
                "no other records"
            )
        if leaf.subset:
            raise UserError(
                f"{leaf.named_in or path} takes a subset of {leaf.path}, and offline commands read data sets whole; "
                "make the part a split of its own with 'energon-packing convert --split'"
            )
        media = leaf.aux.get(MEDIA_AUX, leaf.path)
        if REMOTE in media:
            raise UserError(f"{leaf.path} keeps its media as files in {media}; convert it again, into shards")
        parts.append(
            SourcePart(
                path=named,
                split=leaf.split,
                root=os.path.abspath(leaf.path),
                media_root=os.path.abspath(media),
                shards=inspected.names,
                subflavors=inspected.subflavors,
                weight=leaf.weight,
                repetitions=leaf.repetitions,
            )
        )
    return parts


def _looks(path: str, split: str) -> DataLooks:
    found = look_at_data(path, split, {"data.path": "DATASET", "data.split": "--split"}, {})
    wrong = [look for look in found.looks if look.outcome == "error"]
    if wrong:
        raise UserError(f"{wrong[0].why}; {wrong[0].fix}")
    return found


class IndexedMedia(FileStore[bytes]):
    """Looks up media of one sample in the index of their shards; for measuring, so nothing is read from a tar.

    Args:
        index: of the data set with the media.
        key: of the sample, which a name that begins with a dot continues.
    """

    def __init__(self, index: ShardIndex, key: str) -> None:
        self._index = index
        self._key = key

    def _full(self, name: str) -> str:
        return self._key + name if name.startswith(".") else name

    def position(self, name: str) -> Position | None:
        """Where the file lies; None if it is missing."""
        return self._index.position(self._full(name))

    def __getitem__(self, key: str) -> tuple[bytes, Any]:
        raise KeyError(f"{key} is not read while samples are measured")

    def get_path(self) -> str:
        """The directory of the media."""
        return str(self._index.root)

    def get_media_metadata(self, key: str) -> Any:
        """See `ShardIndex.media_metadata`."""
        return self._index.media_metadata(self._full(key))


class PositionedMedia(FileStore[bytes]):
    """Reads media of one sample at positions that are known.

    Args:
        files: open tars.
        positions: name -> tar, offset, bytes.
        metadata: gives Energon's metadata of a name, for records that lack sizes.
    """

    def __init__(self, files: TarFiles, positions: Mapping[str, tuple[Path, int, int]], metadata: Any = None) -> None:
        self._files = files
        self._positions = positions
        self._metadata = metadata

    def __getitem__(self, key: str) -> tuple[bytes, Any]:
        path, offset, size = self._positions[key]
        return self._files.read(path, offset, size), None

    def get_path(self) -> str:
        """No single directory holds them."""
        return ""

    def get_media_metadata(self, key: str) -> Any:
        """Energon's metadata, for records that lack sizes."""
        if self._metadata is None:
            raise RuntimeError("no media metadata")
        return self._metadata(key)
