"""Encodes the clips of the demo with PyAV, and a file that only looks like a clip."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import av
import numpy as np

from energon_packing.demo.pictures import frame
from energon_packing.demo.scenes import Clip


@cache
def mp4_codec() -> str:
    """``libx264`` (H.264) if this build of FFmpeg can encode it, else ``mpeg4`` (MPEG-4 part 2)."""
    return "libx264" if "libx264" in av.codecs_available else "mpeg4"


def save_clip(clip: Clip, path: Path, width: int, height: int, *, fps: int, frames: int) -> None:
    """Encodes the clip; the suffix decides the container and the codec (``.mp4``: `mp4_codec`, ``.avi``: MPEG-4).

    Args:
        clip: what to show.
        path: ends in ``.mp4`` or ``.avi``.
        width: pixels, even.
        height: pixels, even.
        fps: frames per second.
        frames: number of frames, at least 2.
    """
    codec = mp4_codec() if path.suffix == ".mp4" else "mpeg4"
    with av.open(str(path), mode="w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1  # several threads would split the frames differently on other machines
        if codec == "libx264":
            # Else x264 reads memory that it did not write (macroblock trees), and a clip has other bytes now and then.
            stream.options = {"preset": "veryfast", "crf": "26", "x264-params": "cpu-independent=1"}
        for index in range(frames):
            image = frame(clip, index / (frames - 1), width, height)
            for packet in stream.encode(av.VideoFrame.from_image(image)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def save_sound(path: Path, seconds: float = 1.0) -> None:
    """Writes an ``.mp4`` with a tone and no video: one of the demo's defects."""
    rate = 16000
    with av.open(str(path), mode="w") as container:
        stream = container.add_stream("aac", rate=rate)
        stream.layout = "mono"
        size = 1024
        for start in range(0, int(rate * seconds), size):
            times = np.arange(start, start + size, dtype=np.float32) / rate
            samples = (0.2 * np.sin(2 * np.pi * 440 * times)).astype(np.float32)
            sound = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
            sound.sample_rate, sound.pts = rate, start
            for packet in stream.encode(sound):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
