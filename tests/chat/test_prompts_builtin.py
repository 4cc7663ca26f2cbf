"""The built-in prompt formats against the published ones, written out; and what of each is trained.

In the expected texts, what stands between « and » is trained.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_templates import chat_template
from transformers import AutoTokenizer

from energon_packing.chat.prompt_files import builtin_prompts, template_source
from energon_packing.chat.template import ChatTemplate
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import ConfigError, SampleRejected

SPECIAL = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "vicuna": ("<s>", "</s>", []),
    "alpaca": ("<s>", "</s>", []),
    "mistral": (
        "<s>",
        "</s>",
        [
            *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ],
    ),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ["<｜User｜>", "<｜Assistant｜>"]),
}
"""Beginning, end and further special tokens of the tokenizers that the formats were published with."""

EXPECTED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
        "«Hello!<|im_end|>»\n<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n«4<|im_end|>»\n"
    ),
    "qwen": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
        "«Hello!<|im_end|>»\n<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n«4<|im_end|>»\n"
    ),
    "internvl": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
        "«Hello!<|im_end|>»\n<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n«4<|im_end|>»\n"
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello!<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd 2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«4<|eot_id|>»"
    ),
    "vicuna": "<s>Be brief. USER: Hi there ASSISTANT: «Hello!</s>»USER: And 2+2? ASSISTANT: «4</s>»",
    "mistral": "<s>[INST] Be brief.\n\nHi there[/INST] «Hello!</s>»[INST] And 2+2?[/INST] «4</s>»",
    "deepseek": (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi there<｜Assistant｜>«Hello!<｜end▁of▁sentence｜>»"
        "<｜User｜>And 2+2?<｜Assistant｜>«4<｜end▁of▁sentence｜>»"
    ),
    "gemma": (
        "<bos><start_of_turn>user\nBe brief.\n\nHi there<end_of_turn>\n<start_of_turn>model\n«Hello!<end_of_turn>»\n"
        "<start_of_turn>user\nAnd 2+2?<end_of_turn>\n<start_of_turn>model\n«4<end_of_turn>»\n"
    ),
    "alpaca": (
        "<s>Be brief.\n\n### Instruction:\nHi there\n\n### Response:\n«Hello!</s>»\n\n"
        "### Instruction:\nAnd 2+2?\n\n### Response:\n«4</s>»\n\n"
    ),
}
EXPECTED["qwen3"] = EXPECTED["qwen2_5_vl"] = EXPECTED["chatml"]
ASKED = {
    "chatml": "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>assistant\n",
    "qwen2_5_vl": "<|im_start|>assistant\n",
    "qwen": "<|im_start|>assistant\n",
    "internvl": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "vicuna": " ASSISTANT:",
    "mistral": "[/INST]",
    "deepseek": "<｜Assistant｜>",
    "gemma": "<start_of_turn>model\n",
    "alpaca": "### Response:\n",
}

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
INTERNVL_SYSTEM = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
)


def turns(role: str, text: str, answer: str) -> str:
    """A loop over the turns after a system turn: `text` writes one, `answer` what of an assistant's is generated."""
    return (
        "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
        "{% if m.role == 'assistant' %}" + role + "{% generation %}" + answer + "{% endgeneration %}"
        "{% else %}" + text + "{% endif %}{{ after }}{% endfor %}"
    )


def chatml_with(default: str | None) -> str:
    given = "messages[0].content if messages[0].role == 'system' else " + repr(default or "")
    system = "{{ '<|im_start|>system\\n' + (" + given + ") + '<|im_end|>\\n' }}"
    if default is None:
        system = "{% if messages[0].role == 'system' %}" + system + "{% endif %}"
    head, body = "{{ '<|im_start|>' + m.role + '\\n' }}", "{{ m.content + '<|im_end|>' }}"
    return "{% set after = '\\n' %}" + system + turns(head, head + body, body)


