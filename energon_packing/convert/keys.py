"""Sample keys: unique in the data set, safe as a WebDataset member name, the same in every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from energon_packing.convert.key_names import key_hash, wanted_key
from energon_packing.convert.key_set import Hashes, KeySet

_MOST_SUFFIXES = 100_000
"""Keys whose next suffix is remembered; forgetting it costs time alone, since a taken key is never given back."""


class KeyAssigner:
    """Makes the keys of all records unique, in reading order.

    Rejected records get one too, so that a key in the rejects file never names a sample of the data set.
    """

    def __init__(self) -> None:
        self._taken = KeySet()
        self._next_suffix: dict[str, int] = {}

    def assign(self, record: Any, source_name: str, number: int) -> tuple[str, list[str]]:
        """The key of one record and its warnings: those of `wanted_key`, and ``duplicate_id`` (another record already
        has the key; a suffix was added)."""
        key, named, warnings = wanted_key(record, source_name, number)
        changed = self.assign_all([key], np.array([key_hash(key)], np.uint64))
        if changed and named:
            warnings.append("duplicate_id")
        return changed.get(0, key), warnings

    def assign_all(self, keys: Sequence[str], hashes: Hashes) -> dict[int, str]:
        """Takes the keys of records that follow each other.

        Args:
            keys: that they ask for.
            hashes: `key_hash` of each. Shape [n].

        Returns:
            Index of a record -> the key that it gets in place of one that is taken.
        """
        taken = self._taken.holds(hashes)
        if not taken.any() and len(np.unique(hashes)) == len(hashes):
            self._taken.add(hashes)
            return {}
        changed: dict[int, str] = {}
        new: set[int] = set()
        for index, (key, value, known) in enumerate(zip(keys, hashes.tolist(), taken.tolist(), strict=True)):
            if known or value in new:
                changed[index] = self._free(key, new)
            else:
                new.add(value)
        self._taken.add(np.array(sorted(new), np.uint64))
        return changed

    def _free(self, key: str, new: set[int]) -> str:
        suffix = self._next_suffix.get(key, 2)
        while (value := key_hash(candidate := f"{key}-{suffix}")) in new or value in self._taken:
            suffix += 1
        if len(self._next_suffix) >= _MOST_SUFFIXES:
            self._next_suffix.clear()
        self._next_suffix[key] = suffix + 1
        new.add(value)
        return candidate
