"""JPEG files decoded at a part of their size: what stays the same, and how far pixels are from the processor's."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.media_files import encoded, image_info, picture, turned_by_exif
from support.offline_processors import processor_of

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.media.image import decode_image, decode_scaled_image

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "ernie4_5_vl")
PIXELS = 60_000


@cache
def encoder_of(family: str, bound: float | None) -> ConversationEncoder:
    config = EncoderConfig(
        max_pixels=PIXELS * (2 if family == "glm4v" else 1), min_pixels=4000, jpeg_scaled_decoding=bound
    )
    return ConversationEncoder(config, processor=processor_of(family))


def about(data: bytes) -> Conversation:
    width, height = image_info(data)[:2]
    turns = (
        Turn(role="user", parts=(MediaPart(index=0), "What is it?")),
        Turn(role="assistant", parts=("A thing.",)),
    )
    return Conversation(key="k", turns=turns, media=(Media(kind="image", name="a.jpg", width=width, height=height),))


def rendered(family: str, bound: float | None, data: bytes) -> dict[str, Any]:
    encoder = encoder_of(family, bound)
    row: dict[str, Any] = encoder.render(encoder.measure(about(data)), lambda _: data)
    return row


def photograph(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    """Noise whose strength falls with its frequency, as in photographs."""
    rng = np.random.default_rng(seed)
    falling = 1 / np.maximum(np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)), 1 / max(width, height))
    bands = []
    for _ in range(1 if mode == "L" else len(mode)):
        waves = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(height, width))) * falling, s=(height, width))
        bands.append(Image.fromarray((128 + 50 * waves / waves.std()).clip(0, 255).astype(np.uint8)))
    return bands[0] if mode == "L" else Image.merge(mode, bands)


def pixels(row: dict[str, Any]) -> torch.Tensor:
    (values,) = [value for name, value in row["visual_inputs"].items() if name == "pixel_values"]
    assert values.dtype == torch.uint8
    return values.double()


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    width=st.integers(60, 1500),
    height=st.integers(60, 1500),
    bound=st.sampled_from([1.0, 1.5, 2.0]),
)
def test_tokens_and_grids_of_any_size_stay_the_same(family: str, width: int, height: int, bound: float) -> None:
    data = encoded(picture(width, height), "JPEG", quality=60)
    try:
        exact = rendered(family, None, data)
    except SampleRejected as error:
        with pytest.raises(SampleRejected, match=error.reason):
            rendered(family, bound, data)
        return
    close = rendered(family, bound, data)
    assert torch.equal(exact["input_ids"], close["input_ids"])
    assert torch.equal(exact["visual_inputs"]["image_grid_thw"], close["visual_inputs"]["image_grid_thw"])
    assert pixels(exact).shape == pixels(close).shape


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(("bound", "mean"), [(1.0, 6.0), (2.0, 1.5)])
def test_pixels_of_a_photograph_are_close_to_the_processor_s(family: str, bound: float, mean: float) -> None:
    data = encoded(photograph(1400, 900, seed=1), "JPEG", quality=90)
    exact, close = pixels(rendered(family, None, data)), pixels(rendered(family, bound, data))
    difference = float((exact - close).abs().mean())
    assert 0 < difference < mean


KINDS = {
    **{f"exif {turn}": lambda turn=turn: turned_by_exif(900, 500, turn) for turn in (2, 3, 6, 8)},
    "progressive": lambda: encoded(photograph(900, 500, 2), "JPEG", quality=90, progressive=True),
    "full chroma": lambda: encoded(photograph(900, 500, 2), "JPEG", quality=90, subsampling=0),
    "grey": lambda: encoded(photograph(900, 500, 3, "L"), "JPEG", quality=90),
    "cmyk": lambda: encoded(photograph(900, 500, 4, "CMYK"), "JPEG", quality=90),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_jpeg_file_is_upright_and_in_its_colours(name: str) -> None:
    data = KINDS[name]()
    width, height = image_info(data)[:2]
    exact = decode_image(data, max_pixels=10**7)
    image = decode_scaled_image(data, (height / 4, width / 4), max_pixels=10**7)
    assert (image.width, image.height) == (width, height) == (exact.shape[2], exact.shape[1])
    assert image.pixels.shape == (3, -(-height // 4), -(-width // 4))
    assert (
        float((pixels(rendered("qwen2_5_vl", None, data)) - pixels(rendered("qwen2_5_vl", 2, data))).abs().mean()) < 1.5
    )


@given(width=st.integers(1, 400), height=st.integers(1, 400), least=st.tuples(st.floats(1, 300), st.floats(1, 300)))
@settings(max_examples=60, deadline=None)
def test_the_decoded_size_is_the_smallest_one_that_is_large_enough(
    width: int, height: int, least: tuple[float, float]
) -> None:
    data = encoded(picture(width, height), "JPEG")
    found = decode_scaled_image(data, least, max_pixels=10**6).pixels.shape[1:]
    # Of whole pixels: a side of 21 has 10 at a half, although libjpeg then gives 11.
    enough = [part for part in (8, 4, 2) if height // part >= least[0] and width // part >= least[1]]
    part = enough[0] if enough else 1
    assert found == (-(-height // part), -(-width // part))
    assert part == 1 or (found[0] >= least[0] and found[1] >= least[1])


def test_a_changed_or_cut_file_is_rejected_as_without_the_setting() -> None:
    data = encoded(photograph(1000, 800, 6), "JPEG")
    encoder = encoder_of("qwen2_5_vl", 2)
    measured = encoder.measure(about(data))
    # Of half the measured size: at a part of its size, it must not pass for the whole one.
    half = encoded(photograph(500, 400, 6), "JPEG")
    for other, reason in ((half, "media_changed"), (data[: len(data) // 2], "corrupt_media"), (b"", "corrupt_media")):
        with pytest.raises(SampleRejected) as caught:
            encoder.render(measured, lambda _, other=other: other)
        assert caught.value.reason == reason


@pytest.mark.parametrize("family", ["internvl", "llava", "pixtral"])
def test_a_family_that_resizes_an_image_more_than_once_refuses_the_setting(family: str) -> None:
    with pytest.raises(ConfigError, match="jpeg_scaled_decoding; remove it"):
        ConversationEncoder(EncoderConfig(jpeg_scaled_decoding=2), processor=processor_of(family))