# What the models' own templates and conversation classes write, told anew with marks around what is generated.
ORIGINAL = {
    "chatml": chatml_with(None),
    "qwen3": chatml_with(None),
    "qwen2_5_vl": chatml_with("You are a helpful assistant."),
    "qwen": chatml_with(QWEN_SYSTEM),
    "internvl": chatml_with(INTERNVL_SYSTEM),
    "llama3": (
        "{% for m in messages %}{{ (bos_token if loop.first else '') + '<|start_header_id|>' + m.role"
        " + '<|end_header_id|>\\n\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot_id|>"
        "{% endgeneration %}{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% set head = messages[0].content | trim + '\\n\\n' if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else"
        " m.role) + '\\n' + (head if loop.first else '') }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{% else %}{{ m.content | trim + '<end_of_turn>' }}"
        "{% endif %}{{ '\\n' }}{% endfor %}"
    ),
    "vicuna": (
        "{{ bos_token }}{{ messages[0].content if messages[0].role == 'system' else "
        '"A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, '
        "detailed, and polite answers to the user's questions.\" }} "
        + turns("{{ 'ASSISTANT: ' }}", "{{ 'USER: ' + m.content + ' ' }}", "{{ m.content + eos_token }}")
    ),
    "mistral": (
        "{{ bos_token }}{% set head = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}"
        + turns(
            "{{ ' ' }}",
            "{{ '[INST] ' + (head if loop.first else '') + m.content + '[/INST]' }}",
            "{{ m.content | trim + eos_token }}",
        )
    ),
    "deepseek": (
        "{{ bos_token }}{{ messages[0].content if messages[0].role == 'system' else '' }}"
        + turns("<｜Assistant｜>", "{{ '<｜User｜>' + m.content }}", "{{ m.content + eos_token }}")
    ),
    "alpaca": (
        "{% set after = '\\n\\n' %}{{ bos_token }}{{ messages[0].content if messages[0].role == 'system' else "
        "'Below is an instruction that describes a task. Write a response that appropriately completes the request.' }}"
        "{{ after }}"
        + turns("{{ '### Response:\\n' }}", "{{ '### Instruction:\\n' + m.content }}", "{{ m.content + eos_token }}")
    ),
}


@pytest.fixture(scope="module")
def tokenizers():
    """Name of a format -> a tokenizer with the special tokens of the model that it belongs to."""
    made = {}
    for name in builtin_prompts():
        tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
        if name in SPECIAL:
            bos, eos, others = SPECIAL[name]
            tokenizer.add_special_tokens({"bos_token": bos, "eos_token": eos, "additional_special_tokens": others})
        tokenizer.chat_template = None
        made[name] = tokenizer
    return made


def template(name: str, tokenizers, media=None, **settings) -> ChatTemplate:
    tokenizer = tokenizers[name]
    return chat_template(tokenizer, source=template_source(name, tokenizer, media or {}), **settings)


def marked(rendered) -> str:
    """The text with « and » around what is trained."""
    text = rendered.text
    for span in sorted(rendered.spans, key=lambda span: -span.start):
        text = text[: span.start] + "«" + text[span.start : span.end] + "»" + text[span.end :]
    return text


def talk(*texts: str, system: str | None = None, **others) -> Conversation:
    turns = [Turn(role="system", parts=(system,))] if system is not None else []
    turns += [Turn(role=("user", "assistant")[at % 2], parts=(text,)) for at, text in enumerate(texts)]
    return Conversation(key="k", turns=tuple(turns), **others)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_conversation_reads_as_the_format_was_published_and_answers_with_their_end_are_trained(tokenizers, name):
    rendered = template(name, tokenizers).render(talk("Hi there", "Hello!", "And 2+2?", "4", system="Be brief."))
    assert marked(rendered) == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_generation_prompt_is_what_the_answer_follows(tokenizers, name):
    made = template(name, tokenizers)
    text, _ = made.renderer.run([{"role": "user", "content": "Hi"}], None, prompt=True)
    assert text.endswith(ASKED[name])
    whole = made.render(talk("Hi", "Yes"))
    assert whole.text.startswith(text)


words = st.text(st.sampled_from("ab 9?\n{}<é你😀'\""), min_size=1, max_size=12).filter(str.strip)


