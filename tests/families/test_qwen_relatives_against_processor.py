"""Qwen2-VL and LLaVA-OneVision-1.5: Qwen's geometry with other positions, against processor and model code."""

from __future__ import annotations

from functools import cache
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offline_processors import qwen2_vl
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from whole_sample import conversations, encoder, image, random_pixels, video

from energon_packing.errors import ConfigError, SampleRejected

NAMES = ("qwen2_vl", "llava_onevision_1_5")


@cache
def relative(name: str, **config):
    """The encoder on a processor with the family's own number of frames in one time step."""
    images = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 40}
    videos = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 9}
    processor = qwen2_vl(name, images, videos, max_frames=12)
    return encoder(processor, family=name, **config)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=600)
@given(width=st.integers(1, 20000), height=st.integers(1, 20000))
def test_an_image_of_any_size_costs_the_patches_that_the_processor_says(name, width, height):
    ours = relative(name)
    try:
        expected = ours.processor.image_processor.get_number_of_image_patches(height, width, {})
    except ValueError:
        with pytest.raises(SampleRejected, match="media_geometry"):
            ours.family.plan(image(width, height))
    else:
        assert ours.family.plan(image(width, height)).patches == expected


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300)
@given(
    frames=st.integers(1, 60),
    fps=st.sampled_from([1.0, 8.0, 23.976, 60.0]),
    width=st.integers(8, 120),
    height=st.integers(8, 120),
)
def test_a_video_becomes_the_planned_frames_and_grid(name, frames, fps, width, height):
    ours = relative(name)
    try:
        made = ours.processor.video_processor(
            videos=[torch.zeros(frames, 3, height, width, dtype=torch.uint8)],
            video_metadata=[{"total_num_frames": frames, "fps": fps}],
            do_sample_frames=True,
            fps=ours.family.video_fps,
            return_metadata=True,
            return_tensors="pt",
        )
    except (ValueError, ZeroDivisionError, RuntimeError) as error:
        reason = "too_few_frames" if isinstance(error, ZeroDivisionError) else "media_geometry"
        with pytest.raises(SampleRejected, match=reason):
            ours.family.plan(video(frames, fps, width, height))
        return
    plan = ours.family.plan(video(frames, fps, width, height))
    assert made["video_grid_thw"].tolist() == [list(plan.grid)]
    assert [int(index) for index in made["video_metadata"][0].frames_indices] == list(plan.frame_indices)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(conversation=conversations(kinds=("image", "video"), frames=(4, 20)))
def test_tokens_pixels_and_positions_equal_the_processor_and_model_on_the_whole_sample(name, conversation):
    ours = relative(name, position_ids="mrope" if name == "qwen2_vl" else "auto")
    try:
        measured = ours.measure(conversation)
    except SampleRejected as rejected:
        assert "ratio" in rejected.detail or "larger" in rejected.detail  # noqa: PT017
        return
    ids, _ = measured.expand()
    tensors = random_pixels(measured.plans, conversation.media)
    visual = ours.family.pixels(measured.plans, tensors)
    pairs = list(zip(measured.plans, tensors, strict=True))
    arguments = {}
    if images := [tensor for plan, tensor in pairs if plan.kind == "image"]:
        arguments["images"] = images
    if videos := [tensor for plan, tensor in pairs if plan.kind == "video"]:
        metadata = [
            {"total_num_frames": medium.frames, "fps": medium.fps, "frames_indices": list(plan.frame_indices)}
            for plan, medium in zip(measured.plans, conversation.media, strict=True)
            if plan.kind == "video"
        ]
        arguments |= {"videos": videos, "video_metadata": metadata, "do_sample_frames": False}
    text = ours.processor.apply_chat_template(conversation.to_messages(), tokenize=False)
    whole = ours.processor(text=[text], return_tensors="pt", **arguments)
    assert ids.tolist() == whole["input_ids"][0].tolist()
    for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert (key in visual) == (key in whole)
        assert key not in whole or torch.equal(visual[key], whole[key]), key

    found = ours.family.positions(ids, measured.plans)
    if name == "llava_onevision_1_5":
        assert np.array_equal(found, np.tile(np.arange(len(ids)), (3, 1)))
        return
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=ours.family.merge))
    model = SimpleNamespace(config=config)
    model.get_vision_position_ids = MethodType(Qwen2VLModel.get_vision_position_ids, model)
    kinds = torch.zeros_like(whole["input_ids"])
    for number, kind in ((1, "image"), (2, "video")):
        kinds[whole["input_ids"] == ours.family.placeholder_ids[kind]] = number
    expected, _ = Qwen2VLModel.get_rope_index(
        model, whole["input_ids"], kinds, whole.get("image_grid_thw"), whole.get("video_grid_thw")
    )
    assert np.array_equal(found, expected[:, 0].numpy())


def test_one_position_axis_is_all_that_onevision_1_5_takes():
    with pytest.raises(ConfigError, match="one axis"):
        relative("llava_onevision_1_5", position_ids="mrope")
