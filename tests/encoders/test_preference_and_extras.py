"""Preference pairs as one sample of two segments, and values of trained tokens from the record to the batch."""

import json

import pytest
import torch
from support.bridge_cpu.tiny_models import hugging_face_config
from transformers import AutoModelForCausalLM

from energon_packing import thd
from energon_packing.config import EncoderConfig, LimitsConfig, PackingConfig, ParallelConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.samples import ConversationSample
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError, SampleRejected

CHOSEN = (Turn(role="assistant", parts=("A careful answer with reasons.",)),)
REJECTED = (Turn(role="assistant", parts=("No.",)),)
BEGINNING = (
    Turn(role="user", parts=("Hello",)),
    Turn(role="assistant", parts=("Hello to you, what is it?",)),
    Turn(role="user", parts=("Why is the sky blue?",)),
)


def pair(key: str = "p", turns=BEGINNING, **fields) -> Conversation:
    return Conversation(key=key, turns=turns, **({"chosen": CHOSEN, "rejected": REJECTED} | fields))


def plain(key: str = "s", words: int = 10, **fields) -> Conversation:
    turns = (Turn(role="user", parts=("Say it.",)), Turn(role="assistant", parts=("and so " * words,)))
    return Conversation(key=key, turns=turns, **fields)


@pytest.fixture
def encoder(encoders):
    def make(family="text", **settings):
        return ConversationEncoder(EncoderConfig(**settings), processor=encoders[family].processor)

    return make


@pytest.fixture
def packer(encoders):
    def make(parallel=None, seq_length=128, oversize="drop", pairs="both", **settings):
        return PackingTaskEncoder(
            EncoderConfig(**settings),
            PackingConfig(seq_length=seq_length, oversize=oversize, pairs=pairs),
            parallel,
            processor=encoders["text"].processor,
        )

    return make


def measured(packer, *conversations):
    samples = [
        ConversationSample(__key__=one.key, __restore_key__=(), __subflavors__={}, __sources__=(), conversation=one)
        for one in conversations
    ]
    return [packer.preencode_sample(sample) for sample in samples]


def packed(packer, samples):
    return packer.pack_selected_samples([packer.postencode_sample(sample) for sample in samples])


def test_a_record_of_a_pair_with_extras_reads_back_unchanged():
    conversation = pair(extras={"ref": {"chosen": (-0.5, -1.0), "rejected": -2.0}, "margin": 0.3})
    assert Conversation.from_record("p", json.loads(json.dumps(conversation.to_record()))) == conversation
    single = plain(extras={"advantages": (0.5, -0.5), "reward": 1})
    assert Conversation.from_record("s", json.loads(json.dumps(single.to_record()))) == single


@pytest.mark.parametrize(
    "change",
    [
        {"rejected": []},
        {"chosen": [{"role": "assistant", "parts": [{"media": 0}]}]},
        {"extras": {"ref": [1.0]}},
        {"extras": {"ref": {"chosen": 1.0}}},
        {"extras": {"ref": {"chosen": 1.0, "rejected": {"chosen": 2}}}},
        {"extras": {"ref": float("nan")}},
        {"extras": {"ref": True}},
        {"extras": {"ref": "high"}},
        {"extras": [1.0]},
        {"extras": {"preference": 1.0}},
        {"chosen": "yes"},
    ],
)
def test_a_damaged_record_of_a_pair_is_rejected(change):
    with pytest.raises(SampleRejected, match=r"bad_record|placeholder_mismatch"):
        Conversation.from_record("p", pair().to_record() | change)


def test_each_answer_is_measured_as_its_own_conversation_and_only_the_answers_train(encoder):
    made = encoder()
    found = made.measure_pair(pair())
    for segment, answer in zip(found.segments, (CHOSEN, REJECTED), strict=True):
        alone = made.measure(Conversation(key="a", turns=(*BEGINNING, *answer)))
        assert segment.token_ids.tolist() == alone.token_ids.tolist()
        ids, weights = segment.expand()
        assert made.tokenizer.decode(ids[weights > 0]) == f"{answer[0].text}<|im_end|>"
    assert found.length == sum(found.segment_lengths)


def test_the_two_answers_of_a_pair_lie_side_by_side_in_one_row(packer):
    made = packer(ParallelConfig(context_parallel=2), seq_length=256, extra_fields=("preference",))
    pack = packed(made, measured(made, plain("a"), pair("p"), plain("b")))
    batch = pack.batch
    assert batch.sample_keys == ("a", "p/chosen", "p/rejected", "b")
    assert pack.keys == ("a", "p", "b")
    assert thd.check_thd(batch, multiple=made.multiple) == []
    signs = [set(row["preference"][row["labels"] != -100].tolist()) for row in thd.unpack(batch)]
    assert signs == [{0.0}, {1.0}, {-1.0}, {0.0}]
    assert not batch.extra["preference"][0][batch.labels[0] == -100].any()


def test_a_chosen_answer_is_trained_as_in_the_pair_and_earlier_answers_are_not(packer, encoder):
    made = packer(pairs="chosen", extra_fields=("preference", "ref"))
    conversation = pair(extras={"ref": {"chosen": -0.5, "rejected": -2.0}})
    pack = packed(made, measured(made, conversation))
    assert pack.keys == pack.batch.sample_keys == ("p",)
    (row,) = thd.unpack(pack.batch)
    whole = encoder(extra_fields=("preference", "ref"))
    expected = whole.render(whole.measure_pair(conversation).chosen, lambda name: b"")
    for name in ("input_ids", "labels", "loss_mask", "preference", "ref"):
        assert torch.equal(row[name], expected[name]), name


