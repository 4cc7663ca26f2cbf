"""A hostile image or video is refused from its size, before memory is taken for its pixels."""

import io

import pytest
import torch
from PIL import Image
from support.media_files import noise_clip, png_of, probe_video

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import SampleRejected
from energon_packing.media.image import decode_image
from energon_packing.media.video import decode_frame_files, decode_frames


@pytest.fixture(scope="module")
def clip() -> bytes:
    return noise_clip(range(0, 60, 10), (320, 240))


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes whose header names a size that nobody should allocate."""
    return png_of(width, height, 8, 2, b"\0")


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


def test_an_image_bomb_is_refused_from_its_header(monkeypatch):
    def never(self):
        raise AssertionError("pixels were decoded")

    Image.init()  # a plugin of Pillow draws an image while it is imported
    monkeypatch.setattr(Image.Image, "load", never)
    assert refused(lambda: decode_image(bomb(9000, 9000), max_pixels=10**8, max_bytes=3 * 9000 * 9000 - 1))
    for side in (10_001, 60_000, 2**31 - 1):
        with pytest.raises(SampleRejected, match="media_too_large"):
            decode_image(bomb(side, side), max_pixels=10**8)


def test_frames_of_a_list_are_bounded_together(no_memory):
    data = png(40, 30)
    assert refused(lambda: decode_frame_files(lambda name: data, ["a"] * 5, max_pixels=10**6, max_bytes=5 * 3600 - 1))


def test_a_stream_larger_than_its_container_says_is_refused_by_the_decoder():
    """Two MPEG streams, one after the other: the second one is a hundred times as large."""
    data = b"".join(noise_clip(range(0, 40, 10), size, container="ts") for size in ((64, 48), (1280, 720)))
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