@pytest.mark.parametrize("name", sorted(EXPECTED))
@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(words, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0), system=st.none() | words
)
def test_tokens_and_trained_positions_equal_those_of_a_tokenizer_with_the_original_template(
    tokenizers, name, texts, system
):
    conversation = talk(*texts, system=system)
    tokenizer = tokenizers[name]
    ids, weights = encoder(name, tokenizer).measure(conversation).expand()
    expected = tokenizer.apply_chat_template(
        conversation.to_messages(),
        chat_template=ORIGINAL[name],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert ids.tolist() == expected["input_ids"]
    assert weights.tolist() == expected["assistant_masks"]
    assert sum(expected["assistant_masks"]) >= len(texts)  # an answer and its end, for each of them


@cache
def encoder(name: str, tokenizer) -> ConversationEncoder:
    return ConversationEncoder(EncoderConfig(chat_template=name), processor=tokenizer)


TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def with_tools(tools=TOOLS) -> Conversation:
    return Conversation(
        key="t",
        tools=tools,
        turns=(
            Turn(role="user", parts=("1+1?",)),
            Turn(role="assistant", parts=(), tool_calls=(CALL, CALL)),
            Turn(role="tool", parts=("2",)),
            Turn(role="tool", parts=("two",)),
            Turn(role="assistant", parts=("It is 2.",)),
        ),
    )


def test_tools_of_qwen_are_defined_called_and_answered_as_published(tokenizers):
    assert marked(template("qwen", tokenizers).render(with_tools())) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
        "<args-json-object>}\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n"
        '<|im_start|>assistant\n«<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«It is 2.<|im_end|>»\n"
    )


def test_calls_and_outputs_of_deepseek_are_written_as_published(tokenizers):
    call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
    assert marked(template("deepseek", tokenizers).render(with_tools(tools=None))) == (
        "<｜begin▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜>"
        f"«<｜tool▁calls▁begin｜>{call}\n{call}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>»"
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>2<｜tool▁output▁end｜>\n"
        "<｜tool▁output▁begin｜>two<｜tool▁output▁end｜><｜tool▁outputs▁end｜>«It is 2.<｜end▁of▁sentence｜>»"
    )


# Mistral 7B v0.3 with tools, told anew: what its own template writes where the last question is asked once, with marks.
MISTRAL_TOOLS = (
    "{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == asked %}{{ '[AVAILABLE_TOOLS] [' }}"
    "{% for tool in tools %}{{ '' if loop.first else ', ' }}{{ '{\"type\": \"function\", \"function\": {' }}"
    "{% for key, value in tool.function.items() if key != 'return' %}{{ '' if loop.first else ', ' }}"
    "{{ '\"' ~ key ~ '\": ' }}{{ '\"' ~ value ~ '\"' if value is string else value | tojson }}"
    "{% endfor %}{{ '}}' }}{% endfor %}{{ '][/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' ~ m.content ~ '[/INST]' }}"
    "{% elif m.tool_calls %}{% generation %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{{ '' if loop.first else ', ' }}{{ (call.function | tojson)[:-1] ~ ', \"id\": \"' ~ call.id ~ '\"}' }}{% endfor %}"
    "{{ ']' ~ eos_token }}{% endgeneration %}"
    "{% elif m.role == 'assistant' %}{{ ' ' }}{% generation %}{{ m.content | trim ~ eos_token }}{% endgeneration %}"
    '{% else %}{{ \'[TOOL_RESULTS] {"content": \' ~ m.content ~ \', "call_id": "\' ~ m.tool_call_id }}'
    "{{ '\"}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
ids = st.text("abcdefXYZ019", min_size=9, max_size=9)


@st.composite
def talks_with_tools(draw) -> Conversation:
    """Rounds of a question, calls with their answers, and a text; definitions with fields of every kind."""
    fields = st.fixed_dictionaries({"name": words}, optional={"description": words, "parameters": json_values})
    fields |= st.dictionaries(st.sampled_from(["name", "return", "strict", "é"]), json_values, min_size=1)
    tools = draw(st.none() | st.lists(fields, min_size=1, max_size=3))
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 3))):
        turns.append(Turn(role="user", parts=(f"{draw(words)} {number}",)))  # never the same question twice
        for _ in range(draw(st.integers(0, 2))):
            calls = tuple(
                {
                    "type": "function",
                    "function": {"name": "add", "arguments": draw(st.dictionaries(words, json_values, max_size=2))},
                    "id": draw(ids),
                }
                for _ in range(draw(st.integers(1, 2)))
            )
            turns.append(Turn(role="assistant", parts=(), tool_calls=calls))
            turns += [Turn(role="tool", parts=(draw(words),), tool_call_id=call["id"]) for call in calls]
        turns.append(Turn(role="assistant", parts=(draw(words),)))
    wrapped = None if tools is None else tuple({"type": "function", "function": tool} for tool in tools)
    return Conversation(key="t", turns=tuple(turns), tools=wrapped)


