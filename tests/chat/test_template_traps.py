"""Templates that hide things: calls, definitions, turns, headers, ends. Each trap here trained a model wrong."""

import datetime
import re
from typing import Any

import pytest
from published_templates import (
    ANSWERED,
    ASKED,
    CALL,
    CALLED,
    DATE,
    TOLD,
    TOOL,
    chat_template,
    templates,
    tokenizer_of,
    turn,
)
from templates_in_use import CHATML, LLAMA3, LLAVA, marked, plain
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from energon_packing.chat.template import ChatTemplate
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import ConfigError, SampleRejected

PUBLISHED = templates()
needs_trl = pytest.mark.skipif(not PUBLISHED, reason="trl, whose templates are read, is not installed")


def talk(*turns: Turn, tools: tuple[Any, ...] | None = None) -> Conversation:
    return Conversation(key="k", turns=turns, tools=tools)


def published(name: str, **options: Any) -> ChatTemplate:
    return chat_template(tokenizer_of(name), source=PUBLISHED[name], **{"date": DATE, **options})


def own(source: str, *tokens: str, eos: str = "<|im_end|>", **options: Any) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.eos_token = eos
    return chat_template(tokenizer, source=source, **options)


def trained(template: ChatTemplate, conversation: Conversation) -> list[str]:
    chat = template.render(conversation)
    return [chat.text[span.start : span.end] for span in chat.spans if span.weight]


def reason(template: ChatTemplate, conversation: Conversation) -> tuple[str, str]:
    with pytest.raises(SampleRejected) as caught:
        template.render(conversation)
    return caught.value.reason, caught.value.detail


def trained_tokens_of(tokenizer: Any, source: str, conversation: Conversation, tmp: Any, **settings: Any) -> list[str]:
    """Texts of the trained tokens, one each."""
    path = tmp / "template.jinja"
    path.write_text(source, encoding="utf-8")
    encoder = ConversationEncoder(EncoderConfig(chat_template=str(path), **settings), processor=tokenizer)
    ids, weights = encoder.measure(conversation).expand()
    return [tokenizer.decode([token]) for token, weight in zip(ids, weights, strict=True) if weight]


# -- 41 to 45: what a template hides, and where answers begin and end --------------------------------------------------

