"""The short way into the sandbox of transformers gives what its public function gives."""

from __future__ import annotations

from types import SimpleNamespace

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates_in_use import STABLE, THINKING, marked, plain
from transformers.utils import chat_template_utils

from energon_packing.chat.sandbox import render_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SOURCES = [make(source) for source in (*STABLE.values(), THINKING) for make in (marked, plain)]
texts = st.text(st.sampled_from("ab <>{}\n🙂é"), min_size=1, max_size=8)


def public(source, messages, tools, *, special, track, prompt):
    """What ``apply_chat_template`` gets from the public function of transformers."""
    rendered, spans = chat_template_utils.render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=source,
        return_assistant_tokens_mask=track,
        add_generation_prompt=prompt,
        **special,
    )
    return rendered[0], list(spans[0]) if track else []


talks = st.lists(texts, min_size=1, max_size=5).map(
    lambda talk: [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(talk)]
)
conversations = {
    "source": st.sampled_from(SOURCES),
    "messages": talks,
    "tools": st.sampled_from([None, TOOLS]),
    "prompt": st.booleans(),
    "track": st.booleans(),
}


@settings(max_examples=100, deadline=None)
@given(**conversations)
def test_text_and_spans_are_those_of_the_public_function(source, messages, tools, prompt, track):
    options = {"special": SPECIAL, "track": track, "prompt": prompt}
    text, spans = render_template(source, messages, tools, **options)
    assert (text, list(spans)) == public(source, messages, tools, **options)


def test_the_answer_that_a_template_marks_is_among_the_spans():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    source = marked(STABLE["chatml"])
    text, spans = render_template(source, messages, None, special=SPECIAL, track=True, prompt=False)
    assert ["Yes" in text[start:end] for start, end in spans] == [True]


@pytest.mark.parametrize("lacking", ["_compile_jinja_template", "_render_with_assistant_indices"])
def test_a_transformers_without_one_of_those_functions_gives_the_same_through_the_public_one(lacking):
    asked = []

    def counted(**given):
        asked.append(given)
        return chat_template_utils.render_jinja_template(**given)

    (kept,) = {"_compile_jinja_template", "_render_with_assistant_indices"} - {lacking}
    other = SimpleNamespace(render_jinja_template=counted, **{kept: getattr(chat_template_utils, kept)})

    @settings(max_examples=50, deadline=None)
    @given(**conversations)
    def compare(source, messages, tools, prompt, track):
        options = {"special": SPECIAL, "track": track, "prompt": prompt}
        short, spans = render_template(source, messages, tools, **options)
        assert asked == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("transformers.utils.chat_template_utils", other)
            text, found = render_template(source, messages, tools, **options)
        assert len(asked) == 1
        asked.clear()
        assert (text, list(found)) == (short, list(spans))

    compare()


@pytest.mark.parametrize("track", [True, False])
def test_the_short_way_is_the_same_sandbox(track):
    escapes = "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"
    for source in escapes:
        with pytest.raises(jinja2.exceptions.SecurityError):
            render_template(
                source + "{% generation %}{% endgeneration %}", [], None, special={}, track=track, prompt=False
            )
