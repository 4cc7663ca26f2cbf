"""Stored conversations: what is written is read back, and what nobody of us wrote is a rejection, never a crash."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.conversation import ROLES, Conversation, Media, MediaPart, Turn
from energon_packing.errors import SampleRejected

sizes = st.none() | st.integers(1, 100_000)
rates = st.none() | st.floats(0.001, 1e6)
names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1).filter(lambda name: name != "..")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), values, max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    media: list[Media] = []
    turns = []
    for role in draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=5)):
        parts: list[str | MediaPart] = []
        for kind in draw(st.lists(st.sampled_from(["text", "image", "video"]), max_size=4)):
            if kind == "text":
                parts.append(draw(st.text(max_size=20)))
                continue
            parts.append(MediaPart(index=len(media)))
            clip: dict[str, Any] = {}
            if kind == "video":
                clip = {"frames": draw(sizes), "fps": draw(rates), "duration": draw(rates)}
                if (frames := clip["frames"] or 0) > 1 and draw(st.booleans()):
                    clip["time_points"] = (0, 0.0, frames - 1, draw(st.floats(0, 1e6)))
            if kind == "video" and draw(st.booleans()):
                frames = tuple(draw(st.lists(names, min_size=1, max_size=3)))
                times = sorted(draw(st.sets(st.floats(0, 1e6), min_size=len(frames), max_size=len(frames))))
                clip |= {"name": frames[0], "frames": len(frames), "frame_names": frames, "time_points": ()}
                clip["frame_times"] = tuple(times) if draw(st.booleans()) else ()
            shape = {"kind": kind, "name": draw(names), "width": draw(sizes), "height": draw(sizes)} | clip
            media.append(Media(**shape))
        calls = tuple(draw(st.lists(objects, max_size=2)))
        weight = draw(st.none() | st.floats(0, 1e6))
        answered = draw(st.none() | st.text(max_size=9))
        fields = {"loss_weight": weight, "tool_call_id": answered, "thinking": draw(st.none() | st.text(max_size=9))}
        turns.append(Turn(role=role, parts=tuple(parts), tool_calls=calls, **fields))
    tools = draw(st.none() | st.lists(objects, max_size=2).map(tuple))
    return Conversation(key="k", turns=tuple(turns), media=tuple(media), tools=tools)


@settings(max_examples=60, deadline=None)
@given(conversation=conversations())
def test_a_conversation_survives_being_stored_as_json(conversation: Conversation) -> None:
    stored = json.loads(json.dumps(conversation.to_record()))
    assert Conversation.from_record("k", stored) == conversation


@settings(max_examples=30, deadline=None)
@given(conversation=conversations())
def test_messages_hold_the_media_of_each_turn_in_reading_order(conversation: Conversation) -> None:
    shown: list[str] = []
    for turn, message in zip(conversation.turns, conversation.to_messages(), strict=True):
        assert message["role"] == turn.role
        content = message["content"]
        if isinstance(content, str):
            assert content == turn.text
        else:
            assert "".join(part["text"] for part in content if part["type"] == "text") == turn.text
            shown += [part["type"] for part in content if part["type"] != "text"]
    assert shown == [media.kind for media in conversation.media]


@settings(max_examples=60, deadline=None)
@given(conversation=conversations())
def test_messages_make_the_conversation_again(conversation: Conversation) -> None:
    messages = conversation.to_messages()
    again = Conversation.from_messages(iter(messages), media=conversation.media, tools=conversation.tools)
    assert (again.to_messages(), again.media, again.tools) == (messages, conversation.media, conversation.tools)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "user", "content": [{"type": "video"}]}], "message 1 is of type video, its medium of image"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "message 1 is {'type': 'audio'}"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1 is {'type': 'text'}"),
        ([{"role": "user", "content": "hi"}], "but the record lists 1 media"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], "the record lists 1 media"),
        ([{"role": "user", "text": "hi"}], "unknown field 'text'"),
        (["hi"], "message 1 is"),
        ([{"role": "user", "content": {"type": "text", "text": "hi"}}], "the content of message 1 is a dict"),
        ([{"role": "human", "content": [{"type": "image"}]}], "role 'human' is not one of"),
    ],
)
def test_other_messages_are_refused_by_name(messages: Any, says: str) -> None:
    with pytest.raises(SampleRejected, match=re.escape(says)):
        Conversation.from_messages(messages, media=[image()])


def image(name: str = "a.png") -> Media:
    return Media(kind="image", name=name, width=10, height=10)


@pytest.mark.parametrize("indices", [[], [0], [1, 0], [0, 0], [0, 1, 1], [0, 2], [0, 1, 2], [-1, 0]])
def test_every_medium_stands_in_exactly_one_place_in_order(indices: list[int]) -> None:
    turn = Turn(role="user", parts=tuple(MediaPart(index=index) for index in indices))
    with pytest.raises(SampleRejected) as caught:
        Conversation(key="k", turns=(turn,), media=(image(), image()))
    assert caught.value.reason == "placeholder_mismatch"


RECORD: dict[str, Any] = {
    "version": 1,
    "turns": [
        {"role": "user", "parts": ["look: ", {"media": 0}]},
        {"role": "assistant", "parts": ["a cat"], "loss_weight": 0.5, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "user", "parts": [{"media": 1}]},
        {"role": "tool", "parts": ["1"], "tool_call_id": "c1"},
    ],
    "media": [
        {"kind": "video", "name": "a/b.mp4", "width": 8, "height": 6, "frames": 4, "fps": 2.0, "duration": 2.0},
        {
            "kind": "video",
            "name": "0.jpg",
            "width": 8,
            "height": 6,
            "frames": 2,
            "frame_names": ["0.jpg", "1.jpg"],
            "frame_times": [0, 0.5],
        },
    ],
    "tools": [{"name": "f"}],
}
PATHS: list[tuple[str | int, ...]] = [
    (),
    ("version",),
    ("turns",),
    ("turns", 0),
    ("turns", 0, "role"),
    ("turns", 0, "parts"),
    ("turns", 0, "parts", 0),
    ("turns", 0, "parts", 1),
    ("turns", 0, "parts", 1, "media"),
    ("turns", 1, "loss_weight"),
    ("turns", 1, "tool_calls"),
    ("turns", 1, "tool_calls", 0),
    ("media",),
    ("media", 0),
    *(("media", 0, field) for field in RECORD["media"][0]),
    *(("media", 1, field) for field in RECORD["media"][1]),
    ("media", 1, "frame_names", 1),
    ("media", 1, "frame_times", 0),
    ("turns", 3, "tool_call_id"),
    ("tools",),
    ("tools", 0),
]


def changed(path: tuple[str | int, ...], value: Any) -> Any:
    """The good record with the value at ``path`` replaced."""
    if not path:
        return value
    record = json.loads(json.dumps(RECORD))
    node = record
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return record


def test_the_record_that_the_hostile_ones_start_from_is_good() -> None:
    assert Conversation.from_record("k", RECORD).to_record() == RECORD


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


# Per path: which of the values below are legitimate there.
FITS: dict[tuple[str | int, ...], Callable[[Any], bool]] = {
    ("turns", 0, "parts", 0): lambda value: isinstance(value, str),
    ("turns", 0, "parts", 1, "media"): lambda value: type(value) is int and value == 0,
    ("turns", 1, "loss_weight"): lambda value: value is None or (_is_number(value) and 0 <= value < 2**31),
    ("turns", 1, "tool_calls"): lambda value: value in ([], [{}]),
    ("turns", 1, "tool_calls", 0): lambda value: isinstance(value, dict),
    # That there is no file of such a name is found where it is read.
    ("media", 0, "name"): lambda value: isinstance(value, str) and value != "",
    **{("media", 0, field): lambda value: value is None or value == 7 for field in ("width", "height", "frames")},
    **{("media", 0, field): lambda value: value is None or value in (1.5, 7) for field in ("fps", "duration")},
    **{("media", 1, field): lambda value: value is None or value == 7 for field in ("width", "height")},
    ("media", 1, "frame_names", 1): lambda value: isinstance(value, str) and value != "",
    ("media", 1, "frame_times"): lambda value: value == [],
    ("media", 1, "frame_times", 0): lambda value: _is_number(value) and 0 <= value < 0.5,
    ("turns", 3, "tool_call_id"): lambda value: value is None or isinstance(value, str),
    ("tools",): lambda value: value in (None, [], [{}]),
    ("tools", 0): lambda value: isinstance(value, dict),
}
HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    7,
    -1,
    1.5,
    10**30,
    2**31,
    float("nan"),
    float("inf"),
    float("-inf"),
    1e-300,
    "",
    "1",
    "text",
    [],
    [[]],
    [None],
    [{}],
    {},
    {"media": True},
    {"media": "0"},
    {"media": 0.0},
    {"media": None},
    {"media": [0]},
    {"media": float("inf")},
    {"text": "x"},
    {"role": "user"},
    "9" * 5000,
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)) or "record")
def test_a_value_of_the_wrong_kind_anywhere_is_a_bad_record_and_nothing_else(path: tuple[str | int, ...]) -> None:
    for value in HOSTILE:
        if path in FITS and FITS[path](value):
            Conversation.from_record("k", changed(path, value))
            continue
        with pytest.raises(SampleRejected) as caught:
            Conversation.from_record("k", changed(path, value))
        reasons = {"bad_record"}
        if path == ("turns", 0, "role"):
            reasons.add("unknown_role")
        if path[:3] == ("turns", 0, "parts") or path in (("media",), ("turns",)):
            reasons |= {"placeholder_mismatch", "empty_conversation"}
        assert caught.value.reason in reasons, value


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("turns", 0, "role"), "narrator", "unknown_role"),
        (("turns", 0, "role"), 7, "bad_record"),
        (("turns",), [], "placeholder_mismatch"),
        (("turns", 0, "parts"), "spelled out", "bad_record"),
        (("turns", 0, "parts"), ["no medium"], "placeholder_mismatch"),
        (("turns", 0, "parts", 1, "media"), 1, "placeholder_mismatch"),
        (("turns", 0, "parts", 1, "media"), False, "bad_record"),
        (("turns", 1, "loss_weight"), -0.5, "bad_record"),
        (("turns", 1, "loss_weight"), float("nan"), "bad_record"),
        (("turns", 1, "weight"), 1.0, "bad_record"),
        (("media", 0, "kind"), "audio", "bad_record"),
        (("media", 0, "pixels"), "iVBORw0", "bad_record"),
        (("media", 0, "width"), 0, "bad_record"),
        (("media", 0, "width"), 8.0, "bad_record"),
        (("media", 0, "frames"), 10**20, "bad_record"),
        (("media", 0, "name"), "../secret.jpg", "media_outside_root"),
        (("media", 0, "name"), "a/../../secret.jpg", "media_outside_root"),
        (("media", 0, "name"), "/etc/passwd", "media_outside_root"),
        (("media", 0, "name"), "a\0.jpg", "bad_record"),
        (("media", 0, "name"), "\ud800.jpg", "bad_record"),
        (("media", 1, "frame_names", 1), "../secret.jpg", "media_outside_root"),
        (("media", 1, "frame_names", 1), "/etc/passwd", "media_outside_root"),
        (("media", 1, "frame_names"), ["0.jpg"], "bad_record"),
        (("media", 1, "frame_names"), ["1.jpg", "0.jpg"], "bad_record"),
        (("media", 1, "frame_times"), [0.5, 0.5], "bad_record"),
        (("media", 1, "frame_times"), [0.5], "bad_record"),
        *(
            (("media", 0, "time_points"), points, "bad_record")
            for points in (
                *([0, 0.0, 3], [0, 0.0, 2, 2.0], [0, 0.0, 4, 2.0], [1, 0.0, 3, 2.0], [0, 0.5, 3, 2.0], [0, 0.0]),
                *([0, 0.0, 3.0, 2.0], [0, 0.0, 0, 1.0, 3, 2.0], [0, 0.0, 2, 3.0, 3, 2.0], [0, 0.0, 3, None], {"0": 0}),
                *([0, 0.0, 3, float("inf")], [0, 0.0, True, 1.0, 3, 2.0], 7, "0030"),
            )
        ),
        (("media", 1, "time_points"), [0, 0.0, 1, 0.5], "bad_record"),
        (("media", 1, "kind"), "image", "bad_record"),
        (("extra",), 1, "bad_record"),
        (("version",), 2, "bad_record"),
        (("version",), True, "bad_record"),
        (("version",), 1.0, "bad_record"),
    ],
)
def test_what_is_wrong_with_a_record_has_its_own_reason(path: tuple[str | int, ...], value: Any, reason: str) -> None:
    with pytest.raises(SampleRejected) as caught:
        Conversation.from_record("k", changed(path, value))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "path", [("version",), ("turns", 0, "role"), ("media", 0, "kind"), ("media", 0, "name"), ("9" * 100_000,)]
)
def test_a_rejection_quotes_no_more_than_a_sentence_of_a_hostile_record(path: tuple[str | int, ...]) -> None:
    with pytest.raises(SampleRejected) as caught:
        Conversation.from_record("k", changed(path, "/" + "9" * 100_000))
    assert len(caught.value.detail) < 300
