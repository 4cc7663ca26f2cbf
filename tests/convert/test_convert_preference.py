"""Preference records and extra values: every shape in which they are published becomes the same pair, or a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from energon_reading import read_dataset
from source_files import rejects, run, sharegpt, write_image, write_json

from energon_packing.conversation import Conversation, MediaPart
from energon_packing.convert.records import parse_record
from energon_packing.errors import SampleRejected

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
    "ms-swift, messages": {"messages": [*ASKED_OPENAI, YES], "rejected_messages": [*ASKED_OPENAI, NO]},
}


def reason(record: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(SampleRejected) as caught:
        parse_record(record, **options)
    return caught.value.reason, caught.value.detail


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
    found, detail = reason(record)
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
    assert reason(record, extra_columns=("a",))[0] == expected


@pytest.mark.parametrize("layout", ["polylithic", "monolithic"])
def test_pairs_and_extras_are_stored_and_read_back(tmp_path: Path, layout: str) -> None:
    write_image(tmp_path / "i.png")
    pair = {
        "id": "p",
        "conversations": [{"from": "human", "value": "<image>Why?"}],
        "chosen": GPT_YES,
        "rejected": GPT_NO,
        "images": ["i.png"],
        "extras": {"logp": {"chosen": -0.5, "rejected": -2}},
    }
    records = [pair, sharegpt("s", reward=0.25), {**pair, "id": "bad", "rejected": GPT_YES}]
    source = write_json(tmp_path / "a.json", records)
    report = run(source, tmp_path / "out", layout=layout, extra_columns=("reward",), split={"train": 1.0})
    assert (report.written, report.rejected) == (2, {"nothing_to_learn": 1})
    assert [line["key"] for line in rejects(tmp_path / "out")] == ["bad"]
    samples = read_dataset(report.entry)
    found = {key: Conversation.from_record(key, sample.record) for key, sample in samples.items()}
    assert found["p"].is_pair
    assert [shown(answer.turns)[1:] for answer in found["p"].answers()] == [
        [("assistant", "Because.")],
        [("assistant", "No.")],
    ]
    assert found["p"].extras == {"logp": {"chosen": -0.5, "rejected": -2}}
    assert samples["p"].media == [(tmp_path / "i.png").read_bytes()]
    assert found["s"].extras == {"reward": 0.25}
    assert not found["s"].is_pair
    assert json.loads((tmp_path / "out/conversion.json").read_text())["images"] == 1
