"""What a chat template trains, against transformers' own assistant mask and templates in the shapes in use."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_templates import chat_template
from templates_in_use import CHATML, END_OF_TURN, GEMMA, LLAVA, MISTRAL, STABLE, marked, plain
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from energon_packing.chat.renderer import render_template
from energon_packing.chat.template import ChatTemplate
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import ConfigError, SampleRejected

SHIPPED = (processor_path("text") / "chat_template.jinja").read_text(encoding="utf-8")
UNMARKED = re.sub(r"\{%-? (end)?generation -?%\}", "", SHIPPED)
NEW_TOKENS = [
    "<s>",
    "</s>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]


def load_tokenizer(eos: str = "<|im_end|>") -> Any:
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    tokenizer.add_tokens(NEW_TOKENS, special_tokens=True)
    tokenizer.eos_token = eos
    return tokenizer


TOKENIZERS = {eos: load_tokenizer(eos) for eos in sorted({*END_OF_TURN.values()})}


def tokenizer_for(name: str) -> Any:
    return TOKENIZERS[END_OF_TURN.get(name, "<|im_end|>")]


def talk(*turns: tuple[str, str] | Turn, tools: tuple[Any, ...] | None = None) -> Conversation:
    made = tuple(turn if isinstance(turn, Turn) else Turn(role=turn[0], parts=(turn[1],)) for turn in turns)
    return Conversation(key="k", turns=made, tools=tools)


def trained_text(template: ChatTemplate, conversation: Conversation) -> list[str]:
    chat = template.render(conversation)
    return [chat.text[span.start : span.end] for span in chat.spans if span.weight]


def measured_mask(
    tokenizer: Any, source: str, conversation: Conversation, tmp: Any, train_on: str = "assistant"
) -> Any:
    path = tmp / "template.jinja"
    path.write_text(source, encoding="utf-8")
    config = EncoderConfig(chat_template=str(path), train_on=train_on)  # type: ignore[arg-type]
    ids, weights = ConversationEncoder(config, processor=tokenizer).measure(conversation).expand()
    return ids.tolist(), weights.tolist()


def hugging_face_mask(tokenizer: Any, source: str, conversation: Conversation) -> tuple[list[int], list[float]]:
    made = tokenizer.apply_chat_template(
        conversation.to_messages(),
        tools=list(conversation.tools) if conversation.tools else None,
        chat_template=source,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return made["input_ids"], [float(value) for value in made["assistant_masks"]]


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(
    # What a template may trim is no part of this property, and special tokens in a text are another test.
    lambda text: text.strip() == text and "<" not in text
)


@st.composite
def talks(draw: st.DrawFn) -> Conversation:
    turns: list[tuple[str, str]] = [("system", draw(words))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns += [("user", draw(words)), ("assistant", draw(words))]
    return talk(*turns)


CALLS = talk(
    ("user", "Weather in Rome?"),
    Turn(
        role="assistant",
        parts=("I look it up.",),
        tool_calls=(
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
            {"type": "function", "function": {"name": "time", "arguments": {"city": "Rome"}}},
        ),
    ),
    ("tool", "sunny"),
    ("tool", "noon"),
    ("assistant", "Sunny, at noon."),
    ("user", "Thanks"),
    ("assistant", "🌞"),
    tools=({"type": "function", "function": {"name": "weather"}}, {"type": "function", "function": {"name": "time"}}),
)


@pytest.mark.parametrize("source", [SHIPPED, marked(CHATML)], ids=["shipped", "chatml"])
def test_tool_calls_are_trained_as_transformers_says_and_responses_are_not(tmp_path: Any, source: str) -> None:
    tokenizer = tokenizer_for("chatml")
    assert measured_mask(tokenizer, source, CALLS, tmp_path) == hugging_face_mask(tokenizer, source, CALLS)
    spans = trained_text(chat_template(tokenizer, source=source), CALLS)
    assert len(spans) == 3
    assert spans[0].count("<tool_call>") == 2
    assert not any("sunny" in span or "Rome?" in span for span in spans)


@pytest.mark.parametrize("source", [UNMARKED, plain(CHATML)], ids=["shipped", "chatml"])
def test_a_template_without_marks_trains_tool_calls_all_the_same(tmp_path: Any, source: str) -> None:
    tokenizer = tokenizer_for("chatml")
    with_marks = SHIPPED if source is UNMARKED else marked(CHATML)
    assert "generation %}" not in source.replace("add_generation", "")
    assert measured_mask(tokenizer, source, CALLS, tmp_path) == hugging_face_mask(tokenizer, with_marks, CALLS)


@pytest.mark.parametrize("name", STABLE)
@settings(max_examples=25, deadline=None)
@given(conversation=talks())
def test_spans_found_without_marks_are_those_that_the_marks_would_give(
    tmp_path_factory: Any, name: str, conversation: Conversation
) -> None:
    tokenizer, tmp = tokenizer_for(name), tmp_path_factory.getbasetemp()
    expected = hugging_face_mask(tokenizer, marked(STABLE[name]), conversation)
    assert sum(expected[1]) > 0
    assert measured_mask(tokenizer, plain(STABLE[name]), conversation, tmp) == expected
    assert measured_mask(tokenizer, marked(STABLE[name]), conversation, tmp) == expected


TALK = talk(("system", "Rules."), ("user", "One?"), ("assistant", "First."), ("user", "Two?"), ("assistant", "Second."))


@pytest.mark.parametrize("marks", [plain, marked])
@pytest.mark.parametrize("name", STABLE)
def test_the_end_of_turn_is_trained_and_the_line_break_after_it_is_not(name: str, marks: Any) -> None:
    template = chat_template(tokenizer_for(name), source=marks(STABLE[name]))
    spans = trained_text(template, TALK)
    assert [span.lstrip() for span in spans] == [f"First.{END_OF_TURN[name]}", f"Second.{END_OF_TURN[name]}"]


def test_an_end_of_turn_that_the_marks_leave_out_joins_its_span() -> None:
    """The way in which several published templates are marked: only the content."""
    source = marked(CHATML.replace("{{- '<|im_end|>' }}⟧", "⟧{{- '<|im_end|>' }}"))
    assert trained_text(chat_template(tokenizer_for("chatml"), source=source), TALK) == [
        "First.<|im_end|>",
        "Second.<|im_end|>",
    ]


def test_a_comment_that_speaks_of_marks_is_none() -> None:
    source = "{#- Mark answers with {% generation %} to train them. -#}" + plain(CHATML)
    assert trained_text(chat_template(tokenizer_for("chatml"), source=source), TALK) == [
        "First.<|im_end|>",
        "Second.<|im_end|>",
    ]


def weighed(*weights: float | None) -> Conversation:
    turns: list[Turn] = []
    for number, weight in enumerate(weights):
        turns += [
            Turn(role="user", parts=(f"q{number}",)),
            Turn(role="assistant", parts=(f"a{number}",), loss_weight=weight),
        ]
    return talk(*turns)


def test_a_loss_weight_counts_when_everything_is_trained_too() -> None:
    template = chat_template(tokenizer_for("chatml"), source=plain(CHATML), train_on="all")
    chat = template.render(weighed(None, 0.0, 0.25))
    weights = np.zeros(len(chat.text))
    for span in chat.spans:
        assert not weights[span.start : span.end].any(), "spans are disjoint"
        weights[span.start : span.end] = span.weight
    answer = chat.text.index("a1<|im_end|>")
    assert not weights[answer : answer + len("a1<|im_end|>")].any()
    last = chat.text.index("a2<|im_end|>")
    assert set(weights[last : last + len("a2<|im_end|>")]) == {0.25}
    assert (weights == 1.0).sum() == len(chat.text) - 2 * len("a1<|im_end|>")


@pytest.mark.parametrize("conversation", [talk(("user", "Anyone?")), weighed(0.0, 0.0)])
@pytest.mark.parametrize("marks", [plain, marked])
def test_a_conversation_without_a_trained_turn_is_reported(marks: Any, conversation: Conversation) -> None:
    with pytest.raises(SampleRejected) as caught:
        chat_template(tokenizer_for("chatml"), source=marks(CHATML)).render(conversation)
    assert caught.value.reason == "nothing_to_learn"


def test_weights_of_turns_that_the_template_hides_are_a_mismatch() -> None:
    source = "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}"
    source += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(SampleRejected) as caught:
        chat_template(tokenizer_for("chatml"), source=source).render(weighed(1.0, 0.5))
    assert caught.value.reason == "loss_weight_mismatch"


def test_a_template_that_wants_parts_gets_parts() -> None:
    for marks in (plain, marked):
        template = chat_template(tokenizer_for("vicuna"), source=marks(LLAVA))
        assert trained_text(template, TALK) == ["First.</s>", "Second.</s>"]
        turns = (
            Turn(role="user", parts=("What is it?", MediaPart(index=0))),
            Turn(role="assistant", parts=("A cat.",)),
        )
        media = (Media(kind="image", name="a.png", width=9, height=9),)
        conversation = Conversation(key="k", turns=turns, media=media)
        assert template.render(conversation).text == "USER: <|image_pad|>\nWhat is it? ASSISTANT: A cat.</s>"
        assert trained_text(template, conversation) == ["A cat.</s>"]


def test_what_a_template_refuses_is_a_rejection_with_its_words() -> None:
    for source, conversation, said in (
        (plain(GEMMA), talk(("user", "a"), ("user", "b"), ("assistant", "c")), "Roles must alternate"),
        (marked(MISTRAL), talk(("user", "a"), ("tool", "b"), ("assistant", "c")), "Only user and assistant"),
    ):
        with pytest.raises(SampleRejected, match=said) as caught:
            chat_template(tokenizer_for("mistral"), source=source).render(conversation)
        assert caught.value.reason == "template_error"


HOSTILE = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a module": "{{ raise_exception.__globals__['__builtins__'] }}",
    "a change of the messages": "{{ messages.append({'role': 'assistant', 'content': 'x'}) }}",
    "a change of a message": "{{ messages[0].update(role='assistant') }}",
    "another file": "{% include '/etc/passwd' %}",
    "a long loop": "{% for i in range(1000000000) %}x{% endfor %}",
    "a division": "{{ 1 // 0 }}",
    "a recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an attribute": "{{ none.nothing.more }}",
}


def with_hostile(code: str) -> ChatTemplate:
    """Passes the probe for list content, which holds one message, and does its deed in a longer conversation."""
    source = "{% if messages | length > 1 %}" + code + "{% endif %}" + marked(CHATML)
    return chat_template(tokenizer_for("chatml"), source=source)


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_reaches_out_or_breaks_costs_the_sample_and_nothing_else(code: str) -> None:
    before = TALK.to_record()
    with pytest.raises(SampleRejected) as caught:
        with_hostile(code).render(TALK)
    assert caught.value.reason == "template_error"
    assert TALK.to_record() == before


def test_no_template_several_templates_and_broken_templates_are_told() -> None:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        chat_template(tokenizer)
    tokenizer.chat_template = {"default": SHIPPED, "tool_use": SHIPPED}
    with pytest.raises(ConfigError, match=r"several chat templates.*default, tool_use"):
        chat_template(tokenizer)
    with pytest.raises(ConfigError, match=r"not valid Jinja \(line 2\)"):
        chat_template(tokenizer, source="{{ messages }}\n{% for %}")
    with pytest.raises(ConfigError, match="renders no text"):
        chat_template(tokenizer, source="always the same")


def test_a_document_is_trained_whole_where_the_template_writes_the_content_alone(tmp_path) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    tokenizer = tokenizer_for("qwen")
    document = " Once upon\n a time,  there was.\n"
    ids, weights = measured_mask(tokenizer, source, talk(("assistant", document)), tmp_path, train_on="all")
    assert ids == tokenizer(document + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    assert weights == [1.0] * len(ids)


@pytest.mark.parametrize("source", [marked(CHATML), plain(CHATML)], ids=["marked", "plain"])
def test_a_transformers_without_the_functions_of_the_short_way_gives_the_same(source: str, monkeypatch: Any) -> None:
    messages = [{"role": turn.role, "content": turn.text} for turn in TALK.turns]
    short = render_template(source, messages, list(CALLS.tools or ()), special={}, prompt=True)
    public = SimpleNamespace(render_jinja_template=chat_template_utils.render_jinja_template)
    monkeypatch.setattr("transformers.utils.chat_template_utils", public)
    assert render_template(source, messages, list(CALLS.tools or ()), special={}, prompt=True) == short
