"""Frame counts equal to what decoding yields, upright sizes, true average rates."""

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from support.media_files import noise_clip, probe_video

from energon_packing.errors import SampleRejected

SHARED = Path(__file__).parents[3] / "shared/data/llamafactory_demo/mllm_demo_data"


def make_video(path: Path, times: list[int], **options: Any) -> Path:
    """A video whose frames are shown at `times` in hundredths of a second."""
    path.write_bytes(noise_clip(times, (64, 48), container=path.suffix[1:], **options))
    return path


def decoded_frames(data: bytes) -> int:
    with av.open(io.BytesIO(data)) as container:
        return sum(1 for _ in container.decode(video=0))


CODECS = [
    ("mp4", "libx264"),
    ("mkv", "libx264"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
    ("mov", "mjpeg"),
    ("mpg", "mpeg2video"),
    ("ts", "libx264"),
]


@pytest.mark.parametrize(("container", "codec"), CODECS)
@pytest.mark.parametrize("decode", [False, True])
def test_frame_count_is_what_decoding_yields(tmp_path: Path, container: str, codec: str, decode: bool) -> None:
    options = {"auto-alt-ref": "1", "lag-in-frames": "16"} if codec.startswith("libvpx") else {"bf": "2"}
    if codec == "mjpeg":
        options = {}
    path = make_video(tmp_path / f"v.{container}", list(range(0, 120, 4)), codec=codec, options=options)
    info = probe_video(path, decode=decode)
    assert info.frames == decoded_frames(path.read_bytes()) == 30
    assert (info.width, info.height) == (64, 48)
    assert info.fps == pytest.approx(info.frames / info.duration)


@pytest.mark.parametrize("decode", [False, True])
def test_a_variable_rate_gives_the_average_over_the_whole_video(tmp_path: Path, decode: bool) -> None:
    # Ten frames in one second, then one a second for ten seconds.
    times = [*range(0, 100, 10), *range(100, 1100, 100)]
    info = probe_video(make_video(tmp_path / "vfr.mkv", times), decode=decode)
    assert info.frames == 20
    assert info.duration == pytest.approx(11.0, rel=0.1)
    assert info.fps == pytest.approx(20 / info.duration)


@pytest.mark.parametrize("decode", [False, True])
def test_frames_that_an_edit_list_hides_are_not_counted(tmp_path: Path, decode: bool) -> None:
    path, hidden = tmp_path / "cut.mp4", 10
    options = {"avoid_negative_ts": "disabled", "use_editlist": "1"}
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream("libx264", rate=25, options={"bf": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        rng = np.random.default_rng(0)
        frames = [av.VideoFrame.from_ndarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8), "rgb24")] * 30
        packets = [packet for frame in [*frames, None] for packet in stream.encode(frame)]
        for packet in packets:
            # What a phone does when a clip is trimmed: the frames stay in the file, before time zero.
            shift = int(Fraction(hidden, 25) / packet.time_base)
            packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
            container.mux(packet)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 30
    info = probe_video(path, decode=decode)
    assert info.frames == decoded_frames(path.read_bytes()) == 20
    assert info.duration == pytest.approx(0.8)


def test_a_video_of_one_frame_has_a_rate_and_a_duration(tmp_path: Path) -> None:
    info = probe_video(make_video(tmp_path / "one.mp4", [0]))
    assert info.frames == 1
    assert info.duration > 0
    assert info.fps == pytest.approx(1 / info.duration)


def test_a_file_without_a_duration_field_is_measured_by_its_frames(tmp_path: Path) -> None:
    path = make_video(tmp_path / "live.mkv", list(range(0, 80, 4)), options={"bf": "0"})
    live = tmp_path / "cut.mkv"
    # A recording that broke off: the header's duration was never written. Matroska: Duration is element 0x4489.
    data = bytearray(path.read_bytes())
    place = data.find(b"\x44\x89\x88")
    assert place > 0
    data[place : place + 3] = b"\xec\x40\x08"  # a Void element of the same length
    live.write_bytes(data)
    with av.open(str(live)) as container:
        assert container.duration is None or container.streams.video[0].duration is None
    info = probe_video(live)
    assert info.frames == 20
    assert info.duration == pytest.approx(0.8, rel=0.1)


def faststart_video(path: Path) -> bytes:
    """40 frames; an MP4 has its index in front, so that a cut leaves it whole."""
    options = {"movflags": "faststart"} if path.suffix == ".mp4" else {}
    with av.open(str(path), "w", options=options) as output:
        stream = output.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        rng = np.random.default_rng(0)
        for _ in range(40):
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8), "rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path.read_bytes()


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("container", ["mp4", "mkv", "avi"])
def test_a_truncated_video_is_refused(tmp_path: Path, container: str, decode: bool) -> None:
    data = faststart_video(tmp_path / f"v.{container}")
    assert probe_video(data, decode=decode).frames == 40
    cut = data[: len(data) * 6 // 10]
    with pytest.raises(SampleRejected) as caught:
        probe_video(cut, decode=decode)
    assert caught.value.reason == "corrupt_media"


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"not a video", b"\0\0\0\x18ftypmp42" + b"\0" * 64])
def test_bytes_that_are_no_video_are_corrupt(data: bytes) -> None:
    with pytest.raises(SampleRejected) as caught:
        probe_video(data)
    assert caught.value.reason == "corrupt_media"


def test_frames_larger_than_the_limit_are_refused(tmp_path: Path) -> None:
    path = make_video(tmp_path / "v.mp4", [0, 4])
    assert probe_video(path, max_pixels=64 * 48).frames == 2
    with pytest.raises(SampleRejected, match="media_too_large"):
        probe_video(path, max_pixels=64 * 48 - 1)


def test_an_mp4_that_ends_between_two_frames_is_refused(tmp_path: Path) -> None:
    data = faststart_video(tmp_path / "v.mp4")
    with av.open(io.BytesIO(data)) as container:
        ends = [packet.pos + packet.size for packet in container.demux(video=0) if packet.size]
    assert len(ends) == 40
    for decode in (False, True):
        with pytest.raises(SampleRejected) as caught:
            probe_video(data[: sorted(ends)[20]], decode=decode)
        assert caught.value.reason == "corrupt_media"


@pytest.mark.skipif(not SHARED.is_dir(), reason="shared data are not there")
@pytest.mark.parametrize("name", ["1.mp4", "2.avi", "3.mp4"])
@pytest.mark.parametrize("decode", [False, True])
def test_real_videos_count_as_they_decode(name: str, decode: bool) -> None:
    data = (SHARED / name).read_bytes()
    assert probe_video(data, decode=decode).frames == decoded_frames(data)
