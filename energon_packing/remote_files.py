"""Files in object stores, through the package that Energon reads them with (``multistorageclient``).

Its configuration says what a profile of ``msc://PROFILE/PATH`` is; it also takes ``s3://``, ``gs://`` and ``ais://``.
Paths of the command line are ``pathlib.Path``, which makes one slash of two: `remote_address` gives the address back.
"""

import contextlib
import errno
import functools
import hashlib
import importlib.util
import io
import itertools
import os
import posixpath
import re
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from energon_packing.errors import ConfigError, UserError, is_machines, read_again, said_of_system

PIECE_BYTES = 8 << 20  # read at once
TAIL_BYTES = 1 << 18  # read when a file is opened: all of a small one, and what says where others have what
_ANY_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?=[^/])")
_OURS = ("msc", "s3", "gs", "ais")
_USER = re.compile(r"://[^/?#\s]*(?::\S*)?@")  # a secret key may have "/" in it
_SIGNED = re.compile(r"\?[^/?=]*=.*", re.DOTALL)
_QUERY = re.compile(r"(://[^?#\s]*)[?#]\S*?(?=['\"]?(?:[;:,]?\s|$))")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What a store says about a file."""

    size: int  # bytes
    changed: int  # time of the last change, nanoseconds
    # that the store gives the content (``etag``), for a change within a tick of its clock; may be empty
    version: str = ""


def remote_address(path: str | Path) -> str | None:
    """The address that a path stands for; None for a path of this machine, where a directory may be called ``s3:``."""
    start = _ANY_ADDRESS.match(str(path))
    return None if start is None or os.path.exists(f"{start[1]}:") else f"{start[1]}://{str(path)[start.end() :]}"


def without_secrets(text: str) -> str:
    """The first 2000 characters of a text for a file that is passed on: of the addresses in it, passwords, signatures
    and tokens are left out."""
    return _QUERY.sub(r"\1?...", _USER.sub("://...@", text[:2000]))


def shown(path: str | Path) -> str:
    """A path as the user wrote it: the address, without a password or a signature, or the path itself."""
    address = remote_address(path)
    return str(path) if address is None else _SIGNED.sub("?...", _USER.sub("://...@", address))


def absolute(path: Path) -> Path:
    """A path whatever directory is the current one; an address stays as it is."""
    return path if remote_address(path) else path.absolute()


def check_remote(what: str, path: str | Path) -> None:
    """Refuses an address, which ``what`` (an option or argument) named, if it cannot be read or written here. Raises
    `ConfigError`: it is of another kind, has a password in it, which files would repeat, or needs a package that is not
    installed."""
    if (address := remote_address(path)) is None:
        return
    instead = "mount the storage, or copy the files with its own tool, and name the local path"
    if _USER.search(address):
        why = "has a name or password in it, which belong into the configuration of multi-storage-client"
        raise ConfigError(f"{what} {shown(path)} {why}")
    if address.partition(":")[0] not in _OURS:
        raise ConfigError(f"{what} {shown(path)} is a remote address of a kind that is not read here; {instead}")
    if importlib.util.find_spec("multistorageclient") is None:
        needs = "which needs the package multi-storage-client; run pip install '.[remote]' in the checkout"
        raise ConfigError(f"{what} {shown(path)} is a remote address, {needs}, or {instead}")


def private_directory() -> Path:
    """A directory for copies, of this user alone, below the one for temporary files. Raises `UserError`: it is somebody
    else's, or cannot be made."""
    private = Path(tempfile.gettempdir()) / f"energon-packing-{os.getuid()}"
    with said_of_system(f"{private} cannot be written", "; point TMPDIR elsewhere"):
        private.mkdir(mode=0o700, exist_ok=True)
        owner = private.lstat()
    if not stat.S_ISDIR(owner.st_mode) or owner.st_uid != os.getuid() or owner.st_mode & 0o077:
        raise UserError(f"{private} is not a directory of yours alone; remove it, or point TMPDIR elsewhere")
    return private


