"""Rows of packs: visible padding, dummy images, pieces of split samples, preference pairs."""

import dataclasses
import json
from collections import defaultdict

import pytest
import torch
from support.offline_processors import gemma3
from support.p2p_cut import infers_padding

from energon_packing import thd
from energon_packing.config import EncoderConfig, LimitsConfig, PackingConfig, ParallelConfig
from energon_packing.conversation import Conversation, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.loader import build_dataset, build_loader, build_task_encoder
from energon_packing.energon.sample_task_encoder import MicroBatchTaskEncoder
from energon_packing.energon.samples import ConversationSample
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.energon.window import piece_of
from energon_packing.errors import ConfigError, SampleRejected

MULTIPLE = 64
"""Of 32 context-parallel ranks, so that rows of a few hundred tokens are few units long and often exactly full."""
ROW = 1024


@pytest.fixture
def aligned_config(run_config):
    """The demo's conversations in short rows of coarse alignment."""

    def make(*, data=None, encoder=None, multiple=MULTIPLE, **packing):
        small = {"min_pixels": 784, "max_pixels": 3136, "video_min_pixels": 784, "video_max_pixels": 3136}
        packing = {"seq_length": ROW, "drop_budget": 1.0, "window": 16, "padding": "between"} | packing
        config = run_config(data=data, encoder=small | (encoder or {}), **packing)
        return dataclasses.replace(config, parallel=ParallelConfig(context_parallel=multiple // 2))

    return make


def assert_visible(pack, row=ROW, multiple=MULTIPLE):
    batch = pack.batch
    assert thd.check_thd(batch, multiple=multiple) == []
    assert batch.total_tokens <= row
    has_padding = any(length % multiple for length in batch.sample_lengths)
    for release in ("2.9", "2.16", "2.18", "main"):
        assert infers_padding(batch.cu_seqlens, batch.cu_seqlens_padded, release) is has_padding


@pytest.mark.parametrize(
    ("packing", "buffer"),
    [
        ({}, None),
        ({"pad_to_max_length": True, "dummy_image": True}, None),
        ({"oversize": "truncate", "policy": "best_fit"}, None),
        ({}, 16),
    ],
)
def test_every_row_of_the_loader_shows_its_padding_and_none_exceeds_the_row(aligned_config, tmp_path, packing, buffer):
    rows = {"ledger": str(tmp_path / "ledger")} if buffer is None else {}
    multiple = MULTIPLE if packing else 8  # one sample in eight has no padding, so last samples change places
    packs = list(build_loader(aligned_config(multiple=multiple, **packing, **rows), packing_buffer_size=buffer))
    assert len(packs) > 10
    for pack in packs:
        assert_visible(pack, multiple=multiple)
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
        assert changed or packing
        written = {}
        for file in (tmp_path / "ledger").glob("*.jsonl"):
            for entry in map(json.loads, file.read_text().splitlines()):
                if entry.get("keys"):
                    written[entry["pack"]] = entry["keys"]
        assert [written[pack.index] for pack in packs] == [list(pack.keys) for pack in packs]


def test_a_pack_made_again_from_its_restore_key_has_the_order_of_the_first(aligned_config):
    dataset = build_dataset(aligned_config(multiple=8))
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


SEGMENTS = {"max_segments_per_pack": 1}  # text samples are alone then, in packs without media


def test_the_samples_of_a_pack_are_those_that_it_has_without_the_dummy(run_config):
    plain = {pack.batch.sample_keys: pack for pack in build_loader(run_config(**SEGMENTS))}
    for pack in build_loader(run_config(dummy_image=True, **SEGMENTS)):
        other = plain[pack.batch.sample_keys]
        assert float(pack.batch.loss_mask.sum()) == float(other.batch.loss_mask.sum())
        assert pack.batch.num_samples == other.batch.num_samples
        assert pack.batch.fillers == (other.batch.visual_inputs is None)
        assert pack.batch.visual_inputs
        assert thd.check_thd(pack.batch) == []
        for row, expected in zip(thd.unpack(pack.batch), thd.unpack(other.batch), strict=True):
            assert row.keys() == expected.keys()
            for name in ("input_ids", "labels", "loss_mask", "position_ids"):
                assert torch.equal(row[name], expected[name])
        if pack.batch.fillers:
            start = int(pack.batch.boundaries[pack.batch.num_samples])
            assert pack.batch.padding_mask[0, start:].all()
            assert not pack.batch.padding_mask[0, :start].any()
            assert (pack.batch.labels[0, start:] == thd.IGNORE_INDEX).all()
            assert not pack.batch.loss_mask[0, start:].any()


def test_a_pack_that_loses_its_only_image_to_a_decoder_gets_the_dummy(run_config, monkeypatch):
    config = run_config(dummy_image=True, drop_budget=1.0)
    encoder = build_task_encoder(config)
    render = encoder.encoder.render

    def failing(measured, read):
        if measured.plans:
            raise SampleRejected("corrupt_media", "on purpose")
        return render(measured, read)

    monkeypatch.setattr(encoder.encoder, "render", failing)
    packs = list(build_loader(config, task_encoder=encoder))
    assert packs
    assert all(pack.batch.fillers == 1 and pack.batch.visual_inputs for pack in packs)


def test_a_padding_pack_has_the_dummy_too(run_config):
    pack = build_task_encoder(run_config(dummy_image=True)).padding_pack()
    assert thd.check_thd(pack.batch) == []
    assert pack.batch.visual_inputs
    assert pack.batch.num_samples == 0
    assert pack.batch.padding_mask.all()


def test_rows_that_cannot_hold_the_dummy_are_refused_in_a_sentence(run_config):
    with pytest.raises(ConfigError, match=r"packing\.dummy_image takes \d+ tokens"):
        build_task_encoder(run_config(dummy_image=True, seq_length=8))


ROW_split = 192
"""So short that many demo conversations are split."""


@pytest.fixture
def split_config(run_config):
    """The demo's conversations in rows that hold few of them whole; no piece is refused for its targets."""

    def make(*, data=None, **packing):
        small = {"min_pixels": 784, "max_pixels": 3136, "video_min_pixels": 784, "video_max_pixels": 3136}
        encoder = {"limits": {"min_active_ratio": 0.0}, **small}
        config = run_config(
            data=data,
            **({"seq_length": ROW_split, "oversize": "split", "drop_budget": 1.0, "window": 16} | packing),
        )
        limits = dataclasses.replace(config.encoder.limits, **encoder.pop("limits"))
        return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, limits=limits, **encoder))

    return make


