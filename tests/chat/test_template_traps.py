"""Templates that hide things: calls, definitions, turns, headers, ends. Each trap here trained a model wrong."""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest
from published_templates import ANSWERED, ASKED, CALL, CALLED, DATE, TOLD, TOOL, templates, tokenizer_of, turn
from templates_in_use import CHATML, LLAMA3, LLAVA, marked, plain
from transformers import AddedToken, AutoTokenizer
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
    return ChatTemplate(tokenizer_of(name), source=PUBLISHED[name], **{"date": DATE, **options})


def own(source: str, *tokens: str, eos: str = "<|im_end|>", **options: Any) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.eos_token = eos
    return ChatTemplate(tokenizer, source=source, **options)


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


# -- 41: what the template hides ---------------------------------------------------------------------------------------


@needs_trl
@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3", "smolvlm", "lfm2", "llama3", "phi3_5"])
def test_a_call_that_the_template_hides_costs_the_sample_with_the_name_of_the_call(name: str) -> None:
    why, detail = reason(published(name), talk(ASKED, CALLED, TOLD, ANSWERED))
    assert why == "template_omits"
    assert "the call 'find_weather' of turn 2 (assistant)" in detail
    assert "encoder.chat_template: qwen" in detail


@needs_trl
@pytest.mark.parametrize("name", ["llama3", "gemma3", "deepseekv3", "deepseek_r1_distill", "qwen2_5_vl"])
def test_definitions_that_the_template_hides_cost_the_sample_unless_a_setting_allows_it(name: str) -> None:
    conversation = talk(ASKED, ANSWERED, tools=(TOOL,))
    why, detail = reason(published(name), conversation)
    assert why == "template_omits"
    assert "the definition of the tool 'find_weather'" in detail
    assert "encoder.tool_definitions: optional" in detail
    allowed = published(name, tool_definitions="optional")
    assert trained(allowed, conversation) == trained(allowed, talk(ASKED, ANSWERED))


@needs_trl
def test_the_setting_for_definitions_lets_no_call_vanish() -> None:
    template = published("qwen2_5_vl", tool_definitions="optional")
    assert reason(template, talk(ASKED, CALLED, TOLD, ANSWERED, tools=(TOOL,)))[0] == "template_omits"


@needs_trl
def test_a_second_system_turn_that_the_template_hides_costs_the_sample() -> None:
    turns = (turn("system", "Be brief."), ASKED, ANSWERED, turn("system", "Be kind."), ASKED, ANSWERED)
    assert "'Be kind.' of turn 4 (system)" in reason(published("qwen3_vl"), talk(*turns))[1]


def test_a_template_that_shows_only_some_arguments_is_found_out() -> None:
    first = "(call.function.name ~ '(' ~ (call.function.arguments.values() | first) ~ ')')"
    why, detail = reason(own(plain(CHATML).replace("(call.function | tojson)", first)), talk(ASKED, CALLED))
    assert why == "template_omits"
    assert "the argument 'days' of turn 2 (assistant)" in detail
    assert "the argument '3' of turn 2 (assistant)" in detail
    assert "'Rome'" not in detail


def test_a_short_name_that_stands_elsewhere_in_the_text_is_still_missed() -> None:
    call = {"type": "function", "function": {"name": "a", "arguments": {"t": "is"}}}
    source = re.sub(r"\{%- for call in.*?endfor %\}", "", plain(CHATML), flags=re.DOTALL)
    why, detail = reason(own(source), talk(ASKED, turn("assistant", "That is a town.", tool_calls=(call,))))
    assert (why, "the call 'a' of turn 2" in detail) == ("template_omits", True)


@needs_trl
def test_calls_of_deepseek_are_shown_since_they_are_passed_as_its_template_wants_them() -> None:
    call = 'function<｜tool▁sep｜>find_weather\n```json\n{"town": "Rome", "days": 3}\n```'
    call = f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"
    assert trained(published("deepseekv3"), talk(ASKED, CALLED, TOLD, ANSWERED)) == [
        f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "No, it stays dry.<｜end▁of▁sentence｜>",
    ]


def test_arguments_are_written_as_json_where_the_template_would_print_an_object_as_python_does() -> None:
    source = plain(CHATML).replace("(call.function | tojson)", "call.function.name ~ ' ' ~ call.function.arguments")
    assert trained(own(source), talk(ASKED, CALLED)) == [
        '\n<tool_call>\nfind_weather {"town": "Rome", "days": 3}\n</tool_call><|im_end|>'
    ]


