"""Published templates and records: the text is what transformers renders, and every setting of thinking does its work.

The oracles are ``apply_chat_template`` on the record's own messages and the marks of thinking that each model's card
documents (`MARKS`).
"""

import functools
import re
from typing import Any

import pytest
from published_templates import DATE, chat_template, templates, tokenizer_of
from template_pairs import FIELDS, Message, Oracle, forms, judged, records, stored, verdict

from energon_packing.chat.template import ChatTemplate
from energon_packing.errors import SampleRejected

TEMPLATES = templates()
if not TEMPLATES:
    pytest.skip("trl, whose templates are read, is not installed", allow_module_level=True)
THOUGHTS = {
    kind: record
    for kind, record in records().items()
    if not kind.startswith(("answer: ", "both: ", "tight: ")) or "plain" in kind or "prose" in kind
}
"""Records with thinking in every form, and some without."""
VERSIONS = (
    *("cohere", "gemma", "gemma4_v3", "gemma4_v4", "lfm2_2_5", "lfm2_v2", "llama3", "llama3_1", "phi3", "qwen2_5_vl"),
    *("nemotron_3_super", "nemotron_3_ultra", "qwen3_instruct_2507", "qwen3_vl", "smolvlm", "qwen3_5_nothink"),
)
"""Templates that write and mark thinking as another one of their family does."""
NAMES = [
    pytest.param(name, marks=[pytest.mark.full] * name.endswith("_training"))
    for name in sorted(TEMPLATES)
    if name.removesuffix("_training") == name or name.removesuffix("_training") not in VERSIONS
]
UNMARKED = [name for name in sorted(TEMPLATES) if not name.endswith("_training") and name not in VERSIONS]
"""Without trl's variants for training, which write the same text."""

# What opens and closes thinking, and the line ends after an empty one, by the beginning of a template's name.
THINK = ("<think>", "</think>", 0)
CHANNEL = ("<|channel>thought", "<channel|>", 0)
MARKS = {
    "diffusion_gemma": CHANNEL,
    "gemma4": CHANNEL,
    "gemma4_v2": THINK,
    "glm4moe": ("<think>", "</think>", 1),
    "gptoss": ("<|channel|>analysis<|message|>", "<|end|>", 0),
    "muse": ("to=self<|message|>", "<|eom|>", 0),
    "qwen3": ("<think>", "</think>", 2),
}
UNREAD = {"closing tag alone", "two thoughts"}


def marks_of(name: str) -> tuple[str, str, int]:
    known = [prefix for prefix in MARKS if name.startswith(prefix)]
    return MARKS[max(known, key=len)] if known else THINK


@functools.cache
def oracle_of(name: str) -> Oracle:
    return Oracle(name, tokenizer_of(name), TEMPLATES[name])


def template(name: str, thinking: Any) -> ChatTemplate:
    return chat_template(tokenizer_of(name), source=TEMPLATES[name], thinking=thinking, date=DATE)


def trained(chat: Any) -> list[bool]:
    found = [False] * len(chat.text)
    for span in chat.spans:
        found[span.start : span.end] = [span.weight > 0] * (span.end - span.start)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_record_is_what_transformers_renders_and_its_answers_alone_are_trained(name: str) -> None:
    found = judged(name, tokenizer_of(name), TEMPLATES[name])
    assert not [f"{kind}: {each}" for kind, each in found.items() if each.startswith("wrong")]
    assert sum(each == "exact" for each in found.values()) > 40


@pytest.mark.parametrize("name", UNMARKED)
def test_masked_thinking_is_what_stands_between_the_marks_of_the_template_and_nothing_else(name: str) -> None:
    keep, mask = template(name, "keep"), template(name, "mask")
    opening, closing, _ = marks_of(name)
    seen, refused = 0, {}
    for kind, record in THOUGHTS.items():
        if "prose" in kind:
            continue  # a tag that is a word
        try:
            kept = keep.render(stored(record))
            masked = mask.render(stored(record))
        except SampleRejected as error:
            refused[kind] = error.reason
            continue
        expected = trained(kept)
        for found in re.finditer(f"{re.escape(opening)}.*?{re.escape(closing)}", kept.text, re.DOTALL):
            seen += 1
            expected[found.start() : found.end()] = [False] * (found.end() - found.start())
        assert masked.text == kept.text, kind
        assert trained(masked) == expected, (kind, kept.text)
    assert seen or "deepseek" in name
    # Tags that the template does not read, and that do not open the answer as data of other models do.
    assert {kind for kind, reason in refused.items() if reason == "unclosed_thinking"} <= UNREAD


@pytest.mark.parametrize("name", UNMARKED)
def test_stripped_thinking_leaves_what_transformers_renders_of_the_record_without_it(name: str) -> None:
    strip, seen = template(name, "strip"), 0
    for kind, record in THOUGHTS.items():
        messages: list[Message] = []
        for each in record["messages"]:
            one = {field: value for field, value in each.items() if field not in FIELDS}
            if one["role"] == "assistant":
                one["content"] = re.sub(r"<think>.*?</think>[\r\n]*", "", one["content"], flags=re.DOTALL)
            messages.append(one)
        found = verdict(strip, oracle_of(name), record, messages)
        assert not found.startswith("wrong"), (kind, found)
        seen += found == "exact"
    assert seen > 33


@pytest.mark.parametrize("name", UNMARKED)
def test_empty_thinking_is_trimmed_from_the_record_and_from_what_the_template_writes(name: str) -> None:
    trim, oracle = template(name, "trim_empty"), oracle_of(name)
    opening, closing, breaks = marks_of(name)
    empty = rf"{re.escape(opening)}\s*{re.escape(closing)}\n{{0,{breaks}}}"
    for kind, record in THOUGHTS.items():
        if "prose" in kind:
            continue
        messages = [dict(each) for each in record["messages"]]
        for each in messages:
            if each["role"] == "assistant":
                each["content"] = re.sub(r"\A<think>\s*</think>[\r\n]*", "", each["content"])
        try:
            chat = trim.render(stored(record))
        except SampleRejected:
            continue
        whole = [oracle.text(form, record.get("tools")) for form in forms(oracle.given(messages), oracle.as_list)]
        texts = [re.sub(empty, "", text) for text in whole if text is not None]
        assert any(chat.text.startswith(text) and "\n" not in chat.text[len(text) :] for text in texts), (
            kind,
            chat.text,
        )
        assert not re.search(empty, "".join(c for c, on in zip(chat.text, trained(chat), strict=True) if on)), kind
        answers = [
            each["content"].rpartition("</think>")[2].strip() for each in messages if each["role"] == "assistant"
        ]
        shown = "".join(c if on else "\0" for c, on in zip(chat.text, trained(chat), strict=True))
        assert all(answer in shown for answer in answers), kind
