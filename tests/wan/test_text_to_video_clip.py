"""Measured patches against the VAE, diffusers' pipeline and Bridge's own functions."""

import io
import json
import sys
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.bridge_wan import bridge_wan
from support.media_files import clip_of

from energon_packing.conversation import Media
from energon_packing.energon.pack_bytes import field_digests, pack_from_bytes, pack_to_bytes
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.media.probe import media_file
from energon_packing.wan.config import TextToVideoConfig
from energon_packing.wan.encoder import T5CaptionEncoder, TextToVideoEncoder, WanLatentEncoder, plan_clip, resize_frames
from energon_packing.wan.pack import WanPack, WanSample, pack_wan
from energon_packing.wan.record import StoredTensor, TextToVideo

wan = pytest.fixture(scope="module")(bridge_wan)


def plan(frames, rate, width, height, **options):
    clip = Media(kind="video", name="clip", frames=frames, fps=rate, width=width, height=height)
    return plan_clip(clip, TextToVideoConfig(**options), SimpleNamespace(temporal_stride=4, spatial_stride=8))


@settings(max_examples=100, deadline=None)
@given(
    frames=st.integers(1, 5000),
    fps=st.floats(0.5, 240),
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    wanted=st.sampled_from([None, 8.0, 16.0, 30000 / 1001]),
    longer=st.sampled_from(["middle", "spread"]),
)
def test_frames_stay_inside_the_clip_and_sizes_divide_into_bridges_grid(
    wan, frames, fps, width, height, wanted, longer
):
    options = {"fps": wanted, "longer": longer}
    if min(width, height) < 16:
        with pytest.raises(SampleRejected, match="too_small"):
            plan(frames, fps, width, height, **options)
        return
    assume(max(width, height) / min(width, height) < 50)
    made = plan(frames, fps, width, height, **options)
    indices = made.frame_indices.tolist()
    assert indices == sorted(indices)
    assert 0 <= indices[0] <= indices[-1] < frames
    assert len(indices) <= 81
    assert len(indices) == 1 + (made.latent_shape[0] - 1) * 4
    assert made.width <= width
    assert made.height <= height
    assert made.width * made.height <= 832 * 480
    latent = torch.zeros(1, *made.latent_shape)
    grid = wan.grid_sizes_calculation(latent.shape[1:], (1, 2, 2))
    assert len(wan.patchify([latent], (1, 2, 2))[0]) == grid[0] * grid[1] * grid[2]


@settings(max_examples=4, deadline=None)
@given(frames=st.integers(1, 24), width=st.integers(16, 70), height=st.integers(16, 70))
def test_the_vae_makes_latents_of_the_planned_shape(pipeline, frames, width, height):
    encoder = WanLatentEncoder(str(pipeline))
    made = plan(frames, 16.0, width, height)
    pixels = torch.zeros(len(made.frame_indices), 3, height, width, dtype=torch.uint8)
    latents = encoder.encode(resize_frames(pixels, made.height, made.width))
    assert tuple(latents.shape) == (encoder.channels, *made.latent_shape)


