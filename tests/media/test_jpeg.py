"""JPEG files: the pixels are Pillow's, and so is every refusal, for good files and damaged ones."""

import io

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps
from support.media_files import image_info

from energon_packing.errors import SampleRejected
from energon_packing.media import image as jpeg
from energon_packing.media.image import decode_image
from energon_packing.media.probe import jpeg_info


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@st.composite
def files(draw, *, damage=False):
    """A JPEG of any size, quality, subsampling and mode, maybe progressive, maybe turned by EXIF."""
    height, width = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    mode = draw(st.sampled_from(["RGB", "RGB", "RGB", "L", "CMYK"]))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    pixels = random.integers(0, 256, shape, dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = draw(st.integers(1, 8))
    settings = {"subsampling": draw(st.integers(0, 2))} if mode == "RGB" else {}
    if draw(st.booleans()):
        settings["exif"] = exif
    file = io.BytesIO()
    image = Image.frombytes(mode, (width, height), pixels.tobytes())
    image.save(file, "JPEG", quality=draw(st.integers(5, 98)), progressive=draw(st.booleans()), **settings)
    data = bytearray(file.getvalue())
    if damage:
        if draw(st.booleans()):
            del data[draw(st.integers(2, len(data) - 1)) :]
        else:
            for at in draw(st.lists(st.integers(2, len(data) - 1), min_size=1, max_size=4)):
                data[at] = draw(st.integers(0, 255))
    return bytes(data)


@settings(max_examples=80)
@given(data=files())
def test_pixels_are_those_of_pillow(data):
    assert np.array_equal(decode_image(data, max_pixels=10**6).permute(1, 2, 0).numpy(), by_pillow(data))


@settings(max_examples=120)
@given(data=files(damage=True))
def test_a_damaged_file_is_refused_or_decoded_as_pillow_does(data):
    try:
        found = decode_image(data, max_pixels=10**5).permute(1, 2, 0).numpy()
    except SampleRejected:
        found = None
    try:
        with Image.open(io.BytesIO(data)) as image:
            large = image.width * image.height > 10**5
        expected = None if large else by_pillow(data)
    except Exception:
        expected = None
    assert (found is None) == (expected is None)
    assert found is None or np.array_equal(found, expected)


@settings(max_examples=150)
@given(data=files() | files(damage=True))
def test_a_header_that_is_read_without_pillow_says_what_pillow_says(data):
    found = jpeg_info(data)
    assert found is None or found == image_info(data)


def test_a_usual_header_is_read_without_pillow_from_its_first_bytes():
    file = io.BytesIO()
    Image.new("RGB", (9, 8)).save(file, "JPEG")
    assert jpeg_info(file.getvalue()[:8192]) == image_info(file.getvalue())
    assert jpeg_info(file.getvalue()[:300]) is None


def test_torchvision_decodes_and_a_decoder_with_other_pixels_would_not(monkeypatch):
    file = io.BytesIO()
    Image.fromarray(np.full((8, 9, 3), 77, dtype=np.uint8)).save(file, "JPEG")
    with Image.open(file) as image:
        assert jpeg.decode_jpeg(file.getvalue(), image).shape == (3, 8, 9)
    import torchvision.io

    monkeypatch.setattr(torchvision.io, "decode_jpeg", lambda data, mode: torch.zeros(3, 45, 61, dtype=torch.uint8))
    jpeg._decoder.cache_clear()
    try:
        assert jpeg._decoder() is None
    finally:
        monkeypatch.undo()
        jpeg._decoder.cache_clear()
    assert jpeg._decoder() is not None
