"""Qwen3.5: Qwen3-VL's processor, and positions of the models of Qwen3.5."""

from __future__ import annotations

from functools import cache
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offline_processors import qwen3_5_vl
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel
from whole_sample import conversations, encoder, image, random_pixels, video

from energon_packing.errors import SampleRejected


@cache
def published():
    return encoder(qwen3_5_vl(), family="qwen3_5_vl")


@cache
def small():
    """Small images and frames, so that pixels are quick."""
    images = {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 30}
    videos = {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 60}
    return encoder(qwen3_5_vl(images, videos), family="qwen3_5_vl", position_ids="mrope")


@settings(max_examples=600, deadline=None)
@given(width=st.integers(1, 20000), height=st.integers(1, 20000))
def test_an_image_of_any_size_costs_the_tokens_that_the_processor_says(width, height):
    ours = published()
    try:
        (said,) = ours.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"]
    except ValueError:
        with pytest.raises(SampleRejected, match="media_geometry"):
            ours.family.plan(image(width, height))
    else:
        assert ours.family.plan(image(width, height)).tokens == said


@settings(max_examples=200, deadline=None)
@given(
    frames=st.integers(1, 60),
    fps=st.sampled_from([1.0, 8.0, 23.976, 60.0]),
    width=st.integers(8, 120),
    height=st.integers(8, 120),
)
def test_a_video_becomes_the_planned_frames_grid_and_tokens(frames, fps, width, height):
    ours = small()
    try:
        made = ours.processor(
            text=["<|vision_start|><|video_pad|><|vision_end|>"],
            videos=[torch.zeros(frames, 3, height, width, dtype=torch.uint8)],
            video_metadata=[{"total_num_frames": frames, "fps": fps}],
            do_sample_frames=True,
            fps=ours.family.video_fps,
            return_metadata=True,
            return_tensors="pt",
        )
    except (ValueError, ZeroDivisionError, RuntimeError):
        with pytest.raises(SampleRejected, match="media_geometry"):
            ours.family.plan(video(frames, fps, width, height))
        return
    plan = ours.family.plan(video(frames, fps, width, height))
    assert made["video_grid_thw"].tolist() == [list(plan.grid)]
    assert [int(index) for index in made["video_metadata"][0].frames_indices] == list(plan.frame_indices)
    assert int((made["input_ids"] == ours.processor.video_token_id).sum()) == plan.tokens


@pytest.mark.parametrize("model", [Qwen3_5Model, Qwen3_5MoeModel])
@settings(max_examples=40, deadline=None)
@given(conversation=conversations(kinds=("image", "video"), frames=(2, 20)))
def test_tokens_pixels_and_positions_equal_the_processor_and_model_on_the_whole_sample(model, conversation):
    ours = small()
    try:
        measured = ours.measure(conversation)
    except SampleRejected as rejected:
        assert "ratio" in rejected.detail or "larger" in rejected.detail  # noqa: PT017
        return
    ids, _ = measured.expand()
    tensors = random_pixels(measured.plans, conversation.media)
    visual = ours.family.pixels(measured.plans, tensors)
    triples = list(zip(measured.plans, conversation.media, tensors, strict=True))
    arguments = {}
    if images := [tensor for plan, _, tensor in triples if plan.kind == "image"]:
        arguments["images"] = images
    if clips := [entry for entry in triples if entry[0].kind == "video"]:
        said = [
            {"total_num_frames": medium.frames, "fps": medium.fps, "frames_indices": list(plan.frame_indices)}
            for plan, medium, _ in clips
        ]
        arguments |= {"videos": [tensor for *_, tensor in clips], "video_metadata": said, "do_sample_frames": False}
    text = ours.processor.apply_chat_template(conversation.to_messages(), tokenize=False)
    whole = ours.processor(text=[text], return_tensors="pt", **arguments)
    assert ids.tolist() == whole["input_ids"][0].tolist()
    for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert (key in visual) == (key in whole)
        assert key not in whole or torch.equal(visual[key], whole[key]), key

    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=ours.family.merge))
    asked = SimpleNamespace(config=config)
    asked.get_vision_position_ids = MethodType(model.get_vision_position_ids, asked)
    expected, _ = model.get_rope_index(
        asked,
        whole["input_ids"],
        whole["mm_token_type_ids"],
        whole.get("image_grid_thw"),
        whole.get("video_grid_thw"),
    )
    assert np.array_equal(ours.family.positions(ids, measured.plans), expected[:, 0].numpy())


def test_the_family_of_the_processors_class_makes_the_same_rows():
    own, by_class = small(), encoder(small().processor)
    assert (own.family.name, by_class.family.name) == ("qwen3_5_vl", "qwen3_vl")
    for medium in (image(300, 200), video(30, 8.0, 100, 60)):
        assert own.family.plan(medium) == by_class.family.plan(medium)
        plan = own.family.plan(medium)
        assert own.family.replacement(plan) == by_class.family.replacement(plan)
