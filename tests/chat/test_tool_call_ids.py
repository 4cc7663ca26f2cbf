"""Ids of tool calls: from the record through conversion to templates that insist on them."""

import json
from typing import Any

import pytest

from energon_packing.conversation import Conversation
from energon_packing.convert.records import parse_record
from energon_packing.errors import SampleRejected


# As Mistral 7B v0.3 writes calls and answers: an id of nine characters, or no sample.
def record(call_id: Any = "abcdefghi", answered: Any = "abcdefghi") -> dict[str, Any]:
    call: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer: dict[str, Any] = {"role": "tool", "content": "2"}
    if call_id is not None:
        call["id"] = call_id
    if answered is not None:
        answer["tool_call_id"] = answered
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        answer,
        {"role": "assistant", "content": "Two."},
    ]
    return {"messages": messages}


def stored(value: Any) -> Conversation:
    """The conversation as a loader reads it, after conversion and JSON."""
    written = parse_record(value).record("k", [], [])
    return Conversation.from_record("k", json.loads(json.dumps(written)))


def test_messages_hold_ids_where_the_data_have_them_and_nowhere_else() -> None:
    with_ids, without = (stored(record(*ids)).to_messages() for ids in (("c1", "c1"), (None, None)))
    assert (with_ids[1]["tool_calls"][0]["id"], with_ids[2]["tool_call_id"]) == ("c1", "c1")
    assert "id" not in without[1]["tool_calls"][0]
    assert "tool_call_id" not in without[2]


def test_a_sharegpt_call_may_hold_its_id_too() -> None:
    value = json.dumps({"id": "c7", "name": "f", "arguments": {}})
    turns = [{"from": "human", "value": "U"}, {"from": "function_call", "value": value}]
    turns += [{"from": "observation", "value": "1", "tool_call_id": "c7"}, {"from": "gpt", "value": "A"}]
    parsed = parse_record({"conversations": turns})
    assert parsed.turns[1].tool_calls[0]["id"] == parsed.turns[2].tool_call_id == "c7"


def test_an_answer_to_a_call_that_nobody_made_is_a_warning_and_a_wrong_id_a_rejection() -> None:
    assert parse_record(record()).warnings == ()
    assert parse_record(record("c1", "c2")).warnings == ("unknown_tool_call_id",)
    for ids in ((7, "c1"), ("c1", ["c1"])):
        with pytest.raises(SampleRejected, match="bad_tool_call"):
            parse_record(record(*ids))
