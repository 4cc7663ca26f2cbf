"""Positions on three axes (time, height, width) of a sample with visual tokens, as the Qwen-VL models count them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rope_positions(
    input_ids: np.ndarray,
    visual_ids: frozenset[int],
    grids: Sequence[tuple[int, int, int, int]],
    merge: int,
) -> np.ndarray:
    """Returns the three-axis positions of a sample.

    A text token has the same position on all three axes. A visual token in a run that starts at position ``p`` has
    ``p + (time, row, column)``, and the text after the run continues at ``p + max(rows, columns)``.

    Args:
        input_ids: expanded token ids ``[L]``.
        visual_ids: ids of placeholder tokens.
        grids: for each run ``(t, h, w, interval)`` in patches; time steps are ``interval`` positions apart.
        merge: patches of one token along each spatial axis.

    Returns:
        int64 ``[3, L]``: time, height, width.

    Raises:
        ValueError: a run and its grid differ in their number of tokens, or there are more of one than of the other.
    """
    visual = np.isin(input_ids, np.fromiter(visual_ids, dtype=np.int64))
    edges = np.flatnonzero(np.diff(np.concatenate(([0], visual.view(np.int8), [0]))))
    result = np.empty((3, len(input_ids)), dtype=np.int64)
    position, cursor = 0, 0
    for (start, end), (t, h, w, interval) in zip(edges.reshape(-1, 2), grids, strict=True):
        result[:, cursor:start] = np.arange(position, position + start - cursor)
        position += int(start - cursor)
        rows, columns = h // merge, w // merge
        if end - start != t * rows * columns:
            raise ValueError(
                f"a run has {end - start} visual tokens, but its grid {(t, h, w)} needs {t * rows * columns}"
            )
        steps = np.indices((t, rows, columns)).reshape(3, -1)
        steps[0] *= interval
        result[:, start:end] = steps + position
        position += max(rows, columns)
        cursor = int(end)
    result[:, cursor:] = np.arange(position, position + len(input_ids) - cursor)
    return result