def status(address: str) -> RemoteFile | None:
    """What the store says about a file; None if there is no such file. Here as below, a `UserError` says that the store
    cannot be used, and an ``OSError`` that it does not answer, or that a file is not there or cannot be read."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        there = _ask(address, lambda client, path: client.info(path, strict=False))
        return _described(there) if there.type == "file" else None
    return None


def present(address: str) -> RemoteFile:
    """As `status`; a ``FileNotFoundError`` if there is no such file."""
    if (file := status(address)) is None:
        raise FileNotFoundError(errno.ENOENT, f"there is no {shown(address)}")
    return file


def exists(path: Path) -> bool:
    """Whether there is a file, here or in a store. Raises UserError: nobody can say."""
    if (address := remote_address(path)) is None:
        return read_again(path, path.is_file)
    with said_of_system(f"{shown(address)} cannot be looked at"):
        return status(address) is not None


def make_directory(path: Path) -> None:
    """Makes a directory, unless it is there. Raises OSError: it cannot be made. A store has none."""
    if not remote_address(path):
        path.mkdir(parents=True, exist_ok=True)


def file_size(path: Path) -> int:
    """Bytes of a file, here or in a store. Raises OSError: it is missing, or cannot be looked at."""
    address = remote_address(path)
    return read_again(path, path.stat).st_size if address is None else present(address).size


def open_file(path: Path) -> io.BufferedReader:
    """Opens a file to read, one in a store in pieces. Raises OSError: it is missing, or cannot be read."""
    address = remote_address(path)
    return path.open("rb") if address is None else io.BufferedReader(RemoteReader(address), PIECE_BYTES)


def listed(address: str, most: int | None = None) -> list[tuple[str, RemoteFile]]:
    """The files below an address, or the first ``most``, each with its path relative to it; none if none is there."""

    def ask(client: Any, path: str) -> list[tuple[str, RemoteFile]]:
        directory = f"{path.strip('/')}/" if path.strip("/") else ""
        files = ((each.key.lstrip("/"), each) for each in client.list_recursive(directory) if each.type == "file")
        below = ((key.removeprefix(directory), each) for key, each in files if key.startswith(directory))
        try:
            return [(name, _described(each)) for name, each in itertools.islice(below, most)]
        except FileNotFoundError as error:  # of a file system: one went meanwhile, or a link leads nowhere
            kind = UserError if error.errno is None else functools.partial(OSError, errno.ESTALE)
            raise kind(f"{shown(address)} cannot be listed: {str(error).partition('. Use ')[0]}") from error

    return _ask(address, ask)


def names_in(directory: Path) -> list[str]:
    """The names in a directory, sorted; none if there is none. In a store, those of all files below it."""
    if (address := remote_address(directory)) is not None:
        return sorted(name for name, _ in listed(address))
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def matches(address: str) -> list[str]:
    """The addresses of the files that match a pattern of ``*``, ``?``, ``[...]`` and ``**``, sorted."""
    names, pattern = _ask(address, lambda client, path: (client.glob(path), path))
    return sorted({address.removesuffix(pattern) + name.lstrip("/") for name in names})


def within(root: str, reference: str) -> str | None:
    """The address of a file that data name by a path relative to a root (the address of a directory), or by an address
    below it; None if it would leave the root, also by a link where the store is a file system."""
    root = root.rstrip("/")
    normal = posixpath.normpath(reference.removeprefix(f"{root}/"))
    if normal.startswith(("/", "../")) or normal in ("..", "."):
        return None
    address = f"{root}/{normal}"
    inside, real = (_ask(each, lambda client, path: client.get_posix_path(path)) for each in (root, address))
    if inside is not None and real is not None and not Path(real).resolve().is_relative_to(Path(inside).resolve()):
        return None
    return address


def read_range(address: str, offset: int, size: int) -> bytes:
    """Bytes of a file; fewer at its end. An answer with fewer bytes elsewhere is asked for again."""
    import multistorageclient.types

    def read(client: Any, path: str) -> bytes:
        try:
            content = bytes(client.read(path, multistorageclient.types.Range(offset=offset, size=size)))
        except RuntimeError:
            if offset < client.info(path).content_length:  # else the range begins behind the end (416)
                raise
            content = b""
        if len(content) < size and offset + len(content) < client.info(path).content_length:
            raise OSError(errno.EIO, f"the store gave {len(content)} of {size} bytes", address)
        return content

    return _ask(address, read)


class RemoteReader(io.RawIOBase):
    """A file of a store, of a known size or not, that is read at any place, its last `TAIL_BYTES` when it is opened.
    Raises OSError: it is not there, cannot be read, or became shorter."""

    def __init__(self, address: str, size: int | None = None) -> None:
        self._address, self._at = address, 0
        self._size = present(address).size if size is None else size
        self._tail_at = max(0, self._size - TAIL_BYTES)
        self._tail = read_range(address, self._tail_at, self._size - self._tail_at) if self._size else b""

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        begin, end = self._at, max(self._at, min(self._at + len(buffer), self._size))
        if begin < self._tail_at:
            content = read_range(self._address, begin, end - begin) if begin < end else b""
        else:
            content = self._tail[begin - self._tail_at : end - self._tail_at]
        if len(content) < end - begin:
            raise OSError(errno.EIO, "the file became shorter while it was read", self._address)
        buffer[: end - begin], self._at = content, end
        return end - begin


def read(address: str) -> bytes:
    """A small file."""
    return _ask(address, lambda client, path: client.read(path))


def digest(address: str) -> str:
    """SHA-256 of a file, hexadecimal, read in pieces; an ``OSError`` also if it changes meanwhile."""
    before = present(address)
    content = hashlib.sha256()
    for offset in range(0, before.size, PIECE_BYTES):
        content.update(read_range(address, offset, min(PIECE_BYTES, before.size - offset)))
    if status(address) != before:
        raise OSError(errno.EIO, "the file changed while it was read", address)
    return content.hexdigest()


def local_copy(address: str, directory: Path, before: RemoteFile, version: str = "") -> Path:
    """Copies a file, as it was ``before``, to this machine: whole or not at all, with the time of its last change; each
    version to a place of its own below the directory. One that is there stays. Raises ``OSError``: the file is not
    there, cannot be read, or changed; or the target cannot be written."""
    name = hashlib.sha256((address + version).encode()).hexdigest()[:32]
    target = directory / name[:2] / name[2:] / address.rpartition("/")[2]
    with contextlib.suppress(FileNotFoundError):
        there = target.stat()
        if (there.st_size, there.st_mtime_ns) == (before.size, before.changed):
            return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{os.urandom(8).hex()}.part")  # names of hosts and processes may be those of others
    try:
        _ask(address, lambda client, path: client.download_file(path, str(part)))
        if part.stat().st_size != before.size or status(address) != before:
            raise OSError(errno.EIO, "the file changed while it was read", address)
        os.utime(part, ns=(before.changed, before.changed))
        os.rename(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def store(file: Path, address: str) -> None:
    """Copies a file of this machine to a store, which shows an object when all of it is there, and compares what is
    stored: its size, and its MD5 where that is what the store tells (S3 without KMS, by parts too); else all of it is
    read back. Raises ``OSError``: it cannot be written, or what is stored differs."""
    try:
        _ask(address, lambda client, path: client.upload_file(path, str(file)))
    except FileNotFoundError as error:
        if not file.exists():
            raise
        raise UserError(f"{shown(address)} cannot be written: {_NO_BUCKET}") from error
    if not is_stored(file, address):
        raise OSError(errno.EIO, "what was stored differs from what was sent", address)


def is_stored(file: Path, address: str) -> bool:
    """Whether a store has the content of a file of this machine. Raises OSError: it does not answer."""
    if (there := status(address)) is None or there.size != (size := file.stat().st_size):
        return False
    return (bool(there.version) and _has_md5(file, size, there.version)) or digest(address) == file_digest(file)


def _has_md5(file: Path, size: int, version: str) -> bool:
    """Whether a version is the MD5 of a file, or that of the MD5s of its parts, which clients cut at whole MiB."""
    whole, _, parts = version.partition("-")
    md5 = functools.partial(hashlib.md5, usedforsecurity=False)
    with file.open("rb") as stream:
        if not parts.isdigit():
            return hashlib.file_digest(stream, md5).hexdigest() == version
        for part in (1 << at for at in range(20, 28)):
            if -(-size // part) == int(parts):
                stream.seek(0)
                sums = (md5(some).digest() for some in iter(functools.partial(stream.read, part), b""))
                if md5(b"".join(sums)).hexdigest() == whole:
                    return True
    return False


def file_digest(file: Path) -> str:
    """SHA-256 of a file of this machine, hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def unfinished(path: Path) -> list[str]:
    """A sentence about each file at or below an address whose upload in parts was begun and neither completed nor
    aborted, which no list shows. Only S3 is asked, by its own client, as multistorageclient has nothing for it; no
    other path has any, nor an address of which it may not be told."""
    what = "an upload of {} was begun and broken off; abort it, or the store keeps its parts and bills them"

    def ask(client: Any, path: str) -> list[str]:
        provider: Any = getattr(client, "_storage_provider", None)
        if (s3 := getattr(provider, "_s3_client", None)) is None:
            return []
        bucket, _, prefix = f"{provider._base_path}/{path}".strip("/").partition("/")
        pages = s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        keys = [each["Key"] for page in pages for each in page.get("Uploads", ())]
        return [what.format(key) for key in keys if not prefix or f"{key}/".startswith(f"{prefix}/")]

    with contextlib.suppress(UserError, OSError):
        return _ask(address, ask) if (address := remote_address(path)) else []
    return []