TWO = talk(turn("user", "One?"), turn("assistant", "First."), turn("user", "Two?"), turn("assistant", "Second."))
THOUGHTS = talk(
    turn("user", "One?"),
    turn("assistant", "<think>\nHm.\n</think>\n\nFirst."),
    turn("user", "Two?"),
    turn("assistant", "<think>\nOh.\n</think>\n\nSecond."),
)
# Content and end are marked apart, with something between that is not.
APART = marked(CHATML).replace(
    "{{- '<|im_end|>' }}{%- endgeneration",
    "{%- endgeneration %}{{- ' ' }}{%- generation %}{{- '<|im_end|>' }}{%- endgeneration",
)
LAST_UNMARKED = (
    marked(CHATML)
    .replace("{%- generation %}", "{%- if not loop.last %}{%- generation %}", 1)
    .replace(
        "{%- endgeneration %}", "{%- endgeneration %}{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}", 1
    )
)
UNASKED = plain(LLAMA3).replace("{%- if add_generation_prompt %}", "{%- if true %}")
HEADERS = ("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SHOUTS = (
    "{% for m in messages %}{{ '<|ask|>' + m.content if m.role == 'user' else '<|bot|><|shout|>' + m.content + "
    "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|bot|><|say|>' }}{% endif %}"
)
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find_weather\n```json\n"
    '{"town": "Rome", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
)
AS_TEXT = plain(CHATML).replace("(call.function | tojson)", "call.function.name ~ ' ' ~ call.function.arguments")
TRAINED: dict[str, tuple[Any, Conversation, list[str]]] = {
    "calls of deepseek, passed as its template wants them": (
        lambda: published("deepseekv3"),
        talk(ASKED, CALLED, TOLD, ANSWERED),
        [DEEPSEEK_CALL, "No, it stays dry.<｜end▁of▁sentence｜>"],
    ),
    "arguments as JSON where a template would print an object": (
        lambda: own(AS_TEXT),
        talk(ASKED, CALLED),
        ['\n<tool_call>\nfind_weather {"town": "Rome", "days": 3}\n</tool_call><|im_end|>'],
    ),
    "the last answer, marked in two blocks": (
        lambda: own(APART, train_on="last_assistant"),
        TWO,
        ["Second.", "<|im_end|>"],
    ),
    "all answers, each marked in two blocks": (
        lambda: own(APART),
        TWO,
        ["First.", "<|im_end|>", "Second.", "<|im_end|>"],
    ),
    "an answer before one without a mark": (lambda: own(LAST_UNMARKED), TWO, ["First.<|im_end|>"]),
    "no header that nobody asked for": (
        lambda: own(UNASKED, *HEADERS, eos="<|eot_id|>"),
        TWO,
        ["First.<|eot_id|>", "Second.<|eot_id|>"],
    ),
    "no header that nobody asked for, where the next header ends a turn": (
        lambda: own(UNASKED.replace("<|eot_id|>", ""), *HEADERS[:3], eos="<|endoftext|>"),
        TWO,
        ["First.<|start_header_id|>", "Second.<|start_header_id|>"],
    ),
    "answers of qwen3, which takes back earlier thinking": (
        lambda: published("qwen3"),
        THOUGHTS,
        ["First.<|im_end|>", "<think>\nOh.\n</think>\n\nSecond.<|im_end|>"],
    ),
    "answers of qwen3 without thinking": (
        lambda: published("qwen3"),
        TWO,
        ["First.<|im_end|>", "<think>\n\n</think>\n\nSecond.<|im_end|>"],
    ),
    "a whole token where the prompt offers another": (
        lambda: own(SHOUTS, "<|ask|>", "<|bot|>", "<|say|>", "<|shout|>"),
        TWO,
        ["<|shout|>First.<|im_end|>", "<|shout|>Second.<|im_end|>"],
    ),
}


@needs_trl
@pytest.mark.parametrize("what", TRAINED)
def test_what_is_trained_is(what: str) -> None:
    template, conversation, expected = TRAINED[what]
    assert trained(template(), conversation) == expected


SHORT = turn(
    "assistant", "That is a town.", tool_calls=({"function": {"name": "a", "arguments": {"t": "is"}}, "id": "b"},)
)
SYSTEM_FIRST = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}" + plain(CHATML).replace(
    "message.role == 'user' or (message.role == 'system' and not loop.first)", "message.role == 'user'"
)
THOUGHT_FIRST = turn("assistant", "", thinking="Hm.", tool_calls=CALLED.tool_calls)


def lossy(content: str) -> ChatTemplate:
    return own(plain(CHATML).replace("message.content + '<|im_end|>\\n'", f"({content}) + '<|im_end|>\\n'"))


REFUSED: dict[str, tuple[Any, Conversation, tuple[str, ...]]] = {
    **{
        f"a call that {name} hides": (
            lambda name=name: published(name),
            talk(ASKED, CALLED, TOLD, ANSWERED),
            ("template_omits", "the call 'find_weather' of turn 2 (assistant)", "encoder.chat_template: qwen"),
        )
        for name in ("qwen2_5_vl", "idefics3", "smolvlm", "lfm2", "llama3", "phi3_5")
    },
    **{
        f"definitions that {name} hides": (
            lambda name=name: published(name),
            talk(ASKED, ANSWERED, tools=(TOOL,)),
            ("template_omits", "the definition of the tool 'find_weather'", "encoder.tool_definitions: optional"),
        )
        for name in ("llama3", "gemma3", "deepseekv3", "deepseek_r1_distill", "qwen2_5_vl")
    },
    "a call where definitions may be hidden": (
        lambda: published("qwen2_5_vl", tool_definitions="optional"),
        talk(ASKED, CALLED, TOLD, ANSWERED, tools=(TOOL,)),
        ("template_omits",),
    ),
    "a short name that stands elsewhere in the text": (
        lambda: own(re.sub(r"\{%- for call in.*?endfor %\}", "", plain(CHATML), flags=re.DOTALL)),
        talk(ASKED, SHORT),
        ("template_omits", "the call 'a' of turn 2"),
    ),
    "a later turn that is put first": (
        lambda: own(SYSTEM_FIRST),
        talk(ASKED, ANSWERED, turn("system", "Be kind."), ASKED, ANSWERED),
        ("unstable_prefix", "after turn 3 (system)"),
    ),
    "a last answer without a mark": (
        lambda: own(LAST_UNMARKED, train_on="last_assistant"),
        TWO,
        ("nothing_to_learn",),
    ),
    "answers without a generation prompt": (
        lambda: own("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"),
        TWO,
        ("unstable_prefix", "add_generation_prompt"),
    ),
    "thinking after the call that it led to": (
        lambda: published("gemma4_v2"),
        talk(ASKED, THOUGHT_FIRST, tools=(TOOL,)),
        ("template_omits",),
    ),
    **{
        f"a tag that {content} takes out": (
            lambda content=content: lossy(content),
            talk(turn("user", "What is [IMG] or <sep>?"), ANSWERED),
            ("template_omits", "turn 1 (user)"),
        )
        for content in ("message.content.replace('[IMG]', '')", "message.content | striptags")
    },
}


@needs_trl
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_template_hides_is_refused_by_name(what: str) -> None:
    template, conversation, words = REFUSED[what]
    why, detail = reason(template(), conversation)
    assert why == words[0]
    assert all(word in detail for word in words[1:]), detail


@needs_trl
def test_definitions_may_be_hidden_where_the_setting_allows_it() -> None:
    allowed = published("llama3", tool_definitions="optional")
    assert trained(allowed, talk(ASKED, ANSWERED, tools=(TOOL,))) == trained(allowed, talk(ASKED, ANSWERED))


# -- 41: what the template hides ---------------------------------------------------------------------------------------


@needs_trl
def test_what_may_be_left_out_costs_nothing_where_other_ways_of_passing_are_refused() -> None:
    """Qwen2.5-VL's template refuses a call without text; thinking of earlier questions is missing in any way."""
    thought = turn("assistant", "<think>\nHm.\n</think>\n\nSunny.")
    conversation = talk(ASKED, thought, ASKED, CALLED, TOLD, ANSWERED)
    refuses_none = "{%- for m in messages if m.content is none %}{{ raise_exception('no text') }}{%- endfor %}"
    template = own(refuses_none + PUBLISHED["qwen3"])
    assert trained(template, conversation)[0] == "Sunny.<|im_end|>"


# -- 42: spans and turns -----------------------------------------------------------------------------------------------


def test_weights_belong_to_turns_also_where_a_turn_has_two_marks() -> None:
    turns = [
        turn("user", "One?"),
        turn("assistant", "First.", loss_weight=0.5),
        turn("user", "Two?"),
        turn("assistant", "Second.", loss_weight=0.0),
    ]
    chat = own(APART).render(talk(*turns))
    found = [(chat.text[span.start : span.end], span.weight) for span in chat.spans]
    assert found == [("First.", 0.5), ("<|im_end|>", 0.5), ("Second.", 0.0), ("<|im_end|>", 0.0)]


# -- 44: an empty system turn ------------------------------------------------------------------------------------------


def test_an_empty_system_turn_suppresses_the_default_prompt_or_costs_the_sample() -> None:
    for text in ("", " \n"):
        system = Turn(role="system", parts=(text,) if text else ())
        shown = own(plain(CHATML)).render(talk(system, ASKED, ANSWERED))
        assert "Be brief." not in shown.text
        assert shown.text.startswith(f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user")
        falsy = plain(CHATML).replace(
            "elif messages[0].role == 'system'", "elif messages[0].role == 'system' and messages[0].content | trim"
        )
        why, detail = reason(own(falsy), talk(system, ASKED, ANSWERED))
        assert (why, "default prompt" in detail) == ("template_omits", True)


# -- 45a: the end of an answer -----------------------------------------------------------------------------------------


@needs_trl
def test_an_answer_that_only_the_next_header_ends_is_trained_with_that_header() -> None:
    conversation = talk(ASKED, CALLED, TOLD, ANSWERED, turn("user", "Thanks."), turn("assistant", "Welcome."))
    ends = [piece.rsplit("<|", 1)[-1] for piece in trained(published("glm4moe"), conversation)]
    assert ends == ["observation|>", "user|>", "user|>"]
    text = published("glm4moe").render(conversation).text
    assert text.endswith("Welcome.<|user|>"), "generation stops there, so the token is added"


def test_a_token_across_the_end_of_an_answer_is_not_trained(tmp_path: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    assert tokenizer.tokenize("good [Q]")[-3:] == ["Ġ[", "Q", "]"]
    source = "{% for m in messages %}{{ '[Q]' if m.role == 'user' else '[A]' }}{{ m.content }}"
    source += "{{ ' ' if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}{{ '[A]' }}{% endif %}"
    turns = (turn("user", "Q"), turn("assistant", "good"), turn("user", "R"), turn("assistant", "good"))
    tokens = trained_tokens_of(tokenizer, source, talk(*turns), tmp_path)
    assert "".join(tokens) == "goodgood "


# -- thinking and weights ----------------------------------------------------------------------------------------------


def test_no_token_of_masked_thinking_is_trained_however_it_is_nested(tmp_path: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    answer = "<think>one<think>two</think>three</think>\n\nFour."
    tokens = trained_tokens_of(
        tokenizer, plain(CHATML), talk(turn("user", "Q"), turn("assistant", answer)), tmp_path, thinking="mask"
    )
    assert "".join(tokens).strip() == "Four.<|im_end|>"
    assert ">" not in "".join(tokens).removesuffix("<|im_end|>")


def test_an_answer_of_weight_zero_trains_no_token_that_touches_it_when_all_is_trained(tmp_path: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    assert tokenizer.tokenize("x: yes")[-1] == "Ġyes", "one token across header and answer"
    source = "{% for m in messages %}{{ m.role + ': ' }}{{ m.content }}{{ '<|im_end|>' }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    turns = (turn("user", "Q"), turn("assistant", "yes", loss_weight=0.0), turn("user", "R"), turn("assistant", "fine"))
    tokens = trained_tokens_of(tokenizer, source, talk(*turns), tmp_path, train_on="all")
    assert "".join(tokens) == "user: Q<|im_end|>assistant:user: R<|im_end|>assistant: fine<|im_end|>"


@pytest.mark.parametrize(("setting", "expected"), [("always", "First.<|im_end|>\n"), ("never", "First.<|im_end|>")])
@pytest.mark.parametrize("inside", [True, False])
def test_the_line_break_after_an_answer_is_trained_as_the_setting_says(
    setting: Any, expected: str, inside: bool
) -> None:
    whole = marked(CHATML).replace("{%- endgeneration %}\n        {{- '\\n' }}", "{{- '\\n' }}{%- endgeneration %}")
    assert whole != marked(CHATML)
    for source in (whole if inside else marked(CHATML), plain(CHATML)):
        assert trained(own(source, train_line_break=setting), TWO)[0] == expected
    assert trained(own(whole), TWO)[0] == "First.<|im_end|>\n"
    assert trained(own(plain(CHATML)), TWO)[0] == "First.<|im_end|>"


def test_a_generation_configuration_tells_where_answers_end(tmp_path: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    tokenizer.add_tokens(["<|observe|>"], special_tokens=False)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content }}{{ '<|observe|>!' if m.role == 'assistant' }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    stop = tokenizer.convert_tokens_to_ids("<|observe|>")
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{stop}, {tokenizer.eos_token_id}]}}')
    encoder = ConversationEncoder(EncoderConfig(processor=str(tmp_path)))
    chat = encoder.template.render(TWO)
    assert [chat.text[span.start : span.end] for span in chat.spans] == [
        "assistant First.<|observe|>",
        "assistant Second.<|observe|>",
    ]


def test_arguments_nested_beyond_recursion_cost_their_sample_alone() -> None:
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": deep}}}
    template = own(plain(CHATML))
    assert reason(template, talk(ASKED, turn("assistant", tool_calls=(call,))))[0] in ("bad_record", "template_error")
    assert trained(template, TWO) == ["First.<|im_end|>", "Second.<|im_end|>"]


# -- found by an adversary ---------------------------------------------------------------------------------------------

LEADING = talk(turn("assistant", "Hello."), *TWO.turns)


@needs_trl
@pytest.mark.parametrize(
    ("name", "first"), [("llama3", "Hello.<|eot_id|>"), ("qwen2_5_vl", "Hello.<|im_end|>"), ("muse_glimmer", None)]
)
def test_a_leading_answer_trains_no_beginning_header_or_default_prompt(name: str, first: str | None) -> None:
    if first is None:
        late = talk(LEADING.turns[0], turn("system", "Be brief."), *TWO.turns)
        assert reason(published(name), late)[0] == "assistant_first"
    else:
        assert trained(published(name), LEADING)[0] == first


@needs_trl
@pytest.mark.parametrize("result", ["", "\n", '{"sky": "clear"}'])
def test_a_result_is_not_trained_as_part_of_a_call_that_has_a_text_beside_it(result: str) -> None:
    called = turn("assistant", "Let me look.", tool_calls=(CALL,))
    told = turn("tool", result, tool_call_id=CALL["id"])
    assert reason(published("gemma4"), talk(ASKED, called, told, ANSWERED))[0] == "unstable_prefix"
    assert trained(published("gemma4"), talk(ASKED, CALLED, told, ANSWERED))[1] == "No, it stays dry.<turn|>"


@needs_trl
def test_tags_in_arguments_of_calls_are_words_where_thinking_is_masked() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"q": "what is </think>?", "z": "<think>"}}}
    (first, _) = trained(
        published("qwen3", thinking="mask"), talk(ASKED, turn("assistant", tool_calls=(call,)), TOLD, ANSWERED)
    )
    assert (
        first
        == '<tool_call>\n{"name": "f", "arguments": {"q": "what is </think>?", "z": "<think>"}}\n</tool_call><|im_end|>'
    )


@needs_trl
def test_an_answer_is_never_trained_to_go_on_as_another_role() -> None:
    rows = talk(ASKED, turn("assistant", "One."), turn("assistant", "Two."))
    assert trained(published("glm4moe"), rows) == ["\n<think></think>\nOne.", "\n<think></think>\nTwo.<|user|>"]
    late = talk(ASKED, turn("assistant", "One."), turn("system", "Be kind."), ASKED, turn("assistant", "Two."))
    assert trained(published("glm4moe"), late) == ["\n<think></think>\nOne.", "\n<think></think>\nTwo.<|user|>"]
    stops = ("<|user|>", "<|observation|>", "<|endoftext|>")
    silent = talk(
        ASKED, turn("assistant", "One."), turn("assistant", loss_weight=0.0), ASKED, turn("assistant", "Two.")
    )
    assert trained(published("glm4moe", stops=stops), silent)[0] == "\n<think></think>\nOne."


@needs_trl
def test_an_answer_without_words_is_refused_by_name_unless_it_is_not_trained() -> None:
    for words in ("", " ", "<think></think>"):
        empty = talk(ASKED, turn("assistant", words), ASKED, ANSWERED)
        assert reason(published("qwen3"), empty)[0] == "empty_answer"
    weightless = talk(ASKED, turn("assistant", loss_weight=0.0), ASKED, ANSWERED)
    assert trained(published("qwen3_instruct_2507"), weightless) == ["No, it stays dry.<|im_end|>"]


@pytest.mark.parametrize("words", [(), ("",), (" \n",)])
def test_an_answer_without_words_has_one_reason_whether_the_template_marks_answers_or_not(
    words: tuple[str, ...],
) -> None:
    empty = talk(ASKED, turn("assistant", *words), ASKED, ANSWERED)
    weighted = talk(ASKED, turn("assistant", *words, loss_weight=1.0), ASKED, ANSWERED)
    assert {reason(own(form(CHATML)), each) for form in (plain, marked) for each in (empty, weighted)} == {
        ("empty_answer", "turn 2 (assistant) has no word to train; remove it, or set its weight to 0")
    }
    for form in (plain, marked):
        silent = talk(ASKED, turn("assistant", *words, loss_weight=0.0), ASKED, ANSWERED)
        assert trained(own(form(CHATML)), silent) == ["No, it stays dry.<|im_end|>"]
        assert trained(own(form(CHATML), train_on="last_assistant"), empty) == ["No, it stays dry.<|im_end|>"]


@pytest.mark.parametrize("form", [plain, marked])
@pytest.mark.parametrize("words", ["", "<think>Hm.</think>"])
def test_an_answer_whose_only_words_are_masked_thinking_has_none(form: Any, words: str) -> None:
    def answer(**weight: float) -> Conversation:
        said = turn("assistant", words, thinking=None if words else "Hm.", **weight)
        return talk(ASKED, ANSWERED, ASKED, said)

    template = own(form(CHATML), thinking="mask")
    expected = ("empty_answer", "turn 4 (assistant) has no word to train; remove it, or set its weight to 0")
    assert [reason(template, answer(**weight)) for weight in ({}, {"loss_weight": 1.0})] == [expected] * 2
    assert trained(template, answer(loss_weight=0.0)) == ["No, it stays dry.<|im_end|>"]
    assert "Hm." in trained(own(form(CHATML), thinking="keep"), answer())[1]
    called = talk(ASKED, turn("assistant", thinking="Hm.", tool_calls=(CALL,)), TOLD, ANSWERED, tools=(TOOL,))
    if PUBLISHED:
        assert len(trained(published("qwen3", thinking="mask"), called)) == 2


@pytest.mark.parametrize("setting", ["mask", "trim_empty"])
def test_thinking_that_the_template_does_not_tell_from_the_answer_is_refused_before_the_first_sample(
    setting: Any,
) -> None:
    source = plain(CHATML).replace("{{- message.content }}", "{{- (message.thinking or '') + ' ' + message.content }}")
    with pytest.raises(ConfigError, match=f"encoder.thinking is '{setting}', but the chat template writes no mark"):
        own(source, thinking=setting)
    assert trained(own(source), talk(ASKED, turn("assistant", "No.", thinking="Hm."))) == ["Hm. No.<|im_end|>"]


def test_thinking_around_an_image_is_masked_whole() -> None:
    parts = ("<think>See ", MediaPart(index=0), " and ", MediaPart(index=1), " well.</think>\n\nFour.")
    media = tuple(Media(kind="image", name=name, width=9, height=9) for name in ("a.png", "b.png"))
    source = plain(LLAVA).replace("selectattr('type', 'equalto', 'image')", "rejectattr('type')")
    source = source.replace("| selectattr('type', 'equalto', 'text')", "").replace(
        "part.text", "(part.text or '<|image_pad|>')"
    )
    conversation = Conversation(key="k", turns=(ASKED, Turn(role="assistant", parts=parts)), media=media)
    chat = own(source, eos="</s>", thinking="mask").render(conversation)
    assert [chat.text[span.start : span.end] for span in chat.spans if span.weight] == ["\n\nFour.</s>"]


@pytest.mark.parametrize("source", [marked(CHATML), plain(LLAMA3)], ids=["marked", "plain"])
@pytest.mark.parametrize("thinking", ["", "\n\n", "Hm."])
def test_thinking_in_the_middle_of_an_answer_is_masked_with_or_without_words(source: str, thinking: str) -> None:
    parts = trained(own(source, thinking="mask"), talk(ASKED, turn("assistant", f"One<think>{thinking}</think> two.")))
    assert parts[0] == "One"
    assert parts[1].startswith(" two.")


# -- 75: what is not in the record -------------------------------------------------------------------------------------

ASKS_FOR_THE_DATE = [name for name, source in PUBLISHED.items() if "strftime_now(" in source]
DIRECTIVES = "%a %A %w %d %b %B %h %m %y %Y %H %I %p %P %M %S %j %U %W %c %x %X %r %G %V %%b %-d %s"
EVERY_DIRECTIVE = CHATML.replace("Be brief.<|im_end|>", f"' + strftime_now('{DIRECTIVES}') + '<|im_end|>")


class Frozen(datetime.datetime):
    """A clock that stands still."""

    day = ""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls.fromisoformat(cls.day)


@needs_trl
@pytest.mark.parametrize("day", [DATE, "1999-12-26"])
@pytest.mark.parametrize("name", [*ASKS_FOR_THE_DATE, "own"])
def test_a_template_that_asks_for_the_date_is_told_the_date_of_the_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, day: str
) -> None:
    """Oracle: ``apply_chat_template`` on that day."""
    source = plain(EVERY_DIRECTIVE) if name == "own" else PUBLISHED[name]
    tokenizer = tokenizer_of("qwen2_5" if name == "own" else name)
    asked = talk(ASKED, ANSWERED)
    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)
    monkeypatch.setattr(Frozen, "day", day)
    expected = tokenizer.apply_chat_template(asked.to_messages(), chat_template=source, tokenize=False)
    monkeypatch.setattr(Frozen, "day", "2031-03-03")
    on_another_day = tokenizer.apply_chat_template(asked.to_messages(), chat_template=source, tokenize=False)
    assert on_another_day != expected or name.startswith("muse")  # which writes it with tools alone
    assert chat_template(tokenizer, source=source, date=day).render(asked).text == expected


@needs_trl
@pytest.mark.parametrize("name", [*ASKS_FOR_THE_DATE, "llama3_1", "qwen3"])
def test_a_template_that_asks_for_the_date_is_refused_at_the_start_unless_it_is_set(name: str) -> None:
    if name in ASKS_FOR_THE_DATE:
        with pytest.raises(ConfigError, match=r"set encoder\.template_date"):
            published(name, date=None)
    else:  # also Llama 3.1, which has a date of its own for want of another
        assert published(name, date=None).render(talk(ASKED, ANSWERED)) == published(name).render(talk(ASKED, ANSWERED))


def test_a_template_that_hides_that_it_asks_for_the_date_ends_the_run_and_costs_no_sample() -> None:
    hidden = "{%- set now = strftime_now %}" + plain(CHATML).replace(
        "Be brief.<|im_end|>", "' + now('%Y') + '<|im_end|>"
    )
    with pytest.raises(ConfigError, match="template_date"):
        own(hidden).render(talk(ASKED, ANSWERED))
    assert "2026<|im_end|>" in own(hidden, date=DATE).render(talk(ASKED, ANSWERED)).text
