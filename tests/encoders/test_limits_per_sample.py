"""What happens to a sample over a limit: resized as its own processor would, cut after a turn, dropped, or an error."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_packing.config import EncoderConfig, LimitsConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.fitting import PIXELS
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.thd import finished_row

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def limited(encoders):
    """Encoder of a family with limits, on the session's processor (which resizing must never change)."""

    def make(family="qwen2_5_vl", **limits):
        return ConversationEncoder(EncoderConfig(limits=LimitsConfig(**limits)), processor=encoders[family].processor)

    return make


def image(number: int, width: int, height: int) -> Media:
    return Media(kind="image", name=f"{number}.png", width=width, height=height)


def video(number: int, width: int, height: int, frames: int, fps: float = 24.0) -> Media:
    size = {"width": width, "height": height, "frames": frames, "fps": fps, "duration": frames / fps}
    return Media(kind="video", name=f"{number}.mp4", **size)


def with_media(*media: Media) -> Conversation:
    turns = (
        Turn(role="user", parts=(*(MediaPart(index=index) for index in range(len(media))), "What do these show?")),
        Turn(role="assistant", parts=("A wide field with two trees, and a road that leads to the sea.",)),
    )
    return Conversation(key="k", turns=turns, media=media)


def dialogue(rounds: int, words: int = 12, pictures: tuple[int, ...] = ()) -> Conversation:
    """Rounds of question and answer; the rounds in ``pictures`` begin with an image."""
    turns: list[Turn] = [Turn(role="system", parts=("Be brief.",))]
    media: list[Media] = []
    for at in range(rounds):
        parts: tuple = (f"Question {at}: " + "why " * words,)
        if at in pictures:
            parts = (MediaPart(index=len(media)), *parts)
            media.append(image(at, 280, 280))
        turns += [Turn(role="user", parts=parts), Turn(role="assistant", parts=(f"Answer {at}: " + "so " * words,))]
    return Conversation(key="d", turns=tuple(turns), media=tuple(media))


def said(measure, conversation):
    """What is measured, field by field, or what is raised."""
    try:
        found = measure(conversation)
    except (SampleRejected, ConfigError) as error:
        return type(error), str(error)
    return {
        name: value.tobytes() if isinstance(value := getattr(found, name), np.ndarray) else repr(value)
        for name in found.__dataclass_fields__
    }


spoken = st.lists(
    st.sampled_from([*"ab \n", "é", "🙂", "e\u0301", "<|im_end|>", "<|image_pad|>", "\ud800"]), max_size=8
).map("".join)


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.lists(spoken, min_size=1, max_size=5), min_size=1, max_size=6), most=st.sampled_from([12, 40]))
def test_conversations_that_are_prepared_together_are_measured_as_each_is_alone(limited, texts, most):
    talks = [
        Conversation(
            key=f"k{number}",
            turns=tuple(Turn(role=("user", "assistant")[at % 2], parts=(text,)) for at, text in enumerate(talk)),
        )
        for number, talk in enumerate(texts)
    ]
    talks += [dialogue(3, pictures=(0, 2)), dialogue(1), with_media(image(0, 320, 200), video(1, 96, 64, 12))]
    encoder = limited(max_tokens=most, when_over=("resize", "truncate"))
    alone = [said(encoder.measure, each) for each in talks]
    encoder.prepare(talks)
    assert [said(encoder.measure, each) for each in talks] == alone
    assert [said(encoder.measure, each) for each in talks] == alone  # nothing is kept after its use
    assert int(said(limited().measure, dialogue(1))["length"]) > 12


