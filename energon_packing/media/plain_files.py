"""Image files whose decoding takes a time known from their size: one pass over the data, and no loop that these steer.

These are PNG files, and JPEG files of one sequential scan. A progressive file may hold thousands of scans, each of
which takes as long as the whole picture; so may a sequential one of several scans. Other formats have decoders that
are younger, larger or both.
"""

from __future__ import annotations

_PNG = b"\x89PNG\r\n\x1a\n"
_SEQUENTIAL = (0xC0, 0xC1)  # baseline and extended, with Huffman codes
_SCAN = 0xDA
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))


def is_plain(data: bytes) -> bool:
    """Whether a file is of these two forms; False wherever it cannot be told.

    Args:
        data: the whole file.
    """
    if data[:8] == _PNG:
        return True
    if data[:2] != b"\xff\xd8":
        return False
    at, layers = 2, 0
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker in _WITHOUT_LENGTH:
            return False
        size = data[at + 2] << 8 | data[at + 3]
        if marker in _SEQUENTIAL:
            if layers or size < 8 or at + 9 >= len(data):
                return False
            layers = data[at + 9]
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return False
        elif marker == _SCAN:
            return layers > 0 and at + 4 < len(data) and data[at + 4] == layers
        at += 2 + size
    return False
