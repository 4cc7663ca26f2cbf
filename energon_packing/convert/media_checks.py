"""Checks of media files, each file once: results are remembered across processes and across an interruption."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from energon_packing.conversation import MediaKind
from energon_packing.convert import media_files
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.media_files import MediaFile
from energon_packing.convert.tensor_files import TensorFile, TensorRole
from energon_packing.errors import SampleRejected, UserError

FileKind = MediaKind | TensorRole
Outcome = MediaFile | TensorFile | SampleRejected
Recall = Callable[[list[str]], list[str | None]]
"""Asks for earlier entries of the journal by their place."""
_MOST_RECENT = 20_000  # outcomes that a process keeps; each takes about a kilobyte


class Stamp(NamedTuple):
    """When a file was checked, and what the file system said about it at that time.

    Attributes:
        size: bytes.
        changed: time of the last change of the content, nanoseconds.
        checked: time at which the check began, nanoseconds.
    """

    size: int
    changed: int
    checked: int

    def same_file(self, status: os.stat_result) -> bool:
        """Whether the file still looks as it did."""
        return (status.st_size, status.st_mtime_ns) == (self.size, self.changed)

    @property
    def settled(self) -> bool:
        """Whether a later change would show in the time stamp; one within a clock tick of the check would not."""
        return self.changed < self.checked - 2_000_000_000


class Checked(NamedTuple):
    """The result of a check."""

    outcome: Outcome
    stamp: Stamp


class MediaChecker:
    """Checks files for one process."""

    def __init__(self, config: ConvertConfig, journal: Path | None = None, recall: Recall | None = None) -> None:
        """
        Args:
            config: limits.
            journal: file of results, to which several processes append.
            recall: looks up what others, or an earlier run, have found.
        """
        self._config = config
        self._recall = recall
        self._recent: dict[str, Checked] = {}
        self._journal: int | None = None
        if journal is not None:
            self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.new: list[tuple[str, str]] = []
        """Place and entry of each file that was checked since the list was last emptied."""

    def recall(self, places: Iterable[tuple[str, FileKind]]) -> None:
        """Looks up the earlier results for some files at once."""
        if len(self._recent) > _MOST_RECENT:
            self._recent.clear()
        if self._recall is None:
            return
        wanted = [key for key in dict.fromkeys(_key(*place) for place in places) if key not in self._recent]
        for key, entry in zip(wanted, self._recall(wanted) if wanted else (), strict=True):
            if entry is not None and (checked := _read(entry)) is not None and checked.stamp.same_file(_status(key)):
                self._recent[key] = checked

    def check(self, path: str, kind: FileKind) -> tuple[MediaFile | TensorFile, Stamp]:
        """The result for one file.

        Raises:
            SampleRejected: see `media_files.check_media` and `tensor_files.check_tensor`.
        """
        key = _key(path, kind)
        checked = self._recent.get(key)
        if checked is None:
            status, now = _status(key), time.time_ns()
            stamp = Stamp(status.st_size, status.st_mtime_ns, now)
            checked = self._recent[key] = Checked(self._check(path, kind), stamp)
            self._note(key, checked)
        if isinstance(checked.outcome, SampleRejected):
            # A new one each time: a raised exception collects traceback frames.
            raise SampleRejected(checked.outcome.reason, checked.outcome.detail)
        return checked.outcome, checked.stamp

    def _check(self, path: str, kind: FileKind) -> Outcome:
        try:
            if kind == "latents" or kind == "context":
                return media_files.check_tensor_file(path, kind, self._config)
            return media_files.check_media(path, kind, self._config)
        except SampleRejected as error:
            return SampleRejected(error.reason, error.detail)
        except UserError:
            raise
        except Exception as error:  # a file may do anything to its decoder, and costs itself only
            reason = "corrupt_tensor" if kind in ("latents", "context") else "corrupt_media"
            detail = " ".join(str(error).split())[:300]
            return SampleRejected(reason, f"{Path(path).name} cannot be checked: {type(error).__name__}: {detail}")

    def _note(self, key: str, checked: Checked) -> None:
        outcome = checked.outcome
        if isinstance(outcome, MediaFile):
            found: dict[str, Any] = {"media": _fields(outcome)}
        elif isinstance(outcome, TensorFile):
            found = {"tensor": _fields(outcome)}
        else:
            found = {"rejected": [outcome.reason, outcome.detail]}
        entry = _written({"place": key, "stamp": tuple(checked.stamp), **found})
        self.new.append((key, entry))
        if self._journal is not None:
            # One write each, so that the lines of several processes do not mix. The line break before it ends a line
            # that a killed process has left unfinished.
            os.write(self._journal, f"\n{entry}\n".encode())

    def close(self) -> None:
        """Closes the journal."""
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None


def journal_entries(journal: Path) -> Iterator[tuple[str, str]]:
    """Place and entry of each line of a journal; lines that a killed process left unfinished are skipped."""
    if not journal.is_file():
        return
    with journal.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if _read(line) is not None:
                yield json.loads(line)["place"], line.rstrip("\n")


def _written(entry: dict[str, Any]) -> str:
    try:
        return orjson.dumps(entry).decode()
    except orjson.JSONEncodeError:  # a path that is not Unicode
        return json.dumps(entry)


def _read(entry: str) -> Checked | None:
    try:
        found = json.loads(entry)
        outcome: Outcome
        if "media" in found:
            outcome = MediaFile(**found["media"])
        elif "tensor" in found:
            outcome = TensorFile(**found["tensor"])
        else:
            outcome = SampleRejected(*found["rejected"])
        return Checked(outcome, Stamp(*found["stamp"]))
    except (ValueError, KeyError, TypeError):
        return None


def _fields(outcome: MediaFile | TensorFile) -> dict[str, Any]:
    """`dataclasses.asdict`, without its copies."""
    return {name: getattr(outcome, name) for name in outcome.__slots__}


def _key(path: str, kind: FileKind) -> str:
    return f"{kind} {path}"


def _status(key: str) -> os.stat_result:
    try:
        return os.stat(key.partition(" ")[2])
    except OSError:
        return os.stat_result((0,) * 10)
