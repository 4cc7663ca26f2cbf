"""Frames of a clip of which only the needed packets are decoded equal those of a full decode, bit for bit."""

import io
from random import Random

import av
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.media_files import clip_of

from energon_packing.errors import SampleRejected
from energon_packing.media import video
from energon_packing.media.probe import open_video
from energon_packing.media.video import Run, decode_frames, packet_runs

LIMIT = 10**7


def x264(**options: object) -> dict[str, str]:
    return {"x264-params": ":".join(f"{name.replace('_', '-')}={value}" for name, value in options.items())}


def x265(**options: object) -> dict[str, str]:
    named = {"log_level": "none", "pools": 1, "frame_threads": 1} | options
    return {"x265-params": ":".join(f"{name.replace('_', '-')}={value}" for name, value in named.items())}


@st.composite
def encoders(draw: st.DrawFn) -> tuple[str, str, dict[str, str]]:
    """An encoder, a container and options: what is left out of decoding, and what must not be, in all combinations."""
    codec, container = draw(
        st.sampled_from(
            [
                *(("libx264", "mp4"), ("libx264", "mkv"), ("libx265", "mp4"), ("libx265", "mkv")),
                *(("libvpx-vp9", "webm"), ("libvpx-vp9", "mp4"), ("libvpx", "webm"), ("mpeg4", "mp4")),
                *(("mpeg4", "avi"), ("mpeg2video", "ts"), ("mpeg1video", "ts"), ("libx264", "ts"), ("mjpeg", "mkv")),
            ]
        )
    )
    group = draw(st.sampled_from([1, 2, 3, 5, 8, 12, 40]))
    if codec == "libx264":
        options = {"preset": draw(st.sampled_from(["ultrafast", "fast"]))} | x264(
            keyint=group,
            min_keyint=draw(st.sampled_from([1, group])),
            bframes=draw(st.integers(0, 4)),
            b_pyramid=draw(st.sampled_from(["none", "strict", "normal"])),
            open_gop=draw(st.integers(0, 1)),
            ref=draw(st.sampled_from([1, 4])),
            slices=draw(st.sampled_from([1, 3])),
            intra_refresh=draw(st.sampled_from([0, 0, 1])),
            interlaced=draw(st.sampled_from([0, 0, 1])),
            repeat_headers=draw(st.integers(0, 1)),
        )
    elif codec == "libx265":
        options = {"preset": "ultrafast"} | x265(
            keyint=group,
            min_keyint=draw(st.sampled_from([1, group])),
            bframes=draw(st.sampled_from([0, 1, 4])),
            b_pyramid=draw(st.integers(0, 1)),
            open_gop=draw(st.integers(0, 1)),
            temporal_layers=draw(st.integers(0, 1)),
            repeat_headers=draw(st.integers(0, 1)),
        )
    elif codec.startswith("libvpx"):
        options = {
            "g": str(group),
            "deadline": draw(st.sampled_from(["realtime", "good"])),
            "cpu-used": "5",
            "auto-alt-ref": draw(st.sampled_from(["0", "1"])),
            "lag-in-frames": draw(st.sampled_from(["0", "12"])),
        }
    else:
        options = {"g": str(group), "bf": "2" if codec.startswith("mpeg") and group > 3 else "0"}
    return codec, container, options


def make_clip(codec: str, container: str, options: dict[str, str], times: list[int], seed: int = 0) -> bytes:
    """A clip of a picture that moves and is sometimes replaced, shown at ``times`` in hundredths of a second."""
    rng, pictures = np.random.default_rng(seed), []
    picture = rng.integers(0, 256, (64, 80, 3), dtype=np.uint8)
    for number in range(len(times)):
        if rng.random() < 0.1:
            picture = rng.integers(0, 256, picture.shape, dtype=np.uint8)
        pictures.append(np.roll(picture, (number, 3 * number), (0, 1)))
    return clip_of(pictures, times, codec=codec, container=container, options=options)


def full_decode(data: bytes) -> list[np.ndarray] | None:
    """Every frame, by PyAV alone; None if it stumbles."""
    found = []
    try:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            if stream.codec_context is None:  # of an unknown codec
                return None
            stream.codec_context.thread_count = 1  # with more, what becomes of damage differs between runs
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    return None
                found.append(frame.to_ndarray(format="rgb24"))
    except (av.FFmpegError, ValueError, EOFError, IndexError):
        return None
    return found


def runs_of(data: bytes, wanted: list[int]) -> list[Run] | None:
    with open_video(io.BytesIO(data)) as container:
        found = packet_runs(container, container.streams.video[0], wanted)
    return None if found is None else found[0]


def steps(count: int) -> st.SearchStrategy[list[int]]:
    return st.one_of(st.just([4] * count), st.lists(st.sampled_from([1, 3, 4, 40]), min_size=count, max_size=count))


