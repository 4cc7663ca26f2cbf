"""The key that a record asks for, and the digest that stands for a key. Loads no arrays: every worker needs this."""

from __future__ import annotations

import hashlib
import re
from typing import Any

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_SAFE = re.compile(r"[A-Za-z0-9_-]+")

MAX_KEY_LENGTH = 72
"""Most characters of a key: a tar header has 100 for the whole name, and longer names need extension records."""


def wanted_key(record: Any, source_name: str, number: int) -> tuple[str, bool, list[str]]:
    """The key that one record asks for.

    Args:
        record: the parsed JSON, of any type; its ``id`` is used if it is text or a number.
        source_name: path of the source file; with `number`, it names a record without ``id``.
        number: line or index of the record.

    Returns:
        The key, whether the record itself names it, and the warnings: ``sanitised_id`` (the id had characters that a
        key cannot have), ``unusable_id`` (neither text nor number; ignored).
    """
    warnings: list[str] = []
    name = record.get("id") if isinstance(record, dict) else None
    if type(name) is str and name and len(name) <= MAX_KEY_LENGTH and _SAFE.fullmatch(name) and name.strip("_"):
        return name, True, warnings  # nearly all ids
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int | float)):
        warnings.append("unusable_id")
        name = None
    if name is None or str(name) == "":
        stem = source_name.rsplit(".", 1)[0]
        return safe_key(f"{stem}-{number}"), False, warnings
    wanted = str(name)
    key = safe_key(wanted)
    if key != wanted:
        warnings.append("sanitised_id")
    return key, True, warnings


def safe_key(text: str) -> str:
    """Keeps only letters, digits, ``-`` and ``_``: a dot would split a WebDataset key, a slash would create a folder.

    Long names keep their end, because ids usually differ there.
    """
    key = _UNSAFE.sub("_", text)
    return key[-MAX_KEY_LENGTH:] if key.strip("_") else "record"


def key_digest(key: str) -> bytes:
    """16 bytes of a key's SHA-256: 8 decide its split (`splits.position_of`), 8 stand for it in a `KeySet`."""
    return hashlib.sha256(key.encode("utf-8")).digest()[:16]


def key_hash(key: str) -> int:
    """What stands for a key in a `KeySet`."""
    return int.from_bytes(key_digest(key)[8:], "big")
