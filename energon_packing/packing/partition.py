"""The check on every selection: its output is a partition of its input, within every limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from energon_packing.errors import PackingError
from energon_packing.packing.constraints import FLOAT_TOLERANCE, Constraints
from energon_packing.packing.pack_groups import PackGroups

NAMED = 8  # how many indices an error names before it only counts


def check_partition(groups: Sequence[np.ndarray | Sequence[int]], expected: np.ndarray | Sequence[int] | int) -> None:
    """Checks that each expected index is in exactly one group and no group is empty.

    Args:
        groups: index groups.
        expected: the indices that must appear, distinct and non-negative, or a number N for 0 to N - 1.

    Raises:
        PackingError: names missing, duplicate and unexpected indices, and empty groups.
    """
    flat, _ = flatten(groups)
    _check_indices(flat, expected)


def check_groups(
    groups: Sequence[np.ndarray | Sequence[int]], lengths: np.ndarray, capacity: int, constraints: Constraints
) -> None:
    """Checks a policy's result: a partition of all N samples, every pack within its capacity and every limit.

    Raises:
        PackingError: as `check_partition`; or a pack over a limit: names the first one, its indices and its sum.
    """
    flat, starts = flatten(groups)
    _check_indices(flat, lengths.size)
    if not starts.size:
        return
    columns: dict[str, tuple[np.ndarray, int | float]] = {"tokens": (lengths, capacity)}
    columns.update({name: (cost, constraints.limits[name]) for name, cost in constraints.costs.items()})
    for name, (cost, limit) in columns.items():
        sums = np.add.reduceat(cost[flat], starts)
        over = sums > (limit if cost.dtype.kind == "i" else limit * (1 + FLOAT_TOLERANCE))
        if over.any():
            number = int(over.argmax())
            raise PackingError(
                f"pack {number} holds {sums[number]} {name}, limit {limit}; "
                f"its indices: {_some([int(index) for index in groups[number]])}"
            )


def flatten(groups: Sequence[np.ndarray | Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All indices ``[N]`` int64, one group after another, and where each group starts ``[P]`` int64.

    Raises:
        PackingError: a group is empty; names the groups.
    """
    if isinstance(groups, PackGroups):
        flat, starts = groups.order, groups.offsets[:-1]
        empty = np.flatnonzero(groups.offsets[1:] == starts)
        if empty.size:
            raise PackingError(f"selection made empty packs: {_some(empty.tolist())}")
        return flat, starts
    sizes = np.fromiter(map(len, groups), dtype=np.int64, count=len(groups))
    if not sizes.size:
        return sizes, sizes
    if not sizes.all():
        raise PackingError(f"selection made empty packs: {_some(np.flatnonzero(sizes == 0).tolist())}")
    return np.concatenate(list(groups)).astype(np.int64, copy=False), np.cumsum(sizes) - sizes


def _check_indices(flat: np.ndarray, expected: np.ndarray | Sequence[int] | int) -> None:
    if flat.size and flat.min() < 0:
        raise PackingError(f"selection is not a partition: negative indices {_some(flat[flat < 0].tolist())}")
    if isinstance(expected, int):
        top = max(expected, int(flat.max(initial=-1)) + 1)
        wanted = (np.arange(top) < expected).astype(np.int64)
    else:
        indices = np.asarray(expected, dtype=np.int64)
        top = int(max(flat.max(initial=-1), indices.max(initial=-1))) + 1
        wanted = np.bincount(indices, minlength=top)
    found = np.bincount(flat, minlength=top)
    if np.array_equal(found, wanted):
        return
    problems = []
    for word, where in (
        ("missing", (found == 0) & (wanted > 0)),
        ("more than once", (found > 1) & (wanted > 0)),
        ("not among the input", (found > 0) & (wanted == 0)),
    ):
        if where.any():
            problems.append(f"{word}: {_some(np.flatnonzero(where).tolist())}")
    raise PackingError(f"selection is not a partition of its input; indices {'; '.join(problems)}")


def _some(values: Sequence[int]) -> str:
    shown = ", ".join(str(value) for value in values[:NAMED])
    return shown if len(values) <= NAMED else f"{shown} and {len(values) - NAMED} more"
