"""The packets of a clip that must be decoded for the wanted frames, where that is known to be exact.

All packets are read once, which costs a hundredth of decoding them. Nothing but the beginning is ever sought: a
container's index may be wrong, but the order of packets is what a full decode uses. One packet holds one shown frame,
so sorting packets by time numbers the frames as a full decode does, as long as the times are those that the decoder
shows frames in. That is seen where it matters: of a frame that is wanted, every packet that may be shown before it is
decoded, unless it lies before a packet that nothing later is shown before, or is `FAR` from the frame and not needed.

FFmpeg's own bitstream filters read the bits of a packet: which units it holds, and whether others refer to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from energon_packing.media.probe import SIZED_CONTAINERS

FAR = 16
"""Packets before a wanted one from which on those that no other frame needs are left out. H.264 and H.265 decoders hold
at most 16 pictures, so one that is stored so much earlier is shown earlier."""


class _Units(NamedTuple):
    """Bitstream filters that leave what is looked for in a packet, and nothing of other packets.

    Attributes:
        starts: of frames at which decoding may start: IDR of H.264, random access of H.265, key frames (which VP9 and
            AV1 packets are is told by the container and checked by the decoder).
        needed: of frames that others may need; one frame per packet that is shown.
        parameters: the sets of parameters inside the packet.
    """

    starts: str
    needed: str
    parameters: str


_CODECS = {
    "h264": _Units(
        "filter_units=pass_types=5", "filter_units=discard=nonref:pass_types=1-5", "filter_units=pass_types=7-8"
    ),
    "hevc": _Units(
        "filter_units=pass_types=19-21", "filter_units=discard=nonref:pass_types=0-31", "filter_units=pass_types=32-34"
    ),
    "vp9": _Units("null", "vp9_superframe_split", "filter_units=pass_types=1"),
    "av1": _Units("filter_units=pass_types=1", "null", "filter_units=pass_types=1"),
}
"""Left out on purpose: VP8, whose map of segments outlives a key frame; MPEG-4 part 2, which may pack two frames in a
packet; Motion JPEG, whose tables may be those of an earlier frame."""


class Run(NamedTuple):
    """Packets to decode in one go, from one at which decoding may start.

    Attributes:
        start: number of the first packet.
        stop: number of the last packet.
        left_out: numbers of packets between them that no other frame needs and that are far from any wanted one.
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
        packets: of the clip.
    """

    runs: list[Run]
    packets: list[Any]


def may_have_runs(container: Any, stream: Any) -> bool:
    """Whether `packet_runs` knows the container and the codec; reads nothing."""
    known = stream.codec_context.codec.canonical_name in _CODECS
    return known and bool(set(container.format.name.split(",")) & SIZED_CONTAINERS)


def packet_runs(container: Any, stream: Any, wanted: Sequence[int]) -> PacketRuns | None:
    """Finds the packets that the wanted frames need.

    Args:
        container: opened, at its beginning; it is read to its end, and nothing is decoded.
        stream: of the container.
        wanted: numbers of frames in display order, ascending, without repetition.

    Returns:
        None if it is not known beforehand that decoding these packets gives the frames of a full decode.

    Raises:
        av.FFmpegError: a packet cannot be read.
    """
    if not may_have_runs(container, stream):
        return None
    packets = [packet for packet in container.demux(stream) if packet.size]
    # New extradata: the decoder must see them, wherever they are.
    unfit = (packet.pts is None or packet.is_corrupt or packet.has_sidedata("new_extradata") for packet in packets)
    if not packets or any(unfit):
        return None
    times = [packet.pts for packet in packets]
    # Matroska holds no times of decoding; FFmpeg finds those of the first packets too late.
    stored = [times[0] - 1 if packet.dts is None else packet.dts for packet in packets]
    if len(set(times)) < len(times) or min(times) != times[0] or stored != sorted(stored):
        return None
    order = [number for number in sorted(range(len(packets)), key=times.__getitem__) if not packets[number].is_discard]
    if wanted[0] < 0 or wanted[-1] >= len(order):
        return None
    units = _CODECS[stream.codec_context.codec.canonical_name]
    shown = [number for number, _ in _filtered(stream, units.needed, packets)]
    if "discard" not in units.needed and shown != list(range(len(packets))):
        return None  # a packet of VP9 that holds no shown frame, or several
    parameters = {number: bytes(left) for number, left in _filtered(stream, units.parameters, packets)}
    starts = _starts(packets, {number for number, _ in _filtered(stream, units.starts, packets)}, parameters)
    if starts is None or any(time < at for time, at in zip(times, stored, strict=True)):
        return None
    spans: list[tuple[int, int]] = [(0, 0)]
    by_number = {order[index]: index for index in wanted}
    for number in sorted(by_number, key=times.__getitem__):
        start = max(at for at in starts if times[at] <= times[number])
        stop = bisect_right(stored, times[number]) - 1
        if start > spans[-1][1]:
            spans.append((start, stop))
        spans[-1] = spans[-1][0], max(spans[-1][1], stop)
    return PacketRuns([_run(times, set(shown), *span, by_number) for span in spans], packets)


def _filtered(stream: Any, description: str, packets: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yields what a bitstream filter leaves of each packet that is shown, with the number of the packet."""
    import av

    bitstream = av.bitstream.BitStreamFilterContext(description, stream)
    for number, packet in enumerate(packets):
        copy = av.Packet(bytes(packet))
        copy.pts = copy.dts = number
        yield from ((each.dts, each) for each in bitstream.filter(copy) if each.pts is not None)


def _starts(packets: Sequence[Any], candidates: Set[int], parameters: Mapping[int, bytes]) -> list[int] | None:
    """Returns the packets at which a run may start; None if times contradict what random access means.

    Every frame before such a packet is shown before it. Times that say otherwise (edits that overlap, a damaged table)
    do not tell the order in which a decoder gives frames.
    """
    if 0 not in candidates or len(set(parameters.values())) > 1:
        return None
    starts, latest = [], packets[0].pts - 1
    for number, packet in enumerate(packets):
        if number in candidates and packet.is_keyframe:
            if packet.pts <= latest:
                return None
            # The first packet is always decoded, and what it sets stays.
            if number in parameters or 0 in parameters or not parameters:
                starts.append(number)
        latest = max(latest, packet.pts)
    return starts if starts[:1] == [0] else None


def _run(times: Sequence[int], needed: Set[int], start: int, stop: int, wanted: Mapping[int, int]) -> Run:
    reached = [number for number in wanted if start <= number <= stop]
    near = {number - back for number in reached for back in range(FAR)}
    last = max(reached, default=stop)
    left_out = (number for number in range(start, last) if number not in needed and number not in near)
    return Run(start, stop, frozenset(left_out), {times[number]: wanted[number] for number in reached})
