"""Frames by number equal those of a full decode; clips that are not what they say are refused."""

from __future__ import annotations

import io
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.errors import SampleRejected
from energon_packing.media.probe import probe_video
from energon_packing.media.video import decode_frames

LIMIT = 10**7


def make_clip(
    path: Path,
    times: list[int],
    *,
    size: tuple[int, int] = (48, 32),
    codec: str = "libx264",
    options: dict[str, str] | None = None,
) -> bytes:
    """A clip whose frames, each another pattern, are shown at ``times`` in hundredths of a second."""
    rng, base = np.random.default_rng(0), Fraction(1, 100)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(25), options=options or {})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.time_base = stream.codec_context.time_base = base
        for time_shown in times:
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8), "rgb24")
            frame.pts, frame.time_base = time_shown, base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path.read_bytes()


def full_decode(data: bytes) -> np.ndarray:
    """``[frames, H, W, 3]``: every frame as stored."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


EVEN = [4 * number for number in range(24)]
UNEVEN = [0, 1, 2, 10, 11, 40, 41, 42, 43, 90, 91, 140]
B_FRAMES = {"bf": "3", "g": "6"}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("clips")
    return {
        "mp4": make_clip(folder / "a.mp4", EVEN),
        "mp4 with b-frames": make_clip(folder / "b.mp4", EVEN, options=B_FRAMES),
        "mkv, variable rate": make_clip(folder / "c.mkv", UNEVEN),
        "mp4, variable rate": make_clip(folder / "d.mp4", UNEVEN, options=B_FRAMES),
        "avi": make_clip(folder / "e.avi", EVEN, codec="mpeg4"),
        "webm": make_clip(folder / "f.webm", EVEN, codec="libvpx"),
        "two frames": make_clip(folder / "g.mp4", EVEN[:2]),
        "one frame": make_clip(folder / "h.mp4", EVEN[:1]),
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


def turned(data: bytes, degrees: int) -> bytes:
    """The clip with a display matrix that turns it clockwise (ISO 14496-12: x' = ax + cy, y' = bx + dy)."""
    a, b, c, d = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    result = bytearray(data)
    start = result.index(b"tkhd") + 44
    for index, value in enumerate([a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30]):
        result[start + 4 * index : start + 4 * index + 4] = (value & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(result)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_frames_are_turned_as_the_container_says(clips: dict[str, bytes], degrees: int) -> None:
    data = turned(clips["mp4"], degrees)
    found = decode_frames(data, [0, 7], max_pixels=LIMIT).permute(0, 2, 3, 1).numpy()
    stored = full_decode(clips["mp4"])[[0, 7]]
    # Clockwise by hand: the first column, read upwards, becomes the first row.
    for _ in range(degrees // 90):
        stored = stored[:, ::-1].transpose(0, 2, 1, 3)
    assert np.array_equal(found, stored)
    info = probe_video(data)
    assert found.shape[1:3] == (info.height, info.width)


def make_sound(path: Path, cover: bool = False) -> bytes:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        picture = container.add_stream("mjpeg", rate=1) if cover else None
        if picture is not None:
            picture.width, picture.height, picture.pix_fmt = 32, 32, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic
        for start in range(0, 16000, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.rate, frame.pts = 16000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if picture is not None:
            image = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")
            container.mux(picture.encode(image))
            container.mux(picture.encode(None))
    return path.read_bytes()


@pytest.mark.parametrize("cover", [False, True])
def test_sound_is_no_video_with_or_without_a_cover_picture(tmp_path: Path, cover: bool) -> None:
    data = make_sound(tmp_path / "a.mp4", cover)
    with av.open(io.BytesIO(data)) as container:
        assert bool(container.streams.video) == cover
    with pytest.raises(SampleRejected, match="no video stream") as caught:
        decode_frames(data, [0], max_pixels=LIMIT)
    assert caught.value.reason == "corrupt_media"
    with pytest.raises(SampleRejected, match="no video stream"):
        probe_video(data)


def test_frames_larger_than_the_limit_are_refused(clips: dict[str, bytes]) -> None:
    assert decode_frames(clips["mp4"], [0], max_pixels=48 * 32).shape == (1, 3, 32, 48)
    with pytest.raises(SampleRejected, match=r"48x32.*max_source_pixels=1535") as caught:
        decode_frames(clips["mp4"], [0], max_pixels=48 * 32 - 1)
    assert caught.value.reason == "media_too_large"


def test_a_clip_that_changes_its_size_is_corrupt(tmp_path: Path) -> None:
    """Two MPEG program streams, one after the other, are one legal stream."""
    data = make_clip(tmp_path / "a.ts", EVEN[:6]) + make_clip(tmp_path / "b.ts", EVEN[:6], size=(96, 64))
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


def test_no_index_at_all_is_a_programming_error(clips: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        decode_frames(clips["mp4"], [], max_pixels=LIMIT)


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


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_clip_is_decoded_or_rejected_and_never_anything_else(
    clips: dict[str, bytes], data: st.DataObject
) -> None:
    content = bytearray(clips[data.draw(st.sampled_from(["mp4", "avi", "webm"]))])
    for _ in range(data.draw(st.integers(1, 20))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(1, len(content))) :]
    reason = None
    try:
        assert len(decode_frames(bytes(content), [0, 3, 9], max_pixels=10**5)) == 3
    except SampleRejected as error:
        reason = error.reason
    assert reason in (None, "corrupt_media", "media_too_large")


@pytest.mark.parametrize("name", ["webm", "mkv, variable rate"])
def test_a_clip_of_an_unknown_codec_is_rejected(clips: dict[str, bytes], name: str) -> None:
    content = clips[name].replace(b"V_VP8", b"V_XP8").replace(b"V_MPEG4/ISO/AVC", b"V_MPEG4/ISX/AVC")
    assert content != clips[name]
    with pytest.raises(SampleRejected, match=r"corrupt_media: .*unknown codec"):
        decode_frames(content, [0], max_pixels=10**6)
    with pytest.raises(SampleRejected, match=r"corrupt_media: .*unknown codec"):
        probe_video(content)
