"""Which families can make the media of a sample smaller: what docs/families.md says is what they do."""

import re
from pathlib import Path

import pytest
from support.offline_processors import PROCESSORS, internvl, processor_of
from whole_sample import encoder, image, video

from energon_packing.config import EncoderConfig, LimitsConfig
from energon_packing.conversation import Conversation, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.fitting import Resizer, frames_of, tokens_of
from energon_packing.errors import SampleRejected

PAGE = Path(__file__).parents[2] / "docs/families.md"


def documented() -> dict[str, str]:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| `\w+` \|", line)]
    table: dict[str, str] = {}
    for line in rows:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8:
            table.setdefault(cells[0].strip("`"), cells[-1])
    return table


def of_family(name: str, **settings):
    if name == "huggingface":
        return encoder(processor_of("llava"), family="huggingface", **settings)
    if name == "ernie4_5_vl":  # its own smallest frame is more than half of the clip's
        settings = {"video_min_pixels": 4 * 28 * 28, **settings}
    base = {"llava_onevision_1_5": "qwen2_5_vl", "qianfan_vl": "internvl"}.get(name, name)
    return encoder(processor_of(base), family=name, **settings)


def about(medium):
    turns = (Turn(role="user", parts=(MediaPart(index=0), "?")), Turn(role="assistant", parts=("It is.",)))
    return Conversation(key="k", turns=turns, media=(medium,))


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_page_says_what_a_family_can_make_smaller(name):
    family = of_family(name).family
    resizer = Resizer(family)
    found = []
    picture, clip = (image(1600, 1200),), (video(64, 4.0, 640, 480),)
    if resizer.fewer_tokens(picture, (), tokens_of(family.plans(picture)) // 2) is not None:
        found.append("images")
    try:
        plans = family.plans(clip)
    except SampleRejected:
        plans = ()
    if plans and resizer.fewer_frames(clip, (), frames_of(plans) // 2) is not None:
        found.append("frames")
    if plans and resizer.fewer_tokens(clip, (), tokens_of(plans) // 2) is not None:
        found.append("frame size")
    assert documented().get(name, f"{name} has no row") == (", ".join(found) or "no")


@pytest.mark.parametrize("name", ["llava", "llava_next", "llava_onevision", "gemma3", "huggingface"])
def test_a_sample_that_its_family_cannot_resize_is_dropped_by_the_limits_own_reason(name):
    limits = LimitsConfig(max_visual_tokens=10, when_over=("resize",), min_active_ratio=0.0)
    with pytest.raises(SampleRejected) as caught:
        of_family(name, limits=limits).measure(about(image(1600, 1200)))
    assert caught.value.reason == "too_many_visual_tokens"


def test_no_image_becomes_smaller_than_its_familys_own_smallest_size():
    processor = internvl(28, 4, min_patches=2, max_patches=6)
    limits = LimitsConfig(max_visual_tokens=12, when_over=("resize",), min_active_ratio=0.0)
    made = ConversationEncoder(EncoderConfig(limits=limits), processor=processor)
    # Two tiles and their thumbnail, four tokens each: exactly what is allowed.
    assert made.measure(about(image(300, 280))).plans[0].tokens == 12
    less = ConversationEncoder(
        EncoderConfig(limits=LimitsConfig(max_visual_tokens=11, when_over=("resize",))), processor=processor
    )
    with pytest.raises(SampleRejected, match="too_many_visual_tokens"):
        less.measure(about(image(300, 280)))


@pytest.mark.parametrize("name", ["internvl", "qianfan_vl", "qwen2_5_vl"])
def test_no_limit_far_above_the_one_that_is_found_is_tried_because_high_ones_are_dear(name, monkeypatch):
    tried = []
    plans = Resizer._plans

    def recorded(resizer, media, settings):
        tried.extend(value for field, value in settings if field == "max_pixels")
        return plans(resizer, media, settings)

    monkeypatch.setattr(Resizer, "_plans", recorded)
    family = of_family(name).family
    picture = (image(1600, 1200),)
    before = tokens_of(family.plans(picture))
    settings = Resizer(family).fewer_tokens(picture, (), before - 1)
    assert settings is not None
    powers = (2**exponent for exponent in range(18, 32))
    enough = next(
        pixels for pixels in powers if tokens_of(of_family(name, max_pixels=pixels).family.plans(picture)) >= before
    )
    assert max(tried) <= 2 * enough
    assert Resizer(family)._ladder("max_pixels")[-1] > 100 * enough  # so high it could have gone
