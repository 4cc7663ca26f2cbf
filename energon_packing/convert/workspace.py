"""The directory in which a data set is built, next to its final place, so that a partial one never looks complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.fetched_files import FETCHED
from energon_packing.convert.remote import check_remote_out
from energon_packing.convert.report import fingerprint_difference, read_report
from energon_packing.errors import UserError
from energon_packing.file_lock import lock
from energon_packing.remote_files import remote_address, shown

_STATE = "in-progress.json"
_LOCK = "in-progress.lock"
_JOURNAL = "media-checks.jsonl"
_REPLACED = "replaced"


def partial_directory(out: Path) -> Path:
    """Where a conversion to `out` works until it is finished."""
    return out.with_name(out.name + ".partial")


def check_out(config: ConvertConfig) -> None:
    """Rejects an output that must not be written, before anything is read.

    Raises:
        UserError: `out` is a file, holds something other than a converted data set, must not be replaced, or contains
            a source.
    """
    out = config.out
    if (address := remote_address(out)) is not None:
        check_remote_out(config, address)
        return
    if out.name in ("", ".."):
        raise UserError(f"--out {out} has no name of its own; name a directory to create")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a directory to create")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if read_report(out) is None:
        raise UserError(
            f"--out {out} is not empty, and convert did not write what it contains; choose another directory, or "
            "empty it yourself"
        )
    if not (config.overwrite or config.resume):
        raise UserError(
            f"--out {out} already contains a converted data set; add --overwrite to replace it, --resume to keep it if "
            "it is complete, or choose another directory"
        )
    real = out.resolve()
    roots = [*config.sources, *([config.media_root] if config.media_root is not None else [])]
    for source in roots:
        if remote_address(source) is None and source.resolve().is_relative_to(real):
            raise UserError(f"{source} is inside --out {out}, which would be replaced; choose another directory")


def finished_report(config: ConvertConfig, fingerprint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The report of a finished conversion of the same sources and options, which `resume` skips.

    Raises:
        UserError: the data set there was made from something else, and `overwrite` is not set.
    """
    found = read_report(config.out)
    if found is None or (difference := fingerprint_difference(found["fingerprint"], fingerprint)) is None:
        return found
    if not config.overwrite:
        raise UserError(f"--out {shown(config.out)} cannot be resumed: {difference}; add --overwrite to replace it")
    return None


@contextmanager
def workspace(config: ConvertConfig, fingerprint: Mapping[str, Any]) -> Iterator[tuple[Path, Path]]:
    """A directory to build in, locked against a second conversion to the same place.

    The leftovers of an interrupted conversion are deleted. The journal of checked media is kept if `resume` is set and
    the options are the same, because checking media takes the most time.

    Yields:
        The directory to build in, empty, and the journal's path.

    Raises:
        UserError: another conversion is running there, or the directory cannot be written.
    """
    partial = partial_directory(config.out)
    try:
        if partial.exists() and not (partial / _STATE).is_file() and any(partial.iterdir()):
            raise UserError(f"{partial} is in the way and was not made by convert; move it away")
        partial.mkdir(parents=True, exist_ok=True)
        held = os.fdopen(os.open(partial / _LOCK, os.O_RDWR | os.O_CREAT, 0o644), "w")
    except OSError as error:
        raise UserError(f"--out {config.out} cannot be written: {error.strerror or error}") from error
    with held:
        try:
            lock(held, config.out, wait=False)
            if not os.path.samestat(os.fstat(held.fileno()), os.stat(partial / _LOCK)):
                raise OSError("it was made anew")
        except OSError as error:  # also where another one has finished meanwhile, and removed the file
            raise UserError(
                f"another conversion is writing to {config.out}; wait for it, or choose another --out"
            ) from error
        if (replaced := partial / _REPLACED).is_dir() and not config.out.exists():
            os.rename(replaced, config.out)  # a kill between the two renames of `publish`
        check_out(config)  # another conversion may have finished since it was checked first
        _clear(partial, keep_journal=config.resume and _same_options(partial, fingerprint))
        (partial / _STATE).write_text(json.dumps(fingerprint), encoding="utf-8")
        yield _built_in(partial)


@contextmanager
def dry_workspace() -> Iterator[tuple[Path, Path]]:
    """A directory like that of `workspace` for a conversion that writes nothing; deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="energon-packing-", ignore_cleanup_errors=True) as scratch:
        yield _built_in(Path(scratch))


def _built_in(partial: Path) -> tuple[Path, Path]:
    build = partial / "build"
    build.mkdir()
    return build, partial / _JOURNAL


def _same_options(partial: Path, fingerprint: Mapping[str, Any]) -> bool:
    try:
        state = json.loads((partial / _STATE).read_text(encoding="utf-8"))
        return bool(state["version"] == fingerprint["version"] and state["options"] == fingerprint["options"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _clear(partial: Path, *, keep_journal: bool) -> None:
    for path in partial.iterdir():
        if path.name in (_LOCK, _STATE) or (keep_journal and path.name in (_JOURNAL, FETCHED)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def publish(build: Path, out: Path) -> None:
    """Moves the finished directory to its place in one step, and removes the previous content and the workspace.

    Previous content is moved away first. A kill in between leaves it in the workspace, from where `workspace` brings it
    back.

    Raises:
        UserError: the place cannot be written.
    """
    partial = build.parent
    old = partial / _REPLACED
    try:
        if out.is_dir():
            os.rename(out, old)
        os.rename(build, out)
    except OSError as error:
        if old.is_dir() and not out.exists():
            os.rename(old, out)
        raise UserError(
            f"the data set is complete in {build}, but cannot be moved to {out}: {error.strerror or error}"
        ) from error
    shutil.rmtree(partial)
