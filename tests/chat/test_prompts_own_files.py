"""Prompt formats from a user's YAML or Jinja file, and what becomes of thinking."""

from __future__ import annotations

from pathlib import Path

import pytest

from energon_packing.chat.prompt import MediaText, PromptFormat
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
    for span in sorted(rendered.spans, key=lambda span: -span.start):
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


def test_an_end_of_sequence_that_the_tokenizer_lacks_is_refused():
    class Tokenizer:
        eos_token = None

        def get_added_vocab(self):
            return {}

        get_vocab = get_added_vocab

    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        template_source("vicuna", Tokenizer(), {})


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
