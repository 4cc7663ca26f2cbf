"""The directory in which a data set is built, next to its final place, so that a partial one never looks complete.

A data set for an object store is made on this machine, then copied there file by file, its metadata last. A store shows
each object when all of it is there, but it cannot show a directory in one step. So a mark is written first and deleted
last, and what makes a data set of the shards is stored after them.
"""

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from energon_packing import remote_files
from energon_packing.convert import layout
from energon_packing.convert.chunks import SourceFile
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.layout import fingerprint_difference, read_report
from energon_packing.convert.media_files import FETCHED
from energon_packing.convert.sources import unpacked
from energon_packing.errors import UserError, fault_of, said_of_system
from energon_packing.executors.work import ended_by_sigterm
from energon_packing.line_file import lock
from energon_packing.remote_files import (
    exists,
    listed,
    present,
    remote_address,
    remove,
    shown,
    status,
    store,
)

_STATE = "in-progress.json"
_LOCK = "in-progress.lock"
JOURNAL = "media-checks.jsonl"  # Beside the directory to build in
_REPLACED = "replaced"
MARK = "being-stored.json"  # Beside the files of a data set that is not complete
_SENT = "sent.jsonl"  # Beside the directory to build in: shards that a store has, as it has them


def partial_directory(out: Path) -> Path:
    """Where a conversion to `out` works until it is finished."""
    return out.with_name(out.name + ".partial")


def check_out(config: ConvertConfig) -> None:
    """Refuses an output that must not be written, before anything is read: a file, something other than a converted
    data set, one that must not be replaced or contains a source; in a store, also one that a source contains."""
    out, place = config.out, shown(config.out)
    sources = [*config.sources, *filter(None, [config.media_root])]
    report = read_report(out)
    with said_of_system(f"--out {place} cannot be looked at"):
        if (address := remote_address(out)) is None:
            if out.name in ("", ".."):
                raise UserError(f"--out {out} has no name of its own; name a directory to create")
            if out.is_mount():
                raise UserError(f"--out {out} is a mount point, whose place nothing can take; name a directory in it")
            is_file, is_filled = out.exists() and not out.is_dir(), out.is_dir() and any(out.iterdir())
            below = out.resolve()
            local = [each for each in sources if report and not remote_address(each)]
            inside = [each for each in local if each.resolve().is_relative_to(below)]
        else:
            is_file = status(address) is not None
            is_filled = not is_file and status(f"{address}/{MARK}") is None and bool(listed(address, 1))
            ours, theirs = f"{address}/", [f"{root}/" for root in filter(None, map(remote_address, sources))]
            inside = [Path(root) for root in theirs if root.startswith(ours) or ours.startswith(root)]
    if inside:
        wrong = f"and {shown(inside[0])} lie in each other; choose another place"
    elif is_file:
        wrong = "is a file; name a directory to create"
    elif report is None and is_filled:
        wrong = "is not empty, and convert did not write what it contains; choose another place, or empty it yourself"
    elif report is not None and not (config.overwrite or config.resume):
        wrong = "already contains a converted data set; add --overwrite to replace it, --resume to keep it if it is "
        wrong += "complete, or choose another place"
    else:
        return
    raise UserError(f"--out {place} {wrong}")


