"""InternVL and Qianfan-VL against ``InternVLProcessor`` and ``QianfanOCRProcessor``."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.offline_processors import internvl, qianfan
from transformers import LlavaOnevisionVideoProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from whole_sample import both_ways, conversations, encoder, image, video

from energon_packing.config import EncoderConfig
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.frames import uniform_frames
from energon_packing.families.registry import build_family

TOTALS = st.one_of(st.integers(1, 100_003), st.integers(1, 2**31 - 1))


@pytest.fixture(scope="module")
def published():
    """Families at the sizes of the published checkpoints, with three bounds on the tiles."""
    return [
        encoder(internvl(min_patches=low, max_patches=high)).family for low, high in ((1, 12), (1, 6), (2, 40), (1, 1))
    ]


@pytest.fixture(scope="module")
def small():
    """Encoders on small tiles, for pixels."""
    return {"internvl": encoder(internvl(28, 4, max_patches=6)), "qianfan_vl": encoder(qianfan(28, 4))}


@settings(max_examples=600, deadline=None)
@given(which=st.integers(0, 3), width=st.integers(1, 20000), height=st.integers(1, 20000))
def test_an_image_of_any_size_costs_the_tokens_that_the_processor_says(published, which, width, height):
    family = published[which]
    plan = family.plan(image(width, height))
    said = family.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
    assert plan.tokens + 2 == said["num_image_tokens"][0]  # it counts <img> and </img>
    assert plan.tiles == said["num_image_patches"][0]


@settings(max_examples=150, deadline=None)
@given(which=st.integers(0, 3), width=st.integers(1, 20000), height=st.integers(1, 20000))
def test_an_image_of_any_size_becomes_the_planned_tiles(published, which, width, height):
    """The whole image processor on an image without storage, so that no size is too large."""
    family = published[which]
    made = family.processor.image_processor(
        images=[torch.empty(3, height, width, dtype=torch.uint8, device="meta")],
        crop_to_patches=True,
        input_data_format="channels_first",
    )
    assert [tuple(tile.shape) for tile in made["pixel_values"]] == [(3, 448, 448)] * family.plan(
        image(width, height)
    ).tiles


@settings(max_examples=60, deadline=None)
@given(conversation=conversations(kinds=("image",)))
@pytest.mark.parametrize("name", ["internvl", "qianfan_vl"])
def test_tokens_and_tiles_equal_the_processor_on_a_sample_of_images(small, name, conversation):
    ids, visual, whole, measured = both_ways(small[name], conversation)
    assert ids.tolist() == whole["input_ids"][0].tolist()
    assert ("pixel_values" in visual) == ("pixel_values" in whole) == bool(conversation.media)
    if visual:
        assert torch.equal(visual["pixel_values"], whole["pixel_values"])
    assert measured.images == len(visual.get("pixel_values", ()))


@settings(max_examples=60, deadline=None)
@given(conversation=conversations(kinds=("image", "video"), frames=(8, 60)))
def test_tokens_and_tiles_equal_the_processor_on_a_sample_of_images_and_videos(small, conversation):
    ids, visual, whole, measured = both_ways(small["internvl"], conversation)
    assert ids.tolist() == whole["input_ids"][0].tolist()
    if visual:
        assert torch.equal(visual["pixel_values"], whole["pixel_values"])
    assert measured.images == len(visual.get("pixel_values", ()))


@settings(max_examples=100, deadline=None)
@given(frames=st.integers(1, 40), fps=st.sampled_from([1.0, 7.5, 23.976, 60.0]), rate=st.sampled_from([None, 0.5, 2.0]))
def test_a_video_of_any_length_costs_one_tile_a_sampled_frame(frames, fps, rate):
    """One video a sample here: the processor itself takes several only where all have equally many frames."""
    ours = encoder(internvl(28, 4), video_fps=rate, video_max_frames=16, video_min_frames=2)
    plan = ours.family.plan(video(frames, fps, 30, 40))
    wanted = 16 if rate is None else max(2, int(frames / fps * rate))
    assert len(plan.frame_indices) == plan.tiles == min(wanted, 16, frames)
    made = ours.processor(
        text=["<video>"],
        videos=[torch.zeros(len(plan.frame_indices), 3, 40, 30, dtype=torch.uint8)],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert int((made["input_ids"] == ours.family.placeholder_ids["video"]).sum()) == plan.tokens
    assert len(made["pixel_values"]) == plan.tiles


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from([InternVLVideoProcessor, LlavaOnevisionVideoProcessor]), total=TOTALS, most=st.integers(1, 64)
)
@example(kind=InternVLVideoProcessor, total=100_003, most=61)  # the processor gives index 100003 as well
@example(kind=LlavaOnevisionVideoProcessor, total=2**31 - 1, most=29)  # and here -2147483648
def test_sampled_frames_are_the_processors_and_never_beyond_the_clip(kind, total, most):
    indices = uniform_frames(kind(), total, 25.0, rate=None, fewest=1, most=most)
    assert len(indices) == min(total, most)
    assert indices[0] >= 0
    assert indices[-1] < total
    assert sorted(set(indices)) == list(indices)
    gaps = [after - before for before, after in itertools.pairwise(indices)]
    # Its steps are 32-bit floats, which are coarse for clips of millions of frames.
    assert not gaps or max(gaps) - min(gaps) <= max(1, total // 2**20)


def test_pixel_limits_bound_the_tiles_of_geometry_and_pixels_alike():
    ours = encoder(internvl(28, 4), max_pixels=28 * 28 * 4)
    plan = ours.family.plan(image(400, 400))
    assert (plan.tiles, plan.tokens) == (5, 20)
    assert len(ours.family.pixels([plan], [torch.zeros(3, 400, 400, dtype=torch.uint8)])["pixel_values"]) == 5
    with pytest.raises(ConfigError, match="No grid has between"):
        encoder(internvl(28, 4), max_pixels=28 * 27)


def test_tiles_and_patches_of_a_published_tile():
    plan = encoder(internvl()).family.plan(image(448, 448))
    assert (plan.tiles, plan.grid, plan.patches, plan.tokens) == (1, (1, 32, 32), 1024, 256)


def test_what_the_family_cannot_do_is_refused_by_name():
    with pytest.raises(ConfigError, match="video_max_pixels"):
        encoder(internvl(28, 4), video_max_pixels=1000)
    with pytest.raises(ConfigError, match="one axis"):
        encoder(internvl(28, 4), position_ids="mrope")
    processor = internvl(28, 4)
    processor.video_processor = InternVLVideoProcessor()
    with pytest.raises(ConfigError, match="one size"):
        encoder(processor)
    with pytest.raises(SampleRejected, match="does not accept videos"):
        encoder(qianfan(28, 4)).family.plan(video(8, 2.0, 30, 30))


def test_the_class_of_the_processor_chooses_the_family_and_a_name_may_overrule_it():
    assert build_family(internvl(28, 4), EncoderConfig()).name == "internvl"
    assert build_family(qianfan(28, 4), EncoderConfig()).name == "qianfan_vl"
    assert build_family(internvl(28, 4), EncoderConfig(family="qianfan_vl")).name == "qianfan_vl"
