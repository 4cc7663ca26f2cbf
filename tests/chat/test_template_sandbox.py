"""The short way into the sandbox of transformers gives what its public function gives."""

from __future__ import annotations

from types import SimpleNamespace

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates_in_use import STABLE, THINKING, marked, plain
from transformers.utils import chat_template_utils

from energon_packing.chat.renderer import render_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SOURCES = [make(source) for source in (*STABLE.values(), THINKING) for make in (marked, plain)]
texts = st.text(st.sampled_from("ab <>{}\n🙂é"), min_size=1, max_size=8)


def public(source, messages, tools, *, special, prompt):
    """What ``apply_chat_template`` gets from the public function of transformers."""
    rendered, spans = chat_template_utils.render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=source,
        return_assistant_tokens_mask=True,
        add_generation_prompt=prompt,
        **special,
    )
    return rendered[0], list(spans[0])


talks = st.lists(texts, min_size=1, max_size=5).map(
    lambda talk: [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(talk)]
)
conversations = {
    "source": st.sampled_from(SOURCES),
    "messages": talks,
    "tools": st.sampled_from([None, TOOLS]),
    "prompt": st.booleans(),
}


@settings(max_examples=100, deadline=None)
@given(**conversations)
def test_text_and_spans_are_those_of_the_public_function(source, messages, tools, prompt):
    options = {"special": SPECIAL, "prompt": prompt}
    text, spans = render_template(source, messages, tools, **options)
    assert (text, list(spans)) == public(source, messages, tools, **options)


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
    def compare(source, messages, tools, prompt):
        options = {"special": SPECIAL, "prompt": prompt}
        short, spans = render_template(source, messages, tools, **options)
        assert asked == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("transformers.utils.chat_template_utils", other)
            text, found = render_template(source, messages, tools, **options)
        assert len(asked) == 1
        asked.clear()
        assert (text, list(found)) == (short, list(spans))

    compare()


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ m.__class__ }}",
    "{{ m['__class__'] }}",
    "{{ m.get.__self__ }}",
    "{{ messages.append(1) }}",
    "{{ m.update({'a': 1}) }}",
    "{{ m.pop('role') }}",
    "{{ m.setdefault('a', 1) }}",
    "{{ m.clear() }}",
    "{{ '{0.__class__}'.format(m) }}",
    "{{ '{a.__class__}'.format_map({'a': m}) }}",
    "{{ m.role.format.__globals__ }}",
    "{% for a in [1] %}{{ loop.__init__.__globals__ }}{{ loop._iterator }}{% endfor %}",
    "{% macro say() %}{% endmacro %}{{ say.__call__.__globals__ }}{{ say._environment }}",
    "{% macro say(n) %}{{ n.__class__.__mro__ }}{% endmacro %}{{ say('') }}",
    "{% macro say(n) %}{{ n.pop() }}{% endmacro %}{{ say(messages) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
]


@pytest.mark.parametrize("escape", ESCAPES)
def test_no_template_reaches_out_of_the_sandbox_or_changes_the_conversation(escape):
    messages = [{"role": "user", "content": "Hi"}]
    source = "{% set m = messages[0] %}" + escape + "{% generation %}{% endgeneration %}"
    try:
        said, _ = render_template(source, messages, None, special={}, prompt=False)
    except jinja2.exceptions.SecurityError:
        said = ""
    assert said == ""  # what the sandbox does not refuse is undefined, and says nothing
    assert messages == [{"role": "user", "content": "Hi"}]
