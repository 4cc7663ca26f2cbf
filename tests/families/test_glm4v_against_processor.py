"""GLM-4.1V and GLM-4.5V: images and videos in one kind of token, against processor and model code."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offline_processors import glm4v
from test_families_in_packs import rows
from whole_sample import encoder, video

from energon_packing import PackingConfig, PackingTaskEncoder, ParallelConfig
from energon_packing.conversation import Media
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import SampleRejected

PIXELS = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 60}


@cache
def published() -> ConversationEncoder:
    return encoder(glm4v())


@cache
def small() -> ConversationEncoder:
    """Small images and frames, so that pixels are quick."""
    return encoder(glm4v(PIXELS, {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 90}), position_ids="mrope")


def metadata(medium: Media, indices=None):
    """What transformers' readers of video files say about a clip."""
    found = {"total_num_frames": medium.frames, "fps": medium.fps, "duration": medium.frames / medium.fps}
    return found if indices is None else found | {"frames_indices": list(indices)}


@settings(max_examples=100, deadline=None)
@given(frames=st.integers(200, 60_000), fps=st.sampled_from([0.7, 23.976, 30.0]))
def test_a_clip_of_any_length_is_sampled_as_the_processor_does_it(frames, fps):
    from transformers.video_utils import VideoMetadata

    clip = VideoMetadata(total_num_frames=frames, fps=fps, duration=frames / fps)
    said = published().processor.video_processor.sample_frames(clip, fps=2)
    assert published().family.plan(video(frames, fps, 64, 64)).frame_indices == tuple(map(int, said))


@pytest.mark.parametrize("context_parallel", [1, 3])
def test_a_pack_of_text_alone_has_types_too_and_a_dummy_image_its_own(context_parallel):
    ours, parallel = small(), ParallelConfig(context_parallel=context_parallel)
    text = [row for _, row in rows(ours, [[], []])]
    batch = PackingTaskEncoder(ours, PackingConfig(seq_length=2040), parallel)._assemble(text)
    assert batch.extra["mm_token_type_ids"].tolist() == torch.zeros_like(batch.tokens).tolist()
    with_dummy = PackingTaskEncoder(ours, PackingConfig(seq_length=2040, dummy_image=True), parallel)._assemble(text)
    image_tokens = with_dummy.tokens == ours.family.placeholder_ids["image"]
    assert image_tokens.any()
    assert torch.equal(with_dummy.extra["mm_token_type_ids"], image_tokens.long())


@pytest.mark.parametrize(("fps", "frames"), [(2.5, 1), (30.0, 1), (30.0, 14)])
def test_a_clip_of_less_than_half_a_second_is_refused_by_name_where_the_processor_samples_no_frame_of_it(fps, frames):
    clip, ours = video(frames, fps, 64, 64), small()
    try:
        made = ours.processor.video_processor(
            videos=[torch.zeros(frames, 3, 64, 64, dtype=torch.uint8)],
            video_metadata=[metadata(clip)],
            do_sample_frames=True,
            return_metadata=True,
        )
    except ValueError as theirs:
        with pytest.raises(SampleRejected, match="too_few_frames") as caught:
            ours.family.plan(clip)
        said = "the clip has 1 frame;" if frames == 1 else f"fewer of the clip's {frames} frames at {fps:g} fps"
        assert said in caught.value.detail
        assert str(theirs) in caught.value.detail  # noqa: PT017
    else:  # from transformers 5.17 on, it takes one frame at least, and repeats it
        assert list(ours.family.plan(clip).frame_indices) == [
            int(at) for at in made["video_metadata"][0].frames_indices
        ]


def test_a_frame_list_of_one_image_is_refused_by_name_and_an_odd_one_is_filled():
    def listed(count):
        names = tuple(f"{at}.png" for at in range(count))
        times = tuple(3.0 * at for at in range(count))
        return Media(
            kind="video", name="v", width=64, height=64, frames=count, fps=1 / 3, frame_names=names, frame_times=times
        )

    with pytest.raises(SampleRejected) as caught:
        small().family.plan(listed(1))
    assert caught.value.reason == "too_few_frames"
    plan = small().family.plan(listed(5))
    assert plan.grid[0] == 3
    assert plan.timestamps == (0.0, 6.0, 12.0)
    made = small().family.pixels([plan], [torch.zeros(5, 3, 64, 64, dtype=torch.uint8)])
    assert made["video_grid_thw"].tolist() == [list(plan.grid)]


def test_video_max_frames_takes_whole_time_steps_evenly_over_the_clip():
    plain, fewer = (
        encoder(glm4v(), **config).family.plan(video(300, 10.0, 64, 64)).frame_indices
        for config in ({}, {"video_max_frames": 9})
    )
    assert len(plain) == 60
    assert len(fewer) == 8
    assert set(fewer) <= set(plain)
    assert (fewer[0], fewer[-1]) == (plain[0], plain[-1])
    assert max(np.diff(fewer)) - min(np.diff(fewer)) <= 2 * max(np.diff(plain))
