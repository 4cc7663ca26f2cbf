"""The generic family on processors that it has no code for, and the ones that it must refuse."""

import pytest
import torch
from support.offline_processors import glm46v, internvl, llava_next, pixtral, tokenizer
from test_llava_against_processor import PINPOINTS, SIDE
from whole_sample import encoder, image, video

from energon_packing.config import EncoderConfig
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.registry import build_family


def test_a_processor_whose_images_are_no_single_run_or_no_joined_tensor_is_refused():
    with pytest.raises(ConfigError, match="not one uninterrupted run"):
        encoder(pixtral(128), family="huggingface")
    with pytest.raises(ConfigError, match=r"pixel_values of .* cannot be joined"):
        encoder(llava_next(SIDE, PINPOINTS), family="huggingface")


def test_a_processor_that_counts_otherwise_than_it_writes_is_refused(monkeypatch):
    processor = internvl(28, 4)
    honest = processor._get_num_multimodal_tokens
    monkeypatch.setattr(processor, "_get_num_multimodal_tokens", lambda image_sizes: honest(image_sizes[:1] * 2))
    encoder(processor, family="huggingface")

    def off_by_size(image_sizes):
        said = honest(image_sizes)
        said.num_image_tokens = [said.num_image_tokens[0] + image_sizes[0][0] % 2]
        return said

    monkeypatch.setattr(processor, "_get_num_multimodal_tokens", off_by_size)
    with pytest.raises(ConfigError, match="different tokens for an image than it writes"):
        encoder(processor, family="huggingface")


def test_an_image_that_becomes_other_tokens_than_were_counted_is_rejected(monkeypatch):
    ours = encoder(internvl(28, 4), family="huggingface")
    plan = ours.family.plan(image(28, 28))
    monkeypatch.setattr(ours.processor.image_processor, "min_patches", 2)
    with pytest.raises(SampleRejected, match="media_changed"):
        ours.family.pixels([plan], [torch.zeros(3, 28, 28, dtype=torch.uint8)])


def test_it_is_chosen_by_name_only_and_takes_no_videos():
    with pytest.raises(ConfigError, match="'huggingface', which uses the processor's own counts"):
        build_family(glm46v(), EncoderConfig())
    with pytest.raises(SampleRejected, match="does not accept videos"):
        encoder(glm46v(), family="huggingface").family.plan(video(8, 2.0, 30, 30))
    with pytest.raises(ConfigError, match="no image_token"):
        build_family(tokenizer(), EncoderConfig(family="huggingface"))
