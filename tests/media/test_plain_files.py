"""Which image files are decoded without supervision; Pillow's own files are the oracle."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from energon_packing.media.image import is_plain

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))


def saved(form, image=PICTURE, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "plain"),
    [
        (saved("PNG"), True),
        (saved("JPEG"), True),
        (saved("JPEG", PICTURE.convert("L")), True),
        (saved("JPEG", PICTURE.convert("CMYK")), True),
        (saved("JPEG", optimize=True, quality=95, subsampling=0, exif=Image.Exif().tobytes() or b""), True),
        (saved("JPEG", restart_marker_blocks=2), True),
        (saved("JPEG", progressive=True), False),
        (saved("WEBP"), False),
        (saved("GIF"), False),
        (saved("TIFF"), False),
        (saved("BMP"), False),
        (b"", False),
    ],
    ids=["png", "jpeg", "grey", "cmyk", "exif", "restarts", "progressive", "webp", "gif", "tiff", "bmp", "empty"],
)
def test_png_and_sequential_jpeg_are_plain_and_no_others(data, plain):
    assert is_plain(data) == plain


def test_a_sequential_jpeg_of_several_scans_is_not_plain():
    data = bytearray(saved("JPEG"))
    scan = data.index(b"\xff\xda")
    layers = data[scan + 4]
    assert layers == 3
    # The first scan holds one component: two bytes each, and three at the end.
    first = b"\xff\xda" + (2 + 1 + 2 + 3).to_bytes(2, "big") + b"\x01" + data[scan + 5 : scan + 7] + b"\0\x3f\0"
    assert not is_plain(bytes(data[:scan]) + first + bytes(data[scan + 2 + 12 :]))


@given(data=st.binary(max_size=80), cut=st.integers(0, 700), at=st.integers(0, 699), value=st.integers(0, 255))
def test_any_bytes_have_an_answer(data, cut, at, value):
    jpeg = bytearray(saved("JPEG"))
    jpeg[at] = value
    for each in (data, b"\xff\xd8" + data, bytes(jpeg[:cut]), bytes(jpeg)):
        assert is_plain(each) in (True, False)
