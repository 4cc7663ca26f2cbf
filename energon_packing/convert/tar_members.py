"""Members of a tar shard, with the bytes that Python's `tarfile` writes for them.

`tarfile` takes 25 microseconds for the header of a member; most of the 512 bytes are the same for all members of a
shard. So one header of its own making is the template, and name, size and checksum are filled in.
"""

from __future__ import annotations

import tarfile

BLOCK = tarfile.BLOCKSIZE
_LONGEST_NAME = 100
_LARGEST_SIZE = 8**11 - 1
_NAME, _SIZE, _CHECKSUM = slice(0, 100), slice(124, 136), slice(148, 156)


def _by_tarfile(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)  # time, owner and group stay 0
    member.size = size
    member.mode = 0o644
    # USTAR: no extension records, so a member's offset is its header's, which Energon's index relies on.
    return member.tobuf(tarfile.USTAR_FORMAT)


_TEMPLATE = _by_tarfile("a", 0)
_BEFORE_SIZE = _TEMPLATE[_NAME.stop : _SIZE.start]
_AFTER_SIZE = _TEMPLATE[_SIZE.stop : _CHECKSUM.start]
_AFTER_CHECKSUM = _TEMPLATE[_CHECKSUM.stop :]
_FIXED_SUM = sum(_BEFORE_SIZE + _AFTER_SIZE + _AFTER_CHECKSUM) + 8 * ord(" ")
"""The checksum counts its own eight bytes as spaces."""
_PADDING = tuple(b"\0" * (-length % BLOCK) for length in range(BLOCK))


def header(name: str, size: int) -> bytes:
    """The header of a member, byte for byte what `tarfile` writes for it.

    Args:
        name: of the member.
        size: bytes of its content.
    """
    encoded = name.encode("utf-8")
    if len(encoded) > _LONGEST_NAME or size > _LARGEST_SIZE or name.startswith("/") or name.endswith("/"):
        return _by_tarfile(name, size)
    length = b"%011o" % size
    checksum = _FIXED_SUM + sum(encoded) + sum(length)
    return b"".join(
        (
            encoded.ljust(_LONGEST_NAME, b"\0"),
            _BEFORE_SIZE,
            length,
            b"\0",
            _AFTER_SIZE,
            b"%06o\0 " % checksum,
            _AFTER_CHECKSUM,
        )
    )


def padding(size: int) -> bytes:
    """The zeros after a content of ``size`` bytes."""
    return _PADDING[size % BLOCK]


def stored_size(size: int) -> int:
    """Bytes that a member of ``size`` bytes takes in the tar, its header and padding included."""
    return BLOCK + size + -size % BLOCK


def ending(size: int) -> bytes:
    """What follows the last member of a tar whose members take ``size`` bytes."""
    end = 2 * BLOCK
    return b"\0" * (end + -(size + end) % tarfile.RECORDSIZE)
