"""Reads that failed once are tried again, as a network file system asks for; lasting failures are not waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from energon_packing.errors import fault_of

PAUSES = (0.1, 0.4, 1.6)
"""Seconds before the second, third and fourth try."""

_failing: set[Hashable] = set()


def read_again[T](place: Hashable, read: Callable[[], T], forget: Callable[[], None] | None = None) -> T:
    """Returns what ``read`` returns.

    Args:
        place: of the file. Where the last read failed after all tries, only one is made until one succeeds, so a shard
            that is gone for good costs its pauses once and not for every sample.
        read: reads.
        forget: called after each failure; closes what may be in any state.

    Raises:
        OSError: of the last try. Other errors, and those that will not go away, are raised at once.
    """
    for pause in (*(() if place in _failing else PAUSES), None):
        try:
            found = read()
        except OSError as error:
            if forget is not None:
                forget()
            if fault_of(error) != "store":
                raise
            if pause is None:
                _failing.add(place)
                raise
            time.sleep(pause)
            continue
        _failing.discard(place)
        return found
    raise AssertionError("the last try returns or raises")
