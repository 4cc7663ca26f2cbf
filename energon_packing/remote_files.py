"""Files in object stores, through the package that Energon reads them with (``multistorageclient``).

Its configuration says what a profile of ``msc://PROFILE/PATH`` is; it also takes ``s3://``, ``gs://`` and ``ais://``.
Paths of the command line are ``pathlib.Path``, which makes one slash of two: `remote_address` gives the address back.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import posixpath
import re
import socket
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packing.errors import ConfigError, UserError
from energon_packing.read_again import read_again

PIECE_BYTES = 8 << 20
"""Read at once."""
_ANY_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?=[^/])")
_OURS = ("msc", "s3", "gs", "ais")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What a store says about a file.

    Attributes:
        size: bytes.
        changed: time of the last change, nanoseconds.
        version: that the store gives the content (``etag``), for a change within a tick of its clock; may be empty.
    """

    size: int
    changed: int
    version: str = ""


def remote_address(path: str | Path) -> str | None:
    """The address that a path stands for; None for a path of this machine.

    A directory of this machine may be called ``s3:``; then its paths are local.
    """
    found = _ANY_ADDRESS.match(str(path))
    if found is None or os.path.exists(f"{found[1]}:"):
        return None
    return f"{found[1]}://{str(path)[found.end() :]}"


def shown(path: str | Path) -> str:
    """A path as the user wrote it: the address, or the path itself."""
    return remote_address(path) or str(path)


def absolute(path: Path) -> str:
    """The address, or the absolute path."""
    return remote_address(path) or str(path.absolute())


def check_remote(what: str, path: Path, instead: str) -> None:
    """Refuses an address that cannot be read or written here. Local paths pass.

    Args:
        what: the option that named it.
        path: as given.
        instead: what the user can do without the package.

    Raises:
        ConfigError: it is of another kind, or the package that reads it is not installed.
    """
    address = remote_address(path)
    if address is None:
        return
    if address.partition(":")[0] not in _OURS:
        raise ConfigError(f"{what} {address} is a remote address of a kind that is not read here; {instead}")
    if importlib.util.find_spec("multistorageclient") is None:
        raise ConfigError(
            f"{what} {address} is a remote address, which needs the package multi-storage-client; run pip install "
            f"'energon-packing[remote]', or {instead}"
        )


def check_local(what: str, path: str | Path) -> None:
    """Refuses an address where only a path of this machine will do.

    Args:
        what: the option or argument that named it, and what it is.
        path: as given.

    Raises:
        ConfigError: it is an address.
    """
    if (address := remote_address(path)) is not None:
        raise ConfigError(
            f"{what} {address} is a remote address; it must be on this machine: mount the storage, or copy the files "
            "with its own tool"
        )


def private_directory() -> Path:
    """A directory of this machine for copies, of this user alone; made below the one for temporary files.

    Raises:
        UserError: it is somebody else's, or cannot be made.
    """
    private = Path(tempfile.gettempdir()) / f"energon-packing-{os.getuid()}"
    try:
        private.mkdir(mode=0o700, exist_ok=True)
        found = private.lstat()
    except OSError as error:
        raise UserError(f"{private} cannot be written: {error.strerror}; point TMPDIR elsewhere") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{private} is not a directory of yours alone; remove it, or point TMPDIR elsewhere")
    return private


def status(address: str) -> RemoteFile | None:
    """What the store says about a file; None if there is no such file.

    Raises:
        UserError: the store cannot be used.
        OSError: it does not answer.
    """
    try:
        found = _ask(address, lambda client, path: client.info(path))
    except FileNotFoundError:
        return None
    return None if found.type != "file" else _described(found)


def listed(address: str) -> list[tuple[str, RemoteFile]]:
    """The files below an address, each with its path relative to it; none if there is nothing there.

    Raises:
        UserError: the store cannot be used.
        OSError: it does not answer.
    """

    def ask(client: Any, path: str) -> list[tuple[str, RemoteFile]]:
        directory = f"{path.strip('/')}/" if path.strip("/") else ""
        files = [each for each in client.list_recursive(directory) if each.type == "file"]
        keys = [each.key.lstrip("/") for each in files]
        return [
            (key.removeprefix(directory), _described(each))
            for key, each in zip(keys, files, strict=True)
            if key.startswith(directory)
        ]

    try:
        return _ask(address, ask)
    except FileNotFoundError:
        return []


def matches(address: str) -> list[str]:
    """The addresses of the files that match a pattern of ``*``, ``?``, ``[...]`` and ``**``, sorted.

    Raises:
        UserError: the store cannot be used.
        OSError: it does not answer.
    """
    found, pattern = _ask(address, lambda client, path: (client.glob(path), path))
    root = address[: len(address) - len(pattern)] if address.endswith(pattern) else address
    return sorted({root + each.lstrip("/") for each in found})