def finished_report(config: ConvertConfig, fingerprint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The report of a finished conversion of the same sources and options, which `resume` skips; raises `UserError` if
    the data set there was made from something else, and `overwrite` is not set."""
    found = None if exists(config.out / MARK) else read_report(config.out)  # what another one left may lie beside it
    if found is None or (difference := fingerprint_difference(found["fingerprint"], fingerprint)) is None:
        return found
    if not config.overwrite:
        raise UserError(f"--out {shown(config.out)} cannot be resumed: {difference}; add --overwrite to replace it")
    return None


@contextmanager
def alone(directory: Path, out: Path) -> Iterator[None]:
    """Locks the directory in which a conversion to `out` works. Raises UserError: another one has it.
    OSError: it cannot be written."""
    with (directory / _LOCK).open("a") as held:
        try:
            lock(held, out, wait=False)
            if not os.path.samestat(os.fstat(held.fileno()), os.stat(directory / _LOCK)):
                raise OSError("it was made anew")
        except OSError as error:  # also where another one has finished meanwhile, and removed the file
            busy = f"another conversion is writing to {shown(out)}; wait for it, or choose another --out"
            raise UserError(busy) from error
        yield


@contextmanager
def workspace(config: ConvertConfig, fingerprint: Mapping[str, Any]) -> Iterator[Path]:
    """A directory to build in, locked against a second conversion to the same place. The leftovers of an interrupted
    conversion are deleted. The journal of checked media is kept if `resume` is set and the options are the same,
    because checking media takes the most time. Yields the directory to build in, empty, next to the journal. Raises
    UserError: another conversion is running there, or the directory cannot be written."""
    partial = partial_directory(config.out)
    with ExitStack() as stack:
        with said_of_system(f"--out {config.out} cannot be written"):
            left = set(os.listdir(partial)) if partial.exists() else set()
            if left - {_LOCK} and _STATE not in left:
                raise UserError(f"{partial} is in the way and was not made by convert; move it away")
            partial.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(partial, config.out))
            if (replaced := partial / _REPLACED).is_dir() and not config.out.exists():
                os.rename(replaced, config.out)  # a kill between the two renames of `publish`
            check_out(config)  # another conversion may have finished since it was checked first
            same = _same_options(partial, fingerprint)
            _clear(partial, keep_journal=config.resume and same)
            if not same:  # on a full disk, writing it again would lose it, and the journal with it
                (partial / _STATE).write_text(json.dumps(fingerprint), encoding="utf-8")
            (build := partial / "build").mkdir()
        yield build


@contextmanager
def dry_workspace() -> Iterator[Path]:
    """A directory like that of `workspace` for a conversion that writes nothing; deleted afterwards."""
    scratch = tempfile.TemporaryDirectory(prefix="energon-packing-", ignore_cleanup_errors=True)
    with scratch as directory, ended_by_sigterm():
        (build := Path(directory, "build")).mkdir()
        yield build


def _same_options(partial: Path, fingerprint: Mapping[str, Any]) -> bool:
    try:
        state = json.loads((partial / _STATE).read_text(encoding="utf-8"))
        return bool(state["version"] == fingerprint["version"] and state["options"] == fingerprint["options"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _clear(partial: Path, *, keep_journal: bool) -> None:
    for path in partial.iterdir():
        if path.name in (_LOCK, _STATE) or (keep_journal and path.name in (JOURNAL, FETCHED)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def publish(build: Path, out: Path) -> None:
    """Moves the finished directory to its place in one step, and removes the previous content and the workspace.
    Previous content is moved away first. After a kill in between, `workspace` brings it back."""
    partial = build.parent
    old = partial / _REPLACED
    try:
        if out.is_dir():
            os.rename(out, old)
        os.rename(build, out)
    except OSError as error:
        if old.is_dir() and not out.exists():
            os.rename(old, out)
        why = f"but cannot be moved to {out}: {error.strerror or error}"
        raise UserError(f"the data set is complete in {build}, {why}") from error
    shutil.rmtree(partial)


def fetched(source: SourceFile, scratch: Path) -> SourceFile:
    """A source as a file of this machine: itself, or a copy of one in a store. Raises OSError: the disk is full."""
    if source.address is None:
        return source
    try:
        there = present(source.address)
        return replace(source, path=remote_files.local_copy(source.address, scratch / "sources", there))
    except OSError as error:
        if fault_of(error) == "disk":
            raise
        raise UserError(f"{source.address} cannot be read: {error.strerror or error}") from error


def delete_copies(source: SourceFile, scratch: Path) -> None:
    """Deletes the copies of a source that has been read."""
    unpacked(scratch, source).unlink(missing_ok=True)
    if source.address is not None:
        source.path.unlink(missing_ok=True)


def local_place(address: str) -> Path:
    """Where the data set is made: the same directory of this machine for the same address, and for nobody else."""
    place = remote_files.private_directory() / hashlib.sha256(address.encode()).hexdigest()[:16] / "data"
    with said_of_system(f"{place} cannot be written", "; point TMPDIR elsewhere"):
        place.parent.mkdir(exist_ok=True)
    return place


class StoredDataSet:
    """The data set that a conversion makes in a store, in place of what is there. What is there already is not sent
    again. Raises UserError: the store cannot be written; an interrupted one goes on with ``--resume``."""

    def __init__(self, local: Path, address: str) -> None:
        self._local, self._address = local, address
        self._mode = "w"  # of the file of notes, since all shards of a conversion come again

    @functools.cached_property
    def _before(self) -> set[str]:
        """What was there. From now on it is no data set, or it would describe other shards."""
        (mark := self._local.with_name(MARK)).write_text("{}\n")
        store(mark, f"{self._address}/{MARK}")
        before = {name for name, _ in listed(self._address)} - {MARK}
        for name in sorted(filter(_order, before)):
            remove(f"{self._address}/{name}")
        return before

    def _put(self, file: Path, name: str) -> None:
        target = f"{self._address}/{name}"
        if name not in self._before or _order(name) or not remote_files.is_stored(file, target):
            store(file, target)

    def add(self, tar: Path, build: Path) -> None:
        """Stores a shard that is whole, with its index, notes as what, and deletes it on this machine."""
        with said_of_system(f"--out {shown(self._address)} cannot be written", "; start again with --resume"):
            for file in (tar, tar.with_suffix(".tar.idx")):
                self._put(file, name := file.relative_to(build).as_posix())
                with self._local.with_name(_SENT).open(self._mode, encoding="utf-8") as notes:
                    self._mode = "a"
                    notes.write(json.dumps([name, _stamp(present(f"{self._address}/{name}"))]) + "\n")
                file.unlink()

    def _lost(self, shards: set[str]) -> set[str]:
        """Shards that the store does not have as they were sent, but not at all, or from another conversion."""
        try:
            notes = dict(map(json.loads, self._local.with_name(_SENT).read_text(encoding="utf-8").splitlines()))
        except (OSError, ValueError):  # the disk was full in the middle of a line
            return shards
        there = {name: _stamp(file) for name, file in listed(self._address)}
        others = [name for name in shards if name in notes and notes[name] != there.get(name)]
        with ThreadPoolExecutor(16) as pool:  # each as when it was noted: lists of some stores call versions otherwise
            found = zip(others, pool.map(lambda name: status(f"{self._address}/{name}"), others), strict=True)
            there |= {name: _stamp(file) for name, file in found if file is not None}
        return {name for name in shards if name not in notes or notes[name] != there.get(name)}

    def complete(self, progress: Callable[[str, int, int], None]) -> None:
        """Stores the other files, those last that make it a data set, and deletes what else was there."""
        files = {path.relative_to(self._local).as_posix(): path for path in self._local.rglob("*") if path.is_file()}
        done, total = 0, sum(path.stat().st_size for path in files.values())
        progress("store", done, total)
        complete = f"the data set is complete in {self._local}, but --out {shown(self._address)} cannot be written"
        with said_of_system(complete, "; start again with --resume"):
            shards = set[str]()
            for name in [name for name in files if name.endswith(f"/{layout.INFO_FILE}")]:
                folder = f"./{name}".removesuffix(f"/{layout.META_DIRECTORY}/{layout.INFO_FILE}")
                counts = json.loads(files[name].read_text(encoding="utf-8"))["shard_counts"]
                shards |= {f"{folder}/{shard}{end}".removeprefix("./") for shard in counts for end in ("", ".idx")}
            if lost := self._lost(shards - files.keys()):
                raise UserError(
                    f"--out {shown(self._address)} lacks {min(lost)} as it was sent; start again without --resume"
                )
            before = self._before
            for name in sorted(files, key=lambda name: (_order(name), name)):
                self._put(files[name], name)
                done += files[name].stat().st_size
                progress("store", done, total)
            gone = [name for name in sorted(before - files.keys() - shards) if not _order(name)]  # of the one before
            for name in (*gone, MARK):
                remove(f"{self._address}/{name}")


def _stamp(file: remote_files.RemoteFile) -> list[Any]:
    """What tells a file of a store from another one; the time changes when the same content is sent again."""
    return [file.size, file.version or file.changed]


def _order(name: str) -> int:
    """Shards first, then what describes them, and last what says that all is complete."""
    if name == layout.CONVERSION_FILE:
        return 3
    return 2 if name == layout.DATASET_FILE else 1 if layout.META_DIRECTORY in name.split("/") else 0
