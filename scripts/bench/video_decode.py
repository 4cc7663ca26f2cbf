"""Decoding a few frames of a long clip: ours against a decoder that begins at the first frame and stops at the last."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np

from energon_packing.errors import PackingError
from energon_packing.media.packet_runs import packet_runs
from energon_packing.media.probe import open_video
from energon_packing.media.video import decode_frames

WIDTH, HEIGHT, RATE = 640, 360, 30
WANTED = 8
"""Frames sampled evenly over the clip, the first and the last one among them."""


class Clip(NamedTuple):
    """How a clip is encoded.

    Attributes:
        codec: PyAV's name of the encoder.
        container: a file extension.
        key_frames: seconds between two key frames; None if only the first frame is one.
        options: of the encoder.
    """

    codec: str
    container: str
    key_frames: float | None
    options: dict[str, str]


CLIPS = {
    "h264, key frame every 2 s": Clip("libx264", "mp4", 2, {"preset": "veryfast", "bf": "2"}),
    "h264, key frame every 8.3 s": Clip("libx264", "mp4", 250 / 30, {"preset": "veryfast", "bf": "2"}),
    "h264, one key frame": Clip("libx264", "mp4", None, {"preset": "veryfast", "bf": "2"}),
    "hevc, key frame every 8.3 s": Clip(
        "libx265", "mp4", 250 / 30, {"preset": "ultrafast", "x265-params": "log-level=1"}
    ),
    "vp9, key frame every 4.3 s": Clip("libvpx-vp9", "webm", 128 / 30, {"deadline": "realtime", "cpu-used": "8"}),
    "mpeg4 in avi": Clip("mpeg4", "avi", 0.4, {}),
}


def make_clip(clip: Clip, seconds: float) -> bytes:
    """Returns a clip of a smooth picture that moves, with grain."""
    count = round(seconds * RATE)
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    picture = np.stack([128 + 100 * np.sin(rows / a + columns / b) for a, b in ((37, 23), (17, 51), (61, 13))], axis=-1)
    pictures = [(picture + rng.integers(-6, 7, picture.shape)).clip(0, 255).astype(np.uint8) for _ in range(4)]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format={"mp4": "mp4", "webm": "webm", "avi": "avi"}[clip.container]) as container:
        interval = count if clip.key_frames is None else round(clip.key_frames * RATE)
        stream = container.add_stream(
            clip.codec, rate=RATE, options={"g": str(interval), "threads": "1"} | clip.options
        )
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(np.roll(pictures[number % 4], (number, 2 * number), (0, 1)), "rgb24")
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def from_the_start(data: bytes, wanted: list[int]) -> list[np.ndarray]:
    """Decodes with PyAV alone, every frame up to the last wanted one."""
    found: list[np.ndarray] = []
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for index, frame in enumerate(container.decode(stream)):
            if index == wanted[len(found)]:
                found.append(frame.to_ndarray(format="rgb24"))
                if len(found) == len(wanted):
                    break
    return found


def packets_decoded(data: bytes, wanted: list[int]) -> int | None:
    """Returns how many packets our runs decode; None if all up to the last frame."""
    with open_video(io.BytesIO(data)) as container:
        found = packet_runs(container, container.streams.video[0], wanted)
    return None if found is None else sum(run.stop + 1 - run.start - len(run.left_out) for run in found.runs)


def run(seconds: float, repeat: int) -> Iterator[dict[str, Any]]:
    """Yields an ``encoders.video_decode`` per kind of clip: medians of CPU seconds, and their ratio.

    Args:
        seconds: length of the clips.
        repeat: how often each is decoded both ways, in turns.

    Raises:
        PackingError: our frames differ from PyAV's.
    """
    count = round(seconds * RATE)
    wanted = np.linspace(0, count - 1, WANTED).round().astype(int).tolist()
    for name, clip in CLIPS.items():
        data = make_clip(clip, seconds)
        spent: dict[str, list[float]] = {"ours": [], "start": []}
        for _ in range(repeat):
            begin = time.process_time()
            ours = decode_frames(data, wanted, max_pixels=WIDTH * HEIGHT)
            spent["ours"].append(time.process_time() - begin)
            begin = time.process_time()
            expected = from_the_start(data, wanted)
            spent["start"].append(time.process_time() - begin)
            if not np.array_equal(ours.permute(0, 2, 3, 1).numpy(), np.stack(expected)):
                raise PackingError(f"{name}: our frames differ from those of a decoder that begins at the first frame")
        mine, theirs = statistics.median(spent["ours"]), statistics.median(spent["start"])
        yield {
            "benchmark": "encoders.video_decode",
            "clip": name,
            "frames": count,
            "wanted": len(wanted),
            "packets_decoded": packets_decoded(data, wanted) or count,
            "ours_s": round(mine, 3),
            "from_start_s": round(theirs, 3),
            "ratio": round(mine / theirs, 3),
            "frames_equal": True,
        }
