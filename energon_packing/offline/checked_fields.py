"""Fields of a JSON file that anybody may have written: each has the type that the program relies on."""

from __future__ import annotations

import math
import os.path
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any


def text(values: Mapping[str, Any], name: str) -> str:
    """A text.

    Raises:
        KeyError: it is missing.
        TypeError: it is something else.
        ValueError: no file can be called so.
    """
    found = values[name]
    if not isinstance(found, str):
        raise TypeError(f"{name} is {found!r:.80}, which is no text")
    if "\0" in found:
        raise ValueError(f"{name} is {found!r:.80}, which is no name")
    found.encode()  # half of a character is a ValueError
    return found


def inner_path(values: Mapping[str, Any], name: str) -> str:
    """The path of a file below a directory; raises as `text`, and ValueError if it leaves that directory."""
    found = text(values, name)
    if not found or os.path.isabs(found) or ".." in PurePosixPath(found).parts:
        raise ValueError(f"{name} is {found!r:.80}, which lies in no directory of ours")
    return found


def count(values: Mapping[str, Any], name: str) -> int:
    """A number from 0 to 2**62; raises as `text`."""
    found = values[name]
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= 1 << 62:
        raise TypeError(f"{name} is {found!r:.80}, which is no count")
    return found


def limit(values: Mapping[str, Any], name: str) -> int | float | None:
    """A number of 0 or more, or None; raises as `text`."""
    found = values[name]
    if found is not None and (
        not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= 1 << 62
    ):
        raise TypeError(f"{name} is {found!r:.80}, which is no limit")
    return found


def counts(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of such numbers; raises as `text`."""
    found = values[name]
    if not isinstance(found, list):
        raise TypeError(f"{name} is {found!r:.80}, which is no list of counts")
    return tuple(count({name: each}, name) for each in found)


def amount(values: Mapping[str, Any], name: str) -> float:
    """A finite number of 0 or more; raises as `text`."""
    found = values[name]
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise TypeError(f"{name} is {found!r:.80}, which is no amount")
    return float(found)


def mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; raises as `text`."""
    found = values[name]
    if not isinstance(found, dict):
        raise TypeError(f"{name} is {found!r:.80}, which is no object")
    return found
