"""``encoder.pixels``: what packs carry differs, what the model gets does not."""

from __future__ import annotations

import pytest
import torch

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.loader import build_loader

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pixels")
    source = make_data(folder / "made", conversations=40, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "data", workers=0))
    return folder / "data"


def packs(data, family, pixels, workers):
    config = RunConfig(
        encoder=EncoderConfig(processor=str(processor_path(family)), pixels=pixels),
        packing=PackingConfig(seq_length=2048, window=16, oversize="drop", drop_budget=1.0),
        data=DataConfig(path=str(data), workers=workers, repeat=False, shuffle_buffer=1),
    )
    return [pack.batch for pack in build_loader(config)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("workers", [0, 2])
def test_bytes_become_the_floats_that_workers_would_make(data, family, workers):
    carried, made = (packs(data, family, pixels, workers) for pixels in ("bytes", "float32"))
    assert [batch.sample_keys for batch in carried] == [batch.sample_keys for batch in made]
    names = set()
    for ours, expected in zip(carried, made, strict=True):
        assert not expected.pixel_forms
        done = ours.finished().visual_inputs or {}
        assert done.keys() == (expected.visual_inputs or {}).keys()
        for name, tensor in done.items():
            assert tensor.dtype == expected.visual_inputs[name].dtype
            assert torch.equal(tensor, expected.visual_inputs[name]), name
        for name in ours.pixel_forms:
            names.add(name)
            share = expected.visual_inputs[name].nbytes // ours.visual_inputs[name].nbytes
            assert share == (8 if name == "pixel_values" else 4)  # an image of Qwen is carried once, not twice
    assert names == {"pixel_values", "pixel_values_videos"}


def test_bfloat16_is_the_rounded_float(data):
    rounded, made = (packs(data, "qwen2_5_vl", pixels, 0) for pixels in ("bfloat16", "float32"))
    found = 0
    for ours, expected in zip(rounded, made, strict=True):
        for name, tensor in (expected.visual_inputs or {}).items():
            if name.startswith("pixel_values"):
                assert torch.equal(ours.visual_inputs[name], tensor.bfloat16())
                found += 1
    assert found


def test_a_state_survives_a_change_between_exact_pixels_and_not_one_to_rounded_ones():
    def fingerprint(pixels):
        encoder = EncoderConfig(processor=str(processor_path("qwen2_5_vl")), pixels=pixels)
        return ConversationEncoder(encoder).fingerprint()

    assert fingerprint("bytes") == fingerprint("float32") != fingerprint("bfloat16")
