"""Geometry, pixels and positions of the Qwen-VL families against the Hugging Face processor and model code."""

import pytest
from whole_sample import image

from energon_packing.config import EncoderConfig
from energon_packing.demo import processor_path
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.registry import build_family, load_processor


@pytest.mark.parametrize(
    ("family", "words"), [("qwen3_v", "Did you mean 'qwen3_vl'"), ("qwen2_5_vl", "Qwen3VLProcessor")]
)
def test_an_unknown_family_names_the_nearest_and_one_refuses_the_processor_of_another(family, words):
    config = EncoderConfig(processor=str(processor_path("qwen3_vl")), family=family)
    with pytest.raises(ConfigError, match=words):
        build_family(load_processor(config), config)


def test_a_wrong_processor_path_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="No processor can be loaded"):
        load_processor(EncoderConfig(processor=str(tmp_path / "nothing")))


def test_the_text_family_refuses_media_instead_of_dropping_them(encoders):
    with pytest.raises(SampleRejected, match="unsupported_media"):
        encoders["text"].family.plan(image(10, 10))
