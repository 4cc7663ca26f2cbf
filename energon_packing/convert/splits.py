"""Which split a sample belongs to: decided by a hash of its key, so that more data never moves an old sample."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


def position_of(key: str) -> float:
    """A number in [0, 1) that depends on the key alone."""
    digest = hashlib.sha256(key.encode("utf-8")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def assign_splits(positions: Sequence[float], split: Mapping[str, float]) -> list[str]:
    """The split of each sample.

    A split with a share above 0 gets at least one sample if there are enough, because nobody wants an empty validation
    set from 2 % of a small data set. It takes the sample nearest to its own range from the fullest split.

    Args:
        positions: `position_of` every key.
        split: name -> share, adding up to 1.
    """
    names = list(split)
    ends: list[float] = []
    total = 0.0
    for share in split.values():
        total += share
        ends.append(total)
    ends[-1] = 1.0
    assigned = [next(index for index, end in enumerate(ends) if position < end) for position in positions]
    counts = [0] * len(names)
    for index in assigned:
        counts[index] += 1
    for empty in (index for index in range(len(names)) if counts[index] == 0):
        fullest = max(range(len(names)), key=lambda index: counts[index])
        if counts[fullest] < 2:
            break
        start, end = (ends[empty - 1] if empty else 0.0), ends[empty]
        members = (number for number, index in enumerate(assigned) if index == fullest)
        nearest = min(members, key=lambda number: max(start - positions[number], positions[number] - end))
        assigned[nearest] = empty
        counts[fullest] -= 1
        counts[empty] += 1
    return [names[index] for index in assigned]