@settings(max_examples=50, deadline=None)
@given(conversation=talks_with_tools())
def test_tools_of_mistral_are_defined_called_and_answered_as_its_own_template_writes_them(tokenizers, conversation):
    tokenizer = tokenizers["mistral"]
    ids, weights = encoder("mistral", tokenizer).measure(conversation).expand()
    expected = tokenizer.apply_chat_template(
        conversation.to_messages(),
        tools=conversation.tools,
        chat_template=MISTRAL_TOOLS,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert ids.tolist() == expected["input_ids"]
    assert weights.tolist() == expected["assistant_masks"]


def calling(*, call_id="abcdefghi", answered="abcdefghi", text=(), question=True, system=None) -> Conversation:
    turns = [Turn(role="system", parts=(system,))] if system else []
    turns += [Turn(role="user", parts=("1+1?",))] if question else []
    call = CALL if call_id is None else {**CALL, "id": call_id}
    turns += [
        Turn(role="assistant", parts=text, tool_calls=(call,)),
        Turn(role="tool", parts=("2",), tool_call_id=answered),
        Turn(role="assistant", parts=("It is 2.",)),
    ]
    return Conversation(key="t", turns=tuple(turns), tools=TOOLS)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"call_id": None}, "ids of tool calls, of 9 characters"),
        ({"call_id": "call_1"}, "ids of tool calls, of 9 characters"),
        ({"answered": None}, "ids of tool calls, of 9 characters"),
        ({"answered": "abcdefghij"}, "ids of tool calls, of 9 characters"),
        ({"text": ("Let me see.",)}, "no place for a text beside tool calls"),
        ({"question": False}, "before the last question, and there is none"),
    ],
)
def test_what_mistrals_format_cannot_write_is_refused_and_never_left_out(tokenizers, changed, why):
    with pytest.raises(SampleRejected, match=why):
        template("mistral", tokenizers).render(calling(**changed))


def test_tools_are_refused_where_the_tokenizer_lacks_their_tokens_and_other_conversations_are_not():
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    others = ["[INST]", "[/INST]", "[TOOL_CALLS]"]
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": others})
    made = chat_template(tokenizer, source=template_source("mistral", tokenizer, {}))
    with pytest.raises(SampleRejected, match=r"no token \[AVAILABLE_TOOLS\]"):
        made.render(calling())
    assert marked(made.render(talk("Hi", "Yes"))) == "<s>[INST] Hi[/INST] «Yes</s>»"


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"qwen", "qwen2_5_vl", "qwen3", "mistral"}))
def test_a_format_without_tools_refuses_a_conversation_with_them_instead_of_leaving_them_out(tokenizers, name):
    with pytest.raises(SampleRejected, match=f"{name} defines no tool"):
        template(name, tokenizers).render(with_tools())


def test_a_system_turn_is_never_lost_where_no_question_follows_it(tokenizers):
    turns = (Turn(role="system", parts=("S",)), Turn(role="assistant", parts=("A",)))
    for name in ("mistral", "gemma"):
        with pytest.raises(SampleRejected, match="none follows"):
            template(name, tokenizers).render(Conversation(key="k", turns=turns))


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_a_tokenizer_without_the_formats_tokens_is_refused(tokenizers, name):
    other = tokenizers["gemma" if name != "gemma" else "llama3"]
    with pytest.raises(ConfigError, match="as one token"):
        template_source(name, other, {})


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(("name", "expected"), [("chatml", "<|vision_start|>{}<|vision_end|>"), ("internvl", "{}\n")])
def test_media_stand_where_the_format_puts_them_in_the_frame_of_the_processor(encoders, family, name, expected):
    encoder = ConversationEncoder(EncoderConfig(chat_template=name), processor=encoders[family].processor)
    media = (
        Media(kind="image", name="a.png", width=100, height=100),
        Media(kind="video", name="b.mp4", width=64, height=64, frames=24, fps=24.0, duration=1.0),
    )
    parts = ("Look: ", MediaPart(index=0), " then ", MediaPart(index=1), "?")
    conversation = Conversation(
        key="m", media=media, turns=(Turn(role="user", parts=parts), Turn(role="assistant", parts=("Yes, a field.",)))
    )
    text = encoder.template.render(conversation).text
    assert "Look: " + expected.format("<|image_pad|>") + " then " in text
    if name == "chatml":
        assert encoder.measure(conversation).token_ids.tolist() == (
            encoders[family].measure(conversation).token_ids.tolist()
        )
        assert encoder.measure(conversation).targets == encoders[family].measure(conversation).targets
