"""Conversion from and to object stores: copies of sources and media on this machine, and the data set in a store.

The data set is made on this machine, then copied there file by file, its metadata last. A store shows each object when
all of it is there, but it cannot show a directory in one step. So a mark is written first and deleted last, and what
makes a data set of the shards is stored after them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from energon_packing.convert.chunks import SourceFile
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.layout import DATASET_FILE, META_DIRECTORY
from energon_packing.convert.report import CONVERSION_FILE, read_report
from energon_packing.convert.sources import unpacked
from energon_packing.errors import UserError, fault_of
from energon_packing.remote_files import (
    copy_place,
    digest,
    file_digest,
    listed,
    local_copy,
    private_directory,
    remote_address,
    remove,
    status,
    store,
)

MARK = "being-stored.json"
"""Beside the files of a data set that is not complete."""


def copy_of(source: SourceFile, scratch: Path) -> SourceFile:
    """A source as a file of this machine: itself, or where the copy of one in an object store will be."""
    return source if source.address is None else replace(source, path=copy_place(source.address, scratch / "sources"))


def fetch_source(source: SourceFile, scratch: Path) -> None:
    """Makes the copy of a source in an object store.

    Raises:
        OSError: this machine's disk takes no more.
        UserError: the store does not give it.
    """
    if source.address is None:
        return
    try:
        local_copy(source.address, scratch / "sources")
    except OSError as error:
        if fault_of(error) == "disk":
            raise
        raise UserError(f"{source.address} cannot be read: {error.strerror or error}") from error


def delete_copies(source: SourceFile, scratch: Path) -> None:
    """Deletes the copies of a source that has been read."""
    unpacked(scratch, source).unlink(missing_ok=True)
    if source.address is not None:
        source.path.unlink(missing_ok=True)


def check_remote_out(config: ConvertConfig, address: str) -> None:
    """Rejects an output in a store that must not be written; see `workspace.check_out`.

    Raises:
        UserError: something else is there, it must not be replaced, or it lies in a source, or a source in it.
    """
    roots = [*config.sources, *([config.media_root] if config.media_root is not None else [])]
    for root in filter(None, map(remote_address, roots)):
        if f"{root}/".startswith(f"{address}/") or f"{address}/".startswith(f"{root}/"):
            raise UserError(f"--out {address} and {root} lie in each other; choose another place")
    try:
        if status(address) is not None:
            raise UserError(f"--out {address} is a file; name a directory to create")
        if read_report(config.out) is not None:
            if not (config.overwrite or config.resume):
                raise UserError(
                    f"--out {address} already contains a converted data set; add --overwrite to replace it, --resume "
                    "to keep it if it is complete, or choose another place"
                )
        elif status(f"{address}/{MARK}") is None and listed(address):
            raise UserError(
                f"--out {address} is not empty, and convert did not write what it contains; choose another place, or "
                "empty it yourself"
            )
    except OSError as error:
        raise UserError(f"--out {address} cannot be looked at: {error.strerror or error}") from error


def local_place(address: str) -> Path:
    """Where the data set is made: the same directory of this machine for the same address, and for nobody else.

    Raises:
        UserError: it is somebody else's, or cannot be made.
    """
    place = private_directory() / hashlib.sha256(address.encode()).hexdigest()[:16] / "data"
    try:
        place.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{place} cannot be written: {error.strerror}; point TMPDIR elsewhere") from error
    return place


def store_data_set(local: Path, address: str, progress: Callable[[str, int, int], None]) -> None:
    """Copies a finished data set to a store, in place of what is there. What is there already is not sent again.

    Raises:
        UserError: the store cannot be written. The data set stays on this machine.
    """
    names = [path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()]
    names.sort(key=lambda name: (_order(name), name))
    total = sum((local / name).stat().st_size for name in names)
    done = 0
    progress("store", done, total)
    try:
        store(local / CONVERSION_FILE, f"{address}/{MARK}")
        before = {name for name, _ in listed(address)} - {MARK}
        for name in sorted(each for each in before if _order(each)):  # else it would describe other shards
            remove(f"{address}/{name}")
            before.remove(name)
        for name in names:
            path, target = local / name, f"{address}/{name}"
            if name not in before or not _is_there(path, target):
                store(path, target)
            done += path.stat().st_size
            progress("store", done, total)
        for name in sorted(before.difference(names)):  # of the data set that was there
            remove(f"{address}/{name}")
        remove(f"{address}/{MARK}")
    except OSError as error:
        raise UserError(
            f"the data set is complete in {local}, but --out {address} cannot be written: {error.strerror or error}; "
            "start again with --resume"
        ) from error


def _order(name: str) -> int:
    """Shards first, then what describes them, and last what says that all is complete."""
    if name == CONVERSION_FILE:
        return 3
    return 2 if name == DATASET_FILE else 1 if META_DIRECTORY in name.split("/") else 0


def _is_there(path: Path, address: str) -> bool:
    """Whether a store has a file already; of the same bytes."""
    found = status(address)
    return found is not None and found.size == path.stat().st_size and digest(address) == file_digest(path)
