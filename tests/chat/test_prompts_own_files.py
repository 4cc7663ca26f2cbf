"""Prompt formats from a user's YAML or Jinja file, and what becomes of thinking."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from energon_packing.chat.prompt import MediaText, PromptFormat, ToolText
from energon_packing.chat.prompt_files import template_source
from energon_packing.chat.prompt_jinja import compile_prompt
from energon_packing.chat.template import ChatTemplate
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import ConfigError, SampleRejected

OWN = """\
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
"""


@pytest.fixture
def own(tmp_path, encoders):
    """The template of OWN, with changed lines, on the shipped text tokenizer."""

    def make(text=OWN, media=None, **settings):
        path = tmp_path / "own.yaml"
        path.write_text(text, encoding="utf-8")
        tokenizer = encoders["text"].tokenizer
        known = {"image": "<frame><i></frame>", "image_token": "<i>"} if media is None else media
        return ChatTemplate(tokenizer, source=template_source(str(path), tokenizer, known), **settings)

    return make


def marked(rendered) -> str:
    text = rendered.text
    for span in sorted((span for span in rendered.spans if span.weight), key=lambda span: -span.start):
        text = text[: span.start] + "«" + text[span.start : span.end] + "»" + text[span.end :]
    return text


def answer(text: str) -> Conversation:
    return Conversation(key="k", turns=(Turn(role="user", parts=("Q",)), Turn(role="assistant", parts=(text,))))


def test_every_field_of_a_file_is_used_and_text_in_it_is_never_run_as_a_template(own):
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
    assert marked(own().render(conversation)) == (
        '#start {{ 2 * 3 }}{% if %} [S]Sys {not a name} {{ 1 + 1 }} {% if %} Tools: {"name": "f"}[/S]\n|'
        "[U](pic <frame><i></frame>)Before after {content} {{ 7 * 7 }}[/U]|"
        '[A]«I call f({"x": 1}), f({"x": 1})[/A]»|[T]t[/T]|[A]«done[/A]»|'
    )


def test_a_medium_that_the_format_has_no_text_for_is_refused(own):
    conversation = Conversation(
        key="k",
        media=(Media(kind="video", name="a.mp4", width=9, height=9),),
        turns=(Turn(role="user", parts=(MediaPart(index=0),)), Turn(role="assistant", parts=("x",))),
    )
    with pytest.raises(SampleRejected, match="no text for a video"):
        own().render(conversation)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('usr: "x"', "did you mean 'user'"),
        ('user: "no place"', "exactly once"),
        ('tool: "{content}{content}"', "exactly once"),
        ('system_in_user: "{system}{content}"', "either system or system_in_user"),
        ("media: {placement: last}", "placement"),
        ("trim: maybe", "expected bool"),
        ("user: [", "not valid YAML"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_with_the_files_name(own, line, message):
    key = line.partition(":")[0]
    kept = [text for text in OWN.splitlines() if not text.startswith(f"{key}:")]
    with pytest.raises(ConfigError, match=message) as error:
        own("\n".join([*kept, line]))
    assert "own.yaml" in str(error.value)


@pytest.mark.parametrize("text", ["", "- a list", "user: '{content}'"])
def test_a_file_without_user_and_assistant_is_refused(own, text):
    with pytest.raises(ConfigError, match="needs at least"):
        own(text)


TOOLS = {
    "definitions": "D{definitions}",
    "definition": "{json}",
    "between_definitions": ",",
    "before_definitions": ";",
    "calls": "C{calls}",
    "call": "{name}{arguments}",
    "before_calls": "b",
    "between_calls": ",",
}
FULL = {
    "user": "U{content}",
    "assistant": "A{content}",
    "begin": "^",
    "default_system": "d",
    "system": "S{content}",
    "assistant_after_tool": "B{content}",
    "assistant_with_calls": "C{content}",
    "tool": "T{content}",
    "tool_group": "G{tools}",
    "between_tools": ",",
    "separator": "|",
    "generation_prompt": "A",
}
"""Every text of a format but one, which excludes ``system``."""


def prompt_of(section=None, name=None, text=""):
    """A format with all its texts, one of them ending with ``text``."""
    sections = {"prompt": dict(FULL), "media": {"image": "{image}", "video": "{video}"}, "tools": dict(TOOLS)}
    if name == "system_in_user":
        del sections["prompt"]["system"]
        sections["tools"]["placement"] = "last_user"
        del sections["tools"]["before_definitions"]
        sections["prompt"]["system_in_user"] = "{system}{content}"
    if section is not None:
        sections[section][name] += text
    return PromptFormat(**sections["prompt"], media=MediaText(**sections["media"]), tools=ToolText(**sections["tools"]))


TEXTS = [
    (section, entry.name)
    for section, kind in (("prompt", PromptFormat), ("media", MediaText), ("tools", ToolText))
    for entry in dataclasses.fields(kind)
    if entry.type in ("str", "str | None")
]


@pytest.mark.parametrize(("section", "name"), TEXTS)
def test_a_format_needs_an_end_of_sequence_exactly_where_its_template_writes_one(section, name):
    media = {"image": "<i>", "video": "<v>"}
    assert not prompt_of().needs_eos
    prompt = prompt_of(section, name, "{eos}")
    assert prompt.needs_eos == ("eos_token" in compile_prompt("own", prompt, media))
    assert prompt.needs_eos == (name != "default_system")


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


def test_an_end_of_sequence_that_the_tokenizer_lacks_is_refused():
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        template_source("vicuna", Tokenizer(), {})


@pytest.mark.parametrize(
    ("added", "others", "asked"),
    [
        (("<a>", "<b>", "<t>"), (), 0),
        (("<a>", "<b>"), ("<t>",), 1),
        ((), ("<a>", "<b>", "<t>"), 1),
        ((), ("<a>", "<b>"), 1),
    ],
)
def test_all_tokens_of_a_tokenizer_are_asked_for_once_at_most(tmp_path, added, others, asked):
    path = tmp_path / "own.yaml"
    path.write_text(
        '{user: "{content}", assistant: "{content}", tokens: [<a>, <b>], tool: "{content}", tools: {tokens: [<t>]}}'
    )
    tokenizer = Tokenizer(added, others)
    source = template_source(str(path), tokenizer, {})
    assert tokenizer.asked == asked
    assert ("has no token <t>" in source) == ("<t>" not in (*added, *others))


def test_a_name_that_a_mediums_text_does_not_know_is_text():
    source = compile_prompt(
        "own", PromptFormat(user="{content}", assistant="{content}", media=MediaText(image="{content}")), {}
    )
    assert "no text for a image" not in source
    assert "no text for a video" in source


DEFINED = {"definitions": "{definitions}"}
CALLED = {"call": "{name}{arguments}"}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (DEFINED | {"definition": "nothing"}, "definition 'nothing' must contain {json} or {fields} exactly once"),
        (DEFINED | {"definition": "{json}{json}"}, "must contain {json} or {fields} exactly once"),
        (DEFINED | {"definition": "{json}{fields}"}, "must contain {json} or {fields} exactly once"),
        (
            CALLED | {"placement": "last_user"},
            "placement is 'last_user', but nothing reads it unless tools.definitions",
        ),
        (CALLED | {"before_definitions": ","}, "before_definitions is ',', but nothing reads it unless"),
        (CALLED | {"between_definitions": ","}, "between_definitions is ',', but nothing reads it unless"),
        (CALLED | {"definition": "{fields}"}, "definition is '{fields}', but nothing reads it unless"),
        (DEFINED | {"calls": "[{calls}]"}, "calls is '[{calls}]', but nothing reads it unless tools.call"),
        (DEFINED | {"before_calls": " "}, "before_calls is ' ', but nothing reads it unless tools.call"),
        (DEFINED | {"between_calls": ","}, "between_calls is ',', but nothing reads it unless tools.call"),
        (DEFINED | {"alone": True}, "alone is True, but nothing reads it unless tools.call"),
        (CALLED | {"alone": True, "before_calls": " "}, "nothing reads before_calls"),
        (CALLED | {"id_length": 0}, "id_length is 0"),
        (DEFINED | {"id_length": 9}, "id_length is 9, but nothing reads it unless tool or tools.call"),
        ({"tokens": ("<t>",)}, "tokens is ('<t>',), but nothing reads it unless tool, tools.call or tools.definitions"),
    ],
)
def test_a_setting_of_tools_that_nothing_reads_is_refused(tools, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        PromptFormat(user="{content}", assistant="{content}", system="{content}", tools=ToolText(**tools))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tool_group": "[{tools}]"}, "tool_group is '[{tools}]', but nothing reads it unless tool is set."),
        ({"between_tools": ","}, "between_tools is ',', but nothing reads it unless tool is set."),
        (
            {"assistant_after_tool": "{content}"},
            "assistant_after_tool is '{content}', but nothing reads it unless tool is set.",
        ),
        ({"assistant_with_calls": "{content}"}, "but nothing reads it unless tools.call is set."),
    ],
)
def test_a_setting_of_tool_turns_without_any_is_refused(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        PromptFormat(user="{content}", assistant="{content}", **settings)


def test_a_jinja_file_is_taken_as_it_is(tmp_path, encoders):
    path = tmp_path / "plain.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    processor = encoders["text"].processor
    encoder = ConversationEncoder(EncoderConfig(chat_template=str(path)), processor=processor)
    assert encoder.template.source == path.read_text()


def test_a_compiled_prompt_that_differs_is_another_fingerprint(encoders):
    made = [
        ConversationEncoder(EncoderConfig(chat_template=name), processor=encoders["text"].processor).fingerprint()
        for name in ("chatml", "qwen")
    ]
    assert made[0]["chat_template"] != made[1]["chat_template"]


def test_a_default_system_without_a_place_is_refused():
    with pytest.raises(ConfigError, match="neither system nor system_in_user"):
        PromptFormat(user="{content}", assistant="{content}", default_system="x")


def test_placement_inline_keeps_the_order_of_the_parts(encoders):
    prompt = PromptFormat(user="{content}|", assistant="{content}", media=MediaText(image="I"))
    made = ChatTemplate(encoders["text"].tokenizer, source=compile_prompt("own", prompt, {}))
    turns = (Turn(role="user", parts=("a", MediaPart(index=0), "b")), Turn(role="assistant", parts=("c",)))
    media = (Media(kind="image", name="a.png", width=9, height=9),)
    assert made.render(Conversation(key="k", turns=turns, media=media)).text == "aIb|c"


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


@pytest.mark.parametrize("text", ["<think>never closed", "a <think>b</think> c <think>d"])
@pytest.mark.parametrize("thinking", ["strip", "mask"])
def test_thinking_that_is_not_closed_is_a_rejected_sample(own, thinking, text):
    with pytest.raises(SampleRejected, match="unclosed_thinking"):
        own(thinking=thinking).render(answer(text))


def test_thinking_that_the_template_opens_itself_is_masked_from_the_beginning_of_the_answer(own):
    text = OWN.replace("[A]{content}[/A]", "[A]<think>{content}[/A]")
    assert marked(own(text, thinking="mask").render(answer("Hm.</think>Four."))).endswith(
        "[A]<think>Hm.</think>«Four.[/A]»|"
    )


def test_what_a_user_writes_about_thinking_is_text(own):
    turns = (Turn(role="user", parts=("What does <think> mean?",)), Turn(role="assistant", parts=("A tag.",)))
    conversation = Conversation(key="k", turns=turns)
    for thinking in ("strip", "mask"):
        assert "What does <think> mean?" in own(thinking=thinking).render(conversation).text


def test_several_thoughts_in_one_answer_are_all_masked(own):
    text = "<think>a</think>B<think>c</think>D"
    assert marked(own(thinking="mask").render(answer(text))).endswith("[A]<think>a</think>«B»<think>c</think>«D[/A]»|")


def test_the_example_of_the_documentation_works(own):
    page = Path(__file__).parents[2] / "docs" / "prompts.md"
    example = page.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    rendered = own(example, media={}).render(answer("A"))
    assert marked(rendered) == (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\n«A<|im_end|>»\n"
    )
