"""What the short look at a JPEG header says is what Pillow says; everything unusual is left to Pillow."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_packing.convert.jpeg_header import JpegHeader, read_jpeg_header
from energon_packing.errors import SampleRejected
from energon_packing.media.probe import image_info


def encoded(mode: str = "RGB", size: tuple[int, int] = (40, 24), **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size, 77).save(stream, "JPEG", **options)
    return stream.getvalue()


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    """The file with one more segment in front of the others."""
    return data[:2] + bytes((0xFF, marker)) + (len(body) + 2).to_bytes(2, "big") + body + data[2:]


USUAL = {
    "colour": encoded(),
    "grey": encoded("L"),
    "progressive": encoded(progressive=True),
    "optimised": encoded(optimize=True, quality=95, subsampling=0),
    "comment": encoded(comment=b"made by hand"),
    "restarts": encoded(restart_marker_rows=1),
    "large": encoded(size=(640, 480)),
}
EXIF = Image.Exif()
EXIF[0x0112] = 6
UNUSUAL = {
    "turned": encoded(exif=EXIF),
    "profile": encoded(icc_profile=b"p" * 200),
    "four colours": encoded("CMYK"),
    "several pictures": with_segment(encoded(), 0xE2, b"MPF\0" + bytes(40)),
    "adobe": with_segment(encoded(), 0xEE, b"Adobe" + bytes(7)),
    "no JPEG": b"\x89PNG\r\n\x1a\n" + bytes(40),
    "empty": b"",
}


def by_pillow(data: bytes) -> JpegHeader | None:
    try:
        info = image_info(data)
    except SampleRejected:
        return None
    assert (info.width, info.height) == (info.stored_width, info.stored_height)
    assert info.format == "JPEG"
    return JpegHeader(info.width, info.height, info.mode)


@pytest.mark.parametrize("name", USUAL)
def test_usual_files_need_no_pillow(name: str) -> None:
    found = read_jpeg_header(USUAL[name])
    assert found is not None
    assert found == by_pillow(USUAL[name])


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_files_are_left_to_pillow(name: str) -> None:
    assert read_jpeg_header(UNUSUAL[name]) is None


def test_a_header_that_ends_after_what_was_read_is_left_to_pillow() -> None:
    data = with_segment(encoded(), 0xFE, bytes(60_000))
    assert read_jpeg_header(data) is not None
    assert read_jpeg_header(data[:60_100]) is None


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(sorted(USUAL)),
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=2),
    st.one_of(st.none(), st.integers(0, 700)),
    st.lists(
        st.tuples(
            st.sampled_from([0xC0, 0xC4, 0xD8, 0xDB, 0xDD, 0xE0, 0xE1, 0xE2, 0xEE, 0xFE, 0xFF]), st.binary(max_size=70)
        ),
        max_size=2,
    ),
)
def test_of_a_damaged_header_it_says_what_pillow_says_or_nothing(
    name: str, changes: list[tuple[int, int]], length: int | None, segments: list[tuple[int, bytes]]
) -> None:
    data = USUAL[name]
    for marker, body in segments:
        data = with_segment(data, marker, body)
    damaged = bytearray(data)
    for at, value in changes:
        damaged[min(at, len(damaged) - 1)] = value
    data = bytes(damaged[:length])
    found = read_jpeg_header(data)
    if found is not None:
        assert found == by_pillow(data)
