"""What a packet of a compressed video says about itself: whether decoding may start there, whether others need it.

The bitstream is read, not the container's flags: an index of key frames may be damaged, and in MP4 it also lists frames
at which decoding does not give the same pictures. Headers are those of ITU-T H.264 (7.3.1, 7.4.1), ITU-T H.265 (7.3.1,
7.4.2), the VP9 bitstream specification (6.1, 6.2, annex B) and the AV1 specification (5.3, 5.9).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from energon_packing.media.picture_order import H264Order, HevcOrder, ShownAs


class PacketKind(NamedTuple):
    """What one packet, which holds one shown frame, says.

    Attributes:
        shown_as: increases in the order in which a decoder shows frames; None: in the order of the packets.
        start: decoding may start here: this frame, and every later one that is shown after it, needs nothing earlier.
        needed: another frame may need this one.
        parameters: the sets of parameters inside the packet, empty if there are none.
    """

    shown_as: ShownAs | None
    start: bool
    needed: bool
    parameters: bytes = b""


PacketReader = Callable[[memoryview], PacketKind | None]
"""Reads one packet; None if the packet is not of a form that is known to be exact."""


def packet_reader(codec: str, extradata: bytes) -> PacketReader | None:
    """Returns the reader of a codec's packets; None if there is none.

    Left out on purpose: VP8, whose map of segments outlives a key frame; MPEG-4 part 2, which may pack two frames in a
    packet; Motion JPEG, whose tables may be those of an earlier frame.

    Args:
        codec: FFmpeg's name of the format, such as ``"h264"``.
        extradata: of the stream; it says how H.264 and H.265 packets are divided.
    """
    try:
        if codec == "h264" and extradata[:1] == b"\1":
            return partial(_h264, size=(extradata[4] & 3) + 1, order=H264Order(extradata))
        if codec == "hevc" and extradata[:1] == b"\1":
            return partial(_hevc, size=(extradata[21] & 3) + 1, order=HevcOrder(extradata))
    except IndexError:
        return None
    return {"vp9": _vp9, "av1": _av1}.get(codec)


def _units(data: memoryview, size: int) -> list[memoryview] | None:
    """Divides a packet into units, each after its length in ``size`` bytes; None if lengths do not add up."""
    units, at, end = [], 0, len(data)
    while at < end:
        first = at + size
        at = first + int.from_bytes(data[at:first], "big")
        if first + 2 > at or at > end:
            return None
        units.append(data[first:at])
    return units


def _h264(data: memoryview, *, size: int, order: H264Order) -> PacketKind | None:
    start = needed = False
    shown_as: ShownAs | None = None
    parameters = b""
    for unit in _units(data, size) or ():
        kind = unit[0] & 31
        if kind in (1, 5):  # a slice; 5: of a picture that clears all references (IDR)
            if shown_as is None:
                start, shown_as = kind == 5, order.place(unit)
            if shown_as is None or start != (kind == 5):
                return None
            needed |= bool(unit[0] & 96)
        elif kind in (7, 8):
            parameters += bytes(unit)
            if kind == 7:
                order.learn(unit)
        elif kind not in (6, 9, 12):  # messages, delimiters, filler
            return None
    return PacketKind(shown_as, start, needed, parameters) if shown_as else None


def _hevc(data: memoryview, *, size: int, order: HevcOrder) -> PacketKind | None:
    kinds: set[tuple[int, bool]] = set()
    shown_as: ShownAs | None = None
    parameters = b""
    for unit in _units(data, size) or ():
        kind = unit[0] >> 1 & 63
        if (unit[0] & 1) << 5 | unit[1] >> 3:
            return None  # of another layer: a second view
        if kind in (32, 33, 34):
            parameters += bytes(unit)
            order.learn(unit)
        elif kind in (0, 1, 6, 7, 8, 9, 19, 20, 21):
            if not kinds:
                shown_as = order.place(unit)
            # With sublayers, a picture that its own sublayer does not need may be needed by a higher one.
            kinds.add((kind, unit[1] & 7 == 1))
        elif kind not in (35, 38, 39, 40):
            return None
    if len(kinds) != 1 or shown_as is None:
        return None
    kind, lowest = kinds.pop()
    # 19 to 21: random access; pictures shown before a clean one (21) are found by their time. 0, 6, 8: not needed.
    return PacketKind(shown_as, kind in (19, 20, 21), kind not in (0, 6, 8) or not lowest, parameters)


def _vp9(data: memoryview) -> PacketKind | None:
    frames = _vp9_frames(data)
    if not frames or not all(len(frame) and frame[0] >> 6 == 2 for frame in frames):
        return None
    shown, keys = [], []
    for frame in frames:
        # After the profile (two bits, and one more for profile 3): an earlier frame again, no key frame, shown.
        bits = frame[0] << (frame[0] & 48 == 48)
        again = bool(bits & 8)
        shown.append(again or bool(bits & 2))
        keys.append(not again and not bits & 4)
    # A frame that nothing refers to may still change the probabilities of later ones.
    return PacketKind(None, keys[0] and shown[0], True) if sum(shown) == 1 else None


def _vp9_frames(data: memoryview) -> Sequence[memoryview]:
    """Divides a packet into frames; the last byte says whether a list of sizes precedes it."""
    if not len(data) or data[-1] >> 5 != 6:
        return [data]
    count, width = (data[-1] & 7) + 1, (data[-1] >> 3 & 3) + 1
    index = len(data) - 2 - count * width
    if index < 0 or data[index] != data[-1]:
        return [data]
    frames, at = [], 0
    for number in range(count):
        field = index + 1 + number * width
        size = int.from_bytes(data[field : field + width], "little")
        frames.append(data[at : min(at + size, index)])
        at += size
    return frames


def _av1(data: memoryview) -> PacketKind | None:
    parameters = b""
    at = 0
    while at < len(data):
        header = data[at]
        kind, at = header >> 3 & 15, at + 1
        if header & 4:
            return None  # of a layer
        size = len(data) - at
        if header & 2:
            size, at = _leb128(data, at)
        if size < 0 or at + size > len(data):
            return None
        if kind == 1:
            parameters += bytes(data[at : at + size])
        elif kind in (3, 6):
            # The first frame: an earlier one again, its type (0: key frame), shown. A key frame that is shown at once
            # replaces all references.
            key = size > 0 and data[at] >> 4 == 1
            return PacketKind(None, key and bool(parameters), True, parameters)
        elif kind not in (2, 5, 15):
            return None
        at += size
    return None


def _leb128(data: memoryview, at: int) -> tuple[int, int]:
    """Returns a number of seven bits per byte, and where it ends; -1 if it does not."""
    value = 0
    for shift, byte in enumerate(data[at : at + 8]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    return -1, at