def remove(address: str) -> None:
    """Deletes a file; nothing if there is none."""
    with contextlib.suppress(FileNotFoundError):
        _ask(address, lambda client, path: client.delete(path))


def _ask[Found](address: str, do: Callable[[Any, str], Found]) -> Found:
    """Calls the client of an address with its path in the store; what fails in passing is tried again."""
    check_remote("the address", address)
    unusable = f"{shown(address)} cannot be used"
    import multistorageclient

    def tried() -> Found:
        try:
            client, path = multistorageclient.resolve_storage_client(address)
        except Exception as error:  # of its configuration, or for want of a package of one kind of store
            if is_machines(error):
                raise
            # Without the cause: a traceback would print keys that are in the configuration.
            if isinstance(error, TimeoutError | ConnectionError) or type(error).__name__ in _PASSING:
                raise OSError(errno.EIO, _words(error), address) from None
            raise UserError(f"{unusable}: {_words(error)}; see to its profile for multi-storage-client") from None
        if (cache := getattr(client, "_cache_manager", None)) is not None and not cache.check_source_version():
            raise UserError(f"{unusable}: its cache may give old bytes; set check_source_version to true for it")
        try:
            return do(client, path)
        except Exception as error:
            told = isinstance(error, OSError | UserError) or type(error).__name__ == "RetryableError"
            if told or (type(error).__module__ == "builtins" and not isinstance(error, NotImplementedError)):
                raise
            if (code := _http_status(error)) in (429, *range(500, 600)):  # of lists, which multistorageclient lets pass
                raise OSError(errno.EIO, _words(error), address) from error
            raise UserError(f"{unusable}: {_NO_BUCKET if code == 404 else _words(error)}") from error

    return read_again(shown(address), tried)


