"""Frames, time stamps and positions of clips, from the file on: ours begin at `probe_video`, theirs at `load_video`.

Tests that begin at a number which both sides share cannot see where that number comes from.
"""

import inspect
import itertools
import random
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache

import av
import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.media_files import probe_video
from support.offline_processors import processor_of
from test_families import MODELS, positions_of
from transformers.video_utils import load_video
from whole_sample import encoder

from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.errors import SampleRejected
from energon_packing.families.geometry import set_pixel_limits
from energon_packing.families.qwen_vl import truncates_seconds

RATES = tuple(
    Fraction(rate)
    for rate in ("24000/1001", "24", "25", "30000/1001", "30", "50", "60000/1001", "60", "12", "15", "10/3", "15/2")
)
CONTAINERS = {"mp4": "libx264", "mkv": "libx264", "webm": "libvpx-vp9", "avi": "mpeg4"}
KEYS_ONLY = {"g": "1", "bf": "0", "cpu-used": "8", "deadline": "realtime", "preset": "ultrafast"}
SIDE = 64
LONGEST = 130
CLIPS = 30
SETTINGS = ({}, {"fps": 1.0}, {"fps": 0.7}, {"max_frames": 6}, {"min_frames": 12})
"""Of the video processor, changed one at a time."""
CASES = [
    (family, setting)
    for family, setting in itertools.product(MODELS, SETTINGS)
    # GLM's processor has no limit of frames; a rate turns the usual choice of Ernie's off.
    if family != "glm4v" or not setting.keys() & {"max_frames", "min_frames"}
]


@cache
def packets(codec: str, rate: Fraction):
    """An open stream and its packets: key frames, so that every beginning is a clip."""
    container = av.open("/dev/null", "w", format="avi" if codec == "mpeg4" else "matroska")
    stream = container.add_stream(codec, rate=rate, options=KEYS_ONLY)
    stream.width = stream.height = SIDE
    stream.pix_fmt = "yuv420p"
    found = []
    for number in range(LONGEST):
        frame = av.VideoFrame.from_ndarray(np.full((SIDE, SIDE, 3), number, np.uint8), "rgb24")
        frame.pts, frame.time_base = number, 1 / rate
        found += stream.encode(frame)
    found += stream.encode(None)
    container.mux(found[0])  # which writes the stream's own header
    return container, stream, [bytes(packet) for packet in found]


def write_clip(path, rate, frames, *, times=None):
    """Writes a file of so many frames, ``1 / rate`` seconds apart or at multiples of it."""
    _, template, data = packets(CONTAINERS[path.suffix[1:]], rate)
    with av.open(str(path), "w") as container:
        stream = container.add_stream_from_template(template)
        stream.time_base = 1 / rate
        for number, content in enumerate(data[:frames]):
            packet = av.Packet(content)
            packet.stream, packet.time_base, packet.is_keyframe = stream, 1 / rate, True
            packet.pts = packet.dts = number if times is None else times[number]
            packet.duration = 1 if times is None else times[number + 1] - times[number]
            container.mux(packet)
    return path


def said(path, frames):
    """What transformers' own reader says of a file; it does not count frames that the container does not name."""
    _, metadata = load_video(str(path), backend="pyav", sample_indices_fn=lambda metadata: [0])
    if not metadata.total_num_frames:  # Matroska and WebM
        metadata.total_num_frames, metadata.duration = frames, frames / metadata.fps
    metadata.frames_indices = None
    return metadata


