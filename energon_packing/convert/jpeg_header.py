"""Size and mode of a JPEG file of the usual form, from its first bytes.

Pillow keeps every table and segment of a header, and takes a third of the time of hashing the file. Of the usual form
are JFIF files of 8 bits, grey or with three colours, whose segments are whole. All others (EXIF, colour profiles, four
colours, several pictures, damage) are left to Pillow, so that its word is the last one on what is an image.
"""

from __future__ import annotations

from typing import NamedTuple

_JFIF, _SCAN, _INTERVAL, _COMMENT, _QUANTISATION, _HUFFMAN = 0xE0, 0xDA, 0xDD, 0xFE, 0xDB, 0xC4
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended, progressive
_SKIPPED = frozenset((_INTERVAL, _COMMENT, _HUFFMAN))
_MODES = {1: "L", 3: "RGB"}
_TABLE = 65  # bytes of a quantisation table of 8 bits, its number included


class JpegHeader(NamedTuple):
    """What Pillow says of a file: pixels, which no orientation turns, and the pixel mode."""

    width: int
    height: int
    mode: str


def read_jpeg_header(head: bytes | memoryview) -> JpegHeader | None:
    """Reads up to the first scan.

    Args:
        head: the first bytes of a file, or all of them.

    Returns:
        None if the file is not of the usual form, or if its first scan begins after `head`.
    """
    if bytes(head[:3]) != b"\xff\xd8\xff":
        return None
    header: JpegHeader | None = None
    at = 2
    while at + 4 <= len(head) and head[at] == 0xFF:
        marker, size = head[at + 1], head[at + 2] << 8 | head[at + 3]
        body = head[at + 4 : at + 2 + size]
        if size < 2 or len(body) != size - 2:
            return None
        if marker == _SCAN:
            return header
        if marker == _JFIF:
            if len(body) != 14 or body[:5] != b"JFIF\0":
                return None
        elif marker == _QUANTISATION:
            if len(body) % _TABLE or any(number > 15 for number in body[::_TABLE]):
                return None
        elif marker in _FRAMES:
            if header is not None or len(body) < 6 or body[0] != 8:
                return None
            height, width, layers = body[1] << 8 | body[2], body[3] << 8 | body[4], body[5]
            if not width or not height or layers not in _MODES or len(body) != 6 + 3 * layers:
                return None
            header = JpegHeader(width, height, _MODES[layers])
        elif marker not in _SKIPPED:
            return None
        at += 2 + size
    return None
