"""Sample keys: unique in the data set, safe as a WebDataset member name, the same in every run."""

from __future__ import annotations

import re
from typing import Any

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")

MAX_KEY_LENGTH = 72
"""Most characters of a key: a tar header has 100 for the whole name, and longer names need extension records."""


class KeyAssigner:
    """Assigns every record a key, in reading order.

    Rejected records get one too, so that a key in the rejects file never names a sample of the data set.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next_suffix: dict[str, int] = {}

    def assign(self, record: Any, source_name: str, number: int) -> tuple[str, list[str]]:
        """The key of one record.

        Args:
            record: the parsed JSON, of any type; its ``id`` is used if it is text or a number.
            source_name: path of the source file; with `number`, it names a record without ``id``.
            number: line or index of the record.

        Returns:
            The key and the warnings: ``sanitised_id`` (the id had characters that a key cannot have),
            ``duplicate_id`` (another record already has it; a suffix was added), ``unusable_id`` (neither text nor
            number; ignored).
        """
        warnings: list[str] = []
        name = record.get("id") if isinstance(record, dict) else None
        if name is not None and (isinstance(name, bool) or not isinstance(name, str | int | float)):
            warnings.append("unusable_id")
            name = None
        if name is None or str(name) == "":
            named = False
            stem = source_name.rsplit(".", 1)[0]
            wanted = f"{stem}-{number}"
        else:
            named = True
            wanted = str(name)
        key = safe_key(wanted)
        if named and key != wanted:
            warnings.append("sanitised_id")
        if key in self._taken:
            if named:
                warnings.append("duplicate_id")
            key = self._free(key)
        self._taken.add(key)
        return key, warnings

    def _free(self, key: str) -> str:
        suffix = self._next_suffix.get(key, 2)
        while (candidate := f"{key}-{suffix}") in self._taken:
            suffix += 1
        self._next_suffix[key] = suffix + 1
        return candidate


def safe_key(text: str) -> str:
    """Keeps only letters, digits, ``-`` and ``_``: a dot would split a WebDataset key, a slash would create a folder.

    Long names keep their end, because ids usually differ there.
    """
    key = _UNSAFE.sub("_", text)
    return key[-MAX_KEY_LENGTH:] if key.strip("_") else "record"
