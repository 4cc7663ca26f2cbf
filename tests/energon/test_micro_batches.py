"""Micro-batches of single samples: nothing is chosen, nothing is lost, and their statistics are shares of a whole."""

from __future__ import annotations

import json

import pytest
import torch

from energon_packing import thd
from energon_packing.config import PackingConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.energon.loader import build_loader
from energon_packing.energon.sample_task_encoder import UNREAD, MicroBatchTaskEncoder, refuse_unread
from energon_packing.errors import ConfigError


def micro_batches(config, size):
    """The loader of ``config`` whose micro-batches hold ``size`` samples."""
    task_encoder = MicroBatchTaskEncoder(config.encoder, config.packing, config.parallel, micro_batch_size=size)
    return build_loader(config, task_encoder=task_encoder)


@pytest.fixture
def plain(run_config):
    """A configuration that sets nothing of what micro-batches do not read, and keeps the order of the shards."""

    def make(**packing):
        data = {"shuffle_buffer": 1} | packing.pop("data", {})
        return run_config(data=data, window=PackingConfig().window, **packing)

    return make


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_hold_the_next_samples_of_the_stream_in_their_order(plain, train_keys, size):
    batches = list(micro_batches(plain(), size))
    assert {len(batch.keys) for batch in batches[:-1]} == {size}
    assert len(batches[-1].keys) == (len(train_keys) % size or size)
    one_by_one = [key for batch in micro_batches(plain(), 1) for key in batch.keys]
    assert [key for batch in batches for key in batch.keys] == one_by_one
    assert sorted(one_by_one) == train_keys


def test_rows_of_a_micro_batch_are_those_of_packs_and_have_no_padding_between_them(plain, run_config):
    expected = {row["key"]: row for pack in build_loader(run_config()) for row in thd.unpack(pack.batch)}
    for batch in micro_batches(plain(), 4):
        assert batch.batch.total_tokens == batch.batch.real_tokens == sum(batch.batch.sample_lengths)
        for row in thd.unpack(batch.batch):
            for name in ("input_ids", "labels", "loss_mask", "position_ids"):
                assert torch.equal(row[name], expected[row["key"]][name]), (row["key"], name)


def test_a_longer_sample_is_dropped_before_it_takes_a_place_in_a_micro_batch(plain, train_keys):
    batches = list(micro_batches(plain(seq_length=256, drop_budget=1.0), 4))
    dropped = [entry for batch in batches for entry in batch.dropped]
    assert {entry.reason for entry in dropped} == {"oversize"}
    assert max(length for batch in batches for length in batch.batch.sample_lengths) <= 256
    assert {len(batch.keys) for batch in batches[:-1]} == {4}
    assert set(train_keys) >= {key for batch in batches for key in batch.keys} | {entry.key for entry in dropped}


def test_a_pair_is_left_out_by_choice_or_stops_the_run_where_a_sample_is_one_row(tmp_path, plain):
    lines = []
    for number in range(12):
        record = {"id": f"k{number}", "conversations": [{"from": "human", "value": "Why?"}]}
        if number % 3:
            record["conversations"].append({"from": "gpt", "value": "Because of this."})
        else:
            record |= {"chosen": {"from": "gpt", "value": "Because."}, "rejected": {"from": "gpt", "value": "No."}}
        lines.append(json.dumps(record))
    source = tmp_path / "pairs.jsonl"
    source.write_text("\n".join(lines))
    convert(ConvertConfig(sources=(source,), out=tmp_path / "data", split={"train": 1.0}, workers=1))
    data = {"path": str(tmp_path / "data")}
    for pairs, sentence in (("refuse", "has 4 preference pairs among 12 samples, mixed"), ("both", "makes two rows")):
        with pytest.raises(ConfigError, match=sentence):
            list(micro_batches(plain(data=data, pairs=pairs), 2))
    # The run asked for these drops, so even an empty budget bears them.
    batches = list(micro_batches(plain(data=data, pairs="drop", drop_budget=0.0), 2))
    dropped = {entry.key: entry.reason for batch in batches for entry in batch.dropped}
    emitted = [key for batch in batches for key in batch.keys]
    assert sorted(emitted) == sorted(f"k{number}" for number in range(12) if number % 3)
    assert set(dropped.values()) == {"pair"}
    # What follows the last micro-batch has nothing left to travel with.
    assert {"k0", "k3", "k6"} <= set(dropped) <= {"k0", "k3", "k6", "k9"}


OTHER = {
    "window": 8,
    "policy": "best_fit",
    "balance_window": 4,
    "dummy_image": True,
    "max_images_per_pack": 3,
    "max_patches_per_pack": 3,
    "max_segments_per_pack": 3,
    "max_cost_per_pack": 9000.0,
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_setting_that_chooses_what_shares_a_row_is_refused_by_its_name(run_config, name):
    packing = PackingConfig(**{name: OTHER[name]})
    with pytest.raises(ConfigError, match=rf"^packing\.{name} is .*chooses no packs, so nothing reads it"):
        MicroBatchTaskEncoder(run_config().encoder, packing, micro_batch_size=2)
    with pytest.raises(ConfigError, match=rf"^dataset\.packing\.{name} is .* the mode 'padded'"):
        refuse_unread(packing, where="dataset.packing", mode="padded")


def test_a_micro_batch_of_no_sample_is_refused(plain):
    with pytest.raises(ConfigError, match="micro_batch_size is 0"):
        micro_batches(plain(), 0)


def test_a_buffer_to_choose_from_is_refused(plain):
    config = plain()
    task_encoder = MicroBatchTaskEncoder(config.encoder, config.packing, micro_batch_size=2)
    with pytest.raises(ConfigError, match="leave packing_buffer_size out"):
        build_loader(config, task_encoder=task_encoder, packing_buffer_size=16)