def rows_by_key(packs):
    rows = {}
    for pack in packs:
        for row in thd.unpack(pack.batch):
            assert row["key"] not in rows
            rows[row["key"]] = row
    return rows


@pytest.mark.parametrize(("workers", "buffer"), [(1, None)])
def test_every_piece_is_emitted_or_ledgered_once_and_the_pieces_are_the_sample(split_config, workers, buffer):
    whole = rows_by_key(build_loader(split_config(data={"workers": 0}, seq_length=8192)))
    packs = list(build_loader(split_config(data={"workers": workers}), packing_buffer_size=buffer))
    rows = rows_by_key(packs)
    dropped = {entry.key: entry for pack in packs for entry in pack.dropped}
    pieces = defaultdict(dict)
    for key in rows:
        source, _, number = key.partition("#")
        pieces[source][int(number or 0)] = rows[key]
    refused = {key.partition("#")[0] for key in dropped}
    assert sum(len(found) > 2 for found in pieces.values()) > 10, "the data are too short for this test"
    for key, row in whole.items():
        if key in refused:  # a piece without a target, or a medium larger than the row
            continue
        found = [pieces[key][number] for number in range(len(pieces[key]))]
        assert torch.equal(torch.cat([piece["input_ids"] for piece in found]), row["input_ids"])
    missing = set(whole) - set(pieces) - refused
    # What is refused after the last pack has no pack to travel with; the ledger's file has it.
    assert len(missing) <= max(workers, 1)
    for pack in packs:
        assert pack.batch.total_tokens <= ROW_split
        assert thd.check_thd(pack.batch) == []
        assert list(pack.keys) == list(pack.batch.sample_keys)


@pytest.mark.parametrize(("workers", "balance_window", "positions"), [(0, 1, "restart"), (1, 3, "continue")])
def test_a_state_saved_between_the_pieces_of_a_sample_continues_with_the_next_piece(
    split_config, continues, workers, balance_window, positions
):
    data = {"workers": workers, "repeat": True}
    config = split_config(data=data, balance_window=balance_window, window=4, split_positions=positions)
    packs, _ = continues(lambda: build_loader(config), packs=10, at=(1, 4, 7) if workers == 0 else (3,))
    assert any("#" in key for keys, *_ in packs for key in keys)


