"""Frames by number equal those of a full decode; clips that are not what they say are refused."""

import io
import time
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.media_files import film_after_cover, noise_clip, probe_video, sound, turned_by_container

from energon_packing.errors import SampleRejected
from energon_packing.media.video import decode_frames

LIMIT = 10**7


def full_decode(data: bytes) -> np.ndarray:
    """``[frames, H, W, 3]``: every frame as stored."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


EVEN = [4 * number for number in range(24)]
UNEVEN = [0, 1, 2, 10, 11, 40, 41, 42, 43, 90, 91, 140]
B_FRAMES = {"bf": "3", "g": "6"}


@pytest.fixture(scope="module")
def clips() -> dict[str, bytes]:
    return {
        "mp4": noise_clip(EVEN),
        "mp4 with b-frames": noise_clip(EVEN, options=B_FRAMES),
        "mkv, variable rate": noise_clip(UNEVEN, container="mkv"),
        "mp4, variable rate": noise_clip(UNEVEN, options=B_FRAMES),
        "avi": noise_clip(EVEN, codec="mpeg4", container="avi"),
        "webm": noise_clip(EVEN, codec="libvpx", container="webm"),
        "two frames": noise_clip(EVEN[:2]),
        "one frame": noise_clip(EVEN[:1]),
    }


NAMES = [
    "mp4",
    "mp4 with b-frames",
    "mkv, variable rate",
    "mp4, variable rate",
    "avi",
    "webm",
    "two frames",
    "one frame",
]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_frames_by_number_are_those_of_a_full_decode(clips: dict[str, bytes], name: str, data: st.DataObject) -> None:
    everything = full_decode(clips[name])
    count = len(everything)
    assert probe_video(clips[name]).frames == count
    indices = sorted(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2 * count)))
    found = decode_frames(clips[name], indices, max_pixels=LIMIT)
    assert found.dtype == torch.uint8
    assert np.array_equal(found.permute(0, 2, 3, 1).numpy(), everything[indices])


@pytest.mark.parametrize("name", NAMES)
def test_a_number_behind_the_last_frame_is_a_corrupt_clip(clips: dict[str, bytes], name: str) -> None:
    count = len(full_decode(clips[name]))
    for indices in ([count], [0, count + 5], [-1, 0]):
        with pytest.raises(SampleRejected, match="ends before frame") as caught:
            decode_frames(clips[name], indices, max_pixels=LIMIT)
        assert caught.value.reason == "corrupt_media"


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_frames_are_turned_as_the_container_says(clips: dict[str, bytes], degrees: int) -> None:
    data = turned_by_container(clips["mp4"], degrees)
    found = decode_frames(data, [0, 7], max_pixels=LIMIT).permute(0, 2, 3, 1).numpy()
    stored = full_decode(clips["mp4"])[[0, 7]]
    # Clockwise by hand: the first column, read upwards, becomes the first row.
    for _ in range(degrees // 90):
        stored = stored[:, ::-1].transpose(0, 2, 1, 3)
    assert np.array_equal(found, stored)
    info = probe_video(data)
    assert found.shape[1:3] == (info.height, info.width)


@pytest.mark.parametrize("cover", [False, True])
def test_sound_is_no_video_with_or_without_a_cover_picture(cover: bool) -> None:
    data = sound(cover)
    with av.open(io.BytesIO(data)) as container:
        assert bool(container.streams.video) == cover
    with pytest.raises(SampleRejected, match="no video stream") as caught:
        decode_frames(data, [0], max_pixels=LIMIT)
    assert caught.value.reason == "corrupt_media"
    with pytest.raises(SampleRejected, match="no video stream"):
        probe_video(data)


def test_a_cover_picture_before_the_film_is_not_the_film() -> None:
    data = film_after_cover()
    with av.open(io.BytesIO(data)) as container:
        cover, film = container.streams.video
        assert (cover.disposition.name, container.streams.best("video").index) == ("attached_pic", film.index)
        everything = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(film)])
    for decode in (False, True):
        info = probe_video(data, decode=decode)
        assert (info.width, info.height, info.frames, info.fps) == (48, 32, 20, 25.0)
    found = decode_frames(data, [0, 7, 19], max_pixels=LIMIT).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(found, everything[[0, 7, 19]])


def test_frames_larger_than_the_limit_are_refused(clips: dict[str, bytes]) -> None:
    assert decode_frames(clips["mp4"], [0], max_pixels=48 * 32).shape == (1, 3, 32, 48)
    with pytest.raises(SampleRejected, match=r"48x32.*max_source_pixels=1535") as caught:
        decode_frames(clips["mp4"], [0], max_pixels=48 * 32 - 1)
    assert caught.value.reason == "media_too_large"


def test_a_clip_that_changes_its_size_is_corrupt() -> None:
    """Two MPEG program streams, one after the other, are one legal stream."""
    data = noise_clip(EVEN[:6], container="ts") + noise_clip(EVEN[:6], (96, 64), container="ts")
    sizes = set()
    with av.open(io.BytesIO(data)) as container:
        sizes = {(frame.width, frame.height) for frame in container.decode(video=0)}
    assert sizes == {(48, 32), (96, 64)}
    with pytest.raises(SampleRejected, match="48x32 to 96x64") as caught:
        decode_frames(data, range(12), max_pixels=LIMIT)
    assert caught.value.reason == "corrupt_media"


def test_decoding_gives_up_after_its_deadline(clips: dict[str, bytes]) -> None:
    with pytest.raises(SampleRejected) as caught:
        decode_frames(clips["mp4"], [0, 20], max_pixels=LIMIT, deadline=time.monotonic() - 1)
    assert caught.value.reason == "decode_timeout"
    assert len(decode_frames(clips["mp4"], [0, 20], max_pixels=LIMIT, deadline=time.monotonic() + 3600)) == 2


def test_a_playlist_opens_no_other_file(tmp_path: Path, clips: dict[str, bytes]) -> None:
    target = tmp_path / "secret.mp4"
    target.write_bytes(clips["mp4"])
    for text in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{target}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{target}'\n",
    ):
        with pytest.raises(SampleRejected) as caught:
            decode_frames(text.encode(), [0], max_pixels=LIMIT)
        assert caught.value.reason == "corrupt_media"
        with pytest.raises(SampleRejected, match="corrupt_media"):
            probe_video(text.encode())


@pytest.mark.parametrize("name", ["webm", "mkv, variable rate"])
def test_a_clip_of_an_unknown_codec_is_rejected(clips: dict[str, bytes], name: str) -> None:
    content = clips[name].replace(b"V_VP8", b"V_XP8").replace(b"V_MPEG4/ISO/AVC", b"V_MPEG4/ISX/AVC")
    assert content != clips[name]
    with pytest.raises(SampleRejected, match=r"corrupt_media: .*unknown codec"):
        decode_frames(content, [0], max_pixels=10**6)
    with pytest.raises(SampleRejected, match=r"corrupt_media: .*unknown codec"):
        probe_video(content)