@settings(max_examples=35, deadline=None)
@given(data=st.data(), made=encoders(), count=st.integers(1, 40), seed=st.integers(0, 5))
def test_chosen_frames_of_any_clip_are_those_of_a_full_decode(
    data: st.DataObject, made: tuple[str, str, dict[str, str]], count: int, seed: int
) -> None:
    start = data.draw(st.sampled_from([0, 0, 11]))
    apart = data.draw(steps(count))
    clip = make_clip(*made, [start + sum(apart[:number]) for number in range(count)], seed)
    everything = full_decode(clip)
    assume(everything)  # FFmpeg writes some clips that it cannot read
    for _ in range(3):
        wanted = sorted(data.draw(st.sets(st.integers(0, len(everything) - 1), min_size=1, max_size=6)))
        found = decode_frames(clip, wanted, max_pixels=LIMIT).permute(0, 2, 3, 1).numpy()
        assert np.array_equal(found, np.stack([everything[index] for index in wanted]))


FAST = [
    ("libx264", "mp4", {"preset": "ultrafast"} | x264(keyint=10, bframes=3, repeat_headers=0)),
    ("libx264", "mkv", {"preset": "ultrafast"} | x264(keyint=10, bframes=3, repeat_headers=1)),
    ("libx265", "mp4", {"preset": "ultrafast"} | x265(keyint=10, open_gop=0)),
    ("libx265", "mp4", {"preset": "ultrafast"} | x265(keyint=10, min_keyint=10, open_gop=1, bframes=3)),
    ("libvpx-vp9", "webm", {"g": "10", "deadline": "realtime", "cpu-used": "8"}),
    ("libsvtav1", "mp4", {"preset": "12", "svtav1-params": "keyint=10:lp=1:irefresh-type=2"}),
]