def test_pieces_fill_packs_with_other_samples_within_every_limit_and_alignment(split_config):
    config = dataclasses.replace(
        split_config(max_images_per_pack=2, max_patches_per_pack=64, dummy_image=True),
        parallel=ParallelConfig(tensor_parallel=2, context_parallel=2, sequence_parallel=True),
    )
    multiple = config.parallel.multiple
    packs = list(build_loader(config))
    assert multiple == 4
    assert any("#" in key for pack in packs for key in pack.keys)
    for pack in packs:
        assert pack.batch.total_tokens <= ROW_split
        assert thd.check_thd(pack.batch, multiple=multiple) == []
        visual = pack.batch.visual_inputs or {}
        assert sum(len(visual[name]) for name in visual if name.endswith("grid_thw")) <= 2
        assert sum(len(visual[name]) for name in visual if name.startswith("pixel_values")) <= 64


def test_the_ledger_says_of_each_piece_what_part_it_is(split_config, tmp_path):
    list(build_loader(split_config(ledger=str(tmp_path))))
    entries = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    changed = {entry["changed"]: entry for entry in entries if "changed" in entry}
    emitted = [key for entry in entries if "pack" in entry for key in entry["keys"]]
    assert {key for key in emitted if "#" in key} == set(changed)
    assert all(entry["how"] == "split" for entry in changed.values())


def sample(conversation: Conversation) -> ConversationSample:
    base = {"__key__": conversation.key, "__restore_key__": (), "__subflavors__": {}, "__sources__": ()}
    return ConversationSample(**base, conversation=conversation)


def task_encoder(**packing) -> PackingTaskEncoder:
    config = EncoderConfig(processor=str(processor_path("text")))
    return PackingTaskEncoder(config, PackingConfig(seq_length=128, **packing))


def test_a_preference_pair_is_never_split():
    answer = (Turn(role="assistant", parts=("Because of this. " * 20,)),)
    pair = Conversation(key="p", turns=(Turn(role="user", parts=("Why?",)),), chosen=answer, rejected=answer)
    found = task_encoder(oversize="split", pairs="both").preencode_sample(sample(pair))
    assert found.split is None
    assert found.problem is not None
    assert found.problem.reason == "oversize"


def test_a_sample_that_fits_stays_whole_and_a_piece_keeps_the_key_of_its_source():
    made = task_encoder(oversize="split")
    turns = (Turn(role="user", parts=("Why?",)), Turn(role="assistant", parts=("So. " * 200,)))
    short = made.preencode_sample(
        sample(Conversation(key="s", turns=(turns[0], Turn(role="assistant", parts=("So.",)))))
    )
    assert short.split is None
    assert short.measured is not None
    long = made.preencode_sample(sample(Conversation(key="k", turns=turns)))
    assert long.measured is None
    assert long.split is not None
    assert [piece_of(long, number).__key__ for number in range(2)] == ["k#0", "k#1"]
    dropped = task_encoder().preencode_sample(sample(Conversation(key="k", turns=turns)))
    assert dropped.split is None
    assert dropped.problem.reason == "oversize"


def test_padding_ends_its_sample_unless_between_is_asked_for(aligned_config):
    real, between = (list(build_loader(aligned_config(padding=padding))) for padding in ("auto", "between"))
    assert any(pack.batch.real_tokens < pack.batch.total_tokens for pack in real)
    for ours, theirs in zip(real, between, strict=True):
        assert thd.check_thd(ours.batch, multiple=MULTIPLE) == []
        assert ours.batch.cu_seqlens_padded is None
        assert torch.equal(ours.batch.cu_seqlens, theirs.batch.boundaries)
        for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask"):
            assert torch.equal(getattr(ours.batch, name), getattr(theirs.batch, name)), name


def test_images_that_see_both_ways_have_padding_between_samples():
    encoder, parallel = EncoderConfig(family="gemma3"), ParallelConfig(context_parallel=2)
    packing = PackingConfig(seq_length=ROW)
    task = PackingTaskEncoder(encoder, packing, parallel, processor=gemma3())
    row = {"input_ids": torch.arange(5), "labels": torch.full((5,), -100), "loss_mask": torch.zeros(5)}
    batch = thd.assemble([row | {"position_ids": torch.arange(5)}] * 2, multiple=4)
    assert task.with_boundaries_of_run(batch).pad_between_seqs
    with pytest.raises(ConfigError, match="both directions"):
        PackingTaskEncoder(encoder, dataclasses.replace(packing, padding="real"), parallel, processor=gemma3())