def test_packed_losses_of_preferences_and_advantages_are_those_of_each_answer_alone(packer, encoders):
    made = packer(ParallelConfig(context_parallel=2), 512, extra_fields=("preference", "advantages", "old"))
    extras = {"advantages": {"chosen": 0.5, "rejected": -1.5}, "old": -3.0}
    other = (Turn(role="assistant", parts=("Because of its air, they say.",)),)
    pairs = [pair("p", extras=extras), pair("q", chosen=other, extras=extras)]
    batch = packed(made, measured(made, *pairs)).batch
    torch.manual_seed(0)
    vocabulary = max(encoders["text"].tokenizer.get_vocab().values()) + 1
    config = hugging_face_config("text", vocab_size=vocabulary)
    model, reference = (AutoModelForCausalLM.from_config(config).requires_grad_(False) for _ in range(2))

    def log_probs(each, labels, **inputs):
        return -torch.nn.functional.cross_entropy(each(**inputs).logits[0], labels, reduction="none")

    def clipped(values, advantages, old):
        ratio = (values - old).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()

    inputs = batch.to_hugging_face()
    del inputs["labels"]
    now, before = (log_probs(each, batch.labels[0], **inputs) for each in (model, reference))
    gains = (batch.extra["preference"][0] * (now - before)).split(batch.boundaries.diff().tolist())
    assert [key for key in batch.sample_keys if key.endswith("/chosen")] == ["p/chosen", "q/chosen"]
    margins = [gains[at].sum() + gains[at + 1].sum() for at in (0, 2)]
    alone, loss = [], torch.zeros(())
    for row in thd.unpack(batch):
        given = {"labels": row["labels"], "input_ids": row["input_ids"][None]}
        own = [log_probs(each, **given) for each in (model, reference)]
        alone.append((own[0] - own[1]).sum())
        learned = row["labels"] != -100
        advantage = 0.5 if len(alone) % 2 else -1.5
        loss = loss + clipped(own[0][learned], torch.tensor(advantage), torch.tensor(-3.0))
    expected = torch.stack([alone[0] - alone[1], alone[2] - alone[3]])
    torch.testing.assert_close(torch.stack(margins), expected, rtol=0, atol=1e-5)
    assert expected.abs().min() > 1e-2
    ours = clipped(now, batch.extra["advantages"][0], batch.extra["old"][0])
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("multiple", [1, 4, 16])
def test_a_pair_fills_what_its_two_aligned_segments_fill(packer, multiple):
    made = packer(ParallelConfig(context_parallel=max(1, multiple // 2)), seq_length=256)
    more_than_joined = 0
    for words in range(1, 20):
        answer = (Turn(role="assistant", parts=("so " * words,)),)
        (sample,) = measured(made, pair(rejected=answer))
        expected = sum(-(-length // multiple) * multiple for length in sample.measured.segment_lengths)
        more_than_joined += expected > -(-sample.measured.length // multiple) * multiple
        assert made.limits.aligned(sample.measured) == expected
        assert packed(made, [sample]).occupied == expected
    assert bool(more_than_joined) == (multiple > 1)


@pytest.mark.parametrize("oversize", ["drop", "truncate"])
def test_a_pair_of_which_only_one_answer_fits_is_dropped_whole(packer, oversize):
    (sample,) = measured(packer(), pair())
    room = max(sample.measured.segment_lengths)
    (refused,) = measured(packer(seq_length=room, oversize=oversize), pair())
    assert refused.measured is None
    assert refused.problem.reason == "oversize"


def test_limits_hold_for_both_answers_together_and_resize_both_alike(encoder, encoders):
    media = (Media(kind="image", name="a.png", width=700, height=700),)
    turns = (Turn(role="user", parts=(MediaPart(index=0), "What is it?")),)
    conversation = pair(turns=turns, media=media)
    limits = LimitsConfig(max_visual_tokens=300, when_over=("truncate", "resize"), min_active_ratio=0.0)
    found = encoder("qwen2_5_vl", limits=limits).measure_pair(conversation)
    assert found.chosen.plans == found.rejected.plans
    assert sum(plan.tokens for plan in found.plans) <= 300
    assert [how for how, _ in found.changes] == ["resized"]
    with pytest.raises(SampleRejected, match="too_many_visual_tokens"):
        encoder("qwen2_5_vl", limits=LimitsConfig(max_visual_tokens=300)).measure_pair(conversation)


def test_a_value_of_each_target_stands_where_its_label_stands(encoder):
    made = encoder(extra_fields=("advantages", "reward"))
    count = encoder().measure(plain()).targets
    values = tuple(0.25 * at - 1 for at in range(count))
    row = made.render(made.measure(plain(extras={"advantages": values, "reward": 2, "unused": 5.0})), lambda name: b"")
    learned = row["labels"] != -100
    assert row["advantages"][learned].tolist() == list(values)
    assert row["reward"][learned].tolist() == [2.0] * count
    assert not row["advantages"][~learned].any()
    assert "unused" not in row


def test_a_missing_or_miscounted_value_rejects_the_sample_by_name(encoder):
    made = encoder(extra_fields=("advantages",))
    with pytest.raises(SampleRejected, match="missing_extra"):
        made.measure(plain())
    with pytest.raises(SampleRejected, match="extra_mismatch: extras 'advantages' has 2 numbers"):
        made.measure(plain(extras={"advantages": (1.0, 2.0)}))


def test_extra_fields_are_named_once_and_guard_a_resume(encoder):
    with pytest.raises(ConfigError, match="each field once"):
        EncoderConfig(extra_fields=("a", "a"))
    assert encoder(extra_fields=("a",)).fingerprint()["extra_fields"] != encoder().fingerprint()["extra_fields"]
