"""Encoders by modality: alone as Energon task encoders, composed under the packing encoder, and one of a user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from manual.blocks import read_page
from megatron.energon import WorkerConfig, get_loader, get_savable_loader, get_train_dataset

from energon_packing import thd
from energon_packing.config import EncoderConfig, PackingConfig
from energon_packing.convert.layout import dataset_entry
from energon_packing.demo import processor_path
from energon_packing.encoders.modality import MixedEncoder, TextEncoder, TextImageEncoder
from energon_packing.energon.loader import build_dataset, build_loader
from energon_packing.energon.sample_task_encoder import (
    MixedTaskEncoder,
    TextImageTaskEncoder,
    TextTaskEncoder,
    TextVideoTaskEncoder,
)
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError
from energon_packing.thd import finished_row

KINDS = {
    TextTaskEncoder: set(),
    TextImageTaskEncoder: {"pixel_values"},
    TextVideoTaskEncoder: {"pixel_values_videos"},
    MixedTaskEncoder: {"pixel_values", "pixel_values_videos"},
}


def encoder_config(**fields):
    return EncoderConfig(processor=str(processor_path("qwen2_5_vl")), **fields)


def batches_of(dataset, task_encoder, *, batch_size=4, workers=0, savable=False):
    data = get_train_dataset(
        dataset_entry(str(dataset)),
        split_part="train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
        batch_size=batch_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=task_encoder,
        repeat=False,
    )
    return (get_savable_loader if savable else get_loader)(data)


@pytest.fixture(scope="module")
def single_rows(run_config_of):
    """Key -> the row of each sample of the split, as the packing encoder makes it without company."""
    rows = {}
    for pack in build_loader(run_config_of(seq_length=8192)):
        rows |= {row["key"]: row for row in thd.unpack(pack.batch)}
    return rows


@pytest.mark.parametrize("task_encoder_class", list(KINDS), ids=lambda cls: cls.__name__)
def test_each_task_encoder_alone_gives_every_sample_of_its_modality_and_ledgers_the_others(
    dataset, train_keys, single_rows, task_encoder_class, tmp_path
):
    task_encoder = task_encoder_class(
        encoder_config(), max_length=8192, multiple=8, drop_budget=1.0, ledger=str(tmp_path)
    )
    emitted, dropped, names = [], {}, set()
    for batch in batches_of(dataset, task_encoder):
        emitted += batch.keys
        dropped |= {entry.key: entry.reason for entry in batch.dropped}
        names |= {name for name in batch.visual_inputs if name.startswith("pixel_values")}
        assert batch.input_ids.shape[1] % 8 == 0
        assert batch.attention_mask.sum(1).tolist() == batch.lengths.tolist()
        for number, key in enumerate(batch.keys):
            length, row = int(batch.lengths[number]), single_rows[key]
            for name in ("input_ids", "labels", "loss_mask", "position_ids"):
                assert torch.equal(getattr(batch, name)[number, :length], row[name].reshape(-1)), (key, name)
            assert not batch.loss_mask[number, length:].any()
            assert (batch.labels[number, length:] == -100).all()
    dropped |= {entry.key: entry.reason for entry in task_encoder._worker_ledger().take_dropped()}
    allowed = KINDS[task_encoder_class]
    expected = [
        key
        for key, row in single_rows.items()
        if {name for name in row.get("visual_inputs", {}) if name.startswith("pixel_values")} <= allowed
    ]
    assert sorted(emitted) == sorted(expected)
    assert names == allowed
    assert sorted([*emitted, *dropped]) == train_keys
    assert set(dropped.values()) <= {"other_modality"}
    assert (tmp_path / "rank0-worker0.jsonl").read_text().count("dropped") == len(dropped)


def test_pixels_of_a_batch_are_those_of_its_samples_in_order(dataset, single_rows):
    batch = next(iter(batches_of(dataset, TextImageTaskEncoder(encoder_config(), max_length=8192, drop_budget=1.0))))
    rows = [finished_row(single_rows[key]) for key in batch.keys]
    expected = [row["visual_inputs"] for row in rows if row.get("visual_inputs")]
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(batch.visual_inputs[name], torch.cat([visual[name] for visual in expected]))


def test_a_longer_sample_is_dropped_or_truncated(dataset):
    found = {}
    for truncate in (False, True):
        task_encoder = TextTaskEncoder(encoder_config(), max_length=128, truncate=truncate, drop_budget=1.0)
        batches = list(batches_of(dataset, task_encoder, batch_size=1))
        assert all(int(batch.lengths[0]) <= 128 for batch in batches)
        found[truncate] = {key for batch in batches for key in batch.keys}
        if not truncate:
            assert "oversize" in {entry.reason for batch in batches for entry in batch.dropped}
    assert found[True] > found[False]


def test_a_spent_drop_budget_stops_the_run(tmp_path, run_config_of, dataset, monkeypatch):
    monkeypatch.setattr("energon_packing.drops.BUDGET_STARTS_AT", 10)
    task_encoder = TextVideoTaskEncoder(encoder_config(), max_length=8192, drop_budget=0.05)
    with pytest.raises(Exception, match="drop_budget"):
        list(batches_of(dataset, task_encoder))


def test_a_loader_of_single_samples_resumes_after_any_batch(dataset):
    def keys(loader):
        return [batch.keys for batch in loader]

    def make():
        task_encoder = TextImageTaskEncoder(encoder_config(), max_length=8192, drop_budget=1.0)
        return batches_of(dataset, task_encoder, batch_size=2, savable=True)

    whole = keys(make())
    for stop in (1, 3):
        loader = make()
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        restored = make()
        restored.restore_state_rank(loader.save_state_rank())
        assert keys(restored) == whole[stop:]


def test_the_configuration_names_a_modality_too(dataset, run_config_of, train_keys):
    loader = build_loader(run_config_of(encoder={"modality": "text"}, drop_budget=1.0))
    packs = list(loader)
    emitted = [key for pack in packs for key in pack.keys]
    reasons = {entry.reason for pack in packs for entry in pack.dropped}
    assert all(not pack.batch.visual_inputs for pack in packs)
    assert reasons == {"other_modality"}
    assert len(emitted) < len(train_keys)


def test_a_modality_that_the_family_lacks_or_that_contradicts_the_encoder_is_refused():
    llava = EncoderConfig(processor=str(processor_path("qwen2_5_vl")), family="text")
    with pytest.raises(ConfigError, match="does not accept images"):
        TextImageEncoder(llava)
    with pytest.raises(ConfigError, match=r"encoder\.modality is 'text'"):
        TextImageEncoder(encoder_config(modality="text"))


def test_the_packing_encoder_composes_encoders_and_the_first_that_accepts_measures(run_config_of, train_keys):
    config = run_config_of(seq_length=8192)
    shared = encoder_config()
    every_turn = TextEncoder(encoder_config(train_on="last_assistant"))
    composed = PackingTaskEncoder([every_turn, MixedEncoder(shared)], config.packing)

    def rows(task_encoder):
        packs = build_loader(config, task_encoder=task_encoder)
        return {row["key"]: row for pack in packs for row in thd.unpack(pack.batch)}

    found = rows(composed)
    assert sorted(found) == train_keys
    mixed = rows(PackingTaskEncoder(shared, config.packing))
    for key, row in found.items():
        if row.get("visual_inputs"):
            assert torch.equal(row["labels"], mixed[key]["labels"])
    text = rows(PackingTaskEncoder(every_turn, PackingConfig(seq_length=8192, window=32, drop_budget=1.0)))
    assert text
    assert all(torch.equal(found[key]["labels"], row["labels"]) for key, row in text.items())
    assert any(not torch.equal(mixed[key]["labels"], row["labels"]) for key, row in text.items())
    fingerprint = composed.fingerprint()
    assert fingerprint["train_on"] == "last_assistant"
    assert fingerprint["train_on of encoder 2"] == "assistant"


def test_encoders_of_one_pack_must_agree_on_the_fields_of_a_row(run_config_of):
    packing = run_config_of().packing
    with pytest.raises(ConfigError, match=r"encoder\.position_ids differs"):
        PackingTaskEncoder([TextEncoder(encoder_config()), MixedEncoder(encoder_config(position_ids="mrope"))], packing)
    with pytest.raises(ConfigError, match="at least one built encoder"):
        PackingTaskEncoder([], packing)


def test_the_own_encoder_of_the_page_runs_under_the_packing_encoder(run_config_of, train_keys):
    """The Python example "your own encoder" of docs/encoders.md, as it stands there."""
    page = read_page(Path(__file__).parents[2] / "docs" / "encoders.md")
    example = next(block.text for block in page.blocks if "SampleEncoder" in block.text)
    names = {}
    exec(compile(example, "docs/encoders.md", "exec"), names)
    config = run_config_of(seq_length=8192)
    task_encoder = PackingTaskEncoder(names["Bytes"](EncoderConfig()), config.packing)
    packs = list(build_loader(config, task_encoder=task_encoder))
    emitted = [key for pack in packs for key in pack.keys]
    dropped = [entry for pack in packs for entry in pack.dropped]
    assert sorted([*emitted, *(entry.key for entry in dropped)]) == train_keys
    assert {entry.reason for entry in dropped} == {"has_media"}
    for pack in packs:
        for row in thd.unpack(pack.batch):
            text = bytes(np.asarray(row["input_ids"], dtype=np.uint8)).decode()
            assert text
            assert row["labels"][:-1].tolist() == list(text.encode())[1:]
    assert build_dataset(config, task_encoder=task_encoder) is not None
