"""Seventy-two published chat templates: nothing of a conversation vanishes, and what is trained is what was answered.

The oracles are trl's own training variants (marked by their authors, read by ``apply_chat_template``), transformers'
rendering of the same template, and what each format's model card says of the beginning and end of an answer.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_templates import (
    DATE,
    TOOL,
    chat_template,
    conversation,
    table,
    templates,
    tokenizer_of,
    turn,
)

from energon_packing.chat.prompt_files import template_source
from energon_packing.chat.template import ChatTemplate
from energon_packing.conversation import Conversation
from energon_packing.encoders.targets import trained_tokens
from energon_packing.encoders.tokenized import TextTokenizer

TEMPLATES = templates()
if not TEMPLATES:
    pytest.skip("trl, whose templates are read, is not installed", allow_module_level=True)
PLAIN = sorted(name for name in TEMPLATES if not name.endswith("_training"))

# What an answer begins and ends with, by the beginning of the template's name; longer names first.
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "cohere2": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "glm4moe": "<|user|>",
    "gptoss": "<|end|>",
    "idefics3": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>",
    "llama3": "<|eot_id|>",
    "llava_next": "</s>",
    "muse": "<|eot|>",
    "phi3": "<|end|>",
}
LAST_ENDS = {"gptoss": "<|return|>", "phi3": "<|end|>\n<|endoftext|>"}
BEGINNINGS = {
    "glm4moe": "\n<think></think>\n",
    "gptoss": "<|channel|>final<|message|>",
    "idefics3": " ",
    "llava_next": " ",
    "muse": " to=user<|message|>",
    "nemotron": "<think></think>",
    "qwen3_8": "<think>\n\n</think>\n\n",
    "smolvlm": " ",
}
EMPTY = "<think>\n\n</think>\n\n"
LAST_BEGINNINGS = {"qwen3_5": EMPTY, "qwen3_6": EMPTY, "qwen3_8": EMPTY}


def known(facts: dict[str, str], name: str, default: str) -> str:
    found = [prefix for prefix in facts if name.startswith(prefix)]
    return facts[max(found, key=len)] if found else default


def template(name: str, **options: Any) -> ChatTemplate:
    return chat_template(tokenizer_of(name), source=TEMPLATES[name], **{"date": DATE, **options})


@functools.cache
def made(name: str) -> ChatTemplate:
    return template(name)


def trained(chat: Any) -> list[str]:
    return [chat.text[span.start : span.end] for span in chat.spans if span.weight]


words = st.text(st.sampled_from("ab c9?.\n{}<>&é你😀'\"\\"), min_size=1, max_size=24).filter(str.strip)


@settings(max_examples=250, deadline=None)
@given(
    name=st.sampled_from(PLAIN),
    texts=st.lists(words, min_size=2, max_size=8).filter(lambda texts: len(texts) % 2 == 0),
    system=st.none() | words,
)
def test_exactly_the_answers_and_their_ends_are_trained(name: str, texts: list[str], system: str | None) -> None:
    turns = [turn(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]
    if system is not None and name != "gemma":  # which refuses one
        turns.insert(0, turn("system", system))
    chat = made(name).render(Conversation(key="k", turns=tuple(turns)))
    found, answers = trained(chat), texts[1::2]
    assert len(found) == len(answers)
    for at, (piece, answer) in enumerate(zip(found, answers, strict=True)):
        last = at + 1 == len(answers)
        end = known(ENDS, name, "<|im_end|>")
        end = known(LAST_ENDS, name, end) if last else end
        end += "\n" if piece.endswith(f"{end}\n") and "endgeneration" in TEMPLATES[name] else ""
        beginning = known(BEGINNINGS, name, "")
        if last and (name == "qwen3" or name.startswith(tuple(LAST_BEGINNINGS))):
            beginning = EMPTY
        assert piece.startswith(beginning)
        assert piece.endswith(end)
        assert piece[len(beginning) : len(piece) - len(end)].strip() == answer.strip()
    tokens = TextTokenizer(tokenizer_of(name).backend_tokenizer)(chat.text, add_special_tokens=False)
    mask, _ = trained_tokens(tokens, chat.spans)
    spans = chat.spans
    for (start, stop), is_trained in zip(tokens.offsets.tolist(), mask.tolist(), strict=True):
        inside = any(
            start < span.end and stop > span.start and not chat.text[span.end : stop].strip() for span in spans
        )
        assert is_trained == inside, chat.text[start:stop]


@pytest.mark.parametrize(("builtin", "published"), [("qwen3", "qwen3_instruct_2507"), ("qwen", "qwen2_5")])
@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("kind", ["two answers", "call", "definition", "result"])
def test_a_built_in_format_with_tools_writes_what_the_model_was_published_with(
    builtin: str, published: str, system: str | None, kind: str
) -> None:
    tokenizer = tokenizer_of(published)
    what = conversation(kind)
    turns = what.turns if system is None else (turn("system", system), *what.turns)
    what = Conversation(key="k", turns=turns, tools=(TOOL,))
    texts = [
        chat_template(tokenizer, source=source, date=DATE).render(what)
        for source in (TEMPLATES[published], template_source(builtin, tokenizer, {}))
    ]
    assert texts[0].text == texts[1].text
    assert trained(texts[0]) == trained(texts[1])


def test_the_documented_table_is_what_the_templates_do() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "correctness.md"
    if not page.exists():
        pytest.skip("the documentation is not installed")
    assert table([]) in page.read_text(encoding="utf-8")
