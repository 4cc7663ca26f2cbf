"""Packs without media get an image of weight zero: every micro-step runs the vision tower, and nothing else changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from energon_packing import thd
from energon_packing.config import ParallelConfig
from energon_packing.energon.loader import build_loader, build_task_encoder
from energon_packing.errors import ConfigError

SEGMENTS = {"max_segments_per_pack": 1}  # text samples are alone then, in packs without media


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("parallel", [{}, {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True}])
@pytest.mark.parametrize("width", [False, True])
def test_every_pack_has_media_and_keeps_every_invariant(run_config, family, parallel, width):
    config = run_config(family=family, dummy_image=True, pad_to_max_length=width, **SEGMENTS)
    config = dataclasses.replace(config, parallel=ParallelConfig(**parallel))
    plain = dataclasses.replace(config, packing=dataclasses.replace(config.packing, dummy_image=False))
    packs, without = list(build_loader(config)), list(build_loader(plain))
    assert {key for pack in packs for key in pack.batch.sample_keys} <= {
        key for pack in without for key in pack.batch.sample_keys
    }
    for pack in packs:
        assert thd.check_thd(pack.batch, multiple=config.parallel.multiple) == []
        assert pack.batch.visual_inputs
        assert pack.batch.total_tokens <= 4096
    added = [pack for pack in packs if pack.batch.fillers]
    assert 0 < len(added) < len(packs)
    assert any(not pack.batch.visual_inputs for pack in without)


def test_the_samples_of_a_pack_are_those_that_it_has_without_the_dummy(run_config):
    plain = {pack.batch.sample_keys: pack for pack in build_loader(run_config(**SEGMENTS))}
    for pack in build_loader(run_config(dummy_image=True, **SEGMENTS)):
        other = plain[pack.batch.sample_keys]
        assert float(pack.batch.loss_mask.sum()) == float(other.batch.loss_mask.sum())
        assert pack.batch.num_samples == other.batch.num_samples
        assert pack.batch.fillers == (other.batch.visual_inputs is None)
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
    from energon_packing.errors import SampleRejected

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
