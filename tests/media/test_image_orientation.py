"""All eight orientations: an image has one size when it is measured and when it is decoded, in every format."""

import io

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin, features
from support.media_files import image_info

from energon_packing.media.image import decode_image

WIDTH, HEIGHT = 48, 32
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")
# Orientation -> how the stored pixels are turned to be upright (Exif 2.3, 4.6.4), written with NumPy alone.
UPRIGHT = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda stored: np.rot90(stored, 1),
}


def stored() -> np.ndarray:
    """Four quarters of four colours, ``[HEIGHT, WIDTH, 3]``: no two orientations of it are alike, and lossy formats
    keep it."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[: HEIGHT // 2, : WIDTH // 2] = (220, 30, 30)
    pixels[: HEIGHT // 2, WIDTH // 2 :] = (30, 200, 30)
    pixels[HEIGHT // 2 :, : WIDTH // 2] = (40, 40, 230)
    pixels[HEIGHT // 2 :, WIDTH // 2 :] = (230, 230, 60)
    return pixels


def turned(form: str, orientation: int, **options: object) -> bytes:
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    tags = {"tiffinfo": {0x0112: orientation}} if form == "TIFF" else {"exif": exif, "quality": 95}
    Image.fromarray(stored()).save(stream, form, **tags, **options)
    return stream.getvalue()


def check(data: bytes, orientation: int) -> None:
    expected = UPRIGHT[orientation](stored())
    found = decode_image(data, max_pixels=10**6).permute(1, 2, 0).numpy()
    info = image_info(data, decode=True)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() < 12  # a wrong orientation differs by 90 and more
    assert (info.height, info.width) == found.shape[:2]
    assert (info.stored_width, info.stored_height) == (WIDTH, HEIGHT)
    assert image_info(data) == info


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("form", FORMATS)
def test_an_image_is_upright_and_of_its_measured_size_in_every_orientation(form: str, orientation: int) -> None:
    if form == "AVIF" and not features.check("avif"):
        pytest.skip("this build of Pillow has no AVIF")
    check(turned(form, orientation), orientation)


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_deep_tiff_is_upright_too(orientation: int) -> None:
    stream = io.BytesIO()
    grey = stored()[:, :, 0].astype(np.uint16) * 257
    Image.fromarray(grey).save(stream, "TIFF", tiffinfo={0x0112: orientation})
    found = decode_image(stream.getvalue(), max_pixels=10**6).permute(1, 2, 0).numpy()
    assert np.array_equal(found[:, :, 0], UPRIGHT[orientation](stored())[:, :, 0])
    info = image_info(stream.getvalue())
    assert (info.height, info.width) == found.shape[:2]


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_pillow_that_opens_a_tiff_with_its_stored_size_gives_the_same(
    orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As releases up to 10.3 do; later ones open it with the size after its orientation."""
    setup = TiffImagePlugin.TiffImageFile._setup

    def with_the_stored_size(self: TiffImagePlugin.TiffImageFile) -> None:
        setup(self)
        self._size = (self.tag_v2[256], self.tag_v2[257])

    monkeypatch.setattr(TiffImagePlugin.TiffImageFile, "_setup", with_the_stored_size)
    data = turned("TIFF", orientation)
    assert Image.open(io.BytesIO(data)).size == (WIDTH, HEIGHT)
    check(data, orientation)
