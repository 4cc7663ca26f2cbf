"""Limits that somebody meant as "none": refused when the encoder is made, instead of a run that never begins."""

import re

import pytest
from support.offline_processors import PROCESSORS, internvl, llava, llava_next, llava_onevision, qianfan
from transformers import AutoProcessor
from whole_sample import encoder, image

from energon_packing.config import EncoderConfig
from energon_packing.encoders.fitting import Resizer, tokens_of
from energon_packing.errors import ConfigError
from energon_packing.families import geometry as tile_bound
from energon_packing.families.geometry import MOST_TILES
from energon_packing.families.hugging_face import TILE_LIMITS, HuggingFace
from energon_packing.families.registry import build_family


@pytest.mark.parametrize("make", [internvl, qianfan])
@pytest.mark.parametrize("pixels", [2**32, 2**62])
def test_an_area_of_more_tiles_than_can_be_listed_is_refused_when_the_encoder_is_made(make, pixels):
    with pytest.raises(ConfigError, match=rf"encoder.max_pixels={pixels} .* more than {MOST_TILES}"):
        encoder(make(), max_pixels=pixels)


@pytest.mark.parametrize("make", [internvl, qianfan])
def test_a_processor_file_with_more_tiles_than_can_be_listed_is_refused_under_the_files_name(tmp_path, make):
    make().save_pretrained(tmp_path)
    path = next(path for path in tmp_path.glob("*processor_config.json") if "max_patches" in path.read_text())
    path.write_text(re.sub(r'"max_patches": \d+', f'"max_patches": {10**12}', path.read_text()))
    processor = AutoProcessor.from_pretrained(tmp_path)
    assert processor.image_processor.max_patches == 10**12
    with pytest.raises(ConfigError, match=r"max_patches of the image processor allows 10+ tiles"):
        build_family(processor, EncoderConfig())
    assert build_family(processor, EncoderConfig(max_pixels=448 * 448 * 12)).plan(image(900, 900)).tiles == 5


@pytest.mark.parametrize("name", PROCESSORS)
def test_no_family_makes_a_list_of_all_grids_that_a_processor_allows(name):
    processor = PROCESSORS[name]()
    for limit in TILE_LIMITS:
        if hasattr(processor.image_processor, limit):
            setattr(processor.image_processor, limit, 10**12)
            with pytest.raises(ConfigError, match=rf"^{limit} of the image processor allows 10+ tiles"):
                build_family(processor, EncoderConfig(family=name))


@pytest.fixture
def unasked(monkeypatch):
    """Fails where the generic family asks a processor anything: with such limits it might never get an answer."""

    def ask(*_):
        pytest.fail("the processor was asked")

    monkeypatch.setattr(HuggingFace, "_learn", ask)


@pytest.mark.parametrize("name", TILE_LIMITS)
def test_the_generic_family_refuses_such_a_processor_before_it_asks_it(unasked, name):
    processor = llava()
    setattr(processor.image_processor, name, 10**12)
    with pytest.raises(ConfigError, match=f"^{name} of the image processor allows 10+ tiles"):
        encoder(processor, family="huggingface")


def test_media_are_still_made_smaller_where_the_largest_area_is_the_familys_bound(monkeypatch):
    """The search for a lower limit ends at the bound: above it, every try would be refused."""
    monkeypatch.setattr(tile_bound, "MOST_TILES", 40)
    monkeypatch.setattr("energon_packing.families.internvl.MOST_TILES", 40)
    for most in (40, 37, 4):
        family = encoder(internvl(28, 4, max_patches=most)).family
        picture = (image(280, 280),)
        before = tokens_of(family.plans(picture))
        settings = Resizer(family).fewer_tokens(picture, (), before - 1)
        assert settings is not None
        assert tokens_of(Resizer(family).family(settings).plans(picture)) < before
    narrow = encoder(internvl(28, 4, min_patches=30, max_patches=40)).family
    picture = (image(560, 560),)
    assert tokens_of(narrow.plans(picture)) == 4 * 37  # six by six and the thumbnail
    settings = Resizer(narrow).fewer_tokens(picture, (), 4 * 37 - 1)
    assert settings is not None
    assert tokens_of(Resizer(narrow).family(settings).plans(picture)) == 4 * 31


BAD = {
    "a text": ("[[336, 672]]", "must be a list"),
    "nothing": ([], "must be a list"),
    "a number": ([[336, 672], 5], "not a \\[height, width\\]"),
    "three sides": ([[336, 672, 1]], "not a \\[height, width\\]"),
    "a side of zero": ([[336, 0]], "not a \\[height, width\\]"),
    "too many": ([[336, 672]] * (MOST_TILES + 1), "every image is compared"),
    "a poster": ([[336, 672], [336 * 1000, 336 * 1000]], "over encoder.max_source_pixels"),
}


@pytest.mark.parametrize("what", sorted(BAD))
@pytest.mark.parametrize(
    ("make", "family"), [(llava_next, "auto"), (llava_onevision, "auto"), (llava_next, "huggingface")]
)
def test_resolutions_that_cannot_be_meant_are_refused_when_the_encoder_is_made(unasked, make, family, what):
    pinpoints, why = BAD[what]
    processor = make()
    processor.image_processor.image_grid_pinpoints = pinpoints
    with pytest.raises(ConfigError, match=why):
        encoder(processor, family=family)