@pytest.mark.parametrize(("codec", "container", "options"), FAST, ids=[f"{entry[0]} {entry[1]}" for entry in FAST])
def test_far_apart_frames_cost_the_packets_since_their_key_frames(
    codec: str, container: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make_clip(codec, container, options, [4 * number for number in range(60)])
    everything = full_decode(clip)
    assert everything is not None
    assert len(everything) == 60
    runs = runs_of(clip, [31, 32, 55])
    assert runs is not None
    assert runs[0] == Run(0, 0, frozenset(), {})  # what the encoder says about itself
    assert len(runs) == 3
    assert sum(run.stop + 1 - run.start for run in runs[1:]) <= 10 + 10
    monkeypatch.setattr(video, "_decode_from_start", lambda *_: pytest.fail("decoded from the start"))
    found = decode_frames(clip, [31, 32, 55], max_pixels=LIMIT).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(found, np.stack([everything[index] for index in (31, 32, 55)]))


NOT_KNOWN = {
    "vp8": ("libvpx", "webm", {"g": "5"}),
    "mpeg4": ("mpeg4", "mp4", {"g": "5"}),
    "avi": ("libx264", "avi", {"g": "5"}),
    "mpegts": ("libx264", "ts", {"g": "5"}),
    "mjpeg": ("mjpeg", "mkv", {}),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_is_not_known_to_be_exact_is_decoded_from_the_start(name: str) -> None:
    clip = make_clip(*NOT_KNOWN[name], [4 * number for number in range(20)])
    assert runs_of(clip, [15]) is None
    everything = full_decode(clip)
    assert everything is not None
    assert np.array_equal(decode_frames(clip, [15], max_pixels=LIMIT)[0].permute(1, 2, 0).numpy(), everything[15])


def edited(clip: bytes, units: int, share: float) -> bytes:
    """The clip with an edit list that starts ``units`` later and shows ``share``: frames at both ends are hidden."""
    result = bytearray(clip)
    at = result.index(b"elst") + 12
    length, first = (int.from_bytes(result[at + add : at + add + 4], "big", signed=True) for add in (0, 4))
    result[at : at + 4] = int(length * share).to_bytes(4, "big")
    result[at + 4 : at + 8] = (first + units).to_bytes(4, "big", signed=True)
    return bytes(result)


@pytest.mark.parametrize("units", [0, 512, 7000])
@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("bframes", [0, 3])
def test_frames_that_an_edit_list_hides_are_not_counted(units: int, share: float, bframes: int) -> None:
    options = {"preset": "ultrafast"} | x264(keyint=8, bframes=bframes)
    plain = make_clip("libx264", "mp4", options, [4 * number for number in range(40)])
    clip = edited(plain, units, share)
    everything = full_decode(clip)
    assert everything is not None
    assert (len(everything) < 40) == (units > 0 or share < 1)
    for wanted in ([0], [len(everything) - 1], [len(everything) // 2], list(range(0, len(everything), 5))):
        found = decode_frames(clip, wanted, max_pixels=LIMIT).permute(0, 2, 3, 1).numpy()
        assert np.array_equal(found, np.stack([everything[index] for index in wanted]))


@pytest.mark.parametrize("seed", range(4))
def test_an_index_of_key_frames_that_is_wrong_changes_nothing(seed: int) -> None:
    """A sample that is listed as a key frame and is none would give grey pictures if decoding began there."""
    options = {"preset": "ultrafast"} | x264(keyint=8, bframes=2)
    clip = bytearray(make_clip("libx264", "mp4", options, [4 * number for number in range(40)]))
    everything = full_decode(bytes(clip))
    assert everything is not None
    at = clip.index(b"stss") + 8
    listed = int.from_bytes(clip[at : at + 4], "big")
    wrong = sorted(Random(seed).sample(range(2, 41), listed))
    for place, number in enumerate(wrong):
        clip[at + 4 + 4 * place : at + 8 + 4 * place] = number.to_bytes(4, "big")
    found = decode_frames(bytes(clip), [7, 20, 33], max_pixels=LIMIT).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(found, np.stack([everything[index] for index in (7, 20, 33)]))


def test_parameters_that_change_inside_a_clip_reach_the_decoder() -> None:
    """Two encodings in one track: the sets of parameters of the second stand in its first packet alone."""
    parts = []
    for size, seed in (("ultrafast", 1), ("medium", 2)):
        options = {"preset": size} | x264(keyint=6, repeat_headers=1, bframes=0)
        parts.append(make_clip("libx264", "mkv", options, [4 * number for number in range(20)], seed))
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream = None
        for number, part in enumerate(parts):
            with av.open(io.BytesIO(part)) as container:
                if stream is None:
                    stream = output.add_stream_from_template(container.streams.video[0])
                for packet in container.demux(video=0):
                    if packet.size:
                        packet.pts = packet.dts = packet.pts + number * 800
                        packet.stream = stream
                        output.mux(packet)
    clip = buffer.getvalue()
    everything = full_decode(clip)
    assert everything is not None
    assert runs_of(clip, [3, 33]) is None
    found = decode_frames(clip, [3, 33], max_pixels=LIMIT).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(found, np.stack([everything[3], everything[33]]))


@settings(max_examples=60, deadline=None)
@given(bframes=st.sampled_from([0, 3]), data=st.data())
def test_damaged_tables_of_an_mp4_file_never_give_another_frame(
    tables: dict[int, bytes], bframes: int, data: st.DataObject
) -> None:
    """Times, sizes, places, key frames and edits: each table says something else than the packets."""
    clip = bytearray(tables[bframes])
    box = data.draw(
        st.sampled_from(
            [name for name in (b"ctts", b"stts", b"stsz", b"stsc", b"stco", b"stss", b"elst") if name in clip]
        )
    )
    at = clip.index(box)
    length = int.from_bytes(clip[at - 4 : at], "big")
    for _ in range(data.draw(st.integers(1, 3))):
        place = at + 8 + data.draw(st.integers(0, length - 13))
        clip[place] = (clip[place] + data.draw(st.integers(-3, 3))) % 256
    check_damaged(bytes(clip), data)


@pytest.mark.parametrize(
    ("box", "place", "change", "wanted"),
    [(b"ctts", 58, 3, [9, 13, 26]), (b"ctts", 242, 2, [2, 12, 13]), (b"stts", 19, -2, [9, 15, 19])],
)
def test_times_that_contradict_the_order_of_pictures_number_no_frame(
    tables: dict[int, bytes], box: bytes, place: int, change: int, wanted: list[int]
) -> None:
    """Found by the test above, where only the comparison with the pictures' own order kept another frame out."""
    clip = bytearray(tables[3])
    at = clip.index(box) + place
    clip[at] = (clip[at] + change) % 256
    everything = full_decode(bytes(clip))
    assert everything is not None
    found = decode_frames(bytes(clip), wanted, max_pixels=LIMIT).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(found, np.stack([everything[index] for index in wanted]))


@pytest.fixture(scope="module")
def tables() -> dict[int, bytes]:
    times = [4 * number for number in range(40)]
    return {
        count: make_clip("libx264", "mp4", {"preset": "ultrafast"} | x264(keyint=12, bframes=count), times)
        for count in (0, 3)
    }


@pytest.fixture(scope="module")
def sound_clips() -> list[bytes]:
    times = [4 * number for number in range(30)]
    return [make_clip(*entry, times) for entry in FAST[:5]]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_damaged_clip_gives_the_frames_of_a_full_decode_or_none(
    sound_clips: list[bytes], data: st.DataObject
) -> None:
    clip = bytearray(data.draw(st.sampled_from(sound_clips)))
    for _ in range(data.draw(st.integers(1, 4))):
        clip[data.draw(st.integers(0, len(clip) - 1))] = data.draw(st.integers(0, 255))
    check_damaged(bytes(clip), data)


def check_damaged(clip: bytes, data: st.DataObject) -> None:
    everything = full_decode(clip)
    if not everything:
        return
    wanted = sorted(data.draw(st.sets(st.integers(0, len(everything) - 1), min_size=1, max_size=5)))
    try:
        found = decode_frames(clip, wanted, max_pixels=LIMIT).permute(0, 2, 3, 1).numpy()
    except SampleRejected:
        return
    assert np.array_equal(found, np.stack([everything[index] for index in wanted]))
