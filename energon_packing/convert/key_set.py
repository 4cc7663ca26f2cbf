"""A set of keys that takes 8 bytes for each, so that ten million of them fit into 80 MB."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


class KeySet:
    """Hashes of 64 bits, in a few sorted arrays whose sizes grow by powers of two.

    A key that is in the set is always found. A key that is not is taken for one that is with a probability of one in
    four hundred thousand among ten million keys; it then gets a suffix that it did not need, the same in every run.
    """

    def __init__(self) -> None:
        self._runs: list[Hashes] = []

    def __contains__(self, value: int) -> bool:
        return bool(self.holds(np.array([value], np.uint64))[0])

    def holds(self, values: Hashes) -> NDArray[np.bool_]:
        """Whether each of the values is in the set. Shape [n] -> [n]."""
        found = np.zeros(len(values), np.bool_)
        for run in self._runs:
            at = np.searchsorted(run, values)
            at[at == len(run)] = 0
            found |= run[at] == values
        return found

    def add(self, values: Hashes) -> None:
        """Adds the values. Shape [n]."""
        if not len(values):
            return
        run = np.sort(values)
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")  # merges two sorted halves
        self._runs.append(run)
