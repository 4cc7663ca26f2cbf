"""The short way into the sandbox of transformers gives what its public function gives."""

from __future__ import annotations

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates_in_use import STABLE, THINKING, marked, plain
from transformers.utils import chat_template_utils

from energon_packing.chat.sandbox import render_template, render_through_wrapper

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SOURCES = [make(source) for source in (*STABLE.values(), THINKING) for make in (marked, plain)]
texts = st.text(st.sampled_from("ab <>{}\n🙂é"), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(
    source=st.sampled_from(SOURCES),
    talk=st.lists(texts, min_size=1, max_size=5),
    tools=st.sampled_from([None, TOOLS]),
    prompt=st.booleans(),
    track=st.booleans(),
)
def test_text_and_spans_are_those_of_the_public_function(source, talk, tools, prompt, track):
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(talk)]
    options = {"special": SPECIAL, "track": track, "prompt": prompt}
    text, spans = render_template(source, messages, tools, **options)
    expected, expected_spans = render_through_wrapper(source, messages, tools, **options)
    assert text == expected
    assert list(spans) == list(expected_spans)


def test_a_transformers_without_those_functions_is_asked_through_the_public_one(monkeypatch):
    source, messages = (
        marked(STABLE["chatml"]),
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}],
    )
    options = {"special": SPECIAL, "track": True, "prompt": False}
    short = render_template(source, messages, None, **options)
    asked = []
    public = chat_template_utils.render_jinja_template
    monkeypatch.setattr(
        chat_template_utils, "render_jinja_template", lambda **given: asked.append(given) or public(**given)
    )
    assert render_template(source, messages, None, **options) == short
    assert asked == []
    monkeypatch.setattr(chat_template_utils, "_render_with_assistant_indices", None)
    with pytest.raises(TypeError):  # the public function needs it, and it is the public one that is asked
        render_template(source, messages, None, **options)
    assert len(asked) == 1


@pytest.mark.parametrize("track", [True, False])
def test_the_short_way_is_the_same_sandbox(track):
    escapes = "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"
    for source in escapes:
        with pytest.raises(jinja2.exceptions.SecurityError):
            render_template(
                source + "{% generation %}{% endgeneration %}", [], None, special={}, track=track, prompt=False
            )
