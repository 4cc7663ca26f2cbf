"""Checks for every JSON record of a data set. `convert` writes them, but they may have been changed since or come from
elsewhere, so nothing in them is trusted. Each kind of sample has one `StoredRecord`."""

import reprlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from energon_packing.errors import SampleRejected

LARGEST_NUMBER = 2**31 - 1
"""Limit for any number in a record (pixels, frames, frames per second, seconds, weights); above it, arithmetic
overflows."""
SMALLEST_NUMBER = 1e-6
"""Smallest size, rate or duration: a clip with one frame in eleven days is a mistake, and dividing by less
overflows."""

LARGEST_DEPTH = 100
"""Objects and lists that may lie inside each other in a record. Templates, JSON and copies recurse through them, and
Python stops at a thousand calls."""


def is_too_deep(value: Any) -> bool:
    """Whether objects and lists of a JSON value lie too deep inside each other; does not recurse."""
    level = [value] if isinstance(value, dict | list | tuple) else []
    for _ in range(LARGEST_DEPTH + 1):
        inner = (each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer))
        level = [each for each in inner if isinstance(each, dict | list | tuple)]
        if not level:
            return False
    return True


def check_depth(text: bytes, value: Any) -> None:
    """Rejects a record (``too_deep``) whose objects and lists lie more than `LARGEST_DEPTH` deep inside each other. A
    text with few brackets is not deep, which saves looking at its values."""
    if text.count(b"[") + text.count(b"{") > LARGEST_DEPTH and is_too_deep(value):
        raise SampleRejected("too_deep", f"objects and lists lie more than {LARGEST_DEPTH} deep inside each other")


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The checks for records of one kind of sample, such as ``conversation``. All raise `SampleRejected`."""

    kind: str

    def bad(self, why: str) -> SampleRejected:
        """Returns the rejection ``bad_record`` for the caller to raise."""
        return SampleRejected("bad_record", f"not a stored {self.kind}: {why}")

    def check_keys(self, value: Any, known: Set[str], where: str) -> None:
        """Rejects anything but an object whose keys are all in ``known``."""
        if not isinstance(value, Mapping):
            raise self.bad(f"{where} is a {type(value).__name__}")
        for key in value:
            if key not in known:
                raise self.bad(f"{where} has the unknown field {reprlib.repr(key)}")

    def check_version(self, record: Mapping[str, Any], expected: int) -> None:
        """Rejects every version but the expected integer; ``true`` and ``1.0`` are not integers."""
        version = record.get("version")
        if type(version) is not int or version != expected:
            raise self.bad(f"record version {reprlib.repr(version)}, expected {expected}")

    def read_list(self, value: Mapping[str, Any], field: str, where: str, *, optional: bool = False) -> Sequence[Any]:
        """Returns the list under ``field``; an empty one if it is missing and optional."""
        entries = value.get(field, [] if optional else None)
        if not isinstance(entries, list | tuple):
            raise self.bad(f"{field} of {where} is a {type(entries).__name__}, expected a list")
        return entries

    def check_number(self, value: Any, what: str, *, whole: bool = False, above_zero: bool = True) -> None:
        """Rejects anything but a number, including booleans, NaN, infinities and numbers that overflow arithmetic."""
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise self.bad(f"{what} is a {type(value).__name__}, expected a {'whole ' if whole else ''}number")
        if not 0 <= value <= LARGEST_NUMBER or (above_zero and value < SMALLEST_NUMBER):
            raise self.bad(f"{what} is outside the range that a record allows")

    def check_name(self, name: Any, what: str, owner: str) -> None:
        """Rejects a name of an ``owner`` that no store can have, and (``media_outside_root``) the name of ``what`` kind
        of file that leaves the store."""
        if not isinstance(name, str) or not name or "\0" in name or not is_unicode(name):
            raise self.bad(f"{owner} has no usable name")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise SampleRejected("media_outside_root", f"{what} {reprlib.repr(name)} points outside the data set")


def is_unicode(text: str) -> bool:
    """False for a lone surrogate, which JSON can hold but no file name or tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
