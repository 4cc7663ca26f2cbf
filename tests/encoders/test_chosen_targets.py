"""What is trained is chosen once, on the whole record: no cut changes the choice, and no text of a medium is in it.

``pytest -s tests/encoders/test_chosen_targets.py`` prints the trained tokens in the text of media by family, and what
becomes of cut conversations that have labels.
"""

import copy
import dataclasses
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offline_processors import PROCESSORS, processor_of

from energon_packing.config import EncoderConfig, LimitsConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.sample_encoder import Measured
from energon_packing.errors import SampleRejected

BY_NAME = ("llava_onevision_1_5", "qwen3_5_vl", "huggingface")
"""Families that ``auto`` does not choose."""
VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl", "llava_onevision_1_5", "internvl", "glm4v", "ernie4_5_vl")
BEFORE, AFTER = "First look:", "and that was it."
IMAGE = Media(kind="image", name="i", width=1000, height=260)
CLIP = Media(kind="video", name="v", width=96, height=64, frames=12, fps=4.0, duration=3.0)
CROPS = "gemma3 with crops"
IN_AN_ANSWER = [
    *product((*PROCESSORS, CROPS), [(IMAGE,)], ["assistant"]),
    *product((*PROCESSORS, CROPS), [(IMAGE, IMAGE)], ["all"]),
    *product((*VIDEOS, "llava_onevision"), [(CLIP,)], ["assistant", "all"]),
]


def encoder_of(family: str, **config) -> ConversationEncoder:
    config |= {"family": family} if family in BY_NAME else {}
    config |= {"pan_and_scan": True} if family == CROPS else {}
    processor = processor_of(family.split()[0])
    return ConversationEncoder(EncoderConfig(limits=LimitsConfig(min_active_ratio=0.0), **config), processor=processor)


def processed(encoder: ConversationEncoder, text: str, media) -> list[int]:
    """Token ids of the family's own processor, which puts its texts in place of the placeholders itself."""
    call: dict = {}
    for medium in media:
        shape = (3, medium.height, medium.width)
        if medium.kind == "image":
            call.setdefault("images", [[]])[0].append(torch.zeros(shape, dtype=torch.uint8))
        elif hasattr(encoder.family, "sample_frames"):
            metadata = {"total_num_frames": medium.frames, "fps": medium.fps, "duration": medium.duration}
            call |= {"videos": [torch.zeros((medium.frames, *shape), dtype=torch.uint8)], "do_sample_frames": True}
            call |= {"video_metadata": [metadata], "fps": encoder.family.video_fps}
        else:
            clip = torch.zeros((len(encoder.family.plan(medium).frame_indices), *shape), dtype=torch.uint8)
            spread = getattr(encoder.family, "spread", lambda clip: clip)
            call |= {"videos": [spread(clip)], "do_sample_frames": False}
    if encoder.config.pan_and_scan:
        call["do_pan_and_scan"] = True
    return list(encoder.processor(text=[text], **call)["input_ids"][0])


def with_media(media, before: str = BEFORE, after: str = AFTER) -> Conversation:
    places = tuple(MediaPart(index=at) for at in range(len(media)))
    turns = (Turn(role="user", parts=("Show me.",)), Turn(role="assistant", parts=(before, *places, after)))
    return Conversation(key="k", turns=turns, media=media)


@pytest.mark.parametrize(
    ("family", "media", "train_on"),
    [pytest.param(*case, id=f"{case[0]}-{len(case[1])} {case[1][0].kind}-{case[2]}") for case in IN_AN_ANSWER],
)
def test_no_token_of_the_text_of_media_in_an_answer_is_trained_and_all_others_are(family, media, train_on):
    encoder = encoder_of(family, train_on=train_on)
    conversation = with_media(media)
    ids, weights = encoder.measure(conversation).expand()
    chat = encoder.processor.apply_chat_template(
        conversation.to_messages(), tokenize=False, chat_template=encoder.template.source
    )
    assert ids.tolist() == processed(encoder, chat, media)
    # All that stands between the two texts of the answer stands for the media.
    text = encoder.tokenizer.decode(ids)
    tokens = encoder.tokenizer(text, return_offsets_mapping=True)
    assert tokens["input_ids"] == ids.tolist()
    starts, ends = np.array(tokens["offset_mapping"]).T
    first, last = text.index(BEFORE) + len(BEFORE), text.rindex(AFTER)
    of_media = (starts < last) & (ends > first)
    print(f"\n{family}, {train_on}: {len(media)} {media[0].kind}, trained {(weights[of_media] > 0).sum()}", end=" ")
    assert not weights[of_media].any()
    answer = ~of_media & (starts >= text.index(BEFORE)) & (ends <= last + len(AFTER) + len("<|im_end|>"))
    assert weights[answer].all()
    assert weights[~of_media].all() == (train_on == "all")


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_token_that_holds_the_end_of_a_media_text_and_the_beginning_of_the_answer_is_not_trained(train_on):
    processor = copy.deepcopy(processor_of("gemma3"))  # which writes two line breaks before and after an image
    processor.tokenizer.add_tokens(["\n\n\n"])  # as Gemma's own vocabulary has
    config = EncoderConfig(train_on=train_on, limits=LimitsConfig(min_active_ratio=0.0))
    encoder = ConversationEncoder(config, processor=processor)
    conversation = with_media((IMAGE,), before=f"{BEFORE}\n", after=f"\n{AFTER}")
    ids, weights = encoder.measure(conversation).expand()
    across = ids == processor.tokenizer.convert_tokens_to_ids("\n\n\n")
    assert across.sum() == 2
    assert not weights[across].any()
    first, last = np.flatnonzero(across)
    trained = [
        processor.tokenizer.decode(part[weights[at] > 0])
        for part, at in ((ids[:first], slice(first)), (ids[last:], slice(last, None)))
    ]
    assert trained[0].endswith(BEFORE)
    assert trained[1].startswith(f"{AFTER}<|im_end|>")


