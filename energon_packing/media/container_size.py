"""The size that a video file states, for containers without a frame count: a shorter file was cut off."""

from __future__ import annotations

from typing import BinaryIO

_EBML_HEADER = 0x1A45DFA3
_MATROSKA_SEGMENT = 0x18538067


def named_size(file: BinaryIO) -> int | None:
    """The fewest bytes that the file should have, from its outermost header; None if the header does not say.

    Reads RIFF (AVI) and EBML (Matroska, WebM). Live recordings leave the size open, which also gives None.
    Moves the file's position.
    """
    file.seek(0)
    head = file.read(12)
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        size = int.from_bytes(head[4:8], "little")
        return None if size in (0, 0xFFFFFFFF) else 8 + size
    file.seek(0)
    element = _element(file)
    if element is None or element[0] != _EBML_HEADER or element[1] is None:
        return None
    file.seek(element[1], 1)
    segment = _element(file)
    if segment is None or segment[0] != _MATROSKA_SEGMENT or segment[1] is None:
        return None
    return file.tell() + segment[1]


def _element(file: BinaryIO) -> tuple[int, int | None] | None:
    """Id and size of the EBML element that begins here (RFC 8794, sections 4 to 6); the size is None if unknown."""
    identifier = _variable_integer(file, keep_marker=True, longest=4)
    size = _variable_integer(file, keep_marker=False, longest=8)
    if identifier is None or size is None:
        return None
    value, width = size
    return identifier[0], None if value == (1 << 7 * width) - 1 else value


def _variable_integer(file: BinaryIO, *, keep_marker: bool, longest: int) -> tuple[int, int] | None:
    """An EBML number and its width in bytes; the zeros before the first 1 bit encode the width."""
    first = file.read(1)
    if not first or first[0] == 0:
        return None
    width = 9 - first[0].bit_length()
    rest = file.read(width - 1)
    if width > longest or len(rest) < width - 1:
        return None
    value = int.from_bytes(first + rest, "big")
    return (value if keep_marker else value & ((1 << 7 * width) - 1)), width
