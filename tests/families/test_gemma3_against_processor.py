"""Gemma 3 with and without pan-and-scan, against its Hugging Face processor."""

from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offline_processors import gemma3
from whole_sample import encoder, image


@cache
def published(pan_and_scan: bool):
    return encoder(gemma3(), pan_and_scan=pan_and_scan)


@cache
def small(pan_and_scan: bool | None):
    """Small squares of few tokens, so that pixels are quick."""
    return encoder(gemma3(56, 4), pan_and_scan=pan_and_scan)


def sides():
    """Sides around the smallest crop of 256 pixels, and those that turn pan-and-scan on and off."""
    return st.one_of(st.sampled_from([1, 255, 256, 257, 511, 512, 513, 614, 615, 768]), st.integers(1, 1100))


@settings(max_examples=100, deadline=None)
@given(width=st.one_of(sides(), st.integers(1, 20000)), height=st.one_of(sides(), st.integers(1, 20000)))
def test_an_image_of_any_size_becomes_the_crops_that_the_image_processor_makes(width, height):
    """The whole image processor on an image without storage, so that no size is too large."""
    plan = published(True).family.plan(image(width, height))
    processor = untouched()
    made = processor.image_processor(
        images=[torch.empty(3, height, width, dtype=torch.uint8, device="meta")],
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=256,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
        input_data_format="channels_first",
    )
    assert plan.tiles == len(made["pixel_values"]) == 1 + int(made["num_crops"][0])
    assert plan.runs == (256,) * plan.tiles


@cache
def untouched():
    return gemma3()


def test_without_the_setting_a_call_of_the_processor_makes_no_crops_whatever_its_file_says():
    processor = gemma3(56, 4)
    processor.image_processor.do_pan_and_scan = True
    made = processor(
        text=["<start_of_image>"], images=[[torch.zeros(3, 300, 1200, dtype=torch.uint8)]], return_tensors="pt"
    )
    plan = encoder(processor).family.plan(image(1200, 300))
    assert plan.tiles == len(made["pixel_values"]) == 1
    assert plan.tokens == int((made["input_ids"] == processor.image_token_id).sum())


def test_pan_and_scan_is_part_of_the_fingerprint():
    off, on, unset = (small(mode).fingerprint() for mode in (False, True, None))
    assert [name for name in off if off[name] != on[name]] == ["vision_limits"]
    assert unset == off