def within(root: str, reference: str) -> str | None:
    """The address of a file that data name below a root.

    Args:
        root: address of a directory.
        reference: path relative to it, or an address below it.

    Returns:
        None if it would leave the root, also by a link where the store is a file system.
    """
    root = root.rstrip("/")
    relative = reference.removeprefix(f"{root}/")
    normal = posixpath.normpath(relative)
    if normal.startswith(("/", "../")) or normal in ("..", "."):
        return None
    address = f"{root}/{normal}"
    inside, real = (_ask(each, lambda client, path: client.get_posix_path(path)) for each in (root, address))
    if inside is not None and real is not None:
        inside, real = os.path.realpath(inside), os.path.realpath(real)
        if os.path.commonpath((inside, real)) != inside:
            return None
    return address


def read_range(address: str, offset: int, size: int) -> bytes:
    """Bytes of a file; fewer at its end.

    Raises:
        OSError: the file is not there, or cannot be read.
    """
    import multistorageclient.types

    piece = multistorageclient.types.Range(offset=offset, size=size)
    data: bytes = _ask(address, lambda client, path: client.read(path, piece))
    return data


def read(address: str) -> bytes:
    """A small file.

    Raises:
        OSError: the file is not there, or cannot be read.
    """
    data: bytes = _ask(address, lambda client, path: client.read(path))
    return data


def digest(address: str) -> str:
    """SHA-256 of a file, hexadecimal, read in pieces.

    Raises:
        OSError: the file is not there, cannot be read, or changes.
    """
    before = status(address)
    if before is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address)
    found = hashlib.sha256()
    for offset in range(0, before.size, PIECE_BYTES):
        found.update(read_range(address, offset, min(PIECE_BYTES, before.size - offset)))
    if status(address) != before:
        raise OSError(errno.EIO, "the file changed while it was read", address)
    return found.hexdigest()


def fetch(address: str, target: Path) -> None:
    """Copies a file to this machine: whole or not at all, with the time of its last change.

    Raises:
        OSError: the file is not there, cannot be read, or changes; or the target cannot be written.
    """
    before = status(address)
    if before is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{socket.gethostname()}-{os.getpid()}.part")
    try:
        _ask(address, lambda client, path: client.download_file(path, str(part)))
        if part.stat().st_size != before.size or status(address) != before:
            raise OSError(errno.EIO, "the file changed while it was read", address)
        os.utime(part, ns=(before.changed, before.changed))
        os.rename(part, target)
    finally:
        part.unlink(missing_ok=True)


def store(file: Path, address: str) -> None:
    """Copies a file of this machine to a store, and reads it back to compare the digests.

    A store shows a new object when all of it is there.

    Raises:
        OSError: it cannot be written, or what is stored differs.
    """
    _ask(address, lambda client, path: client.upload_file(path, str(file)))
    with file.open("rb") as stream:
        own = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest(address) != own:
        raise OSError(errno.EIO, "what was stored differs from what was sent", address)


def remove(address: str) -> None:
    """Deletes a file; nothing if there is none.

    Raises:
        OSError: it cannot be deleted.
    """
    try:
        _ask(address, lambda client, path: client.delete(path))
    except FileNotFoundError:
        return


def _ask[Found](address: str, do: Callable[[Any, str], Found]) -> Found:
    """Calls the client of an address with its path in the store; what fails in passing is tried again."""

    def tried() -> Found:
        try:
            client, path = _resolved(address)
            return do(client, path)
        except RuntimeError as error:
            raise _as_os_error(error) from error

    return read_again(address.rpartition("/")[0], tried)


def _resolved(address: str) -> tuple[Any, str]:
    import multistorageclient

    try:
        return multistorageclient.resolve_storage_client(address)
    except (ValueError, ImportError) as error:  # its configuration, or a package of one kind of store
        raise UserError(f"{address} cannot be used: {' '.join(str(error).split())}") from error


def _as_os_error(error: RuntimeError) -> OSError:
    """An error of the client as one of the system; its own kind if the store is a file system."""
    cause = error.__cause__
    code = cause.errno if isinstance(cause, OSError) and cause.errno is not None else errno.EIO
    return OSError(code, " ".join(str(error).split())[:300])


def _described(found: Any) -> RemoteFile:
    changed = round(found.last_modified.timestamp() * 1e6) * 1000
    return RemoteFile(size=found.content_length, changed=changed, version=found.etag or "")
