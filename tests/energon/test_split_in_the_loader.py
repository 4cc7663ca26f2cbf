"""Oversize samples that are split, through Energon: every piece once, exact resume, ledger, disjoint buffers."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict

import pytest
import torch

from energon_packing import thd
from energon_packing.config import EncoderConfig, PackingConfig, ParallelConfig
from energon_packing.conversation import Conversation, Turn
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.energon.samples import ConversationSample
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.energon.window import piece_of

ROW = 192
"""So short that many demo conversations are split."""


@pytest.fixture
def split_config(run_config):
    """The demo's conversations in rows that hold few of them whole; no piece is refused for its targets."""

    def make(*, data=None, **packing):
        small = {"min_pixels": 784, "max_pixels": 3136, "video_min_pixels": 784, "video_max_pixels": 3136}
        encoder = {"limits": {"min_active_ratio": 0.0}, **small}
        config = run_config(
            data=data,
            **({"seq_length": ROW, "oversize": "split", "drop_budget": 1.0, "window": 16} | packing),
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


@pytest.mark.parametrize("buffer", [None, 16])
@pytest.mark.parametrize("workers", [0, 2])
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
        assert pack.batch.total_tokens <= ROW
        assert thd.check_thd(pack.batch) == []
        assert list(pack.keys) == list(pack.batch.sample_keys)


@pytest.mark.parametrize(("workers", "balance_window", "positions"), [(0, 1, "restart"), (1, 3, "continue")])
def test_a_state_saved_between_the_pieces_of_a_sample_continues_with_the_next_piece(
    split_config, workers, balance_window, positions
):
    config = split_config(
        data={"workers": workers, "repeat": True}, balance_window=balance_window, window=4, split_positions=positions
    )
    loader = build_loader(config)
    reference, states = [], []
    for pack in loader:
        reference.append(pack)
        states.append(loader.save_state())
        if len(reference) == 14:
            break
    assert any("#" in key for pack in reference for key in pack.keys)
    for done in range(1, 12, 1 if workers == 0 else 4):
        restored = build_loader(config)
        restored.restore_state(states[done - 1])
        for offset, pack in enumerate(restored):
            expected = reference[done + offset]
            assert pack.keys == expected.keys
            assert torch.equal(pack.batch.tokens, expected.batch.tokens)
            assert torch.equal(pack.batch.position_ids, expected.batch.position_ids)
            assert thd.check_thd(pack.batch) == []
            if offset == 1:
                break


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
        assert pack.batch.total_tokens <= ROW
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
