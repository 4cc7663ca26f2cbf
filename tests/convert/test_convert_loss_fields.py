"""Fields of a message that say how much it is trained: honoured, and refused where they cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_files import openai, sharegpt

from energon_packing.conversation import Conversation
from energon_packing.convert.fields import LOSS_FIELDS
from energon_packing.convert.records import ParsedRecord, parse_record
from energon_packing.errors import SampleRejected


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
    stored = Conversation.from_record("k", json.loads(json.dumps(parsed.record("k", [], []))))
    assert stored.turns == parsed.turns


@pytest.mark.parametrize("field", LOSS_FIELDS)
def test_an_answer_that_is_all_there_is_and_not_trained_teaches_nothing(field: str) -> None:
    record = sharegpt()
    record["conversations"][1][field] = False
    with pytest.raises(SampleRejected, match="nothing_to_learn"):
        parse_record(record)


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
    with pytest.raises(SampleRejected, match="bad_weight") as caught:
        parse_record(two_answers(**fields))
    assert all(name in caught.value.detail for name in fields)


@pytest.mark.parametrize("field", LOSS_FIELDS)
@pytest.mark.parametrize("value", ["0", "true", -1, -0.5, float("inf"), float("nan"), 2**31, [1], {}])
def test_a_weight_that_is_none_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(SampleRejected, match="bad_weight") as caught:
        parse_record(two_answers(**{field: value}))
    assert field in caught.value.detail


@pytest.mark.parametrize("field", LOSS_FIELDS)
def test_a_question_that_asks_to_be_trained_is_refused_and_one_that_asks_not_to_be_is_not(field: str) -> None:
    for value in (True, 1, 0.5):
        record = two_answers()
        record["messages"][2][field] = value
        with pytest.raises(SampleRejected, match="unsupported_weight") as caught:
            parse_record(record)
        assert field in caught.value.detail
        assert "turn 2 (user)" in caught.value.detail
    for value in (False, 0, 0.0):  # as LLaMA-Factory v1 and SlimOrca write it
        record = two_answers()
        record["messages"][2][field] = value
        assert weights(parse_record(record)) == [None] * 4


@given(st.lists(st.sampled_from([True, False, None, 0, 1, 0.5]), min_size=1, max_size=5))
def test_the_answers_that_train_are_those_that_their_fields_say(values: list[Any]) -> None:
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    messages = [dict(turn) for _ in (*values, None) for turn in turns]
    for message, value in zip(messages[1::2], values, strict=False):
        message["loss"] = value
    parsed = parse_record({"messages": messages})
    trained = [turn.loss_weight != 0.0 for turn in parsed.turns if turn.role == "assistant"]
    assert trained == [value is None or bool(value) for value in values] + [True]
