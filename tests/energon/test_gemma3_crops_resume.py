"""Gemma 3's crops through the loader: as many as its processor cuts, the same after a restore, part of the state."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from support.offline_processors import gemma3

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.energon.loader import build_loader
from energon_packing.errors import ConfigError

SIZES = [(640, 300), (64, 64), (300, 900), (1300, 260), (200, 190), (520, 1040), (90, 30)]
"""Width and height of the images, in turn: long ones, which have crops, and others."""


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    """``crops(pan_and_scan)``: a configuration on forty samples of one image each, of the sizes in turn."""
    root = tmp_path_factory.mktemp("crops")
    records = []
    for number in range(40):
        width, height = SIZES[number % len(SIZES)]
        Image.linear_gradient("L").resize((width, height)).rotate(number).convert("RGB").save(root / f"{number}.png")
        turns = [
            {"role": "user", "content": f"<image>What is number {number}?"},
            {"role": "assistant", "content": "A."},
        ]
        records.append(json.dumps({"id": f"s{number}", "messages": turns, "images": [f"{number}.png"]}))
    (root / "data.jsonl").write_text("\n".join(records))
    convert(ConvertConfig(sources=(root / "data.jsonl",), out=root / "data", split={"train": 1.0}, workers=0))
    gemma3(56, 4).save_pretrained(root / "processor")

    def make(pan_and_scan):
        return RunConfig(
            data=DataConfig(path=str(root / "data"), workers=0, repeat=True),
            encoder=EncoderConfig(processor=str(root / "processor"), pan_and_scan=pan_and_scan),
            packing=PackingConfig(seq_length=512, window=8),
        )

    return make


def squares(pack):
    return dict(zip(pack.batch.sample_keys, pack.batch.visual_counts["pixel_values"], strict=True))


def crops_of(width, height):
    """As the image processor itself cuts, with the settings that Gemma 3's processor passes it."""
    made = gemma3(56, 4).image_processor(
        images=[torch.zeros(3, height, width, dtype=torch.uint8)],
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=256,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    )
    return int(made["num_crops"][0])


def test_the_crops_of_long_images_reach_the_pack(crops):
    """As many as the image processor cuts; without the setting there are none."""
    expected = [crops_of(*size) for size in SIZES]
    assert max(expected) > 1
    assert min(expected) == 0
    for pan_and_scan in (True, None):
        for pack, _ in zip(build_loader(crops(pan_and_scan)), range(3), strict=False):
            for key, count in squares(pack).items():
                at = int(key.rpartition("s")[2]) % len(SIZES)
                assert count == 1 + (expected[at] if pan_and_scan else 0), key


def test_a_state_saved_after_any_step_continues_with_the_same_crops_bit_for_bit(crops):
    config = crops(True)
    loader = build_loader(config)
    reference, states = [], []
    for pack in loader:
        reference.append(pack)
        states.append(loader.save_state())
        if len(reference) == 7:
            break
    assert any(max(squares(pack).values()) > 1 for pack in reference)
    for done in range(1, 5):
        resumed = build_loader(config)
        resumed.restore_state(states[done - 1])
        for expected, pack in zip(reference[done : done + 3], resumed, strict=False):
            assert pack.batch.sample_keys == expected.batch.sample_keys
            assert pack.batch.visual_counts == expected.batch.visual_counts
            for name, tensor in expected.batch.token_tensors.items():
                assert torch.equal(pack.batch.token_tensors[name], tensor), name
            assert torch.equal(pack.batch.cu_seqlens, expected.batch.cu_seqlens)
            assert torch.equal(pack.batch.visual_inputs["pixel_values"], expected.batch.visual_inputs["pixel_values"])


@pytest.mark.parametrize("before", [True, None])
def test_a_state_made_with_crops_is_refused_without_them_and_the_other_way_round(crops, before):
    loader = build_loader(crops(before))
    next(iter(loader))
    state = loader.save_state()
    other = build_loader(crops(None if before else True))
    with pytest.raises(ConfigError, match=r"encoder\.pan_and_scan="):  # without workers the state is taken over at once
        other.restore_state(state)
