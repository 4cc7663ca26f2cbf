"""A user's own prompt format, one in YAML that is converted, and what becomes of thinking."""

from pathlib import Path

import pytest
from published_templates import chat_template

from energon_packing.chat.prompt_files import template_source
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.errors import ConfigError, SampleRejected
from scripts.prompt_yaml import jinja_of

OWN = """\
{#- A format with everything.
tokens: ["<|im_end|>"]
tokens of tools: []
-#}
{%- macro show(content) %}
    {%- for part in ([content] if content is string else content or []) if part is not string and part.type != 'text' %}
        {{- '(pic ' + (media[part.type] or raise_exception('no text for a ' + part.type)) + ')' }}
    {%- endfor %}
    {%- for part in ([content] if content is string else content or []) if part is string or part.type == 'text' %}
        {{- part if part is string else part.text }}
    {%- endfor %}
{%- endmacro %}
{{- '#start {{ 2 * 3 }}{% if %} ' }}
{%- if not messages or messages[0].role != 'system' %}
    {{- '[S]Sys {not a name} {{ 1 + 1 }} {% if %}' + (' Tools:' if tools else '') }}
    {%- for tool in tools or [] %}
        {{- ' ' + tool | tojson }}
    {%- endfor %}
    {{- '[/S]\\n|' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '[A]' }}
        {%- generation %}
            {{- show(message.content) }}
            {%- for call in message.tool_calls or [] %}
                {{- (', ' if not loop.first else '') + call.function.name + '(' + call.function.arguments + ')' }}
            {%- endfor %}
            {{- '[/A]' }}
        {%- endgeneration %}
    {%- else %}
        {%- set letter = message.role[0] | upper %}
        {{- '[' + letter + ']' + show(message.content) + '[/' + letter + ']' }}
    {%- endif %}
    {{- '|' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[A]' }}
{%- endif %}
"""
OWN_YAML = """\
begin: "#start {{ 2 * 3 }}{% if %} "
default_system: "Sys {not a name} {{ 1 + 1 }} {% if %}"
system: "[S]{content}[/S]\\n"
user: "[U]{content}[/U]"
assistant: "[A]{content}[/A]"
tool: "[T]{content}[/T]"
separator: "|"
generation_prompt: "[A]"
media: {image: "(pic {image})", placement: first}
tools: {definitions: " Tools:{definitions}", definition: " {json}", call: "{name}({arguments})", between_calls: ", "}
tokens: ["<|im_end|>"]
"""


@pytest.fixture
def own(tmp_path, encoders):
    """The template of OWN on the shipped text tokenizer."""

    def make(text=OWN, media=None, **settings):
        path = tmp_path / "own.jinja"
        path.write_text(text, encoding="utf-8")
        tokenizer = encoders["text"].tokenizer
        known = {"image": "<frame><i></frame>", "image_token": "<i>"} if media is None else media
        return chat_template(tokenizer, source=template_source(str(path), tokenizer, known), **settings)

    return make


def marked(rendered) -> str:
    text = rendered.text
    for span in sorted((span for span in rendered.spans if span.weight), key=lambda span: -span.start):
        text = text[: span.start] + "«" + text[span.start : span.end] + "»" + text[span.end :]
    return text


def answer(text: str) -> Conversation:
    return Conversation(key="k", turns=(Turn(role="user", parts=("Q",)), Turn(role="assistant", parts=(text,))))


@pytest.mark.parametrize("text", [OWN, jinja_of("own.yaml", OWN_YAML)], ids=["jinja", "converted"])
def test_a_format_says_everything_that_a_conversation_does_and_no_text_is_run_as_a_template(own, text):
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    conversation = Conversation(
        key="k",
        media=(Media(kind="image", name="a.png", width=9, height=9),),
        tools=({"name": "f"},),
        turns=(
            Turn(role="user", parts=("Before", MediaPart(index=0), " after {content} {{ 7 * 7 }}")),
            Turn(role="assistant", parts=("I call ",), tool_calls=(call, call)),
            Turn(role="tool", parts=("t",)),
            Turn(role="assistant", parts=("done",)),
        ),
    )
    assert marked(own(text).render(conversation)) == (
        '#start {{ 2 * 3 }}{% if %} [S]Sys {not a name} {{ 1 + 1 }} {% if %} Tools: {"name": "f"}[/S]\n|'
        "[U](pic <frame><i></frame>)Before after {content} {{ 7 * 7 }}[/U]|"
        '[A]«I call f({"x": 1}), f({"x": 1})[/A]»|[T]t[/T]|[A]«done[/A]»|'
    )
    video = Conversation(
        key="k",
        media=(Media(kind="video", name="a.mp4", width=9, height=9),),
        turns=(Turn(role="user", parts=(MediaPart(index=0),)), Turn(role="assistant", parts=("x",))),
    )
    with pytest.raises(SampleRejected, match="no text for a video"):
        own(text).render(video)


def test_a_format_in_yaml_is_refused_with_the_command_that_converts_it_and_a_mistake_in_it_with_its_name(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(OWN_YAML)
    with pytest.raises(ConfigError, match=r"scripts/prompt_yaml.py .*own.yaml > .*own.jinja"):
        template_source(str(path), None, {})
    for wrong in ("usr: x", "user: [", "- a list", "user: no place"):
        with pytest.raises(ConfigError, match=r"own\.yaml is no prompt format"):
            jinja_of("own.yaml", wrong)


class Tokenizer:
    """Counts how often all its tokens are asked for."""

    eos_token = None

    def __init__(self, added=(), others=()):
        self.added, self.others, self.asked = added, others, 0

    def get_added_vocab(self):
        return dict.fromkeys(self.added, 1)

    def get_vocab(self):
        self.asked += 1
        return dict.fromkeys((*self.added, *self.others), 1)


def test_what_a_format_declares_wrongly_or_its_tokenizer_lacks_is_refused(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{#-\ntokens: <a>, <b>\n-#}{{ messages }}")
    with pytest.raises(ConfigError, match="no JSON list"):
        template_source(str(path), Tokenizer(), {})
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        template_source("vicuna", Tokenizer(), {})


THOUGHT = "<think>\nHm, {x}.\n</think>\n\nFour."


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ("keep", "[A]«<think>\nHm, {x}.\n</think>\n\nFour.[/A]»|"),
        ("strip", "[A]«Four.[/A]»|"),
        ("mask", "[A]<think>\nHm, {x}.\n</think>«\n\nFour.[/A]»|"),
    ],
)
def test_thinking_is_trained_left_out_or_shown_without_being_trained(own, thinking, expected):
    assert marked(own(thinking=thinking).render(answer(THOUGHT))).endswith(expected)


def test_the_example_of_the_documentation_works(own):
    page = Path(__file__).parents[2] / "docs" / "prompts.md"
    example = page.read_text(encoding="utf-8").split("```jinja\n")[1].split("```")[0]
    image = Conversation(
        key="k",
        media=(Media(kind="image", name="a.png", width=9, height=9),),
        turns=(Turn(role="user", parts=(MediaPart(index=0), "Q")), Turn(role="assistant", parts=("A",))),
    )
    for conversation, shown in ((answer("A"), "Q"), (image, "<frame><i></frame>\nQ")):
        assert marked(own(example).render(conversation)) == (
            f"<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\n{shown}<|im_end|>\n"
            "<|im_start|>assistant\n«A<|im_end|>»\n"
        )
