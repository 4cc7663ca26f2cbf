"""The check that every selection passes: what comes out is a partition of what went in, within every limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from energon_packing.errors import PackingError
from energon_packing.packing.constraints import FLOAT_TOLERANCE, Constraints

NAMED = 8  # how many indices an error names before it only counts


def check_partition(groups: Sequence[np.ndarray | Sequence[int]], expected: np.ndarray | int) -> None:
    """Checks that each expected index is in exactly one group.

    Args:
        groups: index groups.
        expected: the indices that must appear, distinct and non-negative, or a number N for 0 to N - 1.

    Raises:
        PackingError: names missing, doubled and foreign indices, and empty groups.
    """
    indices = np.arange(expected) if isinstance(expected, int) else np.asarray(expected, dtype=np.int64)
    empty = [number for number, group in enumerate(groups) if len(group) == 0]
    if empty:
        raise PackingError(f"selection made empty packs: {_some(empty)}")
    given = np.concatenate([np.asarray(group, dtype=np.int64) for group in groups]) if len(groups) else indices[:0]
    if given.size and given.min() < 0:
        raise PackingError(f"selection is no partition: negative indices {_some(given[given < 0].tolist())}")
    size = int(max(given.max(initial=-1), indices.max(initial=-1))) + 1
    found = np.bincount(given, minlength=size)
    wanted = np.bincount(indices, minlength=size)
    if not np.array_equal(found, wanted):
        problems = []
        for word, where in (
            ("missing", (found == 0) & (wanted > 0)),
            ("more than once", (found > 1) & (wanted > 0)),
            ("not among the input", (found > 0) & (wanted == 0)),
        ):
            if where.any():
                problems.append(f"{word}: {_some(np.flatnonzero(where).tolist())}")
        raise PackingError(f"selection is no partition of its input; indices {'; '.join(problems)}")


def check_limits(groups: Sequence[np.ndarray], lengths: np.ndarray, capacity: int, constraints: Constraints) -> None:
    """Checks that each group keeps the capacity and every limit.

    Raises:
        PackingError: names the first pack over a limit, its indices and the sum.
    """
    if not groups:
        return
    flat = np.concatenate(groups)
    starts = np.cumsum([0, *(len(group) for group in groups[:-1])])
    columns: dict[str, tuple[np.ndarray, int | float]] = {"tokens": (lengths, capacity)}
    columns.update({name: (cost, constraints.limits[name]) for name, cost in constraints.costs.items()})
    for name, (cost, limit) in columns.items():
        sums = np.add.reduceat(cost[flat], starts)
        over = sums > (limit if cost.dtype.kind == "i" else limit * (1 + FLOAT_TOLERANCE))
        if over.any():
            number = int(over.argmax())
            raise PackingError(
                f"pack {number} holds {sums[number]} {name}, limit {limit}; "
                f"its indices: {_some(groups[number].tolist())}"
            )


def _some(values: Sequence[int]) -> str:
    shown = ", ".join(str(value) for value in values[:NAMED])
    return shown if len(values) <= NAMED else f"{shown} and {len(values) - NAMED} more"
