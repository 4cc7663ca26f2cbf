"""Which settings of the encoder each family takes; a setting that would change nothing is refused, never ignored."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from energon_packing.config import EncoderConfig
from energon_packing.errors import ConfigError
from energon_packing.families.base import FAMILY_FIELDS, VisionFamily
from energon_packing.families.registry import _FAMILIES

VALUES = dict.fromkeys(FAMILY_FIELDS, 56) | {"video_fps": 2.0, "pan_and_scan": True}
ONE_SIZE = frozenset(FAMILY_FIELDS)
REFUSED = {
    "ernie4_5_vl": {"pan_and_scan"},
    "gemma3": ONE_SIZE - {"pan_and_scan"},
    "glm4v": {"video_min_frames", "pan_and_scan"},
    "huggingface": ONE_SIZE,
    "internvl": {"video_min_pixels", "video_max_pixels", "pan_and_scan", "jpeg_scaled_decoding"},
    "llava": ONE_SIZE,
    "llava_next": ONE_SIZE,
    "llava_onevision": ONE_SIZE,
    "llava_onevision_1_5": {"pan_and_scan"},
    "pixtral": ONE_SIZE - {"max_pixels"},
    "qianfan_vl": {"video_min_pixels", "video_max_pixels", "pan_and_scan", "jpeg_scaled_decoding"},
    "qwen2_5_vl": {"pan_and_scan"},
    "qwen2_vl": {"pan_and_scan"},
    "qwen3_5_vl": {"pan_and_scan"},
    "qwen3_vl": {"pan_and_scan"},
    "text": {"pan_and_scan", "jpeg_scaled_decoding"},
}


def test_every_family_is_in_the_table():
    assert set(_FAMILIES) == set(REFUSED)


@pytest.mark.parametrize("field", FAMILY_FIELDS)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_setting_is_refused_by_name_where_the_family_does_not_read_it(name, field):
    family = object.__new__(_FAMILIES[name])
    config = EncoderConfig(**{field: VALUES[field]})
    if field in REFUSED[name]:
        with pytest.raises(ConfigError, match=rf"The family {name} does not use encoder\.{field}; remove it"):
            VisionFamily.__init__(family, SimpleNamespace(), config)
    else:
        VisionFamily.__init__(family, SimpleNamespace(), config)