def reads(conversation: Conversation):
    """Reader of PNG bytes of noise in the right sizes."""
    rng = np.random.default_rng(0)
    files = {}
    for media in conversation.media:
        buffer = io.BytesIO()
        pixels = rng.integers(0, 256, (media.height, media.width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, format="PNG")
        files[media.name] = buffer.getvalue()
    return files.__getitem__


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(30, 1500), st.integers(30, 1500)), min_size=1, max_size=4),
    share=st.floats(0.1, 0.95),
)
@example(sizes=[(71, 295), (378, 379)], share=0.1015625)
def test_a_resized_sample_fits_and_costs_what_the_processor_says_at_the_lower_limit(
    encoders, limited, family, sizes, share
):
    conversation = with_media(*(image(at, *size) for at, size in enumerate(sizes)))
    whole = encoders[family].measure(conversation)
    most = max(1, int(share * sum(plan.tokens for plan in whole.plans)))
    encoder = limited(family, max_visual_tokens=most, when_over=("resize",), min_active_ratio=0.0)
    try:
        measured = encoder.measure(conversation)
    except SampleRejected as error:
        assert error.reason == "too_many_visual_tokens"  # noqa: PT017
        smallest = copy.deepcopy(encoders[family].processor.image_processor)
        smallest.size = {
            "shortest_edge": smallest.size["shortest_edge"],
            "longest_edge": smallest.size["shortest_edge"],
        }
        floor = sum(smallest.get_number_of_image_patches(h, w, {}) // smallest.merge_size**2 for w, h in sizes)
        assert floor > most, "refused although the smallest allowed images would have fitted"
        return
    processor = copy.deepcopy(encoders[family].processor.image_processor)
    processor.size = {
        "shortest_edge": processor.size["shortest_edge"],
        "longest_edge": dict(measured.settings)["max_pixels"],
    }
    expected = [processor.get_number_of_image_patches(h, w, {}) for w, h in sizes]
    assert [plan.patches for plan in measured.plans] == expected
    assert sum(plan.tokens for plan in measured.plans) <= most
    assert measured.changes[0][0] == "resized"
    assert len(measured.expand()[0]) == measured.length


def test_no_step_larger_would_have_fitted(limited):
    conversation = with_media(image(0, 1200, 800), image(1, 300, 900))
    encoder = limited(max_visual_tokens=500, when_over=("resize",))
    chosen = dict(encoder.measure(conversation).settings)["max_pixels"]
    above = PIXELS[PIXELS.index(chosen) + 1]
    larger = encoder._resizer.family((("max_pixels", above),)).plans(conversation.media)
    assert sum(plan.tokens for plan in larger) > 500


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pixels_of_a_resized_sample_are_those_of_the_processor_at_the_lower_limit(encoders, limited, family):
    conversation = with_media(image(0, 640, 480), image(1, 200, 500))
    encoder = limited(family, max_tokens=250, when_over=("resize",))
    measured = encoder.measure(conversation)
    read = reads(conversation)
    row = finished_row(encoder.render(measured, read))
    processor = copy.deepcopy(encoders[family].processor)
    processor.image_processor.size = {
        "shortest_edge": processor.image_processor.size["shortest_edge"],
        "longest_edge": dict(measured.settings)["max_pixels"],
    }
    pictures = [Image.open(io.BytesIO(read(media.name))).convert("RGB") for media in conversation.media]
    text = processor.apply_chat_template(conversation.to_messages(), tokenize=False)
    whole = processor(text=[text], images=pictures, return_tensors="pt")
    assert row["input_ids"].tolist() == whole["input_ids"][0].tolist()
    assert torch.equal(row["visual_inputs"]["pixel_values"], whole["pixel_values"])
    assert torch.equal(row["visual_inputs"]["image_grid_thw"], whole["image_grid_thw"])
    assert len(row["input_ids"]) <= 250


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_frames_are_sampled_over_the_whole_clips(encoders, limited, family):
    conversation = with_media(video(0, 160, 120, 240), video(1, 160, 120, 48))
    whole = encoders[family].measure(conversation)
    frames = [len(plan.frame_indices) for plan in whole.plans]
    encoder = limited(family, max_frames=sum(frames) - 6, when_over=("resize",))
    measured = encoder.measure(conversation)
    fewer = [len(plan.frame_indices) for plan in measured.plans]
    assert sum(fewer) <= sum(frames) - 6
    assert fewer[0] < frames[0]
    assert fewer[1] == frames[1], "the short clip was within the cap and keeps its frames"
    assert measured.plans[0].frame_indices[-1] > 200, "the end of the clip is still sampled"


def test_resizing_leaves_the_runs_own_processor_as_it_was(encoders, limited):
    before = encoders["qwen2_5_vl"].processor.image_processor.to_dict()
    encoder = limited(max_visual_tokens=50, when_over=("resize",))
    conversation = with_media(image(0, 800, 800))
    assert encoder.measure(conversation).plans[0].tokens <= 50
    assert encoders["qwen2_5_vl"].processor.image_processor.to_dict() == before
    small = with_media(image(0, 100, 100))
    assert encoder.measure(small).settings == ()
    assert encoder.measure(small).changes == ()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_images": 1}, "too_many_images"),
        ({"max_visual_tokens": 20}, "too_many_visual_tokens"),
        ({"max_tokens": 40}, "too_many_tokens"),
    ],
)
def test_dropping_and_raising_name_the_limit_and_the_numbers(limited, limits, reason):
    conversation = with_media(image(0, 300, 300), image(1, 300, 300))
    with pytest.raises(SampleRejected) as refused:
        limited(**limits).measure(conversation)
    assert refused.value.reason == reason
    name, most = next(iter(limits.items()))
    assert f"over encoder.limits.{name}={most}" in refused.value.detail
    with pytest.raises(ConfigError, match=f"encoder.limits.{name}"):
        limited(**limits, when_over=("raise",)).measure(conversation)


def test_images_beyond_the_limit_are_cut_with_their_turns_where_that_is_allowed(limited):
    conversation = dialogue(4, 5, pictures=(0, 2, 3))
    measured = limited(max_images=1, when_over=("resize", "truncate")).measure(conversation)
    assert measured.turns == 5  # system and the first two rounds
    assert [plan.kind for plan in measured.plans] == ["image"]
    assert measured.changes[0][0] == "truncated"
    assert "kept 5 of 9 turns" in measured.changes[0][1]