def test_what_a_template_writes_around_a_medium_is_not_trained_even_where_it_counts_the_media(tmp_path):
    """Ernie's published template numbers its images, and LLaVA's put them before the text."""
    numbered = (
        "{% set seen = namespace(count=0) %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}{% set seen.count = seen.count + 1 %}Picture {{ seen.count }}:"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    images_first = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}<|image_pad|>\n{% endif %}{% endfor %}"
        "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    conversation = with_media((IMAGE,) * 12)
    for source, written in ((numbered, "Picture 12:"), (images_first, "\n")):
        path = tmp_path / "template.jinja"
        path.write_text(source, encoding="utf-8")
        encoder = encoder_of("qwen2_5_vl", train_on="all", chat_template=str(path))
        ids, weights = encoder.measure(conversation).expand()
        untrained = ids[(weights == 0.0) & (ids != encoder.family.placeholder_ids["image"])]
        assert encoder.tokenizer.decode(untrained).count(written) == (1 if written.startswith("P") else 12)
        trained = encoder.tokenizer.decode(ids[weights > 0])
        assert "Picture" not in trained
        assert BEFORE in trained
        assert AFTER in trained


# -- cuts -----------------------------------------------------------------------------------------------------------

WORDS = ("sea", "mountain", "🌞", "über", "tree,", "7", "\n\n", "what?")


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Rounds of questions, answers and tools' results, with weights, images in both, and any last turn."""
    turns: list[Turn] = []
    media: list[Media] = []

    def parts() -> tuple:
        found: list = [" ".join(draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9))) + "."]
        if draw(st.integers(0, 3)) == 0:
            found.insert(draw(st.integers(0, 1)), MediaPart(index=len(media)))
            media.append(Media(kind="image", name=f"{len(media)}", width=draw(st.integers(30, 200)), height=60))
        return tuple(found)

    for _ in range(draw(st.integers(1, 6))):
        turns.append(Turn(role="user", parts=parts()))
        weight = draw(st.sampled_from([None, None, 0.0, 0.25, 2.0]))
        turns.append(Turn(role="assistant", parts=parts(), loss_weight=weight))
    if draw(st.booleans()):
        turns.append(Turn(role="user", parts=parts()))
    return Conversation(key="k", turns=tuple(turns), media=tuple(media))


@pytest.fixture(scope="module")
def limited():
    """An encoder with limits; the demo's template renders a beginning as it renders the whole."""
    made: dict = {}

    def make(train_on="assistant", extra_fields=(), template=None, **limits):
        key = train_on, extra_fields, template
        if key not in made:
            config = {"train_on": train_on, "extra_fields": extra_fields, "chat_template": template}
            made[key] = ConversationEncoder(EncoderConfig(processor=str(processor_path("qwen2_5_vl")), **config))
        return made[key].under(LimitsConfig(min_active_ratio=0.0, **limits))

    return make


