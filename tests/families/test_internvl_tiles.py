"""Tiles and frames of bytes that are written to their place, compared with InternVL's own processors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offline_processors import internvl, qianfan

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import SampleRejected
from energon_packing.families.internvl_tiles import InternVLTiles
from energon_packing.families.pixel_forms import RAW
from energon_packing.families.registry import build_family

FAMILIES = {"internvl": internvl, "qianfan_vl": qianfan}


def family(name: str, **config: int):
    return build_family(FAMILIES[name](), EncoderConfig(family=name, **config))


MADE = {name: family(name) for name in FAMILIES}


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Rows of pixels, as images are decoded."""
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).movedim(-1, -3)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=3), seed=st.integers(0, 9)
)
def test_tiles_of_images_equal_the_processor_bit_for_bit(name, sizes, seed):
    made = MADE[name]
    images = [noise(seed, *size, 3) for size in sizes]
    plans = [made.plan(Media(kind="image", name="a", width=width, height=height)) for height, width in sizes]
    assert made._tiles.direct
    found = made.pixels(plans, images, raw=True)["pixel_values"]
    expected = made.images(images=images, crop_to_patches=True, return_tensors="pt", **RAW)["pixel_values"]
    assert found.dtype == torch.uint8
    assert found.is_contiguous()
    assert torch.equal(found, expected)


@settings(max_examples=20, deadline=None)
@given(height=st.integers(1, 700), width=st.integers(1, 700), first=st.booleans(), seed=st.integers(0, 9))
def test_images_and_frames_lie_in_the_order_of_the_text(height, width, first, seed):
    made = MADE["internvl"]
    image, clip = noise(seed, height, width, 3), noise(seed + 10, 5, width, height, 3)
    media = [
        Media(kind="image", name="a", width=width, height=height),
        Media(kind="video", name="b", width=height, height=width, frames=5, fps=2.0, duration=2.5),
    ]
    plans = [made.plan(item) for item in media]
    clip = clip[list(plans[1].frame_indices)]
    tiles = made.images(images=[image], crop_to_patches=True, return_tensors="pt", **RAW)["pixel_values"]
    frames = made.videos(videos=[clip], do_sample_frames=False, return_tensors="pt", **RAW)["pixel_values_videos"][0]
    order = (0, 1) if first else (1, 0)
    found = made.pixels([plans[at] for at in order], [(image, clip)[at] for at in order], raw=True)["pixel_values"]
    assert torch.equal(found, torch.cat([(tiles, frames)[at] for at in order]))


def test_a_processor_that_gives_anything_else_is_asked_itself(monkeypatch):
    made = family("internvl")
    own = made.images.crop_image_to_patches
    monkeypatch.setattr(made.images, "crop_image_to_patches", lambda *args, **kwargs: own(*args, **kwargs).flip(-1))
    assert not InternVLTiles(made.images, made.videos).direct
    image = noise(0, 300, 500, 3)
    plan = made.plan(Media(kind="image", name="a", width=500, height=300))
    found = made.pixels([plan], [image], raw=True)["pixel_values"]
    straight = MADE["internvl"].pixels([plan], [image], raw=True)["pixel_values"]
    assert torch.equal(found, straight.flip(-1))


def test_an_image_with_other_tiles_than_measured_is_rejected():
    made = MADE["internvl"]
    plan = made.plan(Media(kind="image", name="a", width=900, height=300))
    with pytest.raises(SampleRejected, match="tiles") as caught:
        made.pixels([plan], [noise(0, 300, 300, 3)], raw=True)
    assert caught.value.reason == "media_changed"
