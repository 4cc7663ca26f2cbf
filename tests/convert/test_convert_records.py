"""From one record to turns and media: both layouts, tools, placeholders, and every reason to reject."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_files import openai, sharegpt

from energon_packing.conversation import MediaPart
from energon_packing.convert.records import parse_record
from energon_packing.errors import SampleRejected


def reason(record: Any, layout: Any = "auto") -> tuple[str, str]:
    with pytest.raises(SampleRejected) as caught:
        parse_record(record, layout)
    return caught.value.reason, caught.value.detail


def media(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(entry.kind, entry.path) for entry in parse_record(record).media]


def test_both_layouts_of_one_conversation_give_the_same_turns() -> None:
    a = parse_record(sharegpt(question="<image>What?", images=["a.jpg"]))
    b = parse_record(openai(question="<image>What?", images=["a.jpg"]))
    assert a == b
    assert a.turns[0].parts == (MediaPart(index=0), "What?")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("user", "user"),
        ("gpt", "assistant"),
        ("assistant", "assistant"),
        ("system", "system"),
        ("observation", "tool"),
        ("tool", "tool"),
    ],
)
def test_every_sharegpt_role_is_known(name: str, role: str) -> None:
    record = sharegpt()
    record["conversations"].insert(0, {"from": name, "value": "text"})
    assert parse_record(record).turns[0].role == role


@given(
    st.lists(st.one_of(st.text(), st.sampled_from(["<image>", "<video>", "<Image>", "<image", "\n", " "])), max_size=12)
)
def test_text_is_kept_to_the_letter_around_placeholders(pieces: list[str]) -> None:
    text = "x" + "".join(pieces)
    images, videos = text.count("<image>"), text.count("<video>")
    record = sharegpt(question=text, images=[f"i{n}" for n in range(images)], videos=[f"v{n}" for n in range(videos)])
    parsed = parse_record(record)
    back = "".join(
        part if isinstance(part, str) else f"<{parsed.media[part.index].kind}>" for part in parsed.turns[0].parts
    )
    assert back == text
    assert [m.path for m in parsed.media if m.kind == "image"] == [f"i{n}" for n in range(images)]
    assert [m.path for m in parsed.media if m.kind == "video"] == [f"v{n}" for n in range(videos)]
    indices = [part.index for part in parsed.turns[0].parts if isinstance(part, MediaPart)]
    assert indices == list(range(images + videos))


def test_one_image_named_twice_stands_twice() -> None:
    assert media(sharegpt(question="<image>a<image>", images=["a.jpg", "a.jpg"])) == [("image", "a.jpg")] * 2


def test_images_and_videos_are_taken_each_from_its_own_column_in_reading_order() -> None:
    record = sharegpt(question="<video>a<image>b<video>", images="i.png", video=["v.mp4", "w.mp4"])
    assert media(record) == [("video", "v.mp4"), ("image", "i.png"), ("video", "w.mp4")]


@pytest.mark.parametrize("column", [{"image": "a.jpg"}, {"images": ["a.jpg"]}, {"image": [{"path": "a.jpg"}]}])
def test_the_llava_column_may_be_a_path_a_list_or_an_object(column: dict[str, Any]) -> None:
    assert media(sharegpt(question="<image>\nWhat?", **column)) == [("image", "a.jpg")]


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "What?"}],
        [{"type": "image_url", "image_url": {"url": "a.jpg"}}, {"type": "text", "text": "Wh"}, "at?"],
        [{"type": "image_url", "image_url": "a.jpg"}, {"type": "text", "text": "What?"}],
    ],
)
def test_content_parts_may_carry_their_own_paths(parts: list[Any]) -> None:
    parsed = parse_record(openai(question=parts))
    assert parsed.turns[0].parts == (MediaPart(index=0), "What?")
    assert [(m.kind, m.path) for m in parsed.media] == [("image", "a.jpg")]


def test_bare_parts_take_the_column_in_order() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "video"}, {"type": "image"}]
    record = openai(question=parts, images=["a", "b"], videos=["v"])
    assert media(record) == [("image", "a"), ("video", "v"), ("image", "b")]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (sharegpt(question="What?", image="a.jpg"), "no text has a <image> placeholder"),
        (sharegpt(question="<image>?"), "the record names 0 image"),
        (sharegpt(question="<image>?", images=["a", "b"]), "1 <image> placeholder"),
        (sharegpt(question="<image><image>", images=["a"]), "2 <image> placeholder"),
        (sharegpt(question="<image>", videos=["a"]), "image"),
        (openai(question=[{"type": "image"}, {"type": "text", "text": "x"}]), "names 0 image"),
    ],
)
def test_placeholders_and_media_that_do_not_match_are_rejected_with_both_counts(record: Any, words: str) -> None:
    found, detail = reason(record)
    assert found == "placeholder_mismatch"
    assert words in detail


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"texts": "x", "zeta": 1}, "unknown_layout"),
        ([1, 2], "unknown_layout"),
        (None, "unknown_layout"),
        ({"conversations": [["human", "hi"]]}, "unknown_layout"),
        ({"conversations": []}, "empty_conversation"),
        (sharegpt(answer=""), "empty_turn"),
        (sharegpt(question=" \n\t"), "empty_turn"),
        (sharegpt(answer=7), "non_string_value"),
        (sharegpt(answer=None), "non_string_value"),
        (sharegpt(answer=["x", 3]), "unknown_part"),
        (sharegpt(images=[3], question="<image>"), "non_string_value"),
        (sharegpt(system=4), "non_string_value"),
        (sharegpt(images=["a"], image="b", question="<image>"), "conflicting_columns"),
        (sharegpt(tools="not json"), "bad_tools"),
        (sharegpt(tools=[{"description": "no name"}]), "bad_tools"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "nothing_to_learn"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "narrator", "value": "x"}]}, "unknown_role"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"value": "x"}]}, "unknown_role"),
        ({"conversations": [{"from": "human", "value": "Hi"}, "x"]}, "non_string_value"),
        ({"conversations": [{"from": ["human"], "value": "Hi"}]}, "unknown_role"),
        (openai(question=[{"type": "audio", "audio": "a.wav"}]), "unknown_part"),
    ],
)
def test_each_bad_record_is_rejected_with_its_own_reason(record: Any, expected: str) -> None:
    assert reason(record)[0] == expected


def test_an_unknown_layout_names_the_keys_that_were_seen() -> None:
    assert "input, output" in reason({"output": "x", "input": "y"})[1]


def test_a_forced_layout_refuses_the_other_one() -> None:
    assert reason(openai(), "sharegpt")[0] == "unknown_layout"
    assert reason(sharegpt(), "openai")[0] == "unknown_layout"
    assert parse_record(openai(), "openai") == parse_record(sharegpt(), "sharegpt")


def test_two_user_turns_in_a_row_are_kept_and_noted() -> None:
    record = sharegpt()
    record["conversations"].insert(0, {"from": "human", "value": "Hello?"})
    parsed = parse_record(record)
    assert [turn.role for turn in parsed.turns] == ["user", "user", "assistant"]
    assert parsed.warnings == ("consecutive_user_turns",)


def test_the_system_column_becomes_the_first_turn() -> None:
    turns = parse_record(sharegpt(system="Be brief.")).turns
    assert (turns[0].role, turns[0].parts) == ("system", ("Be brief.",))
    assert [turn.role for turn in parse_record(sharegpt(system="")).turns] == ["user", "assistant"]


def test_two_different_system_prompts_are_rejected_and_equal_ones_are_one() -> None:
    record = sharegpt(system="A")
    record["conversations"].insert(0, {"from": "system", "value": "A"})
    assert [turn.role for turn in parse_record(record).turns] == ["system", "user", "assistant"]
    record["system"] = "B"
    assert reason(record)[0] == "two_system_prompts"


def calls(value: str) -> dict[str, Any]:
    return {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": value},
            {"from": "observation", "value": "[1]"},
            {"from": "gpt", "value": "Done."},
        ]
    }


@pytest.mark.parametrize("arguments", [{"a": 1}, json.dumps({"a": 1})])
def test_a_function_call_becomes_an_assistant_turn_with_parsed_arguments(arguments: Any) -> None:
    parsed = parse_record(calls(json.dumps({"name": "f", "arguments": arguments})))
    assert [turn.role for turn in parsed.turns] == ["user", "assistant", "tool", "assistant"]
    assert parsed.turns[1].parts == ()
    assert parsed.turns[1].tool_calls == ({"type": "function", "function": {"name": "f", "arguments": {"a": 1}}},)


def test_several_calls_in_one_turn_stay_together() -> None:
    parsed = parse_record(calls('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'))
    assert [call["function"]["name"] for call in parsed.turns[1].tool_calls] == ["f", "g"]


@pytest.mark.parametrize(
    "value",
    [
        "f(1)",
        "[]",
        "3",
        '{"arguments": {}}',
        '{"name": "f"}',
        '{"name": "f", "arguments": "{"}',
        '{"name": "f", "arguments": [1]}',
    ],
)
def test_a_function_call_that_cannot_be_read_is_rejected(value: str) -> None:
    assert reason(calls(value))[0] == "bad_tool_call"


def test_openai_tool_calls_are_read_without_content() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    record = {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "content": "4"},
            {"role": "assistant", "content": "Four."},
        ]
    }
    parsed = parse_record(record)
    assert parsed.turns[1].tool_calls[0]["function"] == {"name": "f", "arguments": {"a": [1, "é"]}}
    call["function"]["arguments"] = "{"
    assert reason(record)[0] == "bad_tool_call"


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_tools_come_out_in_the_form_of_chat_templates(as_text: bool, wrapped: bool) -> None:
    bare = {"name": "f", "parameters": {"type": "object"}}
    tools: Any = [{"type": "function", "function": bare} if wrapped else bare]
    parsed = parse_record(sharegpt(tools=json.dumps(tools) if as_text else tools))
    assert parsed.tools == ({"type": "function", "function": bare},)


@pytest.mark.parametrize("tools", [None, "", "[]", []])
def test_no_tools_are_none(tools: Any) -> None:
    assert parse_record(sharegpt(tools=tools)).tools is None


def test_a_weight_of_zero_leaves_a_turn_out_and_all_zero_is_nothing_to_learn() -> None:
    record = openai()
    record["messages"].append({"role": "assistant", "content": "More.", "weight": 0})
    assert [turn.loss_weight for turn in parse_record(record).turns] == [None, None, 0.0]
    record["messages"][1]["weight"] = 0
    assert reason(record)[0] == "nothing_to_learn"
    record["messages"][1]["weight"] = "x"
    assert reason(record)[0] == "bad_weight"


@given(
    st.sampled_from(["human", "gpt", "system", "observation", "function_call", "nobody"]),
    st.one_of(st.text(), st.sampled_from(["", " \n", "<image>", "a<video>", '{"name": "f", "arguments": {}}'])),
)
def test_a_turn_with_an_empty_field_beside_its_text_is_read_as_one_without(role: str, text: str) -> None:
    """Turns of nothing but text take a shorter way; a field that says nothing leads round it."""

    def read(**more: Any) -> Any:
        record = sharegpt(images=["a.jpg"] * text.count("<image>"), videos=["a.mp4"] * text.count("<video>"))
        record["conversations"].insert(0, {"from": role, "value": text, **more})
        try:
            return parse_record(record)
        except SampleRejected as error:
            return error.reason, error.detail

    assert read() == read(nothing=None)