@settings(max_examples=60, deadline=None)
@given(
    train_on=st.sampled_from(["assistant", "last_assistant", "all"]),
    conversation=conversations(),
    share=st.floats(0.0, 1.0),
    by=st.sampled_from(["limit", "row"]),
)
def test_what_a_cut_conversation_trains_is_what_the_whole_one_trains_of_it(limited, train_on, conversation, share, by):
    try:
        whole = limited(train_on).measure(conversation)
    except SampleRejected as error:
        assert error.reason == "nothing_to_learn"  # noqa: PT017
        return
    ids, weights = whole.expand()
    # Where each answer ends in the whole row: at its end-of-turn token and the line break after it.
    stop = limited().tokenizer.convert_tokens_to_ids("<|im_end|>")
    stops = np.flatnonzero(ids == stop)
    stops = stops[len(stops) - len(conversation.turns) :]  # without a default system turn
    ends = [stops[at] + 2 for at, turn in enumerate(conversation.turns) if turn.role == "assistant"]
    most = max(2, int(share * whole.length))
    fitting = [end for end in ends if end <= most and weights[1:end].any()]
    try:
        if by == "row":
            cut = limited(train_on).measure(conversation, truncate_to=most)
        else:
            cut = limited(train_on, max_tokens=most, when_over=("truncate",)).measure(conversation)
    except SampleRejected as error:
        assert error.reason == ("oversize" if by == "row" else "too_many_tokens")  # noqa: PT017
        assert "no cut after an answer fits and keeps a target" in error.detail  # noqa: PT017
        assert fitting == []
        return
    assert len(cut.expand()[0]) == (whole.length if whole.length <= most else fitting[-1])
    assert cut.expand()[0].tolist() == ids[: cut.length].tolist()
    assert cut.expand()[1].tolist() == weights[: cut.length].tolist()
    try:
        split = limited(train_on).split(conversation, cut, lambda tokens, *_: tokens <= 40)
    except SampleRejected:
        return  # an image is longer than that
    found = iter(split.pieces)
    start = 0
    for piece in found:
        if isinstance(piece, SampleRejected):  # without a target; how long it is cannot be seen
            return
        assert piece.expand()[1].tolist() == weights[start : start + piece.length].tolist()
        start += piece.length
    assert start == cut.length


ROUNDS = tuple(
    turn
    for at in range(3)
    for turn in (Turn(role="user", parts=(f"Draft {at}?",)), Turn(role="assistant", parts=(f"Answer {at}. " * 9,)))
)
THANKS = Turn(role="user", parts=("Thank you, that was all that I wanted to know about it.",))
LABELS: dict[str, dict] = {
    "none": {},
    "reward": {"reward": 0.7},
    "advantages": {"reward": ...},
    "kto": {"preference": -1.0},
}


@pytest.mark.parametrize("after", ["the last answer", "an earlier answer"])
@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
@pytest.mark.parametrize("labels", LABELS)
def test_labels_stay_on_the_answers_that_they_describe_or_the_cut_is_not_made(limited, labels, train_on, after):
    conversation = Conversation(key="k", turns=(*ROUNDS, THANKS))
    plain = limited(train_on)
    whole = plain.measure(conversation)
    extras = dict(LABELS[labels])
    if extras.get("reward") is ...:
        extras["reward"] = tuple(float(number) for number in range(whole.targets))
    conversation = dataclasses.replace(conversation, extras=extras)
    names = ("preference",) if labels == "none" else tuple(extras)
    turns = 6 if after == "the last answer" else 4
    most = plain.measure(dataclasses.replace(conversation, turns=ROUNDS[:turns], extras={})).length
    encoder = limited(train_on, names, max_tokens=most, when_over=("truncate",))
    cut: Measured | SampleRejected
    try:
        cut = encoder.measure(conversation)
        kept = plain.tokenizer.decode(cut.token_ids[cut.expand()[1] > 0])
        shown = f"trains answers {[at for at in range(3) if f'Answer {at}' in kept]} of 0 to 2"
    except SampleRejected as error:
        cut, shown = error, f"dropped as {error.reason}"
    print(f"\n{train_on}, labels {labels}, cut after {after}: {shown}", end=" ")
    keeps = after == "the last answer" if train_on == "last_assistant" else train_on == "assistant" or labels == "none"
    if labels != "none":
        keeps = after == "the last answer" and train_on != "all"
    assert isinstance(cut, Measured) == keeps
    if isinstance(cut, SampleRejected):
        assert cut.reason == "too_many_tokens"
        return
    assert cut.turns == turns
    if labels != "none" or train_on == "last_assistant":
        assert cut.targets == whole.targets, "every answer that they describe is there"


def test_an_answer_that_the_template_marks_only_at_the_end_is_not_trained_by_cutting(limited, tmp_path):
    for marked, trained in (("loop.last", None), ("(loop.last or loop.index == 2)", "Answer 0. ")):
        path = tmp_path / f"{marked[-2:]}.jinja"
        path.write_text(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
            + marked
            + " %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
            "{% endif %}\n{% endfor %}",
            encoding="utf-8",
        )
        conversation = Conversation(key="k", turns=ROUNDS)
        whole = limited(template=str(path)).measure(conversation)
        encoder = limited(template=str(path), max_tokens=whole.length - 1, when_over=("truncate",))
        if trained is None:
            with pytest.raises(SampleRejected, match=r"too_many_tokens.*keeps a target"):
                encoder.measure(conversation)
            continue
        ids, weights = encoder.measure(conversation).expand()
        assert encoder.tokenizer.decode(ids[weights > 0]) == trained * 9 + "<|im_end|>"
