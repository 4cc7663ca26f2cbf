"""System turns without text: an explicit one is kept, since it is how a conversation keeps a template's own out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from energon_reading import read_dataset
from jinja2 import Environment
from source_files import openai, run, sharegpt, write_json

from energon_packing.conversation import Conversation
from energon_packing.convert.records import parse_record
from energon_packing.errors import SampleRejected

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


def test_a_system_message_of_no_parts_is_an_empty_one() -> None:
    messages = stored(with_system(openai(), [])).to_messages()
    assert [message["content"] for message in messages] == ["", "Hi?", "Yes."]


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


def test_an_empty_system_column_leaves_an_explicit_empty_turn_alone() -> None:
    parsed = parse_record(with_system(sharegpt(system=""), ""))
    assert [turn.role for turn in parsed.turns] == ["system", "user", "assistant"]
    with pytest.raises(SampleRejected, match="two_system_prompts"):
        parse_record(with_system(sharegpt(system="Be brief."), ""))


def test_a_system_message_whose_content_is_null_is_rejected() -> None:
    with pytest.raises(SampleRejected, match="non_string_value"):
        parse_record(with_system(openai(), None))


def test_a_pair_keeps_its_empty_system_turn_in_both_answers() -> None:
    beginning = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi?"}]
    conversation = stored({"messages": beginning, "chosen": "Yes.", "rejected": "No."})
    for answer in conversation.answers():
        assert [turn.role for turn in answer.turns] == ["system", "user", "assistant"]
        assert answer.to_messages()[0]["content"] == ""


def test_kept_system_turns_are_counted_and_come_out_of_the_data_set(tmp_path: Path) -> None:
    records = [with_system(openai("empty"), ""), with_system(sharegpt("blank"), " "), sharegpt("none")]
    report = run(write_json(tmp_path / "a.json", records), tmp_path / "out", split={"train": 1.0})
    assert (report.written, report.warnings) == (3, {"empty_system_turn_kept": 2})
    samples = read_dataset(report.entry)
    turns = {key: Conversation.from_record(key, sample.record).turns for key, sample in samples.items()}
    assert {key: (found[0].role, found[0].text) for key, found in turns.items()} == {
        "empty": ("system", ""),
        "blank": ("system", " "),
        "none": ("user", "Hi?"),
    }
