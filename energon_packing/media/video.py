"""Decoding chosen frames of a video, by index, upright and RGB: only the packets that they need, where that is exact.

All packets are read once, which costs a hundredth of decoding them. Nothing but the beginning is ever sought: a
container's index may be wrong, but the order of packets is what a full decode uses. One packet holds one shown frame,
so sorting packets by time numbers the frames as a full decode does, as long as the times are those that the decoder
shows frames in. That is seen where it matters: of a frame that is wanted, every packet that may be shown before it is
decoded, unless it lies before a packet that nothing later is shown before, or is `FAR` from the frame and not needed.

FFmpeg's own bitstream filters read the bits of a packet: which units it holds, and whether others refer to it.
"""

import io
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from energon_packing.errors import SampleRejected
from energon_packing.media import check_decoded_bytes
from energon_packing.media.image import decode_image
from energon_packing.media.probe import SIZED_CONTAINERS, check_memory, decodable, pyav, size_changes

FAR = 16
"""Packets before a wanted one from which on those that no other frame needs are left out. H.264 and H.265 decoders hold
at most 16 pictures, so one that is stored so much earlier is shown earlier."""


class _Units(NamedTuple):
    """Bitstream filters that leave what is looked for in a packet, and nothing of other packets."""

    # Of frames at which decoding may start: IDR of H.264, random access of H.265, key frames (which VP9 and AV1 packets
    # are is told by the container and checked by the decoder).
    starts: str
    needed: str  # of frames that others may need; one frame per packet that is shown
    parameters: str  # the sets of parameters inside the packet


_PASS, _PASS_NEEDED = "filter_units=pass_types=", "filter_units=discard=nonref:pass_types="
_CODECS = {
    "h264": _Units(f"{_PASS}5", f"{_PASS_NEEDED}1-5", f"{_PASS}7-8"),
    "hevc": _Units(f"{_PASS}19-21", f"{_PASS_NEEDED}0-31", f"{_PASS}32-34"),
    "vp9": _Units("null", "vp9_superframe_split", f"{_PASS}1"),
    "av1": _Units(f"{_PASS}1", "null", f"{_PASS}1"),
}
"""Left out on purpose: VP8, whose map of segments outlives a key frame; MPEG-4 part 2, which may pack two frames in a
packet; Motion JPEG, whose tables may be those of an earlier frame."""


class Run(NamedTuple):
    """Packets to decode in one go, from one at which decoding may start: the numbers of the first and the last one."""

    start: int
    stop: int
    # Numbers of packets between them that no other frame needs and that are far from any wanted one.
    left_out: frozenset[int]
    frames: dict[int, int]  # number of each wanted frame, by its time in the stream's units


def may_have_runs(container: Any, stream: Any) -> bool:
    """Whether `packet_runs` knows the container and the codec; reads nothing."""
    known = stream.codec_context.codec.canonical_name in _CODECS
    return known and bool(set(container.format.name.split(",")) & SIZED_CONTAINERS)


def packet_runs(container: Any, stream: Any, wanted: Sequence[int]) -> tuple[list[Run], list[Any]] | None:
    """Finds the packets that the wanted frames need. Returns the packets to decode, in the order of the stream, and all
    packets; None if it is not known beforehand that decoding the former gives the frames of a full decode. The first
    run always holds the first packet, which tells the decoder about the encoder. The container is read from its
    beginning to its end, and nothing is decoded. ``wanted`` are numbers in display order, each once, ascending."""
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
    return [_run(times, set(shown), *span, by_number) for span in spans], packets


