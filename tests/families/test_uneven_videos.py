"""Videos of a variable frame rate: each family shows what is on the screen at a time, and labels it with that time.

The times are those that PyAV reads of every frame; transformers compute as if all frames were equally far apart.
"""

import io
import json
import re
import tracemalloc
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.media_files import clip_of, probe_video, turned_by_container
from support.offline_processors import processor_of
from test_frame_lists import about, by_the_processor
from test_times_from_files import CONTAINERS, LONGEST, RATES, write_clip
from whole_sample import encoder

from energon_packing.conversation import Conversation, Media
from energon_packing.encoders.decoding import decode_media
from energon_packing.errors import SampleRejected
from energon_packing.families.geometry import shown_frames
from energon_packing.media import probe
from energon_packing.media.probe import media_file
from energon_packing.thd import finished_row

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision", "glm4v", "ernie4_5_vl")
STILL = (20.0, 35.0)
SLACK = 0.02
"""Seconds: twice what a stored time may be off."""


@cache
def recording(container: str = "mp4") -> bytes:
    """A screen of 59 seconds: 90 frames in the first three, then some in each second, and a stretch that is still."""
    draw = np.random.default_rng(1)
    busy, late = draw.choice(np.arange(310, 2000), 50, replace=False), draw.choice(np.arange(3500, 5900), 20, False)
    times = [*(round(number * 10 / 3) for number in range(90)), *sorted(busy.tolist()), *sorted(late.tolist())]
    pictures = (np.full((48, 64, 3), 40 + number, np.uint8) for number in range(len(times)))
    return clip_of(pictures, times, container=container)


@cache
def shown(data: bytes) -> tuple[list[float], list[np.ndarray]]:
    """Seconds since the first frame and pixels of every frame, as PyAV decodes them."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    seconds = [float((frame.pts - frames[0].pts) * frame.time_base) for frame in frames]
    return seconds, [frame.to_ndarray(format="rgb24") for frame in frames]


@pytest.fixture
def media(tmp_path) -> Media:
    (tmp_path / "screen.mp4").write_bytes(recording())
    made = media_file(tmp_path / "screen.mp4", "video")
    assert Conversation.from_record("k", json.loads(json.dumps(about(made).to_record()))).media == (made,)
    return made


def small(family: str, **settings):
    """The family's encoder on its own processor, which draws nothing on frames."""
    processor = processor_of(family)
    processor.video_processor.draw_on_frames = False
    return encoder(processor, family=family, **settings)


