"""Rows that show their padding, from the loader: order, keys, ledger, capacity, resume, and every kind of pack."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from bench.p2p_cut import infers_padding

from energon_packing import thd
from energon_packing.config import EncoderConfig, LimitsConfig, PackingConfig, ParallelConfig
from energon_packing.conversation import Conversation, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.loader import build_dataset, build_loader
from energon_packing.energon.sample_task_encoder import MicroBatchTaskEncoder
from energon_packing.energon.samples import ConversationSample
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError, SampleRejected

MULTIPLE = 64
"""Of 32 context-parallel ranks, so that rows of a few hundred tokens are few units long and often exactly full."""
ROW = 1024


@pytest.fixture
def aligned_config(run_config):
    """The demo's conversations in short rows of coarse alignment."""

    def make(*, data=None, encoder=None, **packing):
        small = {"min_pixels": 784, "max_pixels": 3136, "video_min_pixels": 784, "video_max_pixels": 3136}
        packing = {"seq_length": ROW, "drop_budget": 1.0, "window": 16} | packing
        config = run_config(data=data, encoder=small | (encoder or {}), **packing)
        return dataclasses.replace(config, parallel=ParallelConfig(context_parallel=MULTIPLE // 2))

    return make


def assert_visible(pack, row=ROW):
    batch = pack.batch
    assert thd.check_thd(batch, multiple=MULTIPLE) == []
    assert batch.total_tokens <= row
    has_padding = any(length % MULTIPLE for length in batch.sample_lengths)
    for release in ("2.9", "2.16", "2.18", "main"):
        assert infers_padding(batch.cu_seqlens, batch.cu_seqlens_padded, release) is has_padding


@pytest.mark.parametrize(
    "packing",
    [{}, {"pad_to_max_length": True}, {"dummy_image": True}, {"oversize": "split"}, {"oversize": "truncate"},
     {"policy": "balanced"}],
    ids=lambda packing: next(iter(packing), "plain"),
)  # fmt: skip
@pytest.mark.parametrize("buffer", [None, 16])
def test_every_row_of_the_loader_shows_its_padding_and_none_exceeds_the_row(aligned_config, tmp_path, packing, buffer):
    if buffer and "policy" in packing:
        pytest.skip("Energon's buffers have a policy of their own")
    rows = {"ledger": str(tmp_path / "ledger")} if buffer is None else {}
    packs = list(build_loader(aligned_config(**packing, **rows), packing_buffer_size=buffer))
    assert len(packs) > 10
    for pack in packs:
        assert_visible(pack)
        assert pack.batch.sample_keys == pack.keys
        if packing.get("pad_to_max_length"):
            assert pack.batch.total_tokens == ROW
        if len(pack.keys) > 1 and not pack.batch.fillers and "pad_to_max_length" not in packing:
            assert pack.batch.total_tokens == pack.occupied  # a masked segment is for samples that are alone
        if pack.batch.fillers:
            real, physical = pack.batch.cu_seqlens.diff(), pack.batch.cu_seqlens_padded.diff()
            assert torch.equal(real[len(pack.keys) :], physical[len(pack.keys) :])
    if buffer is None:
        # The oldest comes first, unless the last two had to change places.
        changed = [pack for pack in packs if list(pack.delays) != sorted(pack.delays, reverse=True)]
        assert changed
        written = {}
        for file in (tmp_path / "ledger").glob("*.jsonl"):
            for entry in map(json.loads, file.read_text().splitlines()):
                if entry.get("keys"):
                    written[entry["pack"]] = entry["keys"]
        assert [written[pack.index] for pack in packs] == [list(pack.keys) for pack in packs]


def test_a_pack_made_again_from_its_restore_key_has_the_order_of_the_first(aligned_config):
    dataset = build_dataset(aligned_config())
    config = dataset.worker_config
    config.worker_activate(0)
    try:
        packs = list(dataset)
        moved = [pack for pack in packs if list(pack.delays) != sorted(pack.delays, reverse=True)]
        assert moved
        for pack in moved:
            again = dataset.restore_sample(pack.__restore_key__)
            assert (again.keys, again.__restore_key__) == (pack.keys, pack.__restore_key__)
            assert again.batch.sample_keys == pack.batch.sample_keys
            assert torch.equal(again.batch.tokens, pack.batch.tokens)
            assert torch.equal(again.batch.cu_seqlens, pack.batch.cu_seqlens)
    finally:
        config.worker_deactivate()


def test_a_member_that_fails_leaves_a_row_that_still_shows_its_padding(aligned_config, monkeypatch):
    plan = list(build_loader(aligned_config()))
    # Of every pack the sample whose padding shows for the others, or any.
    failing = {pack.keys[0] for pack in plan if len(pack.keys) > 1} | {pack.keys[-1] for pack in plan[::2]}
    render = ConversationEncoder.render

    def fails(self, measured, read):
        if measured.key in failing:
            raise SampleRejected("corrupt_media", "cannot be decoded")
        return render(self, measured, read)

    monkeypatch.setattr(ConversationEncoder, "render", fails)
    for buffer in (None, 16):
        packs = list(build_loader(aligned_config(), packing_buffer_size=buffer))
        assert {key for pack in packs for key in pack.keys}.isdisjoint(failing)
        assert len(packs) > 5
        for pack in packs:
            assert_visible(pack)


def text_of(encoder, tokens):
    """A conversation of exactly so many tokens."""
    words = tokens
    while True:
        turns = (Turn(role="user", parts=("a",)), Turn(role="assistant", parts=(" a" * words,)))
        conversation = Conversation(key=f"t{tokens}", turns=turns)
        length = encoder.measure(conversation).length
        if length == tokens:
            return conversation
        words += tokens - length


@pytest.fixture(scope="module")
def text_config():
    return EncoderConfig(processor=str(processor_path("qwen2_5_vl")))


def measured(task_encoder, conversation):
    sample = ConversationSample(
        __key__=conversation.key, __restore_key__=(), __subflavors__={}, conversation=conversation
    )
    return task_encoder.preencode_sample(sample)


def test_a_sample_that_fills_its_row_but_for_the_masked_segment_is_too_long(text_config):
    parallel = ParallelConfig(context_parallel=4)  # multiple 8

    def encoder_of(**packing):
        return PackingTaskEncoder(text_config, PackingConfig(**({"seq_length": 256} | packing)), parallel)

    encoder = encoder_of(oversize="drop")
    for tokens, fits in ((256, True), (255, False), (249, False), (248, True), (247, True), (257, False)):
        found = measured(encoder, text_of(encoder.encoder, tokens))
        assert (found.problem is None) == fits, tokens
        if fits:
            pack = encoder.pack_selected_samples([encoder.postencode_sample(found)])
            assert pack.batch.total_tokens <= 256
            assert thd.check_thd(pack.batch, multiple=8) == []
    detail = measured(encoder, text_of(encoder.encoder, 255)).problem.detail
    assert detail == "255 tokens, 256 aligned and 8 for a masked segment after it; a row holds packing.seq_length=256"
    with pytest.raises(ConfigError, match="8 for a masked segment after it"):
        raise measured(encoder_of(oversize="raise"), text_of(encoder.encoder, 255)).problem.fatal

    pieces = measured(encoder_of(oversize="split", split_at="token"), text_of(encoder.encoder, 255)).split.pieces
    assert len(pieces) > 1
    assert all(-(-piece.length // 8) * 8 + 8 <= 256 for piece in pieces)

    wide = encoder_of(seq_length=264, oversize="drop")
    assert measured(wide, text_of(encoder.encoder, 255)).problem is None


def test_a_sample_that_is_made_to_fit_its_row_leaves_room_for_the_masked_segment(text_config):
    # Three answers of 80 tokens and more; whatever fits is a row's length but for a few tokens.
    parallel = ParallelConfig(context_parallel=4)  # multiple 8

    def turns(last):
        answers = (" a" * 100, " a" * last, " a" * 300)
        said = [turn for answer in answers for turn in (("user", "b"), ("assistant", answer))]
        return Conversation(key=f"t{last}", turns=tuple(Turn(role=role, parts=(text,)) for role, text in said))

    limited = dataclasses.replace(text_config, limits=LimitsConfig(max_tokens=256, when_over=("truncate",)))
    for config, oversize in ((text_config, "truncate"), (limited, "drop")):
        encoder = PackingTaskEncoder(config, PackingConfig(seq_length=256, oversize=oversize), parallel)
        lengths = set()
        for last in range(80, 140):
            found = measured(encoder, turns(last))
            assert found.problem is None
            pack = encoder.pack_selected_samples([encoder.postencode_sample(found)])
            assert pack.batch.total_tokens <= 256
            assert thd.check_thd(pack.batch, multiple=8) == []
            lengths.add(found.measured.length)
        assert lengths & set(range(241, 249))  # close to the limit
        assert not lengths & set(range(249, 256))
        assert 256 in lengths  # wholly aligned: it fills the row


def test_micro_batches_for_bridges_own_packer_need_no_room(text_config):
    packing = PackingConfig(seq_length=256, oversize="drop")
    encoder = MicroBatchTaskEncoder(text_config, packing, ParallelConfig(context_parallel=4), micro_batch_size=2)
    assert measured(encoder, text_of(encoder.encoder, 255)).problem is None
    assert "padding" not in encoder.fingerprint()
