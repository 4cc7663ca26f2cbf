"""Grey of more than 8 bits is shown as a person sees it, or refused by name: never white or black without a word.

The oracle is NumPy on the samples that were written, byte by byte, into the file.
"""

import numpy as np
import pytest
from deep_files import pfm, pgm, png, ppm, tiff
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.media_files import image_info

from energon_packing.errors import SampleRejected
from energon_packing.media.image import decode_image

LIMIT = 10**6


def shown(data: bytes) -> np.ndarray:
    """The decoded image ``[H, W, 3]`` without its alpha, which conversion must let pass too."""
    found = decode_image(data, max_pixels=LIMIT, on_white=False).permute(1, 2, 0).numpy()
    info = image_info(data, decode=True)
    assert (info.height, info.width) == found.shape[:2]
    return found


def assert_grey(data: bytes, samples: np.ndarray, white: float, *, inverted: bool = False) -> None:
    """Every channel is the sample's share of white, to one step of 255."""
    share = samples.astype(np.float64) / white
    expected = 255 * (1 - share if inverted else share)
    found = shown(data).astype(np.float64)
    assert np.abs(found - expected[:, :, None]).max() < 1.01
    assert np.array_equal(found[:, :, 0], found[:, :, 1])
    assert np.array_equal(found[:, :, 0], found[:, :, 2])


def ramp(white: int, dtype: str = "u2") -> np.ndarray:
    """Black, white and 58 samples between them."""
    return np.linspace(0, white, 60).round().astype(dtype).reshape(6, 10)


def refused(data: bytes, *, decode: bool = True) -> str:
    """The detail with which an image is refused, alike when it is converted and when it is decoded."""
    details = []
    for read in (lambda: image_info(data, decode=decode), lambda: decode_image(data, max_pixels=LIMIT)):
        with pytest.raises(SampleRejected) as caught:
            read()
        assert caught.value.reason == "unsupported_depth"
        details.append(caught.value.detail)
    assert details[0] == details[1]
    return details[0]


@pytest.mark.parametrize("plain", [False, True], ids=["binary", "plain"])
@pytest.mark.parametrize("maxval", [1, 100, 255, 256, 1023, 4095, 65534, 65535])
def test_a_pgm_is_scaled_by_its_maxval(maxval: int, plain: bool) -> None:
    assert_grey(pgm(ramp(maxval), maxval, plain=plain), ramp(maxval), maxval)


@settings(max_examples=60)
@given(data=st.data(), maxval=st.integers(256, 65535))
def test_a_pgm_of_any_maxval_shows_every_sample_as_its_share(data: st.DataObject, maxval: int) -> None:
    samples = data.draw(arrays.arrays("u2", (3, 5), elements=st.integers(0, maxval)))
    assert_grey(pgm(samples, maxval), samples, maxval)


def test_a_ppm_of_ten_bits_is_scaled_by_its_maxval() -> None:
    samples = np.stack([ramp(1023), ramp(1023)[::-1], ramp(1023)[:, ::-1]], axis=-1)
    assert np.abs(shown(ppm(samples, 1023)) - samples * 255.0 / 1023).max() < 1.01


def test_sixteen_bits_of_a_png_are_scaled_to_eight_with_and_without_colour() -> None:
    samples = ramp(65535)
    assert_grey(png(samples[:, :, None]), samples, 65535)
    assert_grey(png(np.stack([samples, samples[::-1]], axis=-1)), samples, 65535)  # the second channel is alpha
    colour = np.stack([samples, samples[::-1], samples[:, ::-1]], axis=-1)
    for channels in (colour, np.concatenate([colour, samples[:, :, None]], axis=-1)):
        assert np.abs(shown(png(channels)) - colour * (255.0 / 65535)).max() < 1.01


@pytest.mark.parametrize("order", ["<", ">"], ids=["little-endian", "big-endian"])
def test_sixteen_bits_of_a_tiff_are_scaled_to_eight_in_either_byte_order(order: str) -> None:
    assert_grey(tiff(ramp(65535), order=order), ramp(65535), 65535)
    colour = np.stack([ramp(65535), ramp(65535)[::-1], ramp(65535)[:, ::-1]], axis=-1)
    assert np.abs(shown(tiff(colour, order=order)) - colour * (255.0 / 65535)).max() < 1.01


def test_twelve_bits_of_a_tiff_are_not_taken_for_sixteen() -> None:
    assert_grey(tiff(ramp(4095), bits=12), ramp(4095), 4095)


def test_a_deep_tiff_whose_0_is_white_is_no_negative() -> None:
    assert_grey(tiff(ramp(65535), photometric=0), ramp(65535), 65535, inverted=True)
    floats = ramp(1000).astype("f4") / 1000
    assert_grey(tiff(floats, photometric=0), floats, 1.0, inverted=True)


@pytest.mark.parametrize("write", [tiff, pfm], ids=["tiff", "pfm"])
def test_floats_from_0_to_1_are_black_to_white(write) -> None:
    samples = ramp(1000).astype("f4") / 1000
    assert_grey(write(samples), samples, 1.0)


@pytest.mark.parametrize(
    ("value", "said"), [(1.5, "from 0 to 1.5"), (-0.25, "from -0.25 to"), (np.nan, "not numbers"), (np.inf, "to inf")]
)
@pytest.mark.parametrize("write", [tiff, pfm], ids=["tiff", "pfm"])
def test_a_single_float_outside_of_0_to_1_refuses_the_image_with_its_value(write, value: float, said: str) -> None:
    samples = ramp(1000).astype("f4") / 2000
    samples[4, 7] = value
    assert said in refused(write(samples))


@pytest.mark.parametrize("decode", [True, False], ids=["decoded", "header"])
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "u4"])
def test_integers_without_a_defined_white_are_refused_from_the_header(dtype: str, decode: bool) -> None:
    assert "8 or 16 unsigned bits" in refused(tiff(ramp(100, dtype)), decode=decode)