def plans_of(family: str, media: Media, **settings):
    """The plan by stored times, and that of the processor, of which other tests know that it is Hugging Face's."""
    return [
        small(family, video_times=times, **settings).measure(about(media)).plans[0] for times in ("stored", "processor")
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_frame_is_on_the_screen_at_its_time(media: Media, family: str) -> None:
    seconds, _ = shown(recording())
    plan, theirs = plans_of(family, media)
    assert (plan.runs, plan.grid, plan.seconds_per_grid) == (theirs.runs, theirs.grid, theirs.seconds_per_grid)
    instants = [index / media.fps for index in theirs.frame_indices]
    for number, instant in zip(plan.frame_indices, instants, strict=True):
        until = (*seconds, 1e9)[number + 1]
        assert seconds[number] - SLACK <= instant <= until + SLACK
    if step := {"glm4v": 2, "ernie4_5_vl": 1}.get(family):  # which write, or draw, the second of every such frame
        for at, said in zip(range(0, len(instants), step), plan.timestamps, strict=True):
            number, again = plan.frame_indices[at], plan.frame_indices[at] in plan.frame_indices[:at]
            until = (*seconds, 1e9)[number + 1] if again else seconds[number]
            assert seconds[number] - SLACK <= said <= until + SLACK
    off = [abs(seconds[number] - instant) for number, instant in zip(theirs.frame_indices, instants, strict=True)]
    assert max(off) > 15  # seconds: what the processor's way does to this clip


def labels(plan, family: str) -> list[float]:
    text = small(family).family.replacement(plan)
    return [float(label) for label in re.findall(r"<([\d.]+) seconds>", text)]


def test_the_labels_of_a_screen_recording_are_the_times_of_its_frames(media: Media) -> None:
    seconds, _ = shown(recording())
    plan, theirs = plans_of("qwen3_vl", media, video_fps=8.0, video_max_frames=32)

    def times_of(chosen) -> list[float]:
        """The mean time of the two frames of each step; a frame that is shown again has the time at which it is."""
        instants = [index / media.fps for index in theirs.frame_indices]
        own = [seconds[number] for number in chosen.frame_indices]
        for at, (number, later) in enumerate(pairwise(chosen.frame_indices), start=1):
            own[at] = instants[at] if number == later else own[at]
        return [(first + second) / 2 for first, second in zip(own[::2], own[1::2], strict=True)]

    assert len(labels(plan, "qwen3_vl")) == 16
    assert labels(plan, "qwen3_vl") == pytest.approx(times_of(plan), abs=0.05 + SLACK)
    assert labels(plan, "qwen3_vl") == sorted(set(labels(plan, "qwen3_vl")))
    assert sum(label > 3 for label in labels(plan, "qwen3_vl")) >= 15
    assert max(abs(label - time) for label, time in zip(labels(theirs, "qwen3_vl"), times_of(theirs), strict=True)) > 15


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_row_is_what_the_processor_makes_of_those_frames_at_their_times(encoders, media: Media, family: str) -> None:
    """And as long as it was measured."""
    made, (_, pixels) = encoders[family], shown(recording())
    measured = made.measure(about(media))
    chosen = measured.plans[0].frame_indices
    assert len(chosen) > len(set(chosen))  # of the still stretch
    theirs = made.family.sample_frames(media.frames, media.rate)
    _, seconds = shown_frames(media, made.config, theirs)
    metadata = {"total_num_frames": len(chosen), "fps": 1.0, "frames_indices": list(seconds)}
    frames = torch.from_numpy(np.stack([pixels[number] for number in chosen])).permute(0, 3, 1, 2)
    whole = by_the_processor(made, about(media), frames, metadata)
    row = made.render(measured, lambda name: recording())
    assert row["input_ids"].tolist() == whole["input_ids"][0].tolist()
    assert measured.length == row["expected_length"] == whole["input_ids"].shape[1]
    assert torch.equal(finished_row(row)["visual_inputs"]["pixel_values_videos"], whole["pixel_values_videos"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_without_times_is_read_as_before_and_so_is_any_in_the_processors_way(media: Media, family) -> None:
    old = {name: value for name, value in media.to_record().items() if name != "time_points"}
    before = Conversation.from_record("k", {**about(media).to_record(), "media": [old]})
    _, theirs = plans_of(family, media)
    assert small(family).measure(before).plans[0] == theirs
    assert len(set(theirs.frame_indices)) == len(theirs.frame_indices)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_turned_recording_is_upright_and_keeps_its_times(encoders, tmp_path, media: Media, degrees: int) -> None:
    """A phone holds the sensor's rows and a display matrix."""
    data = turned_by_container(recording(), degrees)
    (tmp_path / "turned.mp4").write_bytes(data)
    turned = media_file(tmp_path / "turned.mp4", "video")
    assert (turned.width, turned.height) == ((64, 48) if degrees == 180 else (48, 64))
    assert turned.time_points == media.time_points
    made = encoders["qwen3_vl"]
    measured = made.measure(about(turned))
    chosen, (_, pixels) = measured.plans[0].frame_indices, shown(recording())
    upright = decode_media(measured, lambda name: data, made.config, made.family)[0].permute(0, 2, 3, 1).numpy()
    # The matrix turns clockwise.
    assert np.array_equal(upright, np.stack([np.rot90(pixels[number], -degrees // 90) for number in chosen]))


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("container", ["mp4", "mov", "mkv", "flv"])
def test_times_are_noted_as_the_container_has_them(container: str, decode: bool) -> None:
    data = recording(container)
    info = probe_video(data, decode=decode)
    numbers, seconds = info.time_points[::2], info.time_points[1::2]
    assert np.interp(range(info.frames), numbers, seconds) == pytest.approx(shown(data)[0], abs=0.011)
    assert len(numbers) < info.frames


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("rate", RATES, ids=str)
def test_a_clip_of_a_constant_rate_has_no_times(tmp_path, container: str, rate: Fraction) -> None:
    for frames in (2, LONGEST):
        path = write_clip(tmp_path / f"{frames}.{container}", rate, frames)
        assert [probe_video(path, decode=decode).time_points for decode in (False, True)] == [(), ()]
    lost = [*range(40), *range(41, LONGEST + 2)]  # one frame: a little, unless it was shown for long
    path = write_clip(tmp_path / f"lost.{container}", rate, LONGEST, times=lost)
    assert rate < 10 or probe_video(path).time_points == ()


@given(steps=st.lists(st.sampled_from([0.0, 1 / 60, 1 / 30, 1 / 30, 1 / 30, 0.4, 7.0]), min_size=1, max_size=300))
def test_any_times_are_noted_to_a_hundredth_of_a_second_or_are_even(steps: list[float]) -> None:
    times = np.cumsum([3.0, *steps])
    frames, rate = len(times), len(times) / Fraction(times[-1] - 3 + 1 / 30)
    points = probe._time_points(times, frames, rate, probe._Work(0))
    off = np.abs(times - 3 - np.arange(frames) / float(rate)).max() / max(0.1, 1 / float(rate))
    assert bool(points) == (off > 1) or abs(off - 1) < 1e-6
    if points:
        assert np.interp(range(frames), points[::2], points[1::2]) == pytest.approx(times - 3, abs=0.011)


RANDOM = np.cumsum(np.random.default_rng(0).exponential(0.2, 20_000))
UNEVEN = {
    "random": (RANDOM, 1.3),
    "steps": (np.repeat(np.cumsum(np.random.default_rng(1).exponential(2.0, 3000)), 7), None),
    "bursts": (np.cumsum(np.where(np.random.default_rng(2).random(20_000) < 0.1, 2.0, 0.0)), None),
}


@pytest.mark.parametrize("kind", UNEVEN)
def test_times_of_a_long_film_take_a_bounded_place_and_are_off_by_a_bounded_time(kind: str) -> None:
    times, most = UNEVEN[kind]
    points = probe._time_points(times, len(times), len(times) / Fraction(times[-1]), probe._Work(0))
    assert 300 < len(points) <= 2000
    off = np.abs(np.interp(range(len(times)), points[::2], points[1::2]) - (times - times[0])).max()
    assert 0.1 < off < (most or times[-1] / 240)  # of more than an hour


def test_times_of_a_long_film_are_noted_within_the_time_that_its_file_may_take() -> None:
    late = probe._Work(0)
    late._deadline = 0.0
    with pytest.raises(SampleRejected, match="decode_timeout: frame 20000 was not decoded within 60 seconds"):
        probe._time_points(RANDOM, len(RANDOM), len(RANDOM) / Fraction(RANDOM[-1]), late)


def test_a_frame_of_a_long_film_takes_the_memory_of_a_number() -> None:
    packet = SimpleNamespace(is_corrupt=False, time_base=Fraction(1, 100), duration=1, pts=0)

    def film(frames: int) -> Iterator[Any]:
        for packet.pts in range(frames):
            yield packet

    tracemalloc.start()
    try:
        count = probe._count(film(50_000), "packet", probe._Work(0))
        (_, most) = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (count.frames, count.times[-1]) == (50_000, 499.99)
    assert most < 30 * count.frames


def test_times_that_are_missing_or_mixed_up_are_not_noted() -> None:
    times = [0.0, 0.1, 0.2, 30.0, 60.0]
    work = probe._Work(0)
    assert probe._time_points(times, 5, Fraction(1, 12), work)
    assert probe._time_points(times, 6, Fraction(1, 12), work) == ()
    assert probe._time_points([0.0, 0.2, 0.1, 30.0, 60.0], 5, Fraction(1, 12), work) == ()
    assert probe._time_points([], 5, Fraction(1, 12), work) == ()