def _filtered(stream: Any, description: str, packets: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yields what a bitstream filter leaves of each packet that is shown, with the number of the packet."""
    import av

    bitstream = av.bitstream.BitStreamFilterContext(description, stream)
    for number, packet in enumerate(packets):
        copy = av.Packet(bytes(packet))
        copy.pts = copy.dts = number
        yield from ((each.dts, each) for each in bitstream.filter(copy) if each.pts is not None)


def _starts(packets: Sequence[Any], candidates: Set[int], parameters: Mapping[int, bytes]) -> list[int] | None:
    """Returns the packets at which a run may start; None if times contradict what random access means: every frame
    before such a packet is shown before it. Times that say otherwise (edits that overlap, a damaged table) do not tell
    the order in which a decoder gives frames."""
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


class FrameStack:
    """Takes decoded frames and keeps the pixels of the wanted ones; arguments as for `decode_frames`. ``wanted`` are
    their numbers without repetition, ascending, of which as many as ``missing`` says were not taken yet."""

    def __init__(self, indices: Sequence[int], max_pixels: int, max_bytes: int | None) -> None:
        import av.video.reformatter

        self.wanted = sorted(set(indices))
        self.missing = len(self.wanted)
        self._indices, self._max_pixels, self._max_bytes = indices, max_pixels, max_bytes
        self._size: tuple[int, int] | None = None
        self._frames: np.ndarray | None = None  # rows of pixels, like images
        # Our own: PyAV's shared one keeps a thread pool, which deadlocks in a worker that was forked after its use.
        self._reformatter = av.video.reformatter.VideoReformatter()

    def check_limits(self, width: int, height: int, max_pixels: int) -> None:
        """Refuses frames that are too large, as ``media_too_large``."""
        if width * height > max_pixels:
            limit = f"encoder.max_source_pixels={max_pixels}"
            raise SampleRejected("media_too_large", f"frames of {width}x{height} pixels are over {limit}")
        check_decoded_bytes(len(self._indices), width, height, self._max_bytes)

    def check_size(self, frame: Any) -> None:
        """Refuses a frame, wanted or not, of another size than the first one that was decoded (``corrupt_media``)."""
        size = frame.width, frame.height
        if self._size is None:
            # The container only announced a size; that of the decoded frame counts.
            self.check_limits(*size, self._max_pixels)
            self._size = size
        elif size != self._size:
            raise size_changes(self._size, frame)

    def take(self, frame: Any, index: int) -> None:
        """Keeps the pixels of a wanted frame; ``corrupt_media`` if it is rotated unlike the first one taken."""
        rgb = self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
        pixels = np.rot90(rgb, round(frame.rotation / 90))  # counter-clockwise, like the rotation
        if self._frames is None:
            self._frames = np.empty((len(self._indices), *pixels.shape), dtype=np.uint8)
        if pixels.shape != self._frames.shape[1:]:
            detail = f"frame {index} is rotated differently from the first requested frame"
            raise SampleRejected("corrupt_media", detail)
        self._frames[bisect_left(self._indices, index) : bisect_right(self._indices, index)] = pixels
        self.missing -= 1

    def tensor(self) -> torch.Tensor:
        """uint8 ``[indices, 3, H, W]``, a view of rows of pixels; ``corrupt_media`` if a wanted frame is missing."""
        if self._frames is None or self.missing:
            first = self.wanted[len(self.wanted) - self.missing]
            raise SampleRejected("corrupt_media", f"the video ends before frame {first}, but more frames were measured")
        return torch.from_numpy(self._frames).permute(0, 3, 1, 2)


def decode_frames(
    data: bytes, indices: Sequence[int], *, max_pixels: int, max_bytes: int | None = None, deadline: float | None = None
) -> torch.Tensor:
    """Decodes the requested frames of a clip, counted in display order. Where `packet_runs` knows which packets the
    frames need, only these are decoded; the times of the frames are checked. Otherwise, or if a check fails, decoding
    starts at the first frame and stops after the last requested one. Both give the same pixels. Returns uint8
    ``[len(indices), 3, H, W]``, rotated as the container says; a view of rows of pixels (channels last). Raises
    SampleRejected: ``corrupt_media`` if the clip cannot be read or is shorter than measured, ``media_too_large``,
    ``decode_timeout`` after the deadline; UserError: PyAV is not installed.

    Args:
        indices: frame numbers from 0, ascending, at least one; a number may occur twice.
        max_pixels, max_bytes: as for `decode_image`, the latter for all requested frames together.
        deadline: a `time.monotonic` value after which decoding gives up; None sets no limit.
    """
    av = pyav()
    try:
        for quick in (True, False):
            frames = FrameStack(indices, max_pixels, max_bytes)
            with decodable(io.BytesIO(data), max_pixels, frames.check_limits) as (container, stream):
                if not (quick and may_have_runs(container, stream)):
                    _decode_from_start(container, stream, frames, deadline)
                    break
                if _decode_needed(container, stream, frames, deadline):
                    break
    except (av.FFmpegError, OSError, ValueError, EOFError, IndexError, OverflowError) as error:
        check_memory(error, max_pixels)
        raise SampleRejected("corrupt_media", f"the video cannot be decoded: {error}") from error
    return frames.tensor()


def _check_deadline(deadline: float | None, index: int) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise SampleRejected("decode_timeout", f"frame {index} was not decoded within encoder.decode_seconds")


def _decode_from_start(container: Any, stream: Any, frames: FrameStack, deadline: float | None) -> None:
    for index, frame in enumerate(container.decode(stream)):
        _check_deadline(deadline, index)
        if frame.is_corrupt:
            raise SampleRejected("corrupt_media", f"frame {index} of the video is damaged")
        frames.check_size(frame)
        if index == frames.wanted[-frames.missing]:
            frames.take(frame, index)
            if not frames.missing:
                return


def _decode_needed(container: Any, stream: Any, frames: FrameStack, deadline: float | None) -> bool:
    """Decodes only the packets that the wanted frames need; returns whether the result is that of a full decode."""
    import av

    try:
        if (found := packet_runs(container, stream, frames.wanted)) is None:
            return False
        runs, packets = found
        stream.codec_context.options |= {"err_detect": "explode"}
        whole = all(_decode_run(stream.codec_context, packets, run, frames, deadline) for run in runs)
        return whole and not frames.missing
    except av.FFmpegError:
        return False  # decoding from the start says which frame is damaged


def _decode_run(codec: Any, packets: Sequence[Any], run: Run, frames: FrameStack, deadline: float | None) -> bool:
    """Decodes one run and empties the decoder; returns whether every packet became its frame, in the order of time."""
    first = packets[run.start].pts
    given = [packets[number] for number in range(run.start, run.stop + 1) if number not in run.left_out]
    times: list[int] = []
    whole = run.start == 0  # as a full decode does
    for packet in (*given, None):
        _check_deadline(deadline, next(iter(run.frames.values()), 0))
        for frame in codec.decode(packet):
            if frame.is_corrupt or frame.pts is None:
                return False
            frames.check_size(frame)
            times.append(frame.pts)
            whole = whole or (frame.pts == first and frame.key_frame)
            if frame.pts in run.frames:
                frames.take(frame, run.frames[frame.pts])
    codec.flush_buffers()
    # Frames that are stored after the first one and shown before it may need earlier ones: the decoder drops them.
    expected = [packet.pts for packet in given if packet.pts >= first and not packet.is_discard]
    return whole and times == sorted(times) and [time for time in times if time >= first] == sorted(expected)


def decode_frame_files(
    read: Callable[[str], bytes],
    names: Sequence[str],
    *,
    max_pixels: int,
    max_bytes: int | None = None,
    deadline: float | None = None,
    on_white: bool = True,
) -> torch.Tensor:
    """Decodes images as the frames of one video, uint8 ``[len(names), 3, H, W]``; as `decode_frames`, and
    ``corrupt_media`` if the frames differ in size."""
    frames: torch.Tensor | None = None
    for number, name in enumerate(names):
        _check_deadline(deadline, number)
        frame = decode_image(read(name), max_pixels=max_pixels, max_bytes=max_bytes, on_white=on_white)
        if frames is None:
            check_decoded_bytes(len(names), frame.shape[2], frame.shape[1], max_bytes)
            # Stored as rows of pixels, like images.
            frames = torch.empty((len(names), *frame.shape[1:], 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        if frame.shape != frames.shape[1:]:
            first = f"but the first is {frames.shape[3]}x{frames.shape[2]}"
            detail = f"frame {number} is {frame.shape[2]}x{frame.shape[1]} pixels, {first}"
            raise SampleRejected("corrupt_media", detail)
        frames[number] = frame
    if frames is None:
        raise ValueError("decode_frame_files needs at least one name")
    return frames