_PASSING = ("RetryableError", "CredentialRetrievalError")
# Of what the configuration cannot be understood for, but not the names of variables that are not set.
_VALUES = re.compile(
    r""" in ['"].*|\$(?=[\w{])(?!\{?[A-Z]+(_[A-Z0-9]+)+\}?')[^']*|(?<=alias |e tag )'.*?'""", re.DOTALL
)


def _words(error: Exception) -> str:
    """What a client's error says, on one line and without values of the configuration, which may be keys."""
    text, said = str(error) or type(error).__name__, (error.args or (error,))[-1]
    if hasattr(said, "json_path"):  # of the check of its form
        text = f"{said.json_path}: {said.message.replace(repr(said.instance), 'its value')}"
    return " ".join(_VALUES.sub("...", without_secrets(text)).split()).rstrip(".")


def _http_status(error: Any) -> int:
    """The status of the answer that an error of a store's own client is about; 500 if there was none."""
    answer = getattr(error, "response", None)
    of_s3 = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    others = (getattr(each, name, None) for each in (answer, error) for name in ("status_code", "code", "status"))
    default = 400 if isinstance(error, NotImplementedError) else 500
    return next((each for each in (of_s3, *others, *error.args[1:2]) if isinstance(each, int)), default)


def _described(there: Any) -> RemoteFile:
    changed = round(there.last_modified.timestamp() * 1e6) * 1000
    return RemoteFile(size=there.content_length, changed=changed, version=there.etag or "")


_NO_BUCKET = "there is no such bucket; make it, or correct the address or its profile"
META_DIRECTORY, CONVERSION_FILE, _INDEX = ".nv-meta", "conversion.json", "index.sqlite"
_SHARDS = (".tar", ".idx")


def meta_text(root: Path, name: str) -> str:
    """A file in the ``.nv-meta`` of a data set, here or in a store. Raises ``OSError``, ``ValueError``: it cannot be
    read."""
    address = remote_address(file := root / META_DIRECTORY / name)
    return (read_again(file, file.read_bytes) if address is None else read(address)).decode()


def index_file(root: Path) -> Path:
    """The index of a data set's shards; one in a store is copied once, to the directory for temporary files. Raises
    `UserError`: that directory cannot be used; OSError: the index cannot be read."""
    if (address := remote_address(root)) is None:
        return root / META_DIRECTORY / _INDEX
    there = present(index := f"{address}/{META_DIRECTORY}/{_INDEX}")
    return local_copy(index, private_directory() / "indexes", there, f"\0{there}\0{meta_text(root, 'index.uuid')}")


def describe(address: str, directory: Path) -> Path:
    """Copies what describes a data set (or its YAML) to an empty directory, where its shards are empty files; returns
    what `validate.looks.data.look_at_data` takes in place of the address. Raises `UserError`: there is nothing, or it
    cannot be read."""
    check_remote("DATASET", address)
    with said_of_system(f"{shown(address)} cannot be read"):
        in_file = status(address) is not None
        root = address.rpartition("/")[0] if in_file else address
        if not (files := listed(root)):
            raise UserError(f"{shown(address)} does not exist; name the directory that 'energon-packing convert' wrote")
        for name, _ in files:
            path = PurePosixPath(name)
            in_meta = path.parent.name == META_DIRECTORY
            describes = in_meta or path.suffix in (*_SHARDS, ".yaml", ".yml") or path.name == CONVERSION_FILE
            if path.is_absolute() or ".." in path.parts or not describes:
                continue
            copy = directory / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if in_meta and path.name == _INDEX:
                copy.symlink_to(index_file(Path(f"{root}/{path.parent.parent}")))
            else:
                copy.write_bytes(b"" if path.suffix in _SHARDS else read(f"{root}/{name}"))
    return directory / address.rpartition("/")[2] if in_file else directory
