"""Sizes of images as they are displayed, and what is refused before it is decoded."""

import io
import warnings

import pytest
from PIL import Image
from support.media_files import image_info, png_of

from energon_packing.errors import SampleRejected


def encoded(image: Image.Image, form: str = "JPEG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.effect_noise((width, height), 90).convert(mode)


@pytest.mark.parametrize(
    ("image", "form", "size"),
    [
        (noise(33, 17, "CMYK"), "JPEG", (33, 17)),
        (Image.new("I;16", (12, 9), 40000), "PNG", (12, 9)),
        (Image.new("I;16", (12, 9), 40000), "TIFF", (12, 9)),
        (Image.new("RGB", (1, 1)), "PNG", (1, 1)),
        (Image.new("L", (20000, 20)), "PNG", (20000, 20)),
        (Image.new("1", (30, 20)), "PNG", (30, 20)),
        (noise(40, 30, "RGBA"), "WEBP", (40, 30)),
        (noise(40, 30, "P"), "BMP", (40, 30)),
    ],
)
def test_unusual_but_sound_images_are_accepted_with_their_size(image: Image.Image, form: str, size: tuple) -> None:
    info = image_info(encoded(image, form), decode=True)
    assert (info.width, info.height) == size
    assert info.format == form


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_truncated_image_is_found_by_decoding(form: str) -> None:
    data = encoded(noise(200, 200), form)
    with pytest.raises(SampleRejected) as caught:
        image_info(data[: len(data) // 2], decode=True)
    assert caught.value.reason == "corrupt_media"


@pytest.mark.parametrize("side", [9_500, 14_000, 60_000])
def test_a_decompression_bomb_is_refused_from_its_header(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(SampleRejected) as caught:
            image_info(png_of(side, side, 8, 2, b"\0" * 99), decode=True)
    assert caught.value.reason == "media_too_large"


def test_the_pixel_limit_is_exact() -> None:
    data = encoded(Image.new("L", (100, 50)), "PNG")
    assert image_info(data, max_pixels=5000)[:2] == (100, 50)
    with pytest.raises(SampleRejected, match="100x50"):
        image_info(data, max_pixels=4999)
