"""Decoded pixels equal those of transformers' own loader; whatever is no whole image of a sane size is refused."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps
from support.media_files import image_info, png_of
from transformers.image_utils import load_image

from energon_packing.errors import SampleRejected
from energon_packing.media.image import decode_image

LIMIT = 10**8
SRGB = ImageCms.createProfile("sRGB")


def smooth(width: int, height: int, mode: str, seed: int = 0) -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, bands), dtype=np.uint8)
    image = Image.merge(mode, [Image.fromarray(small[:, :, band]) for band in range(bands)])
    return image.resize((width, height), Image.Resampling.BILINEAR)


def on_white(image: Image.Image) -> Image.Image:
    """By Pillow: what a viewer shows of an image on a white page."""
    shown = ImageOps.exif_transpose(image).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_samples(colour: int, row: bytes, transparent: bytes = b"") -> bytes:
    """A PNG of 2x1 pixels of 16 bits, which Pillow cannot write."""
    return png_of(2, 1, 16, colour, b"\0" + row, transparent)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(
        [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "LA")]
    ),
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    orientation=st.integers(0, 9),
    seed=st.integers(0, 100),
    white=st.booleans(),
)
def test_pixels_equal_those_of_the_transformers_loader(
    kind: tuple[str, str], width: int, height: int, orientation: int, seed: int, white: bool
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(smooth(width, height, kind[1], seed), kind[0], exif=exif)
    image = Image.open(io.BytesIO(data))
    expected = np.asarray(load_image(on_white(image) if white and "A" in kind[1] else image))
    found = decode_image(data, max_pixels=LIMIT, on_white=white)
    assert found.dtype == torch.uint8
    assert found.permute(1, 2, 0).is_contiguous()  # rows of pixels: what resizing is fastest on
    assert np.array_equal(found.permute(1, 2, 0).numpy(), expected)
    assert image_info(data)[:2] == (found.shape[2], found.shape[1])


def transparent(mode: str) -> Image.Image:
    """A black line and a half transparent red one on nothing."""
    image = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (5, 5, 35, 9))
    image.paste((255, 0, 0, 128), (5, 15, 35, 19))
    return image.convert(mode)


KEYED = Image.new("RGB", (8, 8), (9, 9, 9))
KEYED.paste((200, 0, 0), (0, 0, 4, 8))
TRANSPARENT = {
    "rgba png": saved(transparent("RGBA"), "PNG"),
    "grey png": saved(transparent("LA"), "PNG"),
    "palette png": saved(transparent("RGBA").quantize(16), "PNG"),
    "one colour": saved(KEYED, "PNG", transparency=(9, 9, 9)),
    "one grey": saved(KEYED.convert("L"), "PNG", transparency=9),
    "one bit": saved(KEYED.convert("1"), "PNG", transparency=0),
    "webp": saved(transparent("RGBA"), "WEBP", lossless=True),
    "gif": saved(transparent("RGBA"), "GIF"),
    "animated gif": saved(transparent("RGBA"), "GIF", save_all=True, append_images=[smooth(40, 30, "RGBA")]),
    "tiff": saved(transparent("RGBA"), "TIFF"),
    "grey tiff": saved(transparent("LA"), "TIFF"),
    "jpeg 2000": saved(transparent("RGBA"), "JPEG2000"),
    "profile": saved(transparent("RGBA"), "PNG", icc_profile=ImageCms.ImageCmsProfile(SRGB).tobytes()),
    "16 bits of rgba": png_samples(6, struct.pack(">8H", 0, 0, 0, 0, 65535, 0, 0, 32768)),
    "16 bits of grey and alpha": png_samples(4, struct.pack(">4H", 0, 0, 65535, 65535)),
    "one colour of 16 bits": png_samples(2, struct.pack(">6H", 65535, 0, 0, 0, 0, 0), struct.pack(">3H", 65535, 0, 0)),
    "one grey of 16 bits": png_samples(0, struct.pack(">2H", 0, 65535), struct.pack(">H", 0)),
}
OPAQUE = {
    "rgba png": saved(smooth(9, 9, "RGB").convert("RGBA"), "PNG"),
    "palette png": saved(smooth(9, 9, "RGB").quantize(16), "PNG"),
    "jpeg": saved(smooth(9, 9, "RGB"), "JPEG"),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_a_transparent_image_is_shown_on_white_or_as_the_transformers_loader_gives_it(name: str) -> None:
    data = TRANSPARENT[name]
    image = Image.open(io.BytesIO(data))
    on_page, loaded = np.asarray(load_image(on_white(image))), np.asarray(load_image(image))
    assert np.array_equal(decode_image(data, max_pixels=LIMIT).permute(1, 2, 0).numpy(), on_page)
    assert np.array_equal(decode_image(data, max_pixels=LIMIT, on_white=False).permute(1, 2, 0).numpy(), loaded)
    assert not np.array_equal(on_page, loaded)
    assert image_info(data, decode=True).transparent


@pytest.mark.parametrize("decode", [False, True])
def test_damage_after_the_first_frame_costs_no_image(decode: bool) -> None:
    data, whole = TRANSPARENT["animated gif"], 0
    for end in range(200, len(data), 3):
        try:
            Image.open(io.BytesIO(data[:end])).load()
        except Exception:
            continue
        whole += 1
        image_info(data[:end], decode=decode)
    assert whole > 100


@pytest.mark.parametrize("name", OPAQUE)
def test_an_opaque_image_keeps_its_pixels_and_is_not_counted(name: str) -> None:
    found = decode_image(OPAQUE[name], max_pixels=LIMIT).permute(1, 2, 0).numpy()
    assert np.array_equal(found, np.asarray(load_image(Image.open(io.BytesIO(OPAQUE[name])))))
    assert not image_info(OPAQUE[name], decode=True).transparent


GOOD = {
    "jpeg": saved(smooth(60, 40, "RGB"), "JPEG"),
    "png": saved(smooth(60, 40, "RGBA"), "PNG"),
    "gif": saved(smooth(60, 40, "RGB").convert("P"), "GIF"),
    "webp": saved(smooth(60, 40, "RGB"), "WEBP"),
    "tiff": saved(smooth(60, 40, "RGB"), "TIFF", compression="tiff_lzw"),
    "bmp": saved(smooth(60, 40, "RGB"), "BMP"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(GOOD)), data=st.data())
def test_a_damaged_image_is_decoded_or_rejected_and_never_anything_else(name: str, data: st.DataObject) -> None:
    content = bytearray(GOOD[name])
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    reason = None
    try:
        assert decode_image(bytes(content), max_pixels=LIMIT // 100).shape[0] == 3
    except SampleRejected as error:
        reason = error.reason
    assert reason in (None, "corrupt_media", "media_too_large")


def test_postscript_starts_no_interpreter(tmp_path: Path) -> None:
    program = (
        f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({tmp_path}/made) (w) file closefile\nshowpage\n%%EOF\n"
    )
    with pytest.raises(SampleRejected, match="no known image format"):
        decode_image(program.encode(), max_pixels=LIMIT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("read", [decode_image, image_info])
def test_of_two_limits_of_pixels_ours_holds(read, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow refuses twice its own, which is 178,956,970 unless it is changed."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    data = saved(smooth(60, 50, "RGB"), "PNG")
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(data))
    assert read(data, max_pixels=3000)[0] is not None
    with pytest.raises(SampleRejected, match="60x50") as caught:
        read(data, max_pixels=2999)
    assert caught.value.reason == "media_too_large"
    assert Image.MAX_IMAGE_PIXELS == 1000