def test_the_name_of_a_result_is_passed_where_the_template_needs_it() -> None:
    source = plain(CHATML).replace(
        "message.content + '\\n</tool_response>'", "message.name + ': ' + message.content + '\\n</tool_response>'"
    )
    assert "find_weather: " + TOLD.text in own(source).render(talk(ASKED, CALLED, TOLD, ANSWERED)).text


def test_a_template_that_puts_a_later_turn_first_costs_the_sample() -> None:
    source = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}" + plain(CHATML).replace(
        "message.role == 'user' or (message.role == 'system' and not loop.first)", "message.role == 'user'"
    )
    turns = (ASKED, ANSWERED, turn("system", "Be kind."), ASKED, ANSWERED)
    why, detail = reason(own(source), talk(*turns))
    assert why == "unstable_prefix"
    assert "after turn 3 (system)" in detail


@needs_trl
def test_what_may_be_left_out_costs_nothing_where_other_ways_of_passing_are_refused() -> None:
    """Qwen2.5-VL's template refuses a call without text; thinking of earlier questions is missing in any way."""
    thought = turn("assistant", "<think>\nHm.\n</think>\n\nSunny.")
    conversation = talk(ASKED, thought, ASKED, CALLED, TOLD, ANSWERED)
    refuses_none = "{%- for m in messages if m.content is none %}{{ raise_exception('no text') }}{%- endfor %}"
    template = own(refuses_none + PUBLISHED["qwen3"])
    assert trained(template, conversation)[0] == "Sunny.<|im_end|>"


# -- 42: spans and turns -----------------------------------------------------------------------------------------------

TWO = talk(turn("user", "One?"), turn("assistant", "First."), turn("user", "Two?"), turn("assistant", "Second."))


# Content and end are marked apart, with something between that is not.
APART = marked(CHATML).replace(
    "{{- '<|im_end|>' }}{%- endgeneration",
    "{%- endgeneration %}{{- ' ' }}{%- generation %}{{- '<|im_end|>' }}{%- endgeneration",
)


def test_the_last_answer_is_trained_whole_where_the_template_marks_it_in_several_blocks() -> None:
    assert APART.count("{%- generation %}") == 2
    assert trained(own(APART, train_on="last_assistant"), TWO) == ["Second.", "<|im_end|>"]
    assert trained(own(APART), TWO) == ["First.", "<|im_end|>", "Second.", "<|im_end|>"]


def test_an_earlier_answer_is_not_trained_as_the_last_where_the_last_has_no_mark() -> None:
    source = marked(CHATML).replace("{%- generation %}", "{%- if not loop.last %}{%- generation %}", 1)
    source = source.replace(
        "{%- endgeneration %}", "{%- endgeneration %}{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}", 1
    )
    assert trained(own(source), TWO) == ["First.<|im_end|>"]
    assert reason(own(source, train_on="last_assistant"), TWO)[0] == "nothing_to_learn"


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


# -- 43: a header nobody asked for -------------------------------------------------------------------------------------


def test_a_generation_prompt_that_nobody_asked_for_is_not_trained_behind_the_last_answer() -> None:
    always = plain(LLAMA3).replace("{%- if add_generation_prompt %}", "{%- if true %}")
    template = own(always, "<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", eos="<|eot_id|>")
    assert trained(template, TWO) == ["First.<|eot_id|>", "Second.<|eot_id|>"]
    # Neither where no token ends a turn but the next header.
    bare = always.replace("<|eot_id|>", "")
    template = own(bare, "<s>", "<|start_header_id|>", "<|end_header_id|>", eos="<|endoftext|>")
    assert trained(template, TWO) == ["First.<|start_header_id|>", "Second.<|start_header_id|>"]


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


# -- 45: no stable prefixes --------------------------------------------------------------------------------------------


@needs_trl
def test_qwen3_trains_several_answers_under_its_own_template() -> None:
    thoughts = talk(
        turn("user", "One?"),
        turn("assistant", "<think>\nHm.\n</think>\n\nFirst."),
        turn("user", "Two?"),
        turn("assistant", "<think>\nOh.\n</think>\n\nSecond."),
    )
    template = published("qwen3")
    assert trained(template, thoughts) == ["First.<|im_end|>", "<think>\nOh.\n</think>\n\nSecond.<|im_end|>"]
    assert trained(template, TWO) == ["First.<|im_end|>", "<think>\n\n</think>\n\nSecond.<|im_end|>"]


