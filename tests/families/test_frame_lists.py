"""A video given as a list of images: every family makes of it what its processor makes of that list."""

import io
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.offline_processors import internvl, llava_onevision, processor_of

from energon_packing.config import EncoderConfig, LimitsConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import SampleRejected
from energon_packing.thd import finished_row

QWEN = ("qwen2_5_vl", "qwen3_vl")
FRAMES = 6


def pictures(count: int, width: int, height: int) -> list[Image.Image]:
    rng = np.random.default_rng(count)
    return [Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for _ in range(count)]


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def listed(count: int, width: int, height: int, fps: float = 2.0, times: tuple[float, ...] = ()) -> Media:
    names = tuple(f"{number}.png" for number in range(count))
    fields = {"name": names[0], "frames": count, "fps": fps, "frame_names": names, "frame_times": times}
    return Media(kind="video", width=width, height=height, duration=count / fps, **fields)


def about(*media: Media) -> Conversation:
    turns = (
        Turn(role="user", parts=(*(MediaPart(index=at) for at in range(len(media))), "What moves?")),
        Turn(role="assistant", parts=("All of it.",)),
    )
    return Conversation(key="k", turns=turns, media=media)


def by_the_processor(encoder, conversation, frames, metadata=None, **more):
    text = encoder.processor.apply_chat_template(
        conversation.to_messages(), tokenize=False, chat_template=encoder.template.source
    )
    return encoder.processor(
        text=[text],
        videos=[frames],
        do_sample_frames=False,
        return_tensors="pt",
        **({} if metadata is None else {"video_metadata": [metadata], "add_special_tokens": False}),
        **more,
    )


def rendered(encoder, conversation, images):
    measured = encoder.measure(conversation)
    return measured, finished_row(encoder.render(measured, lambda name: png(images[int(name.partition(".")[0])])))


def compare(encoder, conversation, images, metadata):
    measured, row = rendered(encoder, conversation, images)
    whole = by_the_processor(encoder, conversation, images, metadata)
    assert row["input_ids"].tolist() == whole["input_ids"][0].tolist()
    assert measured.length == whole["input_ids"].shape[1]
    for name in ("pixel_values_videos", "video_grid_thw"):
        assert torch.equal(row["visual_inputs"][name], whole[name]), name
    if "second_per_grid_ts" in whole:
        assert row["visual_inputs"]["second_per_grid_ts"].tolist() == pytest.approx(whole["second_per_grid_ts"])
    return measured


@pytest.mark.parametrize("family", QWEN)
@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 9),
    fps=st.sampled_from([0.5, 1.0, 2.0, 7.5, 24.0]),
    width=st.integers(33, 90),
    height=st.integers(33, 90),
)
def test_a_list_of_frames_is_what_the_processor_makes_of_that_list(encoders, family, count, fps, width, height):
    images = pictures(count, width, height)
    metadata = {"total_num_frames": count, "fps": fps, "frames_indices": list(range(count))}
    conversation = about(listed(count, width, height, fps))
    try:
        measured = compare(encoders[family], conversation, images, metadata)
    except SampleRejected as rejected:  # by Qwen3-VL of transformers 5.15 and later, if it has one frame
        with pytest.raises(ValueError, match="must be larger than temporal_factor") as theirs:
            by_the_processor(encoders[family], conversation, images, metadata)
        assert rejected.reason == "too_few_frames"  # noqa: PT017
        assert str(theirs.value) in rejected.detail  # noqa: PT017
        return
    assert measured.plans[0].frame_indices == tuple(range(count))


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 20), width=st.integers(4, 90), height=st.integers(4, 90), still=st.booleans())
def test_internvl_makes_a_tile_of_every_frame_of_a_list_as_its_processor_does(count, width, height, still):
    """More frames than it samples of a clip, too: a list was sampled already.

    Frames of at least 4 x 4: the processor takes a side of 1 or 3 pixels for the colours.
    """
    made = of("internvl")
    images = pictures(count, width, height)
    conversation, extra = about(listed(count, width, height)), {}
    if still:  # an image before the video, whose tiles stand in the same tensor
        image = Media(kind="image", name="0.png", width=width, height=height)
        conversation, extra = about(image, *conversation.media), {"images": [images[0]]}
    measured, row = rendered(made, conversation, images)
    whole = by_the_processor(made, conversation, images, **extra)
    assert row["input_ids"].tolist() == whole["input_ids"][0].tolist()
    assert torch.equal(row["visual_inputs"]["pixel_values"], whole["pixel_values"])
    assert measured.plans[-1].frame_indices == tuple(range(count))
    assert measured.images == len(whole["pixel_values"])


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 14), width=st.integers(4, 90), height=st.integers(4, 90))
def test_llava_onevision_makes_of_a_list_what_its_processor_makes_of_those_frames(count, width, height):
    """As many frames as its model takes: a longer list is thinned out, frames of a shorter one are repeated."""
    made = of("llava_onevision")
    images = pictures(count, width, height)
    conversation = about(listed(count, width, height))
    measured, row = rendered(made, conversation, images)
    taken = {6: range(6), 9: (0, 2, 3, 5, 6, 8), 3: (0, 0, 1, 1, 2, 2), 1: (0,) * 6}.get(count)
    shown = measured.plans[0].frame_indices
    if count < FRAMES:
        assert shown == tuple(range(count))
        shown = tuple(np.linspace(0, count - 1, FRAMES, dtype=np.float32).round().astype(int))
    assert (shown[0], shown[-1]) == (0, count - 1)
    assert taken is None or shown == tuple(taken)
    whole = by_the_processor(made, conversation, [images[at] for at in shown])
    assert row["input_ids"].tolist() == whole["input_ids"][0].tolist()
    assert torch.equal(row["visual_inputs"]["pixel_values_videos"], whole["pixel_values_videos"])


