"""What describes a data set in an object store, as files of this machine: its YAML, and the indexes of its shards."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path, PurePosixPath

from energon_packing.convert.layout import META_DIRECTORY
from energon_packing.errors import UserError
from energon_packing.remote_files import fetch, listed, private_directory, read, remote_address, status

_INDEX = "index.sqlite"
_DESCRIPTIONS = (".yaml", ".yml", ".json", ".uuid")
_SHARDS = (".tar", ".idx")


def metadata_text(root: Path, name: str) -> str:
    """A file in the ``.nv-meta`` of a data set, here or in a store.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    address = remote_address(root)
    if address is None:
        return (root / META_DIRECTORY / name).read_text(encoding="utf-8")
    return read(f"{address}/{META_DIRECTORY}/{name}").decode("utf-8")


def index_file(root: Path) -> Path:
    """The index of a data set's shards; one in a store is copied once, to the directory for temporary files.

    Raises:
        UserError: that directory cannot be used.
        OSError: the index cannot be read.
    """
    address = remote_address(root)
    if address is None:
        return root / META_DIRECTORY / _INDEX
    index = f"{address}/{META_DIRECTORY}/{_INDEX}"
    if (file := status(index)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), index)
    known_by = f"{index}\0{metadata_text(root, 'index.uuid')}\0{file.size}\0{file.changed}"
    copy = private_directory() / "indexes" / f"{hashlib.sha256(known_by.encode()).hexdigest()[:32]}.sqlite"
    if not copy.exists():
        fetch(index, copy)
    return copy


def describe(address: str, directory: Path) -> Path:
    """Copies what describes a data set to a directory, where its shards are empty files: their names are looked at.

    Args:
        address: of a data set, or of its YAML.
        directory: empty.

    Returns:
        What `validate.looks.data.look_at_data` takes in place of the address.

    Raises:
        UserError: there is nothing, or it cannot be read.
    """
    try:
        in_file = status(address) is not None
        root = address.rpartition("/")[0] if in_file else address
        files = listed(root)
        if not files:
            raise UserError(f"{address} does not exist; name the directory that 'energon-packing convert' wrote")
        for name, _ in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                continue
            copy = directory / name
            if path.name == _INDEX and path.parent.name == META_DIRECTORY:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.symlink_to(index_file(Path(f"{root}/{path.parent.parent}")))
            elif path.suffix in _SHARDS or path.suffix in _DESCRIPTIONS or path.parent.name == META_DIRECTORY:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(b"" if path.suffix in _SHARDS else read(f"{root}/{name}"))
    except OSError as error:
        raise UserError(f"{address} cannot be read: {error.strerror or error}") from error
    return directory / address.rpartition("/")[2] if in_file else directory
