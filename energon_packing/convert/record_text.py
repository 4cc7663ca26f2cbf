"""The JSON text of a stored record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from energon_packing.errors import SampleRejected
from energon_packing.stored_record import check_depth

# What a record holds was parsed from JSON or is a row of a table, so it has no cycles.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)


def encode_record(record: Mapping[str, Any]) -> bytes:
    """A record, or a part of one, as JSON in UTF-8, as it is stored.

    Raises:
        SampleRejected: ``bad_text``, or ``too_deep``.
    """
    try:
        text = _ENCODER.encode(record).encode()
    except RecursionError as error:
        raise SampleRejected("too_deep", "objects and lists lie too deep inside each other for Python") from error
    except (TypeError, ValueError) as error:  # dates and bytes of a table, lone surrogates, NaN
        raise SampleRejected("bad_text", f"the record cannot be written as UTF-8 JSON: {error}") from error
    check_depth(text, record)
    return text
