"""The order in which a decoder shows H.264 and H.265 pictures, read from their headers.

Containers hold times, and a decoder ignores them: it shows pictures by their *picture order count*. Where a table of
times is damaged, the two orders differ. The syntax is that of ITU-T H.264 (7.3.2.1, 7.3.3, 8.2.1) and ITU-T H.265
(7.3.2, 7.3.6, 8.3.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

ShownAs = tuple[int, int]
"""Number of the sequence that a picture belongs to, and its picture order count there; tuples compare as shown."""

# Profiles whose sets of parameters hold the fields from chroma_format_idc to the scaling lists.
_WITH_CHROMA = frozenset({44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244})


class _Bits:
    """Reads the bits of a unit after its header, without the bytes that keep start codes out of it.

    Raises:
        IndexError: the unit has no more bits.
    """

    def __init__(self, unit: memoryview, header: int) -> None:
        # A header that is read here takes far fewer bytes; scaling lists are the longest.
        data = bytes(unit[header : header + 1024]).replace(b"\0\0\3", b"\0\0")
        self._value = int.from_bytes(data, "big")
        self._left = 8 * len(data)

    def fixed(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise IndexError("the unit ends inside its header")
        return self._value >> self._left & (1 << count) - 1

    def golomb(self) -> int:
        zeros = 0
        while not self.fixed(1):
            zeros += 1
        return (1 << zeros) - 1 + self.fixed(zeros)

    def signed(self) -> int:
        value = self.golomb()
        return (value + 1) // 2 if value & 1 else -(value // 2)


class _Count:
    """Extends the low bits of a picture order count, which is all that a header holds."""

    def __init__(self) -> None:
        self._sequence = 0
        self._last = 0

    def __call__(self, low: int, bits: int, *, first: bool, kept: bool) -> ShownAs:
        """Returns the place of a picture.

        Args:
            low: the low bits.
            bits: how many.
            first: whether the picture begins a sequence.
            kept: whether later counts are extended from this one.
        """
        if first:
            self._sequence, self._last = self._sequence + 1, low
        size = 1 << bits
        value = self._last - self._last % size + low
        if value - self._last > size // 2:
            value -= size
        elif self._last - value >= size // 2:
            value += size
        if kept:
            self._last = value
        return self._sequence, value


class _H264Parameters(NamedTuple):
    planes: bool  # slices say which colour they are of
    frame_bits: int
    order_bits: int  # 0: pictures are shown in the order of decoding
    frames_only: bool


class H264Order:
    """The order of H.264 pictures.

    Args:
        extradata: ``avcC``, which holds the sets of parameters.
    """

    def __init__(self, extradata: bytes) -> None:
        self._parameters: _H264Parameters | None = None
        self._count = _Count()
        self._decoded = 0
        sets = list(_counted(memoryview(extradata), 6, extradata[5] & 31))
        if len(sets) == 1:
            self.learn(sets[0])

    def learn(self, unit: memoryview) -> None:
        """Reads a set of sequence parameters."""
        bits = _Bits(unit, 1)
        profile = bits.fixed(24) >> 16
        bits.golomb()
        chroma, planes = 1, False
        if profile in _WITH_CHROMA:
            chroma = bits.golomb()
            planes = chroma == 3 and bool(bits.fixed(1))
            bits.golomb()
            bits.golomb()
            bits.fixed(1)
            if bits.fixed(1):
                _skip_scaling_lists(bits, 12 if chroma == 3 else 8)
        frame_bits = bits.golomb() + 4
        kind = bits.golomb()
        if kind == 1:
            self._parameters = None  # a cycle of offsets, which no encoder writes
            return
        order_bits = bits.golomb() + 4 if kind == 0 else 0
        bits.golomb()
        bits.fixed(1)
        bits.golomb()
        bits.golomb()
        self._parameters = _H264Parameters(planes, frame_bits, order_bits, bool(bits.fixed(1)))

    def place(self, unit: memoryview) -> ShownAs | None:
        """Returns the place of the picture whose first slice this is; None if it is not known."""
        known = self._parameters
        if known is None:
            return None
        first, kept = unit[0] & 31 == 5, bool(unit[0] & 96)
        self._decoded += 1
        if not known.order_bits:
            return self._count(0, 1, first=first, kept=True)[0], self._decoded
        bits = _Bits(unit[:64], 1)
        if bits.golomb() != 0:
            return None  # its first slice is missing
        bits.golomb()
        bits.golomb()
        bits.fixed(2 * known.planes + known.frame_bits)
        if not known.frames_only and bits.fixed(1):
            return None  # a field alone
        if first:
            bits.golomb()
        return self._count(bits.fixed(known.order_bits), known.order_bits, first=first, kept=kept)


def _skip_scaling_lists(bits: _Bits, count: int) -> None:
    for number in range(count):
        if not bits.fixed(1):
            continue
        last = following = 8
        for _ in range(16 if number < 6 else 64):
            if following:
                following = (last + bits.signed()) % 256
            last = following or last


def _counted(data: memoryview, at: int, count: int) -> Iterator[memoryview]:
    """Yields units that each stand after their length in two bytes."""
    for _ in range(count):
        size = int.from_bytes(data[at : at + 2], "big")
        yield data[at + 2 : at + 2 + size]
        at += 2 + size


class HevcOrder:
    """The order of H.265 pictures.

    Args:
        extradata: ``hvcC``, which holds the sets of parameters.
    """

    def __init__(self, extradata: bytes) -> None:
        self._planes = False
        self._order_bits: int | None = None
        self._extra_bits = 0
        self._count = _Count()
        self._started = False
        data, at, seen = memoryview(extradata), 23, []
        for _ in range(extradata[22]):
            kind, count = data[at] & 63, int.from_bytes(data[at + 1 : at + 3], "big")
            units = list(_counted(data, at + 3, count))
            at += 3 + sum(2 + len(unit) for unit in units)
            if kind in (33, 34):
                seen += [(kind, unit) for unit in units]
        if sorted(kind for kind, _ in seen) == [33, 34]:
            for _, unit in seen:
                self.learn(unit)

    def learn(self, unit: memoryview) -> None:
        """Reads a set of sequence or picture parameters; others are ignored."""
        kind = unit[0] >> 1 & 63
        if kind == 33:
            self._learn_sequence(_Bits(unit, 2))
        elif kind == 34:
            bits = _Bits(unit, 2)
            bits.golomb()
            bits.golomb()
            bits.fixed(1)
            # A flag says that pictures may be hidden.
            hidden = bool(bits.fixed(1))
            self._extra_bits = bits.fixed(3)
            if hidden:
                self._order_bits = None

    def _learn_sequence(self, bits: _Bits) -> None:
        bits.fixed(4)
        layers = bits.fixed(3)
        bits.fixed(1 + 96)
        if layers:
            flags = [(bits.fixed(1), bits.fixed(1)) for _ in range(layers)]
            bits.fixed(2 * (8 - layers))
            for profile, level in flags:
                bits.fixed(88 * profile + 8 * level)
        bits.golomb()
        self._planes = bits.golomb() == 3 and bool(bits.fixed(1))
        bits.golomb()
        bits.golomb()
        if bits.fixed(1):
            for _ in range(4):
                bits.golomb()
        bits.golomb()
        bits.golomb()
        self._order_bits = bits.golomb() + 4

    def place(self, unit: memoryview) -> ShownAs | None:
        """Returns the place of the picture whose first slice this is; None if it is not known."""
        if self._order_bits is None:
            return None
        kind = unit[0] >> 1 & 63
        bits = _Bits(unit[:64], 2)
        if not bits.fixed(1):
            return None  # its first slice is missing
        if kind >= 16:
            bits.fixed(1)
        bits.golomb()
        bits.fixed(self._extra_bits)
        bits.golomb()
        bits.fixed(2 * self._planes)
        cleared = kind in (19, 20)
        low = 0 if cleared else bits.fixed(self._order_bits)
        first, self._started = cleared or not self._started, True
        # Pictures that need not be decoded do not extend counts; those of higher sublayers do not either.
        kept = kind not in (0, 6, 7, 8, 9) and unit[1] & 7 == 1
        return self._count(low, self._order_bits, first=first, kept=kept)