def test_sampling_keeps_the_speed_or_spreads_over_the_whole_clip():
    middle = plan(300, 30.0, 64, 64, fps=16.0).frame_indices
    assert len(middle) == 81
    assert middle[0] > 50
    assert middle[-1] < 250
    spread = plan(300, 30.0, 64, 64, fps=16.0, longer="spread").frame_indices
    assert (spread[0], len(spread)) == (0, 81)
    assert spread[-1] >= 297
    assert plan(9, 8.0, 64, 64, fps=16.0).frame_indices.tolist() == [index // 2 for index in range(17)]
    assert plan(9, 8.0, 64, 64).frame_indices.tolist() == list(range(9))
    with pytest.raises(SampleRejected, match="too_short"):
        plan(1, 16.0, 64, 64, patch=(2, 2, 2))


def test_a_clip_of_a_variable_rate_shows_at_each_time_what_is_on_the_screen(pipeline, tmp_path):
    """A screen of 40 seconds: 60 frames in the first two, then one or two in each second. The oracle: PyAV's times."""
    late = np.sort(np.random.default_rng(3).choice(np.arange(220, 4000), 60, replace=False)).tolist()
    times = [*(round(number * 10 / 3) for number in range(60)), *late]
    data = clip_of((np.full((48, 64, 3), 40 + number, np.uint8) for number in range(len(times))), times)
    (tmp_path / "screen.mp4").write_bytes(data)
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    seconds = np.array([float((frame.pts - frames[0].pts) * frame.time_base) for frame in frames])
    clip = media_file(tmp_path / "screen.mp4", "video")
    record = TextToVideo(key="k", caption="a ball", video=clip).to_record()
    read = TextToVideo.from_record("k", json.loads(json.dumps(record))).video
    assert read == clip
    before = json.loads(json.dumps(record))
    del before["video"]["time_points"]  # as conversion wrote it until then
    old = TextToVideo.from_record("k", before).video

    def drawn(media, fps):
        models = {"vae": str(pipeline), "text_encoder": str(pipeline), "latent_channels": 4, "text_width": 32}
        return TextToVideoEncoder(TextToVideoConfig(**models, fps=fps))._plan(media).frame_indices

    shown, even = drawn(read, 1.0), drawn(old, 1.0)
    first = (int(clip.duration) - len(shown)) // 2
    for wanted, frame in enumerate(shown.tolist(), start=first):
        assert seconds[frame] <= wanted + 0.02
        assert frame == len(seconds) - 1 or wanted - 0.02 < seconds[frame + 1]
    assert shown.dtype == even.dtype == np.int64
    assert len(shown) == len(even)
    assert sum(seconds[shown] < 2) <= 2 < 10 < sum(seconds[even] < 2)
    assert drawn(read, None).tolist() == drawn(old, None).tolist()  # all frames


@pytest.mark.parametrize(
    ("frames", "fps", "wanted", "changed"),
    [
        (9, 8.0, None, ()),
        (9, 8.0, 8.0, ()),
        (9, 4.0, 2.0, (("still", "of 9 frames only one is taken"),)),
        (9, 8.0, 5.0, ()),
        (9, 8.0, 16.0, (("repeated", "9 frames at 8 fps become 17; encoder.fps is 16"),)),
        (3, 8.0, None, (("still", "of 3 frames only one is taken"),)),
        (1, 8.0, None, ()),
        (6, 8.0, None, ()),
    ],
)
def test_the_ledger_notes_a_clip_with_repeated_frames_and_one_that_becomes_a_still(
    pipeline, frames, fps, wanted, changed
):
    config = TextToVideoConfig(
        vae=str(pipeline), text_encoder=str(pipeline), latent_channels=4, text_width=32, fps=wanted
    )
    clip = Media(kind="video", name="v.mp4", width=64, height=64, frames=frames, fps=fps, duration=frames / fps)
    assert TextToVideoEncoder(config).measure(TextToVideo(key="v", caption="a ball", video=clip)).changes == changed
    odd = StoredTensor(name="l.npy", tensor="", shape=(4, 1, 3, 4), dtype="float32")
    with pytest.raises(SampleRejected, match="does not divide into patches") as wrong:
        TextToVideoEncoder(config).measure(TextToVideo(key="v", caption="a ball", latents=odd))
    assert wrong.value.reason == "wrong_shape"


@pytest.mark.parametrize(("width", "height"), [(64, 48), (1920, 1080), (30, 20), (48, 32), (200, 500)])
def test_every_frame_has_the_size_that_a_run_names(width, height):
    made = plan(9, 16.0, width, height, frame_size=(32, 48))
    assert (made.height, made.width, made.latent_shape) == (32, 48, (3, 4, 6))
    frames = torch.arange(width).mul(255 / width).to(torch.uint8).expand(1, 3, height, width)
    shown = resize_frames(frames, made.height, made.width)
    assert tuple(shown.shape) == (1, 32, 48, 3)
    assert abs(float(shown.float().mean()) - 127) < 6, "the middle is kept"
    with pytest.raises(ConfigError, match=r"frame_size is \[40, 48\]; use multiples of \[16, 16\]"):
        plan(9, 16.0, width, height, frame_size=(40, 48))
    for wrong in ((32,), (32, 0)):
        with pytest.raises(ConfigError, match="name a height and a width"):
            plan(9, 16.0, width, height, frame_size=wrong)


def test_resizing_covers_and_cuts_the_middle_without_distortion():
    frames = torch.zeros(1, 3, 40, 90, dtype=torch.uint8)
    frames[..., 45:] = 255
    made = resize_frames(frames, 32, 64)
    assert tuple(made.shape) == (1, 32, 64, 3)
    assert made[0, :, :28].max() < 30
    assert made[0, :, 36:].min() > 225


@pytest.mark.parametrize("repairs", [True, False])
def test_embeddings_equal_those_of_diffusers_pipeline_without_its_padding(pipeline, monkeypatch, repairs):
    from diffusers.pipelines.wan import pipeline_wan

    monkeypatch.setitem(sys.modules, "ftfy", None)  # it need not be installed
    ftfy = SimpleNamespace(fix_text=lambda text: text.replace("r\u00c3\u00a9d", "red"))
    monkeypatch.setattr(pipeline_wan, "is_ftfy_available", lambda: repairs)
    if repairs:
        monkeypatch.setitem(sys.modules, "ftfy", ftfy)
        monkeypatch.setattr(pipeline_wan, "ftfy", ftfy, raising=False)
        encoder = T5CaptionEncoder(str(pipeline))
    else:
        with pytest.warns(UserWarning, match="ftfy is not installed"):
            encoder = T5CaptionEncoder(str(pipeline))
    assert encoder.stated == (
        {"ftfy": "installed"} if repairs else {}
    )  # a state is refused where it was made without, and the reverse
    tools = type("Tools", (), {})()
    tools.tokenizer, tools.text_encoder = encoder._tokenizer, encoder._model
    tools._execution_device, tools.dtype = "cpu", torch.float32
    for caption in ("the red ball rolls", "a  red &amp;amp; blue\n ball", "the r\u00c3\u00a9d ball", "the " * 40):
        theirs = pipeline_wan.WanPipeline._get_t5_prompt_embeds(tools, caption, max_sequence_length=16)[0]
        token_ids, found = encoder.tokenize(caption, 16)
        assert (found > 16) == (caption == "the " * 40)
        ours = encoder.encode(token_ids)
        assert len(ours) == min(found, 16)
        torch.testing.assert_close(ours, theirs[: len(ours)], atol=1e-5, rtol=1e-4)
        assert not theirs[len(ours) :].any()
    repaired = encoder.tokenize("the r\u00c3\u00a9d ball", 16) == encoder.tokenize("the red ball", 16)
    assert repaired == repairs


@pytest.mark.parametrize("pixels", [True, False])
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_pack_of_clips_arrives_on_another_rank_as_it_was_sent(pixels, multiple):
    metadata = {"sizes": [1, [2, 3]], "name": "a\ud800", "none": None}
    sample = WanSample(key="v", latent=torch.randn(4, 1, 6, 6), text=torch.randn(5, 8), metadata=metadata)
    sent = pack_wan([sample], multiple=multiple)
    arrived = pack_from_bytes(pack_to_bytes(sent, pixels=pixels))  # every pipeline stage reads the latents
    assert (type(arrived), sent.fillers) == (WanPack, multiple > 1)
    assert field_digests(arrived) == field_digests(sent)
    assert (arrived.video_metadata, arrived.keys, arrived.fillers) == ((metadata,), ("v",), sent.fillers)
    assert field_digests(sent) != field_digests(pack_wan([sample, sample], multiple=multiple))
