"""From one record to turns, media, pairs and extra values: every published shape, and every reason to reject."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from energon_reading import read_dataset
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from source_files import openai, refused, rejects, run, sharegpt, write_image, write_json, write_video

from energon_packing.conversation import Conversation, Media, MediaPart
from energon_packing.convert.fields import LOSS_FIELDS, THINKING_FIELDS
from energon_packing.convert.records import ParsedRecord, parse_record
from energon_packing.errors import SampleRejected


def calls(value: str) -> dict[str, Any]:
    return {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": value},
            {"from": "observation", "value": "[1]"},
            {"from": "gpt", "value": "Done."},
        ]
    }


def media(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(entry.kind, entry.path) for entry in parse_record(record).media]


def test_both_layouts_of_one_conversation_give_the_same_turns() -> None:
    a = parse_record(sharegpt(question="<image>What?", images=["a.jpg"]))
    b = parse_record(openai(question="<image>What?", images=["a.jpg"]))
    assert a == b
    assert a.turns[0].parts == (MediaPart(index=0), "What?")


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


@pytest.mark.parametrize("column", [{"image": "a.jpg"}, {"images": ["a.jpg"]}, {"image": [{"path": "a.jpg"}]}])
def test_the_llava_column_may_be_a_path_a_list_or_an_object(column: dict[str, Any]) -> None:
    assert media(sharegpt(question="<image>\nWhat?", **column)) == [("image", "a.jpg")]


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "What?"}],
        [{"type": "image_url", "image_url": {"url": "a.jpg"}}, {"type": "text", "text": "Wh"}, "at?"],
        [{"type": "image_url", "image_url": "a.jpg"}, {"type": "text", "text": "What?"}],
        [{"type": "image", "path": "a.jpg"}, {"type": "text", "text": "What?"}],
        [{"type": "image_url", "image_url": {"url": None, "path": "a.jpg"}}, {"type": "text", "text": "What?"}],
        [{"type": "image_url", "image_url": None, "image": "a.jpg"}, {"type": "text", "text": "What?"}],
    ],
)
def test_content_parts_may_carry_their_own_paths(parts: list[Any]) -> None:
    parsed = parse_record(openai(question=parts))
    assert parsed.turns[0].parts == (MediaPart(index=0), "What?")
    assert [(m.kind, m.path) for m in parsed.media] == [("image", "a.jpg")]


def test_an_empty_column_of_turns_does_not_hide_the_other() -> None:
    assert parse_record(sharegpt(messages=[])).turns == parse_record(sharegpt()).turns


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
    found, detail = refused(record)
    assert found == "placeholder_mismatch"
    assert words in detail


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"texts": "x", "zeta": 1}, "unknown_layout"),
        ({"caption": "x", "image": "a.jpg", "question": "?", "answer": "!"}, "unknown_layout"),
        ({"caption": "x"}, "unknown_layout"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "index": 1}]}], "images": ["a"]},
            "placeholder_mismatch",
        ),
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
        *((calls(text), "bad_tool_call") for text in ("f(1)", "{", "[]", "3", '{"arguments": {}}', '{"name": "f"}')),
        *((calls(f'{{"name": "f", "arguments": {value}}}'), "bad_tool_call") for value in ('"{"', "[1]")),
    ],
)
def test_each_bad_record_is_rejected_with_its_own_reason(record: Any, expected: str) -> None:
    assert refused(record)[0] == expected


def test_a_forced_layout_refuses_the_other_one() -> None:
    assert refused(openai(), "sharegpt")[0] == "unknown_layout"
    assert refused(sharegpt(), "openai")[0] == "unknown_layout"
    assert parse_record(openai(), "openai") == parse_record(sharegpt(), "sharegpt")


def test_two_different_system_prompts_are_rejected_and_equal_ones_are_one() -> None:
    record = sharegpt(system="A")
    record["conversations"].insert(0, {"from": "system", "value": "A"})
    assert [turn.role for turn in parse_record(record).turns] == ["system", "user", "assistant"]
    record["system"] = "B"
    assert refused(record)[0] == "two_system_prompts"


def test_images_and_videos_are_taken_each_from_its_own_column_in_reading_order() -> None:
    record = sharegpt(question="<video>a<image>b<video><image>", images=["i.png"] * 2, video=["v.mp4", "w.mp4"])
    assert media(record) == [("video", "v.mp4"), ("image", "i.png"), ("video", "w.mp4"), ("image", "i.png")]


@pytest.mark.parametrize("arguments", [{"a": [1, "é"]}, '{"a": [1, "é"]}'])
def test_calls_of_both_layouts_become_an_assistant_turn_with_parsed_arguments(arguments: Any) -> None:
    functions = [{"name": name, "arguments": arguments} for name in "fg"]
    expected = tuple({"type": "function", "function": {"name": name, "arguments": {"a": [1, "é"]}}} for name in "fg")
    merged = [{"type": None, "function": functions[0]}, {"type": "function", "function": None, **functions[1]}]
    answer = {"role": "assistant", "content": None, "tool_calls": merged}  # nulls as exporters of tables write them
    asked, found, said = ({"role": role, "content": "x"} for role in ("user", "tool", "assistant"))
    for record in (calls(json.dumps(functions)), {"messages": [asked, answer, found, said]}):
        turns = parse_record(record).turns
        assert [turn.role for turn in turns] == ["user", "assistant", "tool", "assistant"]
        assert (turns[1].parts, turns[1].tool_calls) == ((), expected)


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_tools_come_out_in_the_form_of_chat_templates(as_text: bool, wrapped: bool) -> None:
    bare = {"name": "f", "parameters": {"type": "object"}}
    tools: Any = [{"type": "function", "function": bare} if wrapped else bare]
    parsed = parse_record(sharegpt(tools=json.dumps(tools) if as_text else tools))
    assert parsed.tools == ({"type": "function", "function": bare},)
    assert [parse_record(sharegpt(tools=none)).tools for none in (None, "", "[]", [], {}, "null")] == [None] * 6


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


# As Qwen2.5's published template begins: its own system prompt, unless the conversation has one.
DEFAULT_PROMPT = """
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
"""


def with_system(record: dict[str, Any], content: Any) -> dict[str, Any]:
    if "messages" in record:
        record["messages"].insert(0, {"role": "system", "content": content})
    else:
        record["conversations"].insert(0, {"from": "system", "value": content})
    return record


def stored(record: dict[str, Any]) -> Conversation:
    """The conversation as a loader reads it, after conversion and JSON."""
    return Conversation.from_record("k", json.loads(json.dumps(parse_record(record).record("k", [], []))))


@pytest.mark.parametrize("layout", [sharegpt, openai])
@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_an_explicit_system_turn_without_text_is_kept_to_the_letter(layout: Any, text: str) -> None:
    parsed = parse_record(with_system(layout(), text))
    assert parsed.warnings == ("empty_system_turn_kept",)
    turn = stored(with_system(layout(), text)).to_messages()[0]
    assert turn == {"role": "system", "content": text}
    assert [turn.role for turn in parse_record(with_system(layout(system=""), text)).turns].count("system") == 1
    assert refused(with_system(layout(system="Be brief."), text))[0] == "two_system_prompts"
    assert refused(with_system(layout(), None))[0] == "non_string_value"


def test_an_empty_system_turn_keeps_the_default_prompt_of_a_template_out() -> None:
    template = Environment().from_string(DEFAULT_PROMPT)
    assert "helpful" in template.render(messages=stored(openai()).to_messages())
    record = with_system(openai(), "")
    shown = template.render(messages=stored(record).to_messages())
    assert "helpful" not in shown
    assert shown == template.render(messages=record["messages"])


@pytest.mark.parametrize("system", ["", None])
def test_an_empty_system_column_means_that_no_prompt_was_given(system: Any) -> None:
    parsed = parse_record(sharegpt(system=system))
    assert [turn.role for turn in parsed.turns] == ["user", "assistant"]
    assert (parsed.warnings, parsed.ignored) == ((), ())


def two_answers(**fields: Any) -> dict[str, Any]:
    """A conversation of two answers, the first with these fields."""
    record = openai()
    record["messages"] += [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}]
    record["messages"][1].update(fields)
    return record


def weights(parsed: ParsedRecord) -> list[float | None]:
    return [turn.loss_weight for turn in parsed.turns]


@pytest.mark.parametrize("field", LOSS_FIELDS)
@pytest.mark.parametrize(("value", "weight"), [(False, 0.0), (True, 1.0), (0, 0.0), (1, 1.0), (0.25, 0.25), (3, 3.0)])
def test_every_field_for_the_loss_weighs_its_answer(field: str, value: Any, weight: float) -> None:
    parsed = parse_record(two_answers(**{field: value}))
    assert weights(parsed) == [None, weight, None, None]
    assert parsed.ignored == ()
    assert stored(two_answers(**{field: value})).turns == parsed.turns
    only = openai()
    only["messages"][1][field] = value
    assert weight or refused(only)[0] == "nothing_to_learn"


@pytest.mark.parametrize(
    ("fields", "weight"),
    [
        ({"train": True, "weight": 0.5}, 0.5),
        ({"train": True, "loss_weight": 1.0, "loss": True}, 1.0),
        ({"loss": False, "weight": 0}, 0.0),
        ({"weight": 2, "loss_weight": 2.0}, 2.0),
        ({"weight": None, "loss": None, "train": False}, 0.0),
    ],
)
def test_fields_that_agree_are_one_weight(fields: dict[str, Any], weight: float) -> None:
    assert weights(parse_record(two_answers(**fields)))[1] == weight


@pytest.mark.parametrize(
    "fields",
    [
        {"train": True, "weight": 0},
        {"train": False, "weight": 0.5},
        {"train": True, "loss": False},
        {"weight": 1, "loss_weight": 2},
    ],
)
def test_fields_that_contradict_each_other_are_refused_with_both_names(fields: dict[str, Any]) -> None:
    why, detail = refused(two_answers(**fields))
    assert (why, all(name in detail for name in fields)) == ("bad_weight", True)


@pytest.mark.parametrize("field", LOSS_FIELDS)
@pytest.mark.parametrize("value", ["0", "true", -1, -0.5, float("inf"), float("nan"), 2**31, [1], {}])
def test_a_weight_that_is_none_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    why, detail = refused(two_answers(**{field: value}))
    assert (why, field in detail) == ("bad_weight", True)


@pytest.mark.parametrize("field", LOSS_FIELDS)
def test_a_question_that_asks_to_be_trained_is_refused_and_one_that_asks_not_to_be_is_not(field: str) -> None:
    def question(value: Any) -> dict[str, Any]:
        record = two_answers()
        record["messages"][2][field] = value
        return record

    for value in (True, 1, 0.5):
        why, detail = refused(question(value))
        assert (why, field in detail, "turn 2 (user)" in detail) == ("unsupported_weight", True, True)
    for value in (False, 0, 0.0):  # as LLaMA-Factory v1 and SlimOrca write it
        assert weights(parse_record(question(value))) == [None] * 4


@given(st.lists(st.sampled_from([True, False, None, 0, 1, 0.5]), min_size=1, max_size=5))
def test_the_answers_that_train_are_those_that_their_fields_say(values: list[Any]) -> None:
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    messages = [dict(turn) for _ in (*values, None) for turn in turns]
    for message, value in zip(messages[1::2], values, strict=False):
        message["loss"] = value
    parsed = parse_record({"messages": messages})
    trained = [turn.loss_weight != 0.0 for turn in parsed.turns if turn.role == "assistant"]
    assert trained == [value is None or bool(value) for value in values] + [True]


# What Qwen3's published template does with an assistant message behind the last question.
QWEN3_ANSWER = """
{%- set content = message.content %}
{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}
    {%- set reasoning_content = message.reasoning_content %}
{%- else %}
    {%- if '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
{%- endif %}
{{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
"""


def thinking(answer: Any = "Four.", **fields: Any) -> dict[str, Any]:
    record = openai(answer=answer)
    record["messages"][1].update(fields)
    return record


@pytest.mark.parametrize("field", THINKING_FIELDS)
def test_thinking_of_a_field_is_stored_as_it_is_beside_an_answer_that_keeps_its_white_space(field: str) -> None:
    parsed = parse_record(thinking("\n    four()\n", **{field: "\n Two and two.\n\n"}))
    turn = stored(thinking("\n    four()\n", **{field: "\n Two and two.\n\n"})).turns[1]
    assert (turn.thinking, turn.parts) == ("\n Two and two.\n\n", ("\n    four()\n",))
    assert (parsed.ignored, parsed.warnings) == ((), ())


_TEXT = st.text(st.sampled_from("a<>/\n {é")).filter(lambda text: bool(text.strip()))


@given(thought=_TEXT, answer=_TEXT)
def test_qwen3_shows_the_thinking_that_we_store_as_it_shows_the_field(thought: str, answer: str) -> None:
    record = thinking(answer, reasoning_content=thought)
    ours = stored(record).to_messages()[1]
    template = Environment().from_string(QWEN3_ANSWER)
    assert template.render(message=ours) == template.render(message=record["messages"][1])


def test_a_call_keeps_the_thinking_that_led_to_it() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    turn = parse_record(thinking(None, tool_calls=[call], reasoning_content="I need add.")).turns[1]
    assert (turn.thinking, turn.parts) == ("I need add.", ())
    assert turn.tool_calls == (call,)


def test_thinking_stands_before_parts_and_its_placeholders_count() -> None:
    record = thinking([{"type": "text", "text": "Four."}], reasoning_content="See <image>.")
    record["messages"][0]["content"] = "<image>?"
    turns = parse_record({**record, "images": ["a", "b"]}).turns
    assert turns[1].parts == ("<think>\nSee ", MediaPart(index=1), ".\n</think>\n\nFour.")
    assert refused({**record, "images": ["a"]})[0] == "placeholder_mismatch"


@pytest.mark.parametrize(
    ("answer", "fields", "kept"),
    [
        ("Four.", {"reasoning_content": None}, None),
        ("Four.", {"reasoning_content": " \n"}, None),
        ("Four.", {"reasoning_content": "Hm.", "reasoning": "Hm."}, "Hm."),
        ("<think>\nHm.\n</think>\n\nFour.", {"thinking": "Hm."}, None),  # the text holds it already
        ("<think>Hm.</think>Four.", {"thinking": "Hm."}, None),
    ],
)
def test_thinking_is_kept_once(answer: str, fields: dict[str, Any], kept: str | None) -> None:
    turn = parse_record(thinking(answer, **fields)).turns[1]
    assert (turn.thinking, turn.parts) == (kept, (answer,))


OTHERS = ["<think>Aha.</think>Four.", "Four.</think>", "<think>Hm.</think>Four.<think>Hm.</think>", "<think>Hm."]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (thinking("", reasoning_content="Two and two."), "empty_turn"),
        (thinking(reasoning_content="Hm.", reasoning="Aha."), "conflicting_thinking"),
        *((thinking(text, reasoning_content="Hm."), "conflicting_thinking") for text in OTHERS),
        (thinking([{"type": "text", "text": OTHERS[0]}], reasoning_content="Hm."), "conflicting_thinking"),
        (thinking(reasoning_content="<think>Hm.</think>"), "conflicting_thinking"),
        (thinking(reasoning_content="Hm.</think>Four."), "conflicting_thinking"),
        *((thinking(reasoning_content=value), "non_string_value") for value in (True, 3, ["Hm."], {"text": "Hm."})),
    ],
)
def test_thinking_that_contradicts_the_answer_or_is_none_is_refused(record: dict[str, Any], expected: str) -> None:
    assert refused(record)[0] == expected


def test_answers_of_a_pair_that_differ_in_their_thinking_alone_are_two() -> None:
    user = {"role": "user", "content": "Hi?"}
    one, other = ({"role": "assistant", "content": "Four.", "reasoning_content": thought} for thought in "AB")
    parsed = parse_record({"messages": [user], "chosen": [one], "rejected": [other]})
    assert [turns[0].thinking for turns in (parsed.chosen, parsed.rejected)] == ["A", "B"]
    # Two whole conversations part where the thinking does, not at the last answer.
    more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    whole = parse_record({"chosen": [user, one, *more], "rejected": [user, other, *more]})
    assert [len(turns) for turns in (whole.turns, whole.chosen, whole.rejected)] == [1, 3, 3]


ASKED = [{"from": "human", "value": "Why?"}]
ASKED_OPENAI = [{"role": "user", "content": "Why?"}]
YES, NO = {"role": "assistant", "content": "Because."}, {"role": "assistant", "content": "No."}
GPT_YES, GPT_NO = {"from": "gpt", "value": "Because."}, {"from": "gpt", "value": "No."}
SHAPES: dict[str, dict[str, Any]] = {
    "LLaMA-Factory": {"conversations": ASKED, "chosen": GPT_YES, "rejected": GPT_NO},
    "answers as text": {"conversations": ASKED, "chosen": "Because.", "rejected": "No."},
    "answers as lists": {"conversations": ASKED, "chosen": [GPT_YES], "rejected": [GPT_NO]},
    "OpenAI": {"messages": ASKED_OPENAI, "chosen": YES, "rejected": NO},
    "two ways of naming": {"conversations": ASKED, "chosen": YES, "rejected": GPT_NO},
    "TRL, text": {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
    "TRL, messages": {"prompt": ASKED_OPENAI, "chosen": [YES], "rejected": [NO]},
    "TRL, implicit prompt": {"chosen": [*ASKED_OPENAI, YES], "rejected": [*ASKED_OPENAI, NO]},
    "prompt repeated": {"prompt": "Why?", "chosen": [*ASKED_OPENAI, YES], "rejected": [*ASKED_OPENAI, NO]},
    "ms-swift": {"messages": [*ASKED_OPENAI, YES], "rejected_response": "No."},
    "ms-swift, list": {"messages": [*ASKED_OPENAI, YES], "rejected_response": [NO]},
    "ms-swift, query": {"query": "Why?", "response": "Because.", "rejected_response": "No."},
    "ms-swift, messages": {"messages": [*ASKED_OPENAI, YES], "rejected_messages": [*ASKED_OPENAI, NO]},
}


def shown(turns: Any) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in turns]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_published_shape_of_a_pair_gives_the_same_pair(shape: str) -> None:
    parsed = parse_record(SHAPES[shape])
    assert shown(parsed.turns) == [("user", "Why?")]
    assert shown(parsed.chosen) == [("assistant", "Because.")]
    assert shown(parsed.rejected) == [("assistant", "No.")]
    assert parsed.warnings == ()


def test_a_pair_keeps_earlier_answers_system_prompt_and_media_in_its_beginning() -> None:
    earlier = [{"from": "human", "value": "<image>Hi"}, {"from": "gpt", "value": "Hello"}, *ASKED]
    record = {"system": "Be kind.", "conversations": earlier, "chosen": "A", "rejected": "B", "images": ["i.png"]}
    parsed = parse_record(record)
    assert shown(parsed.turns)[0] == ("system", "Be kind.")
    assert parsed.turns[1].parts == (MediaPart(index=0), "Hi")
    assert [file.path for file in parsed.media] == ["i.png"]
    whole = [{"role": "user", "content": [{"type": "image", "image": "i.png"}, {"type": "text", "text": "Hi"}]}]
    implicit = parse_record({"chosen": [*whole, YES], "rejected": [*whole, NO]})
    assert [file.path for file in implicit.media] == ["i.png"]
    assert shown(implicit.chosen) == [("assistant", "Because.")]


def test_an_answer_may_call_tools_and_go_on() -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": "{}"}}
    chosen = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        YES,
    ]
    parsed = parse_record({"messages": ASKED_OPENAI, "chosen": chosen, "rejected": NO})
    assert [turn.role for turn in parsed.chosen] == ["assistant", "tool", "assistant"]
    assert parsed.warnings == ()
    swift = parse_record({"messages": [*ASKED_OPENAI, *chosen], "rejected_response": [NO]})
    assert (swift.turns, swift.chosen, swift.rejected) == (parsed.turns, parsed.chosen, parsed.rejected)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"conversations": ASKED, "chosen": "A"}, ("bad_pair", "only 'chosen'")),
        ({"conversations": ASKED, "rejected": "A"}, ("bad_pair", "only 'rejected'")),
        ({"conversations": ASKED, "chosen": "A", "rejected": 3}, ("bad_pair", "'rejected' is neither text")),
        ({"conversations": ASKED, "chosen": "A", "rejected": []}, ("bad_pair", "'rejected' is neither text")),
        ({"conversations": ASKED, "chosen": "A", "rejected": "A"}, ("nothing_to_learn", "are the same")),
        ({"conversations": ASKED, "chosen": "A", "rejected": " "}, ("empty_turn", "is empty")),
        ({"conversations": ASKED, "chosen": ASKED, "rejected": "A"}, ("bad_pair", "begins with a user turn")),
        ({"conversations": [], "chosen": "A", "rejected": "B"}, ("bad_pair", "neither text")),
        ({"chosen": "A", "rejected": "B"}, ("bad_pair", "share no beginning")),
        ({"chosen": [YES], "rejected": [NO]}, ("bad_pair", "share no beginning")),
        ({"conversations": ASKED, "chosen": "<image>", "rejected": "B"}, ("bad_pair", "contains media")),
        (
            {"conversations": ASKED, "messages": ASKED_OPENAI, "chosen": "A", "rejected": "B"},
            ("bad_pair", "both 'messages' and 'conversations'"),
        ),
        (
            {"messages": [*ASKED_OPENAI, YES], "rejected_response": "B", "chosen": "A"},
            ("bad_pair", "both 'rejected_response' and 'chosen'"),
        ),
        ({"rejected_response": "B"}, ("bad_pair", "but no 'messages'")),
        (
            {"messages": [*ASKED_OPENAI, YES], "rejected_response": "B", "rejected_images": ["a.png"]},
            ("bad_pair", "its own media"),
        ),
        (
            {"conversations": ASKED, "chosen": {**GPT_YES, "weight": 0}, "rejected": "B"},
            ("nothing_to_learn", "no assistant turn"),
        ),
        ({"conversations": ASKED, "chosen": [1], "rejected": "B"}, ("non_string_value", "turn 0 is a number")),
        ({"conversations": [1], "chosen": "A", "rejected": "B"}, ("unknown_layout", "keys are")),
    ],
)
def test_what_is_no_pair_is_rejected_by_reason(record: dict[str, Any], expected: tuple[str, str]) -> None:
    found, detail = refused(record)
    assert found == expected[0]
    assert expected[1] in detail


def test_extras_come_from_their_column_and_from_named_ones() -> None:
    record = sharegpt(extras={"advantages": [0.5, -1]}, reward=2, ignored=3)
    assert parse_record(record, extra_columns=("reward", "absent")).extras == {"advantages": (0.5, -1), "reward": 2}
    assert parse_record(sharegpt()).extras == {}


@pytest.mark.parametrize(
    "columns",
    [
        {"extras": {"logp": {"chosen": [1.0, 2.0], "rejected": -1}}},
        {"logp": {"chosen": [1.0, 2.0], "rejected": -1}},
        {"chosen_logp": [1.0, 2.0], "rejected_logp": -1},
        {"logp_chosen": [1.0, 2.0], "logp_rejected": -1},
    ],
)
def test_extras_of_a_pair_stand_in_one_column_or_in_two(columns: dict[str, Any]) -> None:
    parsed = parse_record({**SHAPES["LLaMA-Factory"], **columns}, extra_columns=("logp",))
    assert parsed.extras == {"logp": {"chosen": (1.0, 2.0), "rejected": -1}}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"extras": [1]}, "bad_extra"),
        ({"extras": {"a": "high"}}, "bad_extra"),
        ({"extras": {"a": True}}, "bad_extra"),
        ({"extras": {"a": [1, None]}}, "bad_extra"),
        ({"extras": {"a": float("inf")}}, "bad_extra"),
        ({"extras": {"a": 10**400}}, "bad_extra"),
        ({"extras": {"a": {"chosen": 1, "rejected": 2}}}, "bad_extra"),
        ({"extras": {"preference": 1}}, "bad_extra"),
        ({"extras": {"a": 1}, "a": 2}, "conflicting_columns"),
        ({"chosen": "A", "rejected": "B", "extras": {"a": [1]}}, "bad_extra"),
        ({"chosen": "A", "rejected": "B", "extras": {"a": {"chosen": 1}}}, "bad_extra"),
        ({"chosen": "A", "rejected": "B", "chosen_a": 1}, "bad_extra"),
        ({"chosen": "A", "rejected": "B", "chosen_a": 1, "rejected_a": 1, "a": 1}, "conflicting_columns"),
    ],
)
def test_what_is_no_value_of_a_trained_token_is_rejected(columns: dict[str, Any], expected: str) -> None:
    record = {"conversations": ASKED, **columns} if "chosen" in columns else sharegpt(**columns)
    assert refused(record, extra_columns=("a",))[0] == expected


FRAMES = ["f0.jpg", "f1.jpg", "f2.jpg"]


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    for number in range(3):
        write_image(tmp_path / f"f{number}.jpg", seed=number)
    return tmp_path


@pytest.mark.parametrize(
    ("columns", "fps", "times"),
    [
        ({"videos": [FRAMES]}, 2.0, ()),
        ({"video": [FRAMES], "video_fps": 5}, 5.0, ()),
        ({"videos": [FRAMES], "video_fps": [0.5]}, 0.5, ()),
        ({"videos": [{"frames": FRAMES}]}, 2.0, ()),
        ({"videos": {"frames": FRAMES, "fps": "4"}, "video_fps": 9}, 4.0, ()),
        ({"videos": [FRAMES], "video_timestamps": [[0, 1, 4.5]]}, 2.0, (0.0, 1.0, 4.5)),
        ({"videos": [{"frames": FRAMES, "timestamps": [1, 2, 3]}]}, 2.0, (1.0, 2.0, 3.0)),
        ({"videos": [{"frames": None, "video": FRAMES, "timestamps": None, "fps": 4}]}, 4.0, ()),
    ],
)
def test_a_column_may_hold_lists_of_frames_with_their_time(columns: Any, fps: float, times: Any) -> None:
    parsed = parse_record(sharegpt(question="<video>?", **columns))
    (reference,) = parsed.references
    assert (reference.kind, reference.is_frames) == ("video", True)
    assert (reference.fps, reference.times) == (fps, times)
    assert [(file.kind, file.path) for file in parsed.media] == [("image", name) for name in FRAMES]


@pytest.mark.parametrize(
    "rate", [{"fps": 4}, {"sample_fps": "4"}, {"sample_fps": 4.0, "fps": 9}, {"sample_fps": None, "fps": 4}]
)
def test_a_content_part_may_hold_a_list_of_frames_as_qwen_writes_it(rate: dict[str, Any]) -> None:
    (reference,) = parse_record(openai(question=[{"type": "video", "video": FRAMES, **rate}])).references
    assert (reference.paths, reference.fps) == (tuple(FRAMES), 4.0)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"videos": [[]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": 0}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": True}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": "fast"}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": "nan"}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": 10**400}, "bad_frames"),
        ({"videos": [FRAMES], "video_fps": [1, 2]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": [[0, 1]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": [[0, 1, 1]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": [[-1, 1, 2]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": [[0, 1, "2"]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": [[0, 1, 10**400]]}, "bad_frames"),
        ({"videos": [FRAMES], "video_timestamps": 3}, "bad_frames"),
        ({"videos": [["f0.jpg", 3]]}, "non_string_value"),
        ({"videos": FRAMES}, "placeholder_mismatch"),
        ({"images": [FRAMES]}, "non_string_value"),
    ],
)
def test_what_is_no_list_of_frames_is_rejected(columns: Any, reason: str) -> None:
    assert refused(sharegpt(question="<video>?", **columns))[0] == reason


@pytest.mark.parametrize("layout", ["polylithic", "monolithic"])
def test_lists_of_frames_are_stored_beside_files_and_read_back(frames: Path, layout: str) -> None:
    write_video(frames / "clip.mp4", frames=7)
    write_image(frames / "i.png", 20, 10)
    record = sharegpt(
        "mixed",
        "<video><image><video>and<video>",
        videos=[FRAMES, "clip.mp4", {"frames": ["f2.jpg", "f0.jpg", "f0.jpg", "f1.jpg"], "timestamps": [0, 1, 2, 4.5]}],
        images=["i.png"],
    )
    report = run(write_json(frames / "a.json", [record]), frames / "out", layout=layout, split={"train": 1.0})
    assert (report.written, report.images, report.videos, report.media_files) == (1, 1, 3, 5)
    (sample,) = read_dataset(report.entry).values()
    media = Conversation.from_record("mixed", sample.record).media
    assert [medium.kind for medium in media] == ["video", "image", "video", "video"]
    first, _, clip, last = media
    assert (first.frames, first.fps, first.duration, first.width, first.height) == (3, 2.0, 1.5, 40, 30)
    assert (clip.frames, clip.frame_names) == (7, ())
    assert (last.frames, last.frame_times) == (4, (0.0, 1.0, 2.0, 4.5))
    assert last.fps == pytest.approx(3 / 4.5)
    assert first.frame_names == (last.frame_names[1], last.frame_names[3], last.frame_names[0])
    stored: dict[str, bytes] = {}
    for shard in (frames / "out").rglob("*.tar"):
        with tarfile.open(shard) as tar:
            stored |= {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    prefix = "mixed" if layout == "monolithic" else ""
    assert [stored[prefix + name] for name in first.frame_names] == [(frames / name).read_bytes() for name in FRAMES]


def test_the_default_rate_is_an_option_and_part_of_the_fingerprint(frames: Path) -> None:
    source = write_json(frames / "a.json", [sharegpt("a", "<video>", videos=[FRAMES])])
    report = run(source, frames / "out", frame_fps=8.0, split={"train": 1.0})
    (sample,) = read_dataset(report.entry).values()
    assert sample.record["media"][0]["fps"] == 8.0
    assert report.fingerprint["options"]["frame_fps"] == 8.0


def test_bad_frames_reject_their_record_alone(frames: Path) -> None:
    write_image(frames / "other.jpg", 31, 30)
    (frames / "cut.jpg").write_bytes((frames / "f0.jpg").read_bytes()[:200])
    write_video(frames / "clip.mp4")
    lists = {
        "good": FRAMES,
        "unequal": ["f0.jpg", "other.jpg"],
        "missing": ["f0.jpg", "nowhere.jpg"],
        "outside": ["f0.jpg", "../secret.jpg"],
        "cut": ["f0.jpg", "cut.jpg"],
        "video": ["f0.jpg", "clip.mp4"],
        "remote": ["https://example.org/f.jpg"],
    }
    records = [sharegpt(key, "<video>", videos=[paths]) for key, paths in lists.items()]
    run(write_json(frames / "a.json", records), frames / "out", max_rejects=1.0)
    assert {line["key"]: line["reason"] for line in rejects(frames / "out")} == {
        "unequal": "unequal_frames",
        "missing": "missing_media",
        "outside": "media_outside_root",
        "cut": "corrupt_media",
        "video": "corrupt_media",
        "remote": "remote_media",
    }


def test_a_frame_name_that_leaves_the_data_set_is_refused_when_cooking() -> None:
    from energon_packing.energon.cookers import complete

    media = Media(kind="video", name="0.jpg", width=8, height=8, frames=2, fps=2.0, frame_names=("0.jpg", "../x.jpg"))
    record = {"version": 1, "turns": [{"role": "user", "parts": [{"media": 0}]}], "media": [media.to_record()]}
    with pytest.raises(SampleRejected, match="media_outside_root"):
        Conversation.from_record("k", record)
    safe = {**media.to_record(), "frame_names": ["0.jpg", "1.jpg"]}
    conversation = Conversation.from_record("k", {**record, "media": [safe]})
    object.__setattr__(conversation, "media", (media,))  # as a cooker of somebody else's might make it
    with pytest.raises(SampleRejected, match="media_outside_root"):
        complete(conversation, None)  # type: ignore[arg-type]
