"""The packets of a clip that must be decoded for the wanted frames, where that is known to be exact.

All packets are read once, which costs a hundredth of decoding them. Nothing but the beginning is ever sought: a
container's index may be wrong, but the order of packets is what a full decode uses. One packet holds one shown frame.
Sorting packets by time therefore numbers the frames as a full decode does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from energon_packing.media.packet_kinds import PacketKind, packet_reader
from energon_packing.media.probe import SIZED_CONTAINERS


class Run(NamedTuple):
    """Packets to decode in one go, from one at which decoding may start.

    Attributes:
        start: number of the first packet.
        stop: number of the last packet.
        left_out: numbers of packets between them that no other frame needs and that are not wanted.
        frames: number of each wanted frame, by its time in the stream's units.
    """

    start: int
    stop: int
    left_out: frozenset[int]
    frames: dict[int, int]


class PacketRuns(NamedTuple):
    """Which packets of a clip to decode.

    Attributes:
        runs: in the order of the stream. The first one always holds the first packet, which tells the decoder about the
            encoder.
        packets: the time and size in bytes of every packet up to the last needed one, by which it is recognised.
    """

    runs: list[Run]
    packets: list[tuple[int, int]]


class _Packet(NamedTuple):
    time: int
    size: int
    shown: bool
    kind: PacketKind


def may_have_runs(container: Any, stream: Any) -> bool:
    """Whether `packet_runs` knows the container and the codec; reads nothing."""
    known = packet_reader(stream.codec_context.codec.canonical_name, stream.codec_context.extradata or b"")
    return known is not None and bool(set(container.format.name.split(",")) & SIZED_CONTAINERS)


def packet_runs(container: Any, stream: Any, wanted: Sequence[int]) -> PacketRuns | None:
    """Finds the packets that the wanted frames need.

    Args:
        container: opened, at its beginning; it is read to its end, and nothing is decoded.
        stream: of the container.
        wanted: numbers of frames in display order, ascending, without repetition.

    Returns:
        None if it is not known beforehand that decoding these packets gives the frames of a full decode.
    """
    if not may_have_runs(container, stream):
        return None
    packets = _read(container, stream)
    if packets is None or not packets[0].kind.start or len({packet.parameters for packet in _telling(packets)}) > 1:
        return None
    times = [packet.time for packet in packets]
    if len(set(times)) < len(times) or min(times) != times[0]:
        return None
    by_time = sorted(range(len(packets)), key=times.__getitem__)
    if by_time != sorted(range(len(packets)), key=lambda number: packets[number].kind.shown_as or (0, number)):
        return None  # a damaged table of times
    order = [number for number in by_time if packets[number].shown]
    starts = _starts(packets)
    if starts is None or wanted[0] < 0 or wanted[-1] >= len(order):
        return None
    runs = _runs(packets, starts, {order[index]: index for index in wanted})
    return PacketRuns(runs, [(packet.time, packet.size) for packet in packets[: runs[-1].stop + 1]])


def _read(container: Any, stream: Any) -> list[_Packet] | None:
    read = packet_reader(stream.codec_context.codec.canonical_name, stream.codec_context.extradata or b"")
    if read is None:
        return None
    packets = []
    for packet in container.demux(stream):
        if packet.size == 0:
            continue  # the end
        # New extradata: the decoder must see them, wherever they are.
        if packet.pts is None or packet.is_corrupt or packet.has_sidedata("new_extradata"):
            return None
        try:
            kind = read(memoryview(packet))
        except IndexError:
            kind = None  # it ends inside a header
        if kind is None:
            return None
        packets.append(_Packet(packet.pts, packet.size, not packet.is_discard, kind))
    return packets or None


def _telling(packets: Sequence[_Packet]) -> list[PacketKind]:
    return [packet.kind for packet in packets if packet.kind.parameters]


def _starts(packets: Sequence[_Packet]) -> list[int] | None:
    """Returns the packets at which a run may start; None if times contradict what random access means.

    Every frame before such a packet is shown before it. Times that say otherwise (edits that overlap, a damaged table)
    do not tell the order in which a decoder gives frames.
    """
    starts, latest = [], packets[0].time - 1
    # The first packet is always decoded, and what it sets stays.
    known = bool(packets[0].kind.parameters) or not _telling(packets)
    for number, packet in enumerate(packets):
        if packet.kind.start:
            if packet.time <= latest:
                return None
            if packet.kind.parameters or known:
                starts.append(number)
        latest = max(latest, packet.time)
    return starts


def _runs(packets: Sequence[_Packet], starts: Sequence[int], wanted: dict[int, int]) -> list[Run]:
    """Returns the runs of the wanted packets, which are given with the numbers of their frames."""
    spans: list[tuple[int, set[int]]] = [(0, {0})]  # the start of a run, and the packets that it must reach
    at = 0
    for number in wanted:
        while at + 1 < len(starts) and packets[starts[at + 1]].time <= packets[number].time:
            at += 1
        # A frame that is stored after the start of the next run and shown before it joins both.
        if starts[at] > max(spans[-1][1]):
            spans.append((starts[at], {starts[at]}))
        spans[-1][1].add(number)
    return [_run(packets, start, reached, wanted) for start, reached in spans]


def _run(packets: Sequence[_Packet], start: int, reached: Collection[int], wanted: dict[int, int]) -> Run:
    stop = max(reached)
    left_out = (number for number in range(start, stop) if not packets[number].kind.needed and number not in wanted)
    frames = {packets[number].time: wanted[number] for number in reached if number in wanted}
    return Run(start, stop, frozenset(left_out), frames)
