"""InternVL and Qianfan-VL against ``InternVLProcessor`` and ``QianfanOCRProcessor``."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.offline_processors import internvl
from transformers import LlavaOnevisionVideoProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from whole_sample import encoder, image

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.geometry import spread_frames
from energon_packing.families.registry import build_family

TOTALS = st.one_of(st.integers(1, 100_003), st.integers(1, 2**31 - 1))


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from([InternVLVideoProcessor, LlavaOnevisionVideoProcessor]), total=TOTALS, most=st.integers(1, 64)
)
@example(kind=InternVLVideoProcessor, total=100_003, most=61)  # the processor gives index 100003 as well
@example(kind=LlavaOnevisionVideoProcessor, total=2**31 - 1, most=29)  # and here -2147483648
def test_sampled_frames_are_the_processors_and_never_beyond_the_clip(kind, total, most):
    clip = Media(kind="video", name="clip", frames=total, fps=25.0)
    indices = spread_frames(clip, EncoderConfig(), kind(), rate=None, fewest=1, most=most)
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


def test_what_the_family_cannot_do_is_refused_by_name():
    processor = internvl(28, 4)
    processor.video_processor = InternVLVideoProcessor()
    with pytest.raises(ConfigError, match="one size"):
        encoder(processor)


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Rows of pixels, as images are decoded."""
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).movedim(-1, -3)


def test_an_image_with_other_tiles_than_measured_is_rejected():
    made = build_family(internvl(), EncoderConfig())
    plan = made.plan(Media(kind="image", name="a", width=900, height=300))
    with pytest.raises(SampleRejected, match="tiles") as caught:
        made.pixels([plan], [noise(0, 300, 300, 3)], raw=True)
    assert caught.value.reason == "media_changed"
