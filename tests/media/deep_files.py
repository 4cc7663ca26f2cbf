"""Image files of more than 8 bits a sample, written byte by byte: no image library says what is in them."""

import struct
from typing import Any

import numpy as np
from support.media_files import png_of


def pgm(samples: np.ndarray, maxval: int, *, plain: bool = False) -> bytes:
    """A PGM of unsigned samples ``[H, W]``; plain writes them as text."""
    height, width = samples.shape
    if plain:
        rows = "\n".join(" ".join(str(value) for value in row) for row in samples)
        return f"P2\n{width} {height}\n{maxval}\n{rows}\n".encode()
    return f"P5\n{width} {height}\n{maxval}\n".encode() + samples.astype(">u2" if maxval > 255 else "u1").tobytes()


def ppm(samples: np.ndarray, maxval: int) -> bytes:
    """A PPM of unsigned samples ``[H, W, 3]``."""
    height, width, _ = samples.shape
    return f"P6\n{width} {height}\n{maxval}\n".encode() + samples.astype(">u2" if maxval > 255 else "u1").tobytes()


def pfm(samples: np.ndarray) -> bytes:
    """A grey PFM of float samples ``[H, W]``; its rows go upwards."""
    height, width = samples.shape
    return f"Pf\n{width} {height}\n-1.0\n".encode() + samples[::-1].astype("<f4").tobytes()


def png(samples: np.ndarray) -> bytes:
    """A PNG of 16-bit samples ``[H, W, 1 to 4]``."""
    height, width, channels = samples.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    return png_of(width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], rows)


def twelve_bits(samples: np.ndarray) -> bytes:
    """Samples ``[H, W]`` of 12 bits, two in three bytes; each row begins with a byte of its own."""
    rows = []
    for row in samples:
        bits = "".join(f"{int(value):012b}" for value in row)
        bits += "0" * (-len(bits) % 8)
        rows.append(int(bits, 2).to_bytes(len(bits) // 8, "big"))
    return b"".join(rows)


def tiff(samples: np.ndarray, *, photometric: int | None = None, bits: int | None = None, order: str = "<") -> bytes:
    """An uncompressed TIFF 6.0 of samples ``[H, W]`` or ``[H, W, channels]``, of the array's own type.

    Args:
        photometric: 0 shows 0 as white, 1 as black, 2 is RGB; None takes 1 of grey and 2 of colour.
        bits: 12 writes unsigned samples so; None writes the array's own bits.
        order: ``<`` writes a little-endian file, ``>`` a big-endian one.
    """
    height, width = samples.shape[:2]
    channels = 1 if samples.ndim == 2 else samples.shape[2]
    data = twelve_bits(samples) if bits == 12 else samples.astype(samples.dtype.newbyteorder(order)).tobytes()
    if photometric is None:
        photometric = 1 if channels == 1 else 2
    bits = bits or 8 * samples.dtype.itemsize
    sample_format = {"u": 1, "i": 2, "f": 3}[samples.dtype.kind]
    entries: list[tuple[int, str, Any]] = [
        *((256, "I", [width]), (257, "I", [height]), (258, "H", [bits] * channels), (259, "H", [1])),
        *((262, "H", [photometric]), (273, "I", None), (277, "H", [channels]), (278, "I", [height])),
        *((279, "I", [len(data)]), (339, "H", [sample_format] * channels)),
    ]
    beyond = 8 + 2 + 12 * len(entries) + 4
    size = sum(struct.calcsize(kind) * len(values) for _, kind, values in entries if values and len(values) > 2)
    table, extra = b"", b""
    for tag, kind, values in entries:
        numbers = [beyond + size] if values is None else values
        packed = struct.pack(order + kind * len(numbers), *numbers)
        if len(packed) > 4:
            packed, extra = struct.pack(order + "I", beyond + len(extra)), extra + packed
        table += struct.pack(order + "HHI", tag, {"H": 3, "I": 4}[kind], len(numbers)) + packed.ljust(4, b"\0")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    return head + struct.pack(order + "H", len(entries)) + table + bytes(4) + extra + data
