"""Thinking in a field of its own stays one, to the byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from source_files import openai

from energon_packing.conversation import Conversation, MediaPart
from energon_packing.convert.fields import THINKING_FIELDS
from energon_packing.convert.records import parse_record
from energon_packing.errors import SampleRejected

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


def refused(record: dict[str, Any]) -> str:
    with pytest.raises(SampleRejected) as caught:
        parse_record(record)
    return caught.value.reason


@pytest.mark.parametrize("field", THINKING_FIELDS)
def test_thinking_of_a_field_is_stored_as_it_is_beside_an_answer_that_keeps_its_white_space(field: str) -> None:
    parsed = parse_record(thinking("\n    four()\n", **{field: "\n Two and two.\n\n"}))
    stored = Conversation.from_record("k", json.loads(json.dumps(parsed.record("k", [], [])))).turns[1]
    assert (stored.thinking, stored.parts) == ("\n Two and two.\n\n", ("\n    four()\n",))
    assert (parsed.ignored, parsed.warnings) == ((), ())


_TEXT = st.text(st.sampled_from("a<>/\n {é")).filter(lambda text: bool(text.strip()))


@given(thought=_TEXT, answer=_TEXT)
def test_qwen3_shows_the_thinking_that_we_store_as_it_shows_the_field(thought: str, answer: str) -> None:
    record = thinking(answer, reasoning_content=thought)
    written = json.loads(json.dumps(parse_record(record).record("k", [], [])))
    ours = Conversation.from_record("k", written).to_messages()[1]
    template = Environment().from_string(QWEN3_ANSWER)
    assert template.render(message=ours) == template.render(message=record["messages"][1])


@pytest.mark.parametrize("empty", [None, "", " \n"])
def test_a_field_without_thinking_changes_nothing(empty: Any) -> None:
    assert parse_record(thinking(reasoning_content=empty)).turns[1].parts == ("Four.",)


def test_a_call_keeps_the_thinking_that_led_to_it() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    turn = parse_record(thinking(None, tool_calls=[call], reasoning_content="I need add.")).turns[1]
    assert (turn.thinking, turn.parts) == ("I need add.", ())
    assert turn.tool_calls == (call,)


def test_a_sharegpt_call_keeps_its_thinking_too() -> None:
    value = json.dumps({"name": "add", "arguments": {}})
    turns = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": value, "thinking": "Hm."},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "Four."},
    ]
    assert parse_record({"conversations": turns}).turns[1].thinking == "Hm."


def test_thinking_without_an_answer_is_an_empty_turn() -> None:
    assert refused(thinking("", reasoning_content="Two and two.")) == "empty_turn"


def test_thinking_stands_before_parts_and_its_placeholders_count() -> None:
    record = thinking([{"type": "text", "text": "Four."}], reasoning_content="See <image>.")
    record["messages"][0]["content"] = "<image>?"
    turns = parse_record({**record, "images": ["a", "b"]}).turns
    assert turns[1].parts == ("<think>\nSee ", MediaPart(index=1), ".\n</think>\n\nFour.")
    assert refused({**record, "images": ["a"]}) == "placeholder_mismatch"


def test_two_fields_of_one_thinking_are_one_and_of_two_are_refused() -> None:
    parsed = parse_record(thinking(reasoning_content="Hm.", reasoning="Hm."))
    assert (parsed.turns[1].thinking, parsed.turns[1].parts) == ("Hm.", ("Four.",))
    assert refused(thinking(reasoning_content="Hm.", reasoning="Aha.")) == "conflicting_thinking"


@pytest.mark.parametrize("answer", ["<think>\nHm.\n</think>\n\nFour.", "<think>Hm.</think>Four."])
def test_thinking_that_the_text_holds_already_is_not_written_twice(answer: str) -> None:
    assert parse_record(thinking(answer, reasoning_content="Hm.")).turns[1].parts == (answer,)


@pytest.mark.parametrize(
    "answer", ["<think>Aha.</think>Four.", "Four.</think>", "<think>Hm.</think>Four.<think>Hm.</think>", "<think>Hm."]
)
def test_other_thinking_in_the_text_is_refused(answer: str) -> None:
    assert refused(thinking(answer, reasoning_content="Hm.")) == "conflicting_thinking"
    assert refused(thinking([{"type": "text", "text": answer}], reasoning_content="Hm.")) == "conflicting_thinking"


@pytest.mark.parametrize("thought", ["<think>Hm.</think>", "Hm.</think>Four."])
def test_tags_inside_of_the_field_are_refused(thought: str) -> None:
    assert refused(thinking(reasoning_content=thought)) == "conflicting_thinking"


@pytest.mark.parametrize("thought", [True, 3, ["Hm."], {"text": "Hm."}])
def test_thinking_that_is_no_text_is_refused(thought: Any) -> None:
    assert refused(thinking(reasoning_content=thought)) == "non_string_value"


def test_answers_of_a_pair_that_differ_in_their_thinking_alone_are_two() -> None:
    user = {"role": "user", "content": "Hi?"}
    one, other = ({"role": "assistant", "content": "Four.", "reasoning_content": thought} for thought in "AB")
    parsed = parse_record({"messages": [user], "chosen": [one], "rejected": [other]})
    assert [turns[0].thinking for turns in (parsed.chosen, parsed.rejected)] == ["A", "B"]
    # Two whole conversations part where the thinking does, not at the last answer.
    more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    whole = parse_record({"chosen": [user, one, *more], "rejected": [user, other, *more]})
    assert [len(turns) for turns in (whole.turns, whole.chosen, whole.rejected)] == [1, 3, 3]
