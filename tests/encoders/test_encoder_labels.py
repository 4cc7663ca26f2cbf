"""Labels, loss masks, positions and fingerprints of encoded samples; what the encoder refuses."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from energon_packing.config import EncoderConfig
from energon_packing.config.setting import changing, entries_of, marked
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import SampleRejected
from energon_packing.thd import IGNORE_INDEX

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
IMAGE = Media(kind="image", name="a.png", width=100, height=60)


def talk(*turns: tuple[str, str], media: tuple[Media, ...] = (), tools: Any = None) -> Conversation:
    """The media stand in front of the first turn."""
    parts = tuple(MediaPart(index=index) for index in range(len(media)))
    made = [Turn(role=role, parts=(text,)) for role, text in turns]  # type: ignore[arg-type]
    made[0] = dataclasses.replace(made[0], parts=(*parts, *made[0].parts))
    return Conversation(key="k", turns=tuple(made), media=media, tools=tools)


def encoder_with(processor: Any = "text", **settings: Any) -> ConversationEncoder:
    return ConversationEncoder(EncoderConfig(processor=str(processor_path(processor)), **settings))


def never(name: str) -> bytes:
    raise AssertionError(f"{name} was read for a text sample")


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(lambda text: "<" not in text)


@settings(max_examples=80, deadline=None)
@given(pairs=st.lists(st.tuples(texts, texts.filter(str.strip)), min_size=1, max_size=3))  # others are empty_answer
def test_labels_are_the_next_tokens_of_what_transformers_calls_the_assistants(encoders: Any, pairs: Any) -> None:
    encoder = encoders["text"]
    conversation = talk(*[turn for ask, answer in pairs for turn in (("user", ask), ("assistant", answer))])
    measured = encoder.measure(conversation)
    row = encoder.render(measured, never)
    made = encoder.tokenizer.apply_chat_template(
        conversation.to_messages(), return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = made["input_ids"], made["assistant_masks"]
    assert row["input_ids"].tolist() == ids
    assert measured.length == len(ids)
    expected = [token if trained else IGNORE_INDEX for token, trained in zip(ids[1:], mask[1:], strict=True)]
    assert row["labels"].tolist() == [*expected, IGNORE_INDEX]
    assert row["loss_mask"].tolist() == [*map(float, mask[1:]), 0.0]
    assert row["loss_mask"].sum() == sum(mask[1:])
    assert row["position_ids"].tolist() == list(range(len(ids)))
    assert row["visual_inputs"] == {}


def targets(encoder: ConversationEncoder, conversation: Conversation) -> str:
    row = encoder.render(encoder.measure(conversation), never)
    return encoder.tokenizer.decode(row["labels"][row["labels"] != IGNORE_INDEX])


TWO = talk(("user", "One?"), ("assistant", "First."), ("user", "Two?"), ("assistant", "Second."))


def test_every_assistant_turn_is_a_target_or_only_the_last() -> None:
    assert targets(encoder_with(), TWO) == "First.<|im_end|>Second.<|im_end|>"
    assert targets(encoder_with(train_on="last_assistant"), TWO) == "Second.<|im_end|>"


def test_a_turns_weight_is_the_weight_of_its_tokens_and_of_no_other() -> None:
    encoder = encoder_with()
    turns = tuple(
        dataclasses.replace(turn, loss_weight=weight)
        for turn, weight in zip(TWO.turns, [None, 0.0, None, 0.25], strict=True)
    )
    conversation = dataclasses.replace(TWO, turns=turns)
    row = encoder.render(encoder.measure(conversation), never)
    assert targets(encoder, conversation) == "Second.<|im_end|>"
    learned = row["labels"] != IGNORE_INDEX
    assert set(row["loss_mask"][learned].tolist()) == {0.25}
    assert not row["loss_mask"][~learned].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_word_image_in_a_users_text_stays_text(encoders: Any, family: str) -> None:
    encoder = encoders[family]
    words = "Write <image> and <video> here, then [IMG] and <img src='x'>."
    conversation = talk(("user", words), ("assistant", "<image>"), media=(IMAGE,))
    measured = encoder.measure(conversation)
    assert measured.images == 1
    assert words in encoder.tokenizer.decode(measured.token_ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", ["user", "assistant", "system", "tool", "call", "definition"])
def test_a_token_that_stands_for_media_is_rejected_wherever_text_holds_it(
    encoders: Any, family: str, place: str
) -> None:
    encoder = encoders[family]
    for token in encoder.family.reserved:
        turns = [Turn(role="user", parts=("Hi",)), Turn(role="assistant", parts=("Ho",))]
        tools = None
        if place == "call":
            call = {"type": "function", "function": {"name": "f", "arguments": {"deep": [{token: 1}]}}}
            turns[1] = dataclasses.replace(turns[1], tool_calls=(call,))
        elif place == "definition":
            tools = ({"type": "function", "function": {"name": "f", "description": f"a {token} b"}},)
        else:
            turns.insert(1 if place == "tool" else 0, Turn(role=place, parts=(f"a {token} b",)))  # type: ignore[arg-type]
        with pytest.raises(SampleRejected) as caught:
            encoder.measure(Conversation(key="k", turns=tuple(turns), tools=tools))
        assert caught.value.reason == "reserved_token"


END, MARK = "<|im_end|>", "@@at@mark@"
"""A special token of the tokenizers, and a text of the same length that stands for one in a record."""


def with_end(place: str, end: str) -> Conversation:
    """A conversation with a text at one place."""
    said = f"a {end}\n<|im_start|>system\nb" if end == END else f"a {end}\n{MARK}@@system\nb"
    call = {"type": "function", "function": {"name": "f", "arguments": {"deep": [{f"k {end}": said}]}}}
    tool = {"type": "function", "function": {"name": "f", "description": said, "parameters": {}}}
    turns = (
        Turn(role="system", parts=(said if place == "system" else "Be kind.",)),
        Turn(role="user", parts=(said if place == "user" else "Hi",)),
        Turn(role="assistant", parts=("Ho",), tool_calls=(call,) if place == "call" else ()),
        Turn(role="tool", parts=(said if place == "tool" else "3",)),
        Turn(
            role="assistant",
            parts=(said if place == "assistant" else "Well.",),
            thinking=said if place == "thinking" else None,
        ),
    )
    return Conversation(key="k", turns=turns, tools=(tool,) if place == "definition" else None)


def pieces_of(tokenizer: Any, rendered: str) -> list[int]:
    """Hugging Face, stretch by stretch: the template's special tokens by their number, the record's as text."""
    ids: list[int] = []
    for piece in re.split(r"(<\|im_start\|>|<\|im_end\|>)", rendered):
        if piece in ("<|im_start|>", END):
            ids.append(tokenizer.convert_tokens_to_ids(piece))
        else:
            text = piece.replace(f"{MARK}@@", "<|im_start|>").replace(MARK, END)
            ids += tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return ids


PLACES = ["system", "user", "call", "tool", "assistant", "thinking", "definition"]


@pytest.mark.parametrize("place", PLACES)
def test_a_special_token_in_a_text_of_the_record_is_kept_or_text_or_refused(encoders: Any, place: str) -> None:
    conversation = with_end(place, END)
    tokenizer = encoders["text"].tokenizer
    kept = encoders["text"].measure(conversation)
    rendered = encoders["text"].template.render(conversation).text
    assert kept.token_ids.tolist() == tokenizer(rendered, add_special_tokens=False).input_ids
    encoder = encoder_with(special_tokens_in_text="text")
    measured = encoder.measure(conversation)
    with_marks = encoders["text"].template.render(with_end(place, MARK)).text
    assert measured.token_ids.tolist() == pieces_of(tokenizer, with_marks)
    assert measured.token_ids.tolist() != kept.token_ids.tolist()
    assert tokenizer.decode(measured.token_ids) == rendered
    # The same characters are trained, and each answer ends with the real token.
    ids, weights = measured.expand()
    trained = tokenizer.decode(ids[weights > 0])
    kept_ids, kept_weights = kept.expand()
    assert trained == tokenizer.decode(kept_ids[kept_weights > 0])
    assert trained.startswith("Ho")
    encoder.prepare([conversation])
    assert encoder.measure(conversation).token_ids.tolist() == measured.token_ids.tolist()
    half = measured.length // 2 + 1
    assert len(encoder.split(conversation, measured, lambda tokens, *_: tokens <= half, at="token").pieces) == 2
    with pytest.raises(SampleRejected, match=r"special_token: .*'<\|im_"):
        encoder_with(special_tokens_in_text="refuse").measure(conversation)


@functools.cache
def encoder_with_choice(choice: str) -> ConversationEncoder:
    return encoder_with(special_tokens_in_text=choice)


def test_both_answers_of_a_pair_may_hold_special_tokens(encoders: Any) -> None:
    answers = [(Turn(role="assistant", parts=(f"{word} {END} more",)),) for word in ("Yes", "No")]
    pair = Conversation(key="k", turns=(Turn(role="user", parts=("Hi",)),), chosen=answers[0], rejected=answers[1])
    measured = encoder_with_choice("text").measure_pair(pair)
    number = encoders["text"].tokenizer.convert_tokens_to_ids(END)
    for segment, turns in zip(measured.segments, answers, strict=True):
        ids, weights = segment.expand()
        assert encoders["text"].tokenizer.decode(ids[weights > 0]).rstrip() == f"{turns[0].parts[0]}{END}"
        assert (ids[weights > 0] == number).sum() == 1
    with pytest.raises(SampleRejected, match="special_token"):
        encoder_with_choice("refuse").measure_pair(pair)


def test_a_token_that_stands_for_media_is_text_beside_a_real_image(encoders: Any) -> None:
    encoder = encoder_with("qwen2_5_vl", special_tokens_in_text="text")
    marked = talk(("user", "What does <|image_pad|> mean?"), ("assistant", "An image: <|image_pad|>."), media=(IMAGE,))
    measured = encoder.measure(marked)
    bare = encoders["qwen2_5_vl"].measure(talk(("user", "What?"), ("assistant", "An image."), media=(IMAGE,)))
    assert measured.run_lengths.tolist() == bare.run_lengths.tolist()
    assert (measured.token_ids == encoder.family.placeholder_ids["image"]).sum() == 1
    ids, weights = measured.expand()
    assert encoder.tokenizer.decode(ids[weights > 0]).startswith("An image: <|image_pad|>.")


def test_text_that_is_no_unicode_is_rejected(encoders: Any) -> None:
    for family in ("text", "qwen3_vl"):
        with pytest.raises(SampleRejected) as caught:
            encoders[family].measure(talk(("user", "half a \ud83d pair"), ("assistant", "b")))
        assert caught.value.reason == "bad_text"


@pytest.mark.parametrize("turns", [[("user", "Anyone?")], [("user", "a"), ("system", "b")]])
def test_a_sample_with_nothing_to_learn_is_rejected(encoders: Any, turns: Any) -> None:
    with pytest.raises(SampleRejected) as caught:
        encoders["text"].measure(talk(*turns))
    assert caught.value.reason == "nothing_to_learn"


def test_an_answer_of_media_alone_is_no_target(tmp_path: Path) -> None:
    """The template marks a span, and every token of it stands for media."""
    path = tmp_path / "marked.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% generation %}"
        "{% for part in m.content %}{{ '<|image_pad|>' if part.type == 'image' else '' }}{% endfor %}"
        "{% endgeneration %}{% endif %}{% endfor %}",
        encoding="utf-8",
    )
    turns = (Turn(role="user", parts=("Draw it.",)), Turn(role="assistant", parts=(MediaPart(index=0),)))
    with pytest.raises(SampleRejected) as caught:
        encoder_with("qwen3_vl", chat_template=str(path)).measure(Conversation(key="k", turns=turns, media=(IMAGE,)))
    assert caught.value.reason == "nothing_to_learn"


def test_a_template_that_loses_or_invents_media_is_a_mismatch(tmp_path: Path) -> None:
    path = tmp_path / "lossy.jinja"
    header = "{% for m in messages %}{{ m.role }}: "
    texts = "(m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join)"
    for body in (
        "{{ m.content if m.content is string else " + texts + " }}",
        "{{ m.content }}<|image_pad|><|image_pad|>",
    ):
        path.write_text(header + body + "<|im_end|>\n{% endfor %}", encoding="utf-8")
        encoder = encoder_with("qwen2_5_vl", chat_template=str(path), train_on="all")
        with pytest.raises(SampleRejected) as caught:
            encoder.measure(talk(("user", "What?"), ("assistant", "That."), media=(IMAGE,)))
        assert caught.value.reason == "placeholder_mismatch"


CHANGES: list[dict[str, Any]] = [
    {"min_pixels": 28 * 28 * 5},
    {"max_pixels": 28 * 28 * 50},
    {"video_min_pixels": 28 * 28 * 5},
    {"video_max_pixels": 28 * 28 * 999},
    {"video_fps": 1.5},
    {"video_min_frames": 6},
    {"video_max_frames": 10},
    {"train_on": "all"},
    {"train_on": "last_assistant"},
    {"position_ids": "mrope"},
]


def test_every_setting_that_changes_rows_is_in_the_fingerprint(encoders: Any) -> None:
    """Plans and stored lengths compare this fingerprint alone, so a setting that it lacks would go unseen there."""
    changed = {name for change in CHANGES for name in change}
    assert changed <= set(changing(EncoderConfig, "lengths", "rows"))
    newer = marked(EncoderConfig, "newer")
    entries = {each for name, found in entries_of(EncoderConfig).items() if name not in newer for each in found}
    assert entries <= set(encoders["text"].fingerprint())
    stated = {"tokenizer", "family", "chat_template", "pixels"}
    assert {entry.metadata.get("stated") or "" for entry in dataclasses.fields(EncoderConfig)} == {"", *stated}
    assert stated <= set(encoders["text"].fingerprint())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "=".join(map(str, *change.items())))
def test_whatever_changes_tokens_pixels_or_targets_changes_the_fingerprint(
    encoders: Any, family: str, change: dict[str, Any]
) -> None:
    before, after = encoders[family].fingerprint(), encoder_with(family, **change).fingerprint()
    assert before.keys() <= after.keys()  # a newer setting is there only where it is set
    changed = [name for name in after if before.get(name) != after[name]]
    frames = [name for name in changed if name == "video_frame_limits"]
    assert len(changed) - len(frames) == 1
    assert len(frames) == ("frames" in next(iter(change)))


def test_another_template_tokenizer_or_family_changes_the_fingerprint(encoders: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.jinja"
    path.write_text(encoders["text"].template.source + " ", encoding="utf-8")
    before = encoders["text"].fingerprint()
    after = encoder_with(chat_template=str(path)).fingerprint()
    assert [name for name in before if before[name] != after[name]] == ["chat_template"]
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    tokenizer.add_tokens(["<new>"])
    after = ConversationEncoder(EncoderConfig(), processor=tokenizer).fingerprint()
    assert [name for name in before if before[name] != after[name]] == ["tokenizer"]
    assert len({tuple(encoder.fingerprint().items()) for encoder in encoders.values()}) == 3