def measured_media(path) -> Media:
    """The clip as a record holds it after conversion."""
    video = probe_video(path)
    names = ("width", "height", "frames", "fps", "duration")
    media = Media(kind="video", name=path.name, **{name: getattr(video, name) for name in names})
    asked = Turn(role="user", parts=(MediaPart(index=0), "What happens?"))
    conversation = Conversation(
        key="k", turns=(asked, Turn(role="assistant", parts=("It moves. " * 40,))), media=(media,)
    )
    return Conversation.from_record("k", orjson.loads(orjson.dumps(conversation.to_record())))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A function: what transformers and we know of the file of a number."""
    folder = tmp_path_factory.mktemp("clips")

    @cache
    def made(number):
        draw = random.Random(number)
        frames = draw.randint(4, LONGEST)
        path = folder / f"{number}.{draw.choice(tuple(CONTAINERS))}"
        write_clip(path, draw.choice(RATES), frames)
        return said(path, frames), measured_media(path)

    return made


def small(family):
    """A processor that leaves frames as small as they are, and draws nothing on them: only times matter here."""
    processor = processor_of(family)
    set_pixel_limits(processor.video_processor, 32 * 32, None)
    processor.video_processor.draw_on_frames = False
    return processor


def oracle(family, setting):
    """A processor with the setting as its own."""
    processor = small(family)
    for name, value in ({"fps": 2.0} | setting if family != "ernie4_5_vl" else setting).items():
        setattr(processor.video_processor, name, value)
    return processor


def same_positions(ours, ids, plans, batch):
    """Whether ours are those of the model, from the batch that the processor made."""
    kinds = torch.tensor(ours.family.visual_kinds(batch["input_ids"][0].numpy()))[None]
    theirs = positions_of(ours, MODELS[ours.family.name][0], {**batch, "mm_token_type_ids": kinds})
    return np.array_equal(ours.family.positions(ids, plans), theirs)


@pytest.mark.parametrize(("family", "setting"), CASES)
def test_a_file_has_the_frames_times_and_positions_that_processor_and_model_give_it(clip, family, setting):
    changed = {f"video_{name}": value for name, value in setting.items()}
    ours = encoder(small(family), family=family, position_ids="mrope", **changed)
    theirs = oracle(family, setting)
    wrong, refused = Counter(), 0
    first = CLIPS * SETTINGS.index(setting)  # other clips for each
    for number in range(first, first + CLIPS):
        metadata, conversation = clip(number)
        text = ours.processor.apply_chat_template(conversation.to_messages(), tokenize=False)
        try:
            whole = theirs(
                text=[text],
                videos=[torch.zeros(metadata.total_num_frames, 3, SIDE, SIDE, dtype=torch.uint8)],
                video_metadata=[replace(metadata)],
                do_sample_frames=True,
                return_metadata=True,
                return_tensors="pt",
            )
        except (ValueError, ZeroDivisionError, RuntimeError):  # too few frames
            refused += 1
            with pytest.raises(SampleRejected):
                ours.measure(conversation)
            continue
        except IndexError:  # its last step is past the end of the clip
            assert ours.measure(conversation).plans[0].frame_indices[-1] < metadata.total_num_frames
            continue
        measured = ours.measure(conversation)
        ids, _ = measured.expand()
        plan, sampled = measured.plans[0], whole["video_metadata"][0]
        wrong["frames"] += list(plan.frame_indices) != [int(at) for at in sampled.frames_indices]
        wrong["text"] += ids.tolist() != whole["input_ids"][0].tolist()
        if len(ids) == whole["input_ids"].shape[1]:
            wrong["positions"] += not same_positions(ours, ids, measured.plans, whole)
        if family == "ernie4_5_vl":  # which draws them on the frames
            wrong["times"] += list(plan.timestamps) != [float(at) for at in sampled.timestamps]
    assert not +wrong, f"of {CLIPS} clips"
    assert refused < CLIPS / 2


def test_whole_seconds_between_time_steps_are_not_truncated_to_fewer(tmp_path):
    """In float64 the steps of the first clip are 2.9999999999999996 seconds apart, in the float32 of the batch 3."""
    ours = encoder(small("qwen2_5_vl"), position_ids="mrope", video_max_frames=6)
    for frames in (30, 60, 70, 120):
        path = write_clip(tmp_path / f"{frames}.mp4", Fraction(10, 3), frames)
        measured = ours.measure(measured_media(path))
        ids, _ = measured.expand()
        visual = ours.family.pixels(measured.plans, [torch.zeros(6, 3, SIDE, SIDE, dtype=torch.uint8)])
        batch = visual | {"input_ids": torch.tensor(ids)[None]}
        assert same_positions(ours, ids, measured.plans, batch)


METHODS = ("get_vision_position_ids", "get_rope_index")
STEPS = "torch.arange(llm_grid_t, device=device) * time_interval"
RULES = {
    "seconds": [(" * next(second_per_grid_ts)", " * int(next(second_per_grid_ts))")],
    "positions": [("int(next(second_per_grid_ts))", "next(second_per_grid_ts)"), (STEPS, f"({STEPS}).long()")],
}
"""What a release of transformers truncates: its difference to the other, as published (5.14 and 5.18)."""


@pytest.mark.parametrize("rule", RULES)
def test_positions_of_a_clip_are_truncated_where_the_installed_model_truncates_them(tmp_path, monkeypatch, rule):
    (model,) = MODELS["qwen2_5_vl"]
    source = "".join(inspect.getsource(getattr(model, name)) for name in METHODS)
    for old, new in RULES[rule]:
        source = source.replace(old, new)
    exec(f"class Other:\n{source}", space := dict(vars(sys.modules[model.__module__])))
    for name in METHODS:
        monkeypatch.setattr(model, name, vars(space["Other"])[name])
    truncates_seconds.cache_clear()
    try:
        ours = encoder(small("qwen2_5_vl"), position_ids="mrope", video_max_frames=8)
        for frames in range(30, 75, 5):
            path = write_clip(tmp_path / f"{frames}.mp4", Fraction(10, 3), frames)
            measured = ours.measure(measured_media(path))
            ids, _ = measured.expand()
            clip = torch.zeros(len(measured.plans[0].frame_indices), 3, SIDE, SIDE, dtype=torch.uint8)
            batch = ours.family.pixels(measured.plans, [clip]) | {"input_ids": torch.tensor(ids)[None]}
            assert same_positions(ours, ids, measured.plans, batch)
        assert truncates_seconds() is (rule == "seconds")
        other = ", steps of clips as in transformers 5.18" if rule == "positions" else ""
        assert ours.fingerprint()["position_ids"] == f"mrope, 2 tokens a second{other}"
        assert encoder(small("qwen2_5_vl")).fingerprint()["position_ids"] == "auto, 2 tokens a second"
    finally:
        monkeypatch.undo()
        truncates_seconds.cache_clear()


@pytest.mark.parametrize("family", ["internvl", "llava_onevision"])
def test_a_file_has_the_frames_that_a_processor_of_tiles_samples(clip, family):
    # The usual number of frames is in `test_internvl_against_processor.py`; only a rate reads that of the file.
    config = {"video_fps": 2.0, "video_max_frames": 1000} if family == "internvl" else {}
    ours = encoder(processor_of(family), **config)
    theirs = ours.processor.video_processor
    for number in range(CLIPS):
        metadata, conversation = clip(number)
        rate = {"fps": 2.0} if family == "internvl" else {"num_frames": min(32, metadata.total_num_frames)}
        if family == "internvl" and metadata.duration * 2 < 1:
            continue
        expected = [int(at) for at in theirs.sample_frames(metadata, **rate) if int(at) < metadata.total_num_frames]
        assert list(ours.family.plan(conversation.media[0]).frame_indices) == expected, metadata


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_recording_of_changing_rate_has_the_rate_of_its_frames_where_the_container_states_another(
    tmp_path, container
):
    rate, draw = Fraction(30), random.Random(0)
    times = list(itertools.accumulate((draw.choice((1, 2, 9)) for _ in range(60)), initial=0))
    path = write_clip(tmp_path / f"changing.{container}", rate, 60, times=times)
    metadata, media = said(path, 60), measured_media(path).media[0]
    if container == "mp4":  # its average is that of all frames
        assert (media.fps, media.duration) == (metadata.fps, metadata.duration)
    elif container != "avi":  # which has no times, and repeats frames instead
        assert metadata.fps == 30.0, "the rate of the first frames"
        assert media.fps == pytest.approx(60 / (times[60] / 30), rel=0.01)


def test_a_record_of_an_older_conversion_has_the_rate_of_the_container_too():
    """Rates were computed in floats: frames over the seconds from the first to the end of the last."""
    off = 0
    for rate, frames in itertools.product(RATES, range(1, 2000, 3)):
        old = frames / (float((frames - 1) / rate) + float(1 / rate))
        off += old != float(rate)
        assert Media(kind="video", name="v.mp4", fps=old).rate == rate
    assert off > 1000


@given(numerator=st.integers(1, 2**31 - 1), denominator=st.integers(1, 2**31 - 1))
def test_every_fraction_that_a_container_can_state_survives_a_record(numerator, denominator):
    rate = Fraction(numerator, denominator)
    media = Media(kind="video", name="v.mp4", width=1, height=1, frames=1, fps=float(rate))
    if rate.denominator <= 10_000:
        assert media.rate == rate
    assert media.rate == pytest.approx(rate, rel=1e-15)