@cache
def of(family: str) -> ConversationEncoder:
    """Encoders on small tiles, LLaVA-OneVision with a clip of six frames, InternVL with eight."""
    if family == "internvl":
        return ConversationEncoder(EncoderConfig(), processor=internvl(28, 4, max_patches=6))
    return ConversationEncoder(EncoderConfig(), processor=llava_onevision(28, 9, frames=FRAMES))


@pytest.mark.parametrize("family", ["qwen2_vl", "internvl"])
def test_whatever_changes_which_frames_of_a_list_are_shown_changes_the_fingerprint(family):
    """The processor's own number of frames does not thin a list out; the same number in the configuration does."""
    every = LimitsConfig(min_active_ratio=0.0)
    plain = ConversationEncoder(EncoderConfig(limits=every), processor=processor_of(family))
    own = 8 if family == "internvl" else plain.family.videos.max_frames
    capped = ConversationEncoder(EncoderConfig(video_max_frames=own, limits=every), processor=processor_of(family))
    clip = about(listed(own + 1, 64, 48))
    assert len(plain.measure(clip).plans[0].frame_indices) == own + 1
    assert len(capped.measure(clip).plans[0].frame_indices) == own
    before, after = plain.fingerprint(), capped.fingerprint()
    assert [name for name in before if before[name] != after[name]] == ["video_frame_limits"]
    least = ConversationEncoder(EncoderConfig(video_min_frames=2, limits=every), processor=processor_of(family))
    assert least.fingerprint() != plain.fingerprint()


def test_uneven_frame_times_are_written_as_they_are(encoders):
    """The processor knows times as frame numbers over a rate: at one frame a second, the numbers are the seconds."""
    times = (0.0, 0.4, 3.0, 10.2, 11.0)
    images = pictures(5, 64, 48)
    metadata = {"total_num_frames": 12, "fps": 1.0, "frames_indices": list(times)}
    conversation = about(listed(5, 64, 48, fps=4 / 11, times=times))
    measured = compare(encoders["qwen3_vl"], conversation, images, metadata)
    assert measured.plans[0].timestamps == pytest.approx((0.2, 6.6, 11.0))


@pytest.mark.parametrize("family", QWEN)
def test_a_limit_on_frames_thins_a_list_out_over_its_whole_length(family):
    processor = processor_of(family)  # a fresh one: a limit is set on the processor itself
    media = listed(9, 64, 48)
    capped = ConversationEncoder(EncoderConfig(video_max_frames=4), processor=processor)
    assert capped.measure(about(media)).plans[0].frame_indices == (0, 3, 5, 8)
    limits = LimitsConfig(max_frames=4, when_over=("resize",))
    resized = ConversationEncoder(EncoderConfig(limits=limits), processor=processor).measure(about(media))
    assert resized.plans[0].frame_indices == (0, 3, 5, 8)
    assert [how for how, _ in resized.changes] == ["resized"]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda number: png(pictures(1, 64, 50)[0]) if number == 2 else None, "corrupt_media"),
        (lambda number: png(pictures(1, 64, 50)[0]), "media_changed"),
        (lambda number: b"" if number == 2 else None, "corrupt_media"),
        (lambda number: KeyError("gone") if number == 2 else None, "missing_media"),
    ],
)
def test_a_frame_that_is_not_what_was_measured_rejects_the_sample(encoders, broken, reason):
    images = pictures(4, 64, 48)

    def read(name):
        number = int(name.partition(".")[0])
        data = broken(number)
        if isinstance(data, Exception):
            raise data
        return png(images[number]) if data is None else data

    encoder = encoders["qwen2_5_vl"]
    with pytest.raises(SampleRejected) as caught:
        encoder.render(encoder.measure(about(listed(4, 64, 48))), read)
    assert caught.value.reason == reason
