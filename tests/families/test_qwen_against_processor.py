"""Geometry, pixels and positions of the Qwen-VL families against the Hugging Face processor and model code."""

from __future__ import annotations

from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.registry import build_family, families, load_processor

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
MODELS = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}


def image(width: int, height: int) -> Media:
    return Media(kind="image", name=f"{width}x{height}.png", width=width, height=height)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=600, deadline=None)
@given(width=st.integers(1, 20000), height=st.integers(1, 20000))
def test_an_image_of_any_size_costs_the_patches_that_the_processor_says(encoders, name, width, height):
    processor = encoders[name].processor
    try:
        expected = processor.image_processor.get_number_of_image_patches(height, width, {})
    except ValueError:
        with pytest.raises(SampleRejected, match="media_geometry"):
            encoders[name].family.plan(image(width, height))
    else:
        plan = encoders[name].family.plan(image(width, height))
        assert plan.patches == expected
        assert plan.tokens == expected // processor.image_processor.merge_size**2


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("width", "height"), [(1, 1), (27, 29), (640, 480), (31, 900), (1000, 333)])
def test_the_processor_makes_the_planned_grid_of_a_real_image(encoders, name, width, height):
    made = encoders[name].processor.image_processor(
        images=[torch.zeros(3, height, width, dtype=torch.uint8)], return_tensors="pt"
    )
    assert made["image_grid_thw"].tolist() == [list(encoders[name].family.plan(image(width, height)).grid)]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=300, deadline=None)
@given(
    frames=st.integers(1, 60),
    fps=st.sampled_from([1.0, 8.0, 23.976, 25.0, 60.0]),
    width=st.integers(16, 200),
    height=st.integers(16, 200),
)
def test_a_video_becomes_the_planned_frames_grid_and_seconds(encoders, name, frames, fps, width, height):
    family = encoders[name].family
    clip = torch.zeros(frames, 3, height, width, dtype=torch.uint8)
    clip[:, 0] = torch.arange(frames, dtype=torch.uint8)[:, None, None]
    media = Media(kind="video", name="v.mp4", width=width, height=height, frames=frames, fps=fps, duration=frames / fps)
    text = "<|vision_start|><|video_pad|><|vision_end|>"
    try:
        metadata = {"total_num_frames": frames, "fps": fps, "width": width, "height": height}
        made = encoders[name].processor(
            text=[text],
            videos=[clip],
            video_metadata=[metadata],
            do_sample_frames=True,
            fps=family.video_fps,
            return_tensors="pt",
            return_metadata=True,
        )
    except (ValueError, ZeroDivisionError, RuntimeError) as error:
        reason = "too_few_frames" if isinstance(error, ZeroDivisionError) else "media_geometry"
        with pytest.raises(SampleRejected, match=reason):
            family.plan(media)
        return
    plan = family.plan(media)
    assert made["video_grid_thw"].tolist() == [list(plan.grid)]
    assert [int(index) for index in made["video_metadata"][0].frames_indices] == list(plan.frame_indices)
    assert int((made["input_ids"] == family.placeholder_ids["video"]).sum()) == plan.tokens
    if name == "qwen2_5_vl":
        assert made["second_per_grid_ts"] == pytest.approx([plan.seconds_per_grid])


@st.composite
def conversations(draw):
    """Any order and number of images, videos and texts, adjacent media included."""
    media, parts = [], []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["text", "image", "video"]))
        if kind == "text":
            parts.append(draw(st.sampled_from(["Hello there. ", "\n", "what is  this?", "9 < 3 seconds"])))
            continue
        size = {"width": draw(st.integers(33, 120)), "height": draw(st.integers(33, 120))}
        if kind == "video":
            frames, fps = draw(st.integers(4, 20)), draw(st.sampled_from([2.0, 7.5, 24.0]))
            size |= {"frames": frames, "fps": fps, "duration": frames / fps}
        parts.append(MediaPart(index=len(media)))
        media.append(Media(kind=kind, name=f"m{len(media)}", **size))
    turns = (
        Turn(role="user", parts=tuple(parts)),
        Turn(role="assistant", parts=(draw(st.sampled_from(["Fine.", "a b\nc", "Ünïcödé 你好"])),)),
    )
    return Conversation(key="k", turns=turns, media=tuple(media))


def pixels_of(plans, media):
    """Random sampled frames or images of the right size, as decoding would give them."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(
            0,
            256,
            ((len(plan.frame_indices),) if plan.kind == "video" else ()) + (3, medium.height, medium.width),
            dtype=torch.uint8,
            generator=generator,
        )
        for plan, medium in zip(plans, media, strict=True)
    ]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(conversation=conversations())
def test_tokens_pixels_and_positions_equal_the_processor_and_model_on_the_whole_sample(encoders, name, conversation):
    encoder = encoders[name]
    measured = encoder.measure(conversation)
    ids, _ = measured.expand()
    tensors = pixels_of(measured.plans, conversation.media)
    visual = encoder.family.pixels(measured.plans, tensors)

    text = encoder.processor.apply_chat_template(
        conversation.to_messages(), tokenize=False, chat_template=encoder.template.source
    )
    by_kind = {
        kind: [tensor for plan, tensor in zip(measured.plans, tensors, strict=True) if plan.kind == kind]
        for kind in ("image", "video")
    }
    metadata = [
        {"total_num_frames": medium.frames, "fps": medium.fps, "frames_indices": list(plan.frame_indices)}
        for plan, medium in zip(measured.plans, conversation.media, strict=True)
        if plan.kind == "video"
    ]
    arguments = {"images": by_kind["image"]} if by_kind["image"] else {}
    if by_kind["video"]:
        arguments |= {"videos": by_kind["video"], "video_metadata": metadata, "do_sample_frames": False}
    whole = encoder.processor(text=[text], return_tensors="pt", add_special_tokens=False, **arguments)

    assert ids.tolist() == whole["input_ids"][0].tolist()
    assert measured.length == whole["input_ids"].shape[1]
    for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert (key in visual) == (key in whole)
        if key in whole:
            assert torch.equal(visual[key], whole[key]), key

    model = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(
                spatial_merge_size=encoder.family.merge, tokens_per_second=encoder.config.tokens_per_second
            )
        )
    )
    model.get_vision_position_ids = MethodType(MODELS[name].get_vision_position_ids, model)
    kinds = torch.zeros_like(whole["input_ids"])
    for number, kind in ((1, "image"), (2, "video")):
        kinds[whole["input_ids"] == encoder.family.placeholder_ids[kind]] = number
    expected, _ = MODELS[name].get_rope_index(
        model,
        whole["input_ids"],
        kinds,
        whole.get("image_grid_thw"),
        whole.get("video_grid_thw"),
        second_per_grid_ts=whole.get("second_per_grid_ts"),
    )
    assert np.array_equal(encoder.family.positions(ids, measured.plans), expected[:, 0].numpy())


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
