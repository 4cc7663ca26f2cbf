"""Patches of bytes, and the floats made of them, compared with the processors of images and videos."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoProcessor

from energon_packing.config import EncoderConfig
from energon_packing.demo import processor_path
from energon_packing.families.qwen_patches import QwenPatches
from energon_packing.families.registry import build_family


def family(name, **config):
    """A fresh family: limits are set on the processor itself."""
    return build_family(AutoProcessor.from_pretrained(str(processor_path(name))), EncoderConfig(**config))


FAMILIES = {name: family(name, min_pixels=56 * 56, max_pixels=112 * 140) for name in ("qwen2_5_vl", "qwen3_vl")}


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(8, 300), st.integers(8, 300)), min_size=1, max_size=3), seed=st.integers(0, 9)
)
def test_patches_equal_the_processor_bit_for_bit(name, sizes, seed):
    made = FAMILIES[name]
    random = torch.Generator().manual_seed(seed)
    images = [torch.randint(256, (3, *size), dtype=torch.uint8, generator=random) for size in sizes]
    found, expected = made._image_patches(images, raw=False), made.images(images=images, return_tensors="pt")
    assert made._image_patches.direct
    for tensor in ("pixel_values", "image_grid_thw"):
        assert found[tensor].dtype == expected[tensor].dtype
        assert torch.equal(found[tensor], expected[tensor])
    carried = made._image_patches(images, raw=True)["pixel_values"]
    assert carried.dtype == torch.uint8
    assert carried.numel() * 2 == expected["pixel_values"].numel()  # an image is carried once, not for each frame


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(
    clips=st.lists(st.tuples(st.integers(1, 7), st.integers(32, 200), st.integers(32, 200)), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_patches_of_videos_equal_the_processor_bit_for_bit(name, clips, seed):
    made = FAMILIES[name]
    random = torch.Generator().manual_seed(seed)
    videos = [torch.randint(256, (n, 3, *size), dtype=torch.uint8, generator=random) for n, *size in clips]
    # One by one: the processor puts videos of one size together, in an order of its own.
    expected = [made.videos(videos=[each], do_sample_frames=False, return_tensors="pt") for each in videos]
    found = made._video_patches(videos, raw=False)
    assert made._video_patches.direct
    for tensor in ("pixel_values_videos", "video_grid_thw"):
        assert torch.equal(found[tensor], torch.cat([each[tensor] for each in expected]))
    carried = made._video_patches(videos, raw=True)["pixel_values_videos"]
    assert carried.dtype == torch.uint8
    assert carried.numel() == found["pixel_values_videos"].numel()


def test_the_layout_of_the_pixels_in_memory_changes_nothing():
    image = torch.randint(256, (3, 90, 70), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    rows_of_pixels = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    patches = FAMILIES["qwen2_5_vl"]._image_patches
    assert torch.equal(patches([image], raw=True)["pixel_values"], patches([rows_of_pixels], raw=True)["pixel_values"])


@pytest.mark.parametrize("setting", [{"do_normalize": False}, {"do_resize": False}, {"do_rescale": False}])
def test_a_processor_that_does_something_else_is_called_itself(setting):
    processor = AutoProcessor.from_pretrained(str(processor_path("qwen2_5_vl"))).image_processor
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
