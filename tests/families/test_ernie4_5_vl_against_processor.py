"""Ernie 4.5 VL: native resolution, times drawn on frames, and types of tokens, against processor and model code."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offline_processors import ernie4_5_vl, font_file
from test_families_in_packs import SAMPLES, rows
from whole_sample import encoder, video

from energon_packing import PackingConfig, PackingTaskEncoder, ParallelConfig
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.registry import load_processor

IMAGES = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 60}
FRAMES = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 12}
CLIP = "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>"


@cache
def small(raw: bool = False) -> ConversationEncoder:
    """Small images and frames, so that pixels are quick."""
    return encoder(ernie4_5_vl(IMAGES, FRAMES, raw=raw), position_ids="mrope")


@settings(max_examples=40, deadline=None)
@given(
    frames=st.integers(1, 60),
    fps=st.sampled_from([0.7, 1.0, 8.0, 23.976, 25.0, 60.0]),
    rate=st.sampled_from([None, 0.5, 2.0, 4.0]),
    drawn=st.booleans(),
    width=st.integers(8, 120),
    height=st.integers(8, 120),
)
def test_a_video_becomes_the_frames_the_grid_and_the_pixels_that_the_whole_processor_makes(
    frames, fps, rate, drawn, width, height
):
    """The processor samples the clip and draws the times itself."""
    ours = encoder(ernie4_5_vl(IMAGES, FRAMES, draw_on_frames=drawn, min_frames=4, max_frames=20), video_fps=rate)
    medium = video(frames, fps, width, height)
    pixels = torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8)
    try:
        made = ours.processor(
            text=[CLIP],
            videos=[pixels.clone()],
            video_metadata=[{"total_num_frames": frames, "fps": fps}],
            do_sample_frames=True,
            fps=rate,
            return_metadata=True,
            return_tensors="pt",
        )
    except ValueError as error:
        with pytest.raises(SampleRejected, match=f"media_geometry.*{re.escape(str(error))}"):
            ours.family.plan(medium)
        return
    except IndexError:  # its last step is past the end, as in the next test
        assert max(ours.family.plan(medium).frame_indices) < frames
        return
    plan = ours.family.plan(medium)
    assert made["video_grid_thw"].tolist() == [list(plan.grid)]
    assert [int(index) for index in made["video_metadata"][0].frames_indices] == list(plan.frame_indices)
    assert int((made["input_ids"] == ours.processor.video_token_id).sum()) == plan.tokens
    taken = pixels[list(plan.frame_indices)]
    visual = ours.family.pixels([plan], [taken])
    assert torch.equal(visual["pixel_values_videos"], made["pixel_values_videos"])
    assert torch.equal(taken, pixels[list(plan.frame_indices)]), "the caller's frames are drawn on"


def test_a_clip_whose_last_step_is_past_its_end_loses_that_step_where_the_processor_fails():
    ours, medium = encoder(ernie4_5_vl(IMAGES, FRAMES)), video(461, 30.0, 30, 30)
    pixels = torch.zeros(461, 3, 30, 30, dtype=torch.uint8)
    with pytest.raises(IndexError, match="out of bounds"):
        ours.processor.video_processor(videos=[pixels], video_metadata=[{"total_num_frames": 461, "fps": 30.0}])
    plan = ours.family.plan(medium)
    assert len(plan.frame_indices) == 180
    assert plan.frame_indices[-1] == 458


def test_a_frame_list_shows_the_times_that_it_gives():
    times = (0.0, 3.5, 61.25)
    names = tuple(f"{at}.png" for at in range(3))
    medium = Media(
        kind="video", name="v", width=80, height=60, frames=3, fps=0.05, frame_names=names, frame_times=times
    )
    plan = small().family.plan(medium)
    assert plan.grid[0] == 4
    frames = torch.randint(0, 256, (3, 3, 60, 80), dtype=torch.uint8)
    made = small().family.pixels([plan], [frames])
    processor = small().processor.video_processor
    drawn = [
        processor._render_image_with_timestamp(frame, text)
        for frame, text in zip(frames, ("time: 00:00:00.00", "time: 00:00:03.50", "time: 00:01:01.25"), strict=True)
    ]
    still = processor(videos=[torch.stack(drawn)], draw_on_frames=False, do_sample_frames=False, return_tensors="pt")
    assert torch.equal(made["pixel_values_videos"], still["pixel_values_videos"])


def test_a_pack_carries_both_types_of_its_samples_and_0_on_padding():
    ours = small()
    made = [row for _, row in rows(ours, SAMPLES)]
    encoders = PackingTaskEncoder(ours, PackingConfig(seq_length=2048), parallel=ParallelConfig(context_parallel=4))
    batch = encoders._assemble(made)
    for name in ("mm_token_type_ids", "moe_mm_token_type_ids"):
        types = batch.extra[name]
        assert types.shape == batch.tokens.shape
        assert types.dtype == torch.int64
        for start, row in zip(batch.boundaries.tolist(), made, strict=False):
            assert torch.equal(types[0, start : start + len(row["input_ids"])], row[name])
        assert not types[batch.padding_mask].any()
    assert batch.padding_mask.any()
    images = sum(len(sizes) for sizes in SAMPLES)
    assert int((batch.extra["moe_mm_token_type_ids"] - batch.extra["mm_token_type_ids"]).sum()) == 2 * images


def test_a_rate_of_the_configuration_replaces_a_number_of_frames_of_the_processor():
    fixed = encoder(ernie4_5_vl(num_frames=16, max_frames=64))
    assert len(fixed.family.plan(video(100, 10.0, 64, 64)).frame_indices) == 16
    assert fixed.family.plan(video(12, 10.0, 64, 64)).frame_indices == tuple(range(12))
    rate = encoder(ernie4_5_vl(num_frames=16, max_frames=64), video_fps=4.0)
    assert len(rate.family.plan(video(100, 10.0, 64, 64)).frame_indices) == 40


@pytest.mark.parametrize("font", ["nowhere.ttf", None])
def test_a_processor_that_draws_without_a_font_is_refused_by_name_and_one_that_does_not_draw_is_not(font):
    with pytest.raises(ConfigError, match=r"its font .* cannot be opened .*draw_on_frames"):
        encoder(ernie4_5_vl(font=font))
    assert encoder(ernie4_5_vl(font=font, draw_on_frames=False)).family.name == "ernie4_5_vl"


def test_a_saved_processor_brings_its_font_and_without_it_cannot_be_loaded(tmp_path):
    ernie4_5_vl().save_pretrained(tmp_path)
    config = EncoderConfig(processor=str(tmp_path))
    made = encoder(load_processor(config))
    clip = torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8)
    plan = made.family.plan(video(2, 1.0, 40, 40))
    assert torch.equal(
        made.family.pixels([plan], [clip])["pixel_values_videos"],
        encoder(ernie4_5_vl()).family.pixels([plan], [clip])["pixel_values_videos"],
    )
    (tmp_path / Path(font_file()).name).unlink()
    with pytest.raises(ConfigError, match=r"names the font 'pillow.ttf', which is not in the directory; put the font"):
        load_processor(config)
