"""A number with its noun, for sentences on a terminal."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """For example ``"1 pack"`` and ``"1,204 packs"``; for nouns whose plural ends in s."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
