"""Splitting a sample that fits no pack: the pieces side by side are the sample, and no medium is cut."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offline_processors import llava_onevision

from energon_packing.config import EncoderConfig, LimitsConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders import encoder as encoder_module
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.sample_encoder import Measured
from energon_packing.encoders.splitting import MeasuredSplit
from energon_packing.errors import SampleRejected
from energon_packing.packing.constraints import PackLimits, Size

MANY = settings(max_examples=int(os.environ.get("ENERGON_PACKING_EXAMPLES", "40")), deadline=None)
FAMILIES = ("text", "qwen2_5_vl", "qwen3_vl")
WORDS = ("sea", "mountain", "🌞", "über", "tree,", "7", "\n\n", "what?", "naïve", "日本")


def encoder_of(family: str = "qwen2_5_vl", *, ratio: float = 0.0, **config) -> ConversationEncoder:
    limits = LimitsConfig(min_active_ratio=ratio)
    return ConversationEncoder(EncoderConfig(processor=str(processor_path(family)), limits=limits, **config))


@pytest.fixture(scope="module")
def made():
    """Encoders that drop no piece, by family and kind of positions."""
    found = {(family, "auto"): encoder_of(family) for family in FAMILIES}
    found |= {(family, "mrope"): encoder_of(family, position_ids="mrope") for family in FAMILIES[1:]}
    return found


@st.composite
def conversations(draw: st.DrawFn, media: bool = True) -> Conversation:
    """Exchanges of any length, turns with several images and clips, tools between answers."""
    turns: list[Turn] = [Turn(role="system", parts=("Be brief.",))] if draw(st.booleans()) else []
    named: list[Media] = []

    def text(most: int) -> str:
        drawn = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6)
        words = draw(drawn.filter(lambda words: "".join(words).strip()))  # others are empty_answer
        return " ".join(words * draw(st.integers(1, most)))

    for _ in range(draw(st.integers(1, 5))):
        parts: list = []
        for _ in range(draw(st.integers(0, 3)) if media else 0):
            name, width, height = str(len(named)), draw(st.integers(40, 300)), draw(st.integers(40, 300))
            if draw(st.integers(0, 3)):
                medium = Media(kind="image", name=f"{name}.png", width=width, height=height)
            else:
                size = {"width": width, "height": height, "frames": 24, "fps": 8.0, "duration": 3.0}
                medium = Media(kind="video", name=f"{name}.mp4", **size)
            parts.append(MediaPart(index=len(named)))
            named.append(medium)
            if draw(st.booleans()):
                parts.append(text(1))
        turns.append(Turn(role="user", parts=(*parts, text(8))))
        turns.append(Turn(role="assistant", parts=(text(20),)))
    return Conversation(key="k", turns=tuple(turns), media=tuple(named))


def bounded(tokens: int, images: int | None = None, patches: int | None = None):
    limits = PackLimits(tokens=tokens, images=images, patches=patches)
    return lambda tokens, *visual: limits.holds(Size(segment_lengths=(tokens,), images=visual[0], patches=visual[1]))


def whole_of(found: MeasuredSplit) -> list[Measured]:
    assert all(isinstance(piece, Measured) or piece.reason == "too_few_targets" for piece in found.pieces)
    return [piece for piece in found.pieces if isinstance(piece, Measured)]


def pieces_of(encoder, conversation, fits, **options) -> list[Measured]:
    """All pieces, also those without a target, which the validity filter would refuse."""
    passed = encoder_module.enough_targets
    try:
        encoder_module.enough_targets = lambda piece, ratio: piece
        return whole_of(encoder.split(conversation, encoder.measure(conversation), fits, **options))
    finally:
        encoder_module.enough_targets = passed


@given(family=st.sampled_from(FAMILIES), data=st.data())
@MANY
def test_the_pieces_side_by_side_are_the_sample(made, family, data):
    encoder = made[family, "auto"]
    conversation = data.draw(conversations(media=family != "text"))
    whole = encoder.measure(conversation)
    row = data.draw(st.integers(8, whole.length + 5))
    limits = data.draw(st.sampled_from([{}, {"images": 2}, {"patches": 400}]))
    at = data.draw(st.sampled_from(["turn", "token"]))
    try:
        pieces = pieces_of(encoder, conversation, bounded(row, **limits), at=at)
    except SampleRejected as error:
        assert error.reason == "oversize"  # noqa: PT017
        assert whole.media or row < 24, "text can always be split, but between the tokens of one character"
        return
    keys = [f"k#{number}" for number in range(len(pieces))]
    assert [piece.key for piece in pieces] == (keys if len(pieces) > 1 else ["k"])
    ids, weights = zip(*(piece.expand() for piece in pieces), strict=True)
    assert np.array_equal(np.concatenate(ids), whole.expand()[0])
    assert np.array_equal(np.concatenate(weights), whole.expand()[1])
    assert tuple(plan for piece in pieces for plan in piece.plans) == whole.plans
    assert tuple(medium for piece in pieces for medium in piece.media) == whole.media
    assert [piece.length for piece in pieces] == [len(part) for part in ids]
    for piece, tokens in zip(pieces, ids, strict=True):
        assert bounded(row, **limits)(piece.length, piece.images, piece.patches)
        placeholders = np.isin(tokens, list(encoder.family.placeholder_ids.values())).sum()
        assert placeholders == sum(plan.tokens for plan in piece.plans), "a medium was cut"
        # The first token of a piece is no target: nothing stands before it.
        assert piece.targets == int((piece.expand()[1][1:] > 0).sum())


@given(family=st.sampled_from(FAMILIES), data=st.data())
@MANY
def test_at_turns_a_piece_ends_after_the_last_answer_that_fits(made, family, data):
    encoder = made[family, "auto"]
    conversation = data.draw(conversations(media=family != "text"))
    ends = [0]
    for count in range(1, len(conversation.turns) + 1):
        if conversation.turns[count - 1].role == "assistant":
            named = sum(isinstance(part, MediaPart) for turn in conversation.turns[:count] for part in turn.parts)
            start = dataclasses.replace(
                conversation, turns=conversation.turns[:count], media=conversation.media[:named]
            )
            ends.append(encoder.measure(start).length)
    row = data.draw(st.integers(max(np.diff(ends)), ends[-1] + 5), label="a row that holds every exchange")
    pieces = pieces_of(encoder, conversation, bounded(row))
    expected, start = [], 0
    while start < ends[-1]:
        stop = max(end for end in ends if end - start <= row)
        expected.append(stop - start)
        start = stop
    assert [piece.length for piece in pieces] == expected
    assert all(piece.targets for piece in pieces)


@given(family=st.sampled_from(FAMILIES), data=st.data())
@MANY
def test_positions_restart_in_each_piece_or_go_on_as_in_the_sample(made, family, data):
    kind = "auto" if family == "text" else "mrope"
    encoder = made[family, kind]
    conversation = data.draw(conversations(media=family != "text"))
    whole = encoder.measure(conversation)
    row = data.draw(st.integers(whole.length // 3 + 200, whole.length + 200))

    def positions(measured: Measured) -> np.ndarray:
        ids, _ = measured.expand()
        own = encoder.family.positions(ids, measured.plans) if kind == "mrope" else np.arange(len(ids))[None]
        return own + measured.position_start

    going_on = pieces_of(encoder, conversation, bounded(row), positions="continue")
    assert np.array_equal(np.concatenate([positions(piece) for piece in going_on], axis=1), positions(whole))
    anew = pieces_of(encoder, conversation, bounded(row), positions="restart")
    assert [piece.length for piece in anew] == [piece.length for piece in going_on]
    assert all(piece.position_start == 0 for piece in anew)


def talk(*texts: str, **more) -> Conversation:
    turns = [Turn(role="user" if at % 2 == 0 else "assistant", parts=(text,)) for at, text in enumerate(texts)]
    return Conversation(key="k", turns=tuple(turns), **more)


def test_rows_of_pieces_hold_what_the_row_of_the_sample_holds_but_for_the_targets_behind_cuts():
    encoder = encoder_of("text", extra_fields=("advantages", "reward"))
    plain = talk("Why? " * 10, "Because of it. " * 40, "And now?", "Nothing. " * 30)
    values = tuple(map(float, range(encoder_of("text").measure(plain).targets)))
    conversation = dataclasses.replace(plain, extras={"advantages": values, "reward": 2.0})
    whole = encoder.render(encoder.measure(conversation), lambda name: b"")
    pieces = pieces_of(encoder, conversation, bounded(50), at="token", positions="continue")
    rows = [encoder.render(piece, lambda name: b"") for piece in pieces]
    assert len(rows) > 3
    joined = {name: torch.cat([row[name] for row in rows]) for name in ("labels", "loss_mask", "advantages", "reward")}
    for name in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([row[name] for row in rows]), whole[name])
    last = np.cumsum([len(row["labels"]) for row in rows]) - 1
    assert all(joined["labels"][last] == -100), "the last token of a piece would else be trained on another segment"
    others = np.setdiff1d(np.arange(len(joined["labels"])), last)
    for name, values in joined.items():
        assert torch.equal(values[others], whole[name][others]), name


def test_a_medium_that_fits_no_pack_makes_the_sample_oversize(made):
    encoder = made["qwen2_5_vl", "auto"]
    image = Media(kind="image", name="a.png", width=800, height=800)
    turns = (
        Turn(role="user", parts=("Look: ", MediaPart(index=0), "What is it? " * 50)),
        Turn(role="assistant", parts=("A cat.",)),
    )
    conversation = Conversation(key="k", turns=turns, media=(image,))
    measured = encoder.measure(conversation)
    tokens = measured.plans[0].tokens
    # The image's tokens and the two that frame it.
    assert len(encoder.split(conversation, measured, bounded(tokens + 2)).pieces) > 1
    with pytest.raises(SampleRejected, match=f"one part that must stay whole has {tokens + 2} tokens, 1 images") as no:
        encoder.split(conversation, measured, bounded(tokens + 1))
    assert no.value.reason == "oversize"


def test_adjacent_images_may_be_parted_and_keep_their_frames(made):
    encoder = made["qwen2_5_vl", "auto"]
    images = tuple(Media(kind="image", name=f"{at}.png", width=280, height=280) for at in range(4))
    turns = (
        Turn(role="user", parts=(*(MediaPart(index=at) for at in range(4)), "Which one?")),
        Turn(role="assistant", parts=("The first.",)),
    )
    conversation = Conversation(key="k", turns=turns, media=images)
    pieces = pieces_of(encoder, conversation, bounded(10_000, images=1))
    assert [piece.images for piece in pieces] == [1, 1, 1, 1]
    tokens = encoder.tokenizer.convert_tokens_to_ids
    for piece in pieces:
        ids = piece.token_ids.tolist()
        at = ids.index(tokens("<|image_pad|>"))
        assert [ids[at - 1], ids[at + 1]] == [tokens("<|vision_start|>"), tokens("<|vision_end|>")]


def test_a_piece_whose_image_would_become_another_without_the_others_of_its_sample_says_so():
    images = tuple(Media(kind="image", name=f"{at}.png", width=90, height=60) for at in range(3))
    turns = [Turn(role="user", parts=(MediaPart(index=at), "What is it?")) for at in range(3)]
    answer = Turn(role="assistant", parts=("A cat.",))
    conversation = Conversation(key="k", turns=tuple(turn for ask in turns for turn in (ask, answer)), media=images)
    encoder = ConversationEncoder(EncoderConfig(), processor=llava_onevision(28, 9))
    two, alone = encoder.split(conversation, encoder.measure(conversation), bounded(10_000, images=2)).pieces
    assert [plan.tiles for plan in two.plans] == [1, 1]
    assert alone.reason == "oversize"
    assert "llava_onevision" in alone.detail


def test_a_piece_needs_a_share_of_targets_strictly_above_the_ratio_and_so_does_the_sample():
    conversation = talk("A long story. " * 60, "Yes, it is so.", "Why? " * 5, "Because. " * 20)
    plain = encoder_of("text")
    pieces = pieces_of(plain, conversation, bounded(100), at="token")
    shares = [piece.targets / piece.length for piece in pieces]
    assert shares[0] == 0.0
    middle = sorted(shares)[len(shares) // 2]
    for ratio, kept in ((middle, [share > middle for share in shares]), (0.0, [share > 0 for share in shares])):
        encoder = encoder_of("text", ratio=ratio)
        found = encoder.split(conversation, plain.measure(conversation), bounded(100), at="token").pieces
        assert [isinstance(piece, Measured) for piece in found] == kept
        refused = [piece for piece in found if isinstance(piece, SampleRejected)]
        assert refused
        assert all(piece.reason == "too_few_targets" for piece in refused)
    measured = plain.measure(conversation)
    with pytest.raises(SampleRejected, match="too_few_targets"):
        encoder_of("text", ratio=measured.targets / measured.length).measure(conversation)
