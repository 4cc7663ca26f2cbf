"""Every kind of record is held to the same checks: names of files, numbers, versions, and unknown fields."""

import json
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_packing.conversation import Conversation
from energon_packing.errors import SampleRejected
from energon_packing.wan.record import TextToVideo

SIZES = {"width": 64, "height": 48, "frames": 9, "fps": 16.0, "duration": 0.5}
TENSOR = {"tensor": "", "dtype": "float32"}


def image(name: Any, **sizes: Any) -> Any:
    entry = {"kind": "image", "name": name, "width": 64, **sizes}
    turns = [{"role": "user", "parts": [{"media": 0}, "what is this?"]}]
    return Conversation.from_record("k", {"version": 1, "turns": turns, "media": [entry]})


def clip(**parts: Any) -> Any:
    return TextToVideo.from_record("k", {"version": 1, "kind": "text_to_video", "caption": "a ball", **parts})


def video(name: Any, **sizes: Any) -> Any:
    return clip(video={"name": name, **SIZES, **sizes})


def latents(name: Any, **_: Any) -> Any:
    return clip(latents={"name": name, "shape": [4, 1, 2, 2], **TENSOR})


def context(name: Any, **_: Any) -> Any:
    return clip(video={"name": "a.mp4", **SIZES}, context={"name": name, "shape": [5, 8], **TENSOR})


def verdict(read: Callable[..., Any], *values: Any, **named: Any) -> str | None:
    try:
        read(*values, **named)
    except SampleRejected as rejected:
        return rejected.reason
    return None


def expected_of_name(name: Any) -> str | None:
    """What a file system on Linux can hold below a folder, by Python's own codec and path class."""
    if not isinstance(name, str) or not name or "\0" in name:
        return "bad_record"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "bad_record"
    path = PurePosixPath(name)
    return "media_outside_root" if path.is_absolute() or ".." in path.parts else None


@pytest.mark.parametrize("read", [image, video, latents, context])
@given(name=st.text(st.characters(exclude_categories=()), max_size=8) | st.none() | st.integers())
@example(name="a\ud800.mp4")
@example(name=json.loads('"\\udcff.png"'))
@example(name="../a.mp4")
@example(name="/a.mp4")
@example(name="a\0.mp4")
@example(name="a/../../b")
def test_a_name_that_no_store_can_hold_is_refused_in_every_kind_of_record(read: Callable[..., Any], name: Any) -> None:
    assert verdict(read, name) == expected_of_name(name)


@pytest.mark.parametrize("read", [image, video])
@pytest.mark.parametrize("width", [True, 0, -1, 1.5, "64", 2**31, float("nan"), [64]])
def test_a_width_that_no_image_or_video_has_is_refused_in_every_kind_of_record(
    read: Callable[..., Any], width: Any
) -> None:
    assert verdict(read, "a.mp4", width=width) == "bad_record"
    assert verdict(read, "a.mp4", width=65) is None


@pytest.mark.parametrize("version", [True, 1.0, "1", 2, None])
def test_another_version_is_refused_in_every_kind_of_record(version: Any) -> None:
    turns = [{"role": "user", "parts": ["hello"]}]
    assert verdict(Conversation.from_record, "k", {"version": 1, "turns": turns}) is None
    assert verdict(Conversation.from_record, "k", {"version": version, "turns": turns}) == "bad_record"
    assert verdict(clip, version=version, video={"name": "a.mp4", **SIZES}) == "bad_record"
