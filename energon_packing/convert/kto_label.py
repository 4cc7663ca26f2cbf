"""A label that marks one answer as wanted or unwanted (KTO): stored as the extra ``preference``, as pairs have it.

LLaMA-Factory calls the column ``kto_tag``, TRL and ms-swift ``label``. It is read only where the user names it: without
a loss that reads ``preference``, unwanted answers would be learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_packing.conversation import PREFERENCE
from energon_packing.errors import SampleRejected

_WORDS = {"true": True, "1": True, "desirable": True, "false": False, "0": False, "-1": False, "undesirable": False}


def read_kto_label(record: Mapping[str, Any], column: str, warnings: list[str], *, pair: bool) -> dict[str, float]:
    """The extra of a record: 1 for a wanted answer, -1 for an unwanted one.

    Args:
        record: the parsed JSON.
        column: name of the label.
        warnings: receives ``unpaired_preference``.
        pair: whether the record is a pair, which needs no label.

    Raises:
        SampleRejected: ``bad_label`` if it is missing or is neither true nor false, ``bad_pair`` for a pair.
    """
    value = record.get(column)
    if pair:
        raise SampleRejected("bad_pair", f"the record is a pair and has the label {column!r}; convert pairs without it")
    wanted = value if isinstance(value, bool) else _WORDS.get(str(value).strip().lower())
    if wanted is None:
        found = "is missing" if value is None else f"is {value!r:.60}"
        raise SampleRejected("bad_label", f"the label {column!r} {found}; it must be true or false")
    warnings.append("unpaired_preference")
    return {PREFERENCE: 1.0 if wanted else -1.0}