@needs_trl
def test_a_late_system_turn_under_deepseek_costs_its_sample_alone() -> None:
    template = published("deepseekv3")
    late = talk(ASKED, ANSWERED, turn("system", "Be kind."), ASKED, ANSWERED)
    why, detail = reason(template, late)
    assert why == "unstable_prefix"
    assert "move the turn, or use another encoder.chat_template" in detail
    assert trained(template, TWO) == ["First.<｜end▁of▁sentence｜>", "Second.<｜end▁of▁sentence｜>"]


@needs_trl
def test_thinking_of_the_last_answer_that_the_template_hides_costs_the_sample() -> None:
    conversation = talk(ASKED, turn("assistant", "<think>\nHm.\n</think>\n\nNo."))
    why, detail = reason(published("deepseekv3"), conversation)
    assert why == "template_omits"
    assert "encoder.thinking: strip" in detail
    assert trained(published("deepseekv3", thinking="strip"), conversation) == ["No.<｜end▁of▁sentence｜>"]


def test_an_answer_begins_with_a_whole_token_where_the_prompt_offers_another() -> None:
    source = (
        "{% for m in messages %}{{ '<|ask|>' + m.content if m.role == 'user' else '<|bot|><|shout|>' + m.content + "
    )
    source += "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|bot|><|say|>' }}{% endif %}"
    template = own(source, "<|ask|>", "<|bot|>", "<|say|>", "<|shout|>")
    assert trained(template, TWO) == ["<|shout|>First.<|im_end|>", "<|shout|>Second.<|im_end|>"]


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


