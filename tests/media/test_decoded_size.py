"""A hostile image or video is refused from its size, before memory is taken for its pixels."""

from __future__ import annotations

import io
import struct
import zlib

import av
import numpy as np
import pytest
import torch
from PIL import Image

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.media.image import decode_image
from energon_packing.media.probe import probe_video
from energon_packing.media.video import decode_frame_files, decode_frames


@pytest.fixture(scope="module")
def clip() -> bytes:
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        video = container.add_stream("libx264", rate=10)
        video.width, video.height, video.pix_fmt = 320, 240, "yuv420p"
        for shade in range(6):
            pixels = np.full((240, 320, 3), 40 * shade, dtype=np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(video.encode(None))
    return stream.getvalue()


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes whose header names a size that nobody should allocate."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"\0")) + part(b"IEND", b"")


def refused(call) -> str:
    with pytest.raises(SampleRejected) as caught:
        call()
    assert "max_decoded_bytes" in caught.value.detail
    return caught.value.reason


@pytest.fixture
def no_memory(monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("memory was taken for the frames")

    monkeypatch.setattr(torch, "empty", never)


def test_a_clip_whose_wanted_frames_take_too_much_is_refused_before_memory_is_taken(clip, no_memory):
    exact = 6 * 3 * 320 * 240
    for indices, limit in ((range(6), exact - 1), ([0] * 10**5, 10**9)):
        reason = refused(lambda: decode_frames(clip, indices, max_pixels=10**6, max_bytes=limit))  # noqa: B023
        assert reason == "media_too_large"


def test_a_clip_that_takes_exactly_what_is_allowed_is_decoded(clip):
    assert decode_frames(clip, range(6), max_pixels=10**6, max_bytes=6 * 3 * 320 * 240).shape == (6, 3, 240, 320)


def test_an_image_bomb_is_refused_from_its_header(monkeypatch):
    def never(self):
        raise AssertionError("pixels were decoded")

    Image.init()  # a plugin of Pillow draws an image while it is imported
    monkeypatch.setattr(Image.Image, "load", never)
    assert refused(lambda: decode_image(bomb(9000, 9000), max_pixels=10**8, max_bytes=3 * 9000 * 9000 - 1))
    with pytest.raises(SampleRejected, match="media_too_large"):
        decode_image(bomb(60000, 60000), max_pixels=10**8)


def test_frames_of_a_list_are_bounded_together(no_memory):
    data = png(40, 30)
    assert refused(lambda: decode_frame_files(lambda name: data, ["a"] * 5, max_pixels=10**6, max_bytes=5 * 3600 - 1))


def test_a_stream_larger_than_its_container_says_is_refused_by_the_decoder(tmp_path):
    """Two MPEG streams, one after the other: the second one is a hundred times as large."""
    parts = []
    for width, height in ((64, 48), (1280, 720)):
        path = tmp_path / f"{width}.ts"
        with av.open(str(path), "w") as container:
            video = container.add_stream("libx264", rate=10)
            video.width, video.height, video.pix_fmt = width, height, "yuv420p"
            for _ in range(4):
                frame = av.VideoFrame.from_ndarray(np.zeros((height, width, 3), dtype=np.uint8), "rgb24")
                container.mux(video.encode(frame))
            container.mux(video.encode(None))
        parts.append(path.read_bytes())
    data = b"".join(parts)
    for call in (lambda: decode_frames(data, range(8), max_pixels=4000), lambda: probe_video(data, max_pixels=4000)):
        with pytest.raises(SampleRejected, match=r"corrupt_media|media_too_large"):
            call()


def conversation(media: Media, count: int = 1) -> Conversation:
    turns = (
        Turn(role="user", parts=tuple(MediaPart(index=at) for at in range(count))),
        Turn(role="assistant", parts=("Yes.",)),
    )
    return Conversation(key="k", turns=turns, media=(media,) * count)


def test_the_media_of_a_sample_are_bounded_together_when_measured_and_when_rendered(encoders, monkeypatch):
    media = Media(kind="image", name="a.png", width=100, height=60)
    data, size = png(100, 60), 3 * 100 * 60

    def encoder(limit):
        return ConversationEncoder(EncoderConfig(max_decoded_bytes=limit), processor=encoders["qwen2_5_vl"].processor)

    enough, little = encoder(2 * size), encoder(2 * size - 1)
    measured = enough.measure(conversation(media, 2))
    assert enough.render(measured, lambda name: data)["input_ids"].shape == (measured.length,)
    assert refused(lambda: little.measure(conversation(media, 2))) == "media_too_large"
    # What the record says of the size is not believed: the bytes are asked again.
    assert refused(lambda: little.render(measured, lambda name: data)) == "media_too_large"


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="max_decoded_bytes"):
        EncoderConfig(max_decoded_bytes=0)
