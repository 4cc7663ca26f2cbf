"""Clips of one, two and three frames: every family takes what its processor takes, and refuses the rest by name."""

import pytest
import torch
from support.offline_processors import processor_of
from transformers.models.glm4v import image_processing_glm4v
from transformers.models.qwen3_vl import video_processing_qwen3_vl
from whole_sample import encoder, video

from energon_packing.config import LimitsConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.errors import ConfigError, SampleRejected

BY_RATE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl", "llava_onevision_1_5")
ALL_FRAMES = ("internvl", "llava_onevision")
WIDTH, HEIGHT = 96, 64


@pytest.fixture(scope="module")
def made():
    every_share = LimitsConfig(min_active_ratio=0.0)  # LLaVA-OneVision pays 6,273 tokens for any clip
    return {name: encoder(processor_of(name), family=name, limits=every_share) for name in (*BY_RATE, *ALL_FRAMES)}


def about(*media: Media) -> Conversation:
    parts = (*(MediaPart(index=at) for at in range(len(media))), "What moves?")
    turns = (Turn(role="user", parts=parts), Turn(role="assistant", parts=("All of it.",)))
    return Conversation(key="k", turns=turns, media=media)


def by_the_processor(ours, frames: int, fps: float):
    """The sampled frames and the grid of the family's own video processor."""
    made = ours.processor.video_processor(
        videos=[torch.zeros(frames, 3, HEIGHT, WIDTH, dtype=torch.uint8)],
        video_metadata=[{"total_num_frames": frames, "fps": fps}],
        do_sample_frames=True,
        fps=ours.family.video_fps,
        return_metadata=True,
        return_tensors="pt",
    )
    return tuple(int(index) for index in made["video_metadata"][0].frames_indices), made["video_grid_thw"].tolist()


@pytest.mark.parametrize("fps", [0.5, 2.0, 30.0])
@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("name", BY_RATE)
def test_a_short_clip_is_planned_as_its_processor_samples_it_or_refused_by_name(made, name, frames, fps):
    ours, clip = made[name], video(frames, fps, WIDTH, HEIGHT)
    try:
        indices, grid = by_the_processor(ours, frames, fps)
    except (ZeroDivisionError, ValueError):  # Qwen3-VL's, from transformers 5.15 on
        with pytest.raises(SampleRejected) as caught:
            ours.measure(about(clip))
        assert caught.value.reason == "too_few_frames"
        assert "clip.mp4" in caught.value.detail
        assert "has 1 frame;" in caught.value.detail
        assert f"{name} needs at least 2" in caught.value.detail
        assert frames == 1
    else:
        measured = ours.measure(about(clip))
        assert measured.plans[0].frame_indices == indices
        assert [list(measured.plans[0].grid)] == grid


def test_settings_that_leave_no_time_step_of_a_long_clip_are_named_with_their_values():
    ours = encoder(processor_of("qwen2_5_vl"), video_max_frames=1)
    with pytest.raises(SampleRejected, match=r"too_few_frames.*60 frames at 30 fps.*video_max_frames=1"):
        ours.measure(about(video(60, 30.0, WIDTH, HEIGHT)))


def resize_of_5_12(num_frames, height, width, temporal_factor, factor, *limits, **named):
    """Refuses what ``smart_resize`` of Qwen3-VL's video processor refuses until transformers 5.14."""
    if height < factor or width < factor:
        raise ValueError(f"height:{height} or width:{width} must be larger than factor:{factor}")
    frames = max(num_frames, temporal_factor)
    return image_processing_glm4v.smart_resize(frames, height, width, temporal_factor, factor, *limits, **named)


@pytest.mark.parametrize("sides", [(WIDTH, HEIGHT), (300, 1)])
def test_a_release_whose_resizing_takes_no_single_frame_refuses_it_by_name_and_has_its_own_fingerprint(
    monkeypatch, sides
):
    """GLM-4.1V's resizing, which is Qwen3-VL's from transformers 5.15 on; it refuses a size too."""

    def clip_sizes(**config):
        made = encoder(processor_of("qwen3_vl"), **config)
        return made, made.fingerprint()["vision_limits"].partition(", ")[2]

    monkeypatch.setattr(video_processing_qwen3_vl, "smart_resize", resize_of_5_12)
    assert clip_sizes()[1] == ""
    monkeypatch.setattr(video_processing_qwen3_vl, "smart_resize", image_processing_glm4v.smart_resize)
    ours, said = clip_sizes()
    assert said == "clips resized as in transformers 5.15"
    assert clip_sizes(modality="text_image")[1] == ""
    with pytest.raises(SampleRejected) as caught:
        ours.measure(about(video(1, 2.0, *sides)))
    said = "has 1 frame; the processor of qwen3_vl needs at least 2 (t:1 must be larger than temporal_factor:2)"
    assert said in caught.value.detail if sides[1] > 1 else caught.value.reason == "media_geometry"


def test_a_processor_that_caps_the_pixels_of_each_frame_is_refused_where_the_installed_class_does(monkeypatch):
    processor = processor_of("qwen3_vl")
    kind = type(processor.video_processor)
    if not hasattr(kind, "cap_pixels_per_frame"):  # until transformers 5.15, which ignore it
        processor.video_processor.cap_pixels_per_frame = True
        encoder(processor)
        monkeypatch.setattr(kind, "cap_pixels_per_frame", None, raising=False)
    processor.video_processor.cap_pixels_per_frame = False
    encoder(processor)
    processor.video_processor.cap_pixels_per_frame = True
    with pytest.raises(ConfigError, match=r"cap_pixels_per_frame of the video processor .* is not supported; set it"):
        encoder(processor)