def test_an_end_that_swallows_the_line_break_after_it_is_trained(tmp_path: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    tokenizer.add_tokens([AddedToken("<|stop|>", rstrip=True, special=True)], special_tokens=True)
    tokenizer.eos_token = "<|stop|>"
    source = plain(CHATML).replace("<|im_end|>", "<|stop|>")
    assert "".join(trained_tokens_of(tokenizer, source, TWO, tmp_path)) == "First.<|stop|>Second.<|stop|>"


# -- thinking and weights ----------------------------------------------------------------------------------------------


@needs_trl
def test_an_empty_thinking_that_the_template_writes_is_left_out_on_request() -> None:
    template = published("qwen3", thinking="trim_empty")
    chat = template.render(TWO)
    assert "<think>" not in chat.text
    assert trained(template, TWO) == ["First.<|im_end|>", "Second.<|im_end|>"]
    empty = talk(turn("user", "One?"), turn("assistant", "<think>\n\n</think>\n\nFirst."))
    assert trained(template, empty) == ["First.<|im_end|>"]
    thought = talk(turn("user", "One?"), turn("assistant", "<think>\nHm.\n</think>\n\nFirst."))
    assert trained(template, thought) == ["<think>\nHm.\n</think>\n\nFirst.<|im_end|>"]


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


def test_ids_of_calls_reach_the_results_that_answer_them() -> None:
    other = {"id": "zzzzzzzzz", "type": "function", "function": {"name": "find_time", "arguments": {}}}
    source = plain(CHATML).replace(
        "message.content + '\\n</tool_response>'", "message.name + ': ' + message.content + '\\n</tool_response>'"
    )
    calls = turn("assistant", tool_calls=(CALL, other))
    noon = turn("tool", "noon", tool_call_id="zzzzzzzzz")
    text = own(source).render(talk(ASKED, calls, noon, TOLD, ANSWERED)).text
    assert "find_time: noon" in text
    assert "find_weather: " + TOLD.text in text


def test_arguments_nested_beyond_recursion_cost_their_sample_alone() -> None:
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": deep}}}
    template = own(plain(CHATML))
    assert reason(template, talk(ASKED, turn("assistant", tool_calls=(call,))))[0] in ("bad_record", "template_error")
    assert trained(template, TWO) == ["First.<|im_end|>", "Second.<|im_end|>"]


def test_everything_is_trained_also_where_the_template_does_not_show_where_answers_begin() -> None:
    leading = talk(turn("assistant", "Welcome."), *TWO.turns)
    assert reason(own(plain(CHATML)), leading)[0] == "assistant_first"
    chat = own(plain(CHATML), train_on="all").render(leading)
    assert [(span.start, span.end) for span in chat.spans] == [(0, len(chat.text))]


def test_the_date_that_a_template_writes_may_change_under_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import energon_packing.chat.renderer as module

    rendered, day = module.render_template, ["Monday"]

    def dated(*arguments: Any, **options: Any) -> Any:
        text, spans = rendered(*arguments, **options)
        return f"{day[0]} {text}", [(start + len(day[0]) + 1, end + len(day[0]) + 1) for start, end in spans]

    monkeypatch.setattr(module, "render_template", dated)
    for source in (plain(CHATML), marked(CHATML)):
        template = own(source)
        for today in ("Monday", "Tuesday", "Tuesday"):
            day[0] = today
            assert template.render(TWO).text.startswith(today)
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
def test_a_closing_tag_alone_is_refused_where_thinking_is_masked() -> None:
    talked = talk(ASKED, turn("assistant", "The tag is </think>, as said."))
    assert reason(published("qwen2_5", thinking="mask"), talked)[0] == "unclosed_thinking"


def test_a_template_that_knows_no_generation_prompt_never_trains_its_header() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    assert "add_generation_prompt" in reason(own(source), TWO)[1]


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


@pytest.mark.parametrize("lossy", ["m.content.replace('[IMG]', '')", "m.content | striptags"])
def test_a_tag_that_the_template_takes_out_of_a_text_is_missed(lossy: str) -> None:
    source = plain(CHATML).replace(
        "message.content + '<|im_end|>\\n'", "(" + lossy.replace("m.", "message.") + ") + '<|im_end|>\\n'"
    )
    assert lossy.replace("m.", "message.") in source
    why, detail = reason(own(source), talk(turn("user", "What is [IMG] or <sep>?"), ANSWERED))
    assert why == "template_omits"
    assert "turn 1 (user)" in detail


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


@needs_trl
def test_thinking_that_would_stand_after_the_call_it_led_to_is_refused() -> None:
    """``apply_chat_template`` shows no thinking of this record; as text it would be trained after its consequence."""
    called = turn("assistant", "", thinking="Hm.", tool_calls=CALLED.tool_calls)
    conversation = talk(ASKED, called, tools=(TOOL,))
    assert reason(published("gemma4_v2"), conversation)[0] == "template_omits"
    assert trained(published("gemma4_v2", thinking="strip"), conversation)


@needs_trl
def test_prose_about_thinking_is_no_empty_thinking() -> None:
    prose = "Write <think></think> to skip thinking."
    assert trained(published("qwen3_instruct_2507", thinking="trim_empty"), talk(ASKED, turn("assistant", prose))) == [
        f"{prose}<|im_end|>"
    ]


@needs_trl
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "qwen3_6", "lfm2_2_5_v2"])
def test_thinking_that_only_closes_is_taken_back_like_any_other(name: str) -> None:
    """Data of models whose prompt opens the thinking hold no opening tag."""
    found = trained(published(name), talk(ASKED, turn("assistant", "Hm.</think>\n\nNo."), ASKED, ANSWERED))
    assert "Hm." not in found[0]
    assert "No." in found[0]


def test_a_call_without_a_name_is_refused_and_never_named_none() -> None:
    call: dict[str, Any] = {"type": "function", "function": {}}
    assert reason(own(plain(CHATML)), talk(ASKED, turn("assistant", tool_calls=(call,))))[0] == "bad_record"


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
@pytest.mark.parametrize("day", [DATE, "2024-05-01", "1999-12-26"])
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
    assert ChatTemplate(tokenizer, source=source, date=day).render(asked).text == expected


@needs_trl
@pytest.mark.parametrize("name", sorted(PUBLISHED))
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


@pytest.mark.parametrize("by_chance", ["{{ ['a', 'b'] | random }}", "{{ lipsum(n=1) }}"])
def test_a_template_that_draws_at_random_is_refused(by_chance: str) -> None:
    with pytest.raises(ConfigError, match="at random"):
        own(plain(CHATML) + by_chance)
    own(plain(CHATML) + "{# " + by_chance + " #}")


@pytest.mark.parametrize("value", ["2026-1-31", "31.01.2026", "20260131", "2026-02-30", "today", ""])
def test_a_date_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"encoder\.template_date"):
        EncoderConfig(template_date=value)
