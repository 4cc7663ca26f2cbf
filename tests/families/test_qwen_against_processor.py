"""Geometry, pixels and positions of the Qwen-VL families against the Hugging Face processor and model code."""

from __future__ import annotations

import pytest
import torch
from support.offline_processors import processor_of, qwen3_5_vl
from whole_sample import encoder, image, video

from energon_packing.config import EncoderConfig
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.qwen_patches import QwenPatches
from energon_packing.families.registry import build_family, families, load_processor


def test_pixel_limits_change_geometry_and_pixels_alike():
    config = EncoderConfig(processor=str(processor_path("qwen2_5_vl")), min_pixels=28 * 28, max_pixels=28 * 28 * 9)
    encoder = ConversationEncoder(config)
    plan = encoder.family.plan(image(500, 500))
    made = encoder.family.pixels([plan], [torch.zeros(3, 500, 500, dtype=torch.uint8)])
    assert plan.tokens == 9
    assert made["image_grid_thw"].tolist() == [list(plan.grid)]


def test_an_unknown_family_names_the_known_ones_and_the_nearest():
    config = EncoderConfig(processor=str(processor_path("qwen3_vl")), family="qwen3_v")
    with pytest.raises(ConfigError, match="Did you mean 'qwen3_vl'"):
        build_family(load_processor(config), config)
    assert "text" in families()


def test_a_family_refuses_the_processor_of_another():
    config = EncoderConfig(processor=str(processor_path("qwen3_vl")), family="qwen2_5_vl")
    with pytest.raises(ConfigError, match="Qwen3VLProcessor"):
        build_family(load_processor(config), config)


def test_a_wrong_processor_path_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="No processor can be loaded"):
        load_processor(EncoderConfig(processor=str(tmp_path / "nothing")))


def test_the_text_family_refuses_media_instead_of_dropping_them(encoders):
    with pytest.raises(SampleRejected, match="unsupported_media"):
        encoders["text"].family.plan(image(10, 10))


def test_the_family_of_the_processors_class_makes_the_same_rows():
    own, by_class = encoder(qwen3_5_vl(), family="qwen3_5_vl"), encoder(qwen3_5_vl())
    assert (own.family.name, by_class.family.name) == ("qwen3_5_vl", "qwen3_vl")
    for medium in (image(300, 200), video(30, 8.0, 100, 60)):
        assert own.family.plan(medium) == by_class.family.plan(medium)
        plan = own.family.plan(medium)
        assert own.family.replacement(plan) == by_class.family.replacement(plan)


def test_the_layout_of_the_pixels_in_memory_changes_nothing():
    image = torch.randint(256, (3, 90, 70), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    rows_of_pixels = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    patches = build_family(processor_of("qwen2_5_vl"), EncoderConfig())._image_patches
    assert patches.direct
    assert torch.equal(patches([image], raw=True)["pixel_values"], patches([rows_of_pixels], raw=True)["pixel_values"])


@pytest.mark.parametrize("setting", [{"do_normalize": False}, {"do_resize": False}, {"do_rescale": False}])
def test_a_processor_that_does_something_else_is_called_itself(setting):
    processor = processor_of("qwen2_5_vl").image_processor
    for name, value in setting.items():
        setattr(processor, name, value)
    step = processor.patch_size * processor.merge_size

    def grid(frames, height, width):
        return -(-height // step) * processor.merge_size, -(-width // step) * processor.merge_size

    image = torch.randint(256, (3, 112, 140), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    patches = QwenPatches(processor, "image", grid)
    assert not patches.direct
    found = patches([image], raw=False)["pixel_values"]
    assert torch.equal(found, processor(images=[image], return_tensors="pt")["pixel_values"])
