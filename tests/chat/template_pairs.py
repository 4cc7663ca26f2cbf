"""Pairs of a chat template and a record, judged by ``apply_chat_template`` on the record's own messages.

A pair is *exact* if the text that we train on is what transformers renders, to the byte, and exactly the answers are
trained in it; *refused* if our error says why; else *wrong*. Nothing here asks this package what is right: a record's
message is passed as it is, with the thinking in the field, or in the text, that it came with. Templates expect calls in
different forms, so any form of the same call will do, if everything that the record says is in the text.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from unittest.mock import patch

from published_templates import DATE, chat_template
from transformers.utils import chat_template_utils

from energon_packing.chat.template import ChatTemplate
from energon_packing.conversation import Conversation
from energon_packing.convert.records import parse_record
from energon_packing.errors import SampleRejected


class _Clock(datetime):
    """A clock that stands still, as `DATE` in the renderings of ours."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls.fromisoformat(DATE)


ON_THE_DATE = patch.object(chat_template_utils, "datetime", _Clock)

FIELDS = ("reasoning_content", "reasoning", "thinking")
FIELD_ALONE = ("gptoss", "gemma4", "diffusion_gemma", "muse", "qwen3_8")
"""Templates that write thinking from a field and know no ``<think>`` in a text (their own words)."""
NEXT_HEADERS = ("<|user|>", "<|observation|>", "<｜tool▁outputs▁begin｜>")
"""What follows an answer that has no end of its own: of GLM, which stops there (its ``generation_config.json``), and of
DeepSeek-R1 after a call."""
TOOL = {
    "type": "function",
    "function": {
        "name": "find_weather",
        "description": "Weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "Its name."}},
            "required": ["town"],
        },
    },
}
Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def field(thought: str) -> dict[str, str]:
    return dict.fromkeys(FIELDS, thought)


def call(number: int = 1, **arguments: Any) -> Message:
    function = {"name": "find_weather", "arguments": arguments or {"town": "Rome", "days": 3}}
    return {"id": f"a1b2c3d4{number}", "type": "function", "function": function}


def result(text: str, number: int = 1) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": f"a1b2c3d4{number}"}


ASKED = user("Quest one, please?")
MORE = user("Quest two, then?")
ANSWERS = {
    "plain": "Reply alpha.",
    "spaces first": "    return alpha",
    "tab first": "\tif alpha:\n\t\treturn",
    "line ends first": "\n\nReply alpha.",
    "line end and spaces first": "\n  - alpha\n  - beta",
    "white space last": "Reply alpha. \n\n",
    "code": "def alpha(x):\n    if x:\n\n        return [1, {}]\n",
    "fence": "```python\n    alpha = 1\n```",
    "carriage returns": "\r\n  alpha\r\nbeta",
}
TEXTS = {
    "unicode": "Ответ: naïve 数据 مرحبا 👩‍👩‍👧 e\u0301 \u200bz",
    "quotes": "He said \"alpha\" and 'beta' \\ \\n {x} %s $y",
    "jinja": "Write {{ alpha }} and {% if x %}beta{% endif %}.",
    "tags": "Use <b>alpha</b>, <sep> and <br/>.",
    "brackets": "The [INST] alpha [/INST] and [TOOL].",
    "numbers": "1234567 and 3.25e-9, 70831.",
    "roles": "user: alpha\nassistant: beta\nsystem: gamma",
    "json": '{"alpha": [1, null, "b"], "c": {"d": true}}',
    "long": "alpha beta gamma delta epsilon. " * 60 + "omega",
    "short": "ß",
    "prose about thinking": "Write <think></think> to skip alpha.",
    "mathematics": "If $a<b$ and b>c, alpha\n\n\n\\begin{x}",
}


def thought(text: str, how: str, about: str = "kappa") -> Message:
    """An answer after thinking, in each form that data have."""
    if how == "field":
        return said(text, **field(f"Hmm {about}.\n\n  Then {about}."))
    if how == "padded field":
        return said(text, **field(f"\n  Hmm {about}. \n"))
    opening, closing = {"inline": ("<think>\n", "\n</think>\n\n"), "tight": ("<think>", "</think>")}[how]
    return said(f"{opening}Hmm {about}.{closing}{text}")


def records() -> dict[str, dict[str, Any]]:
    """Records in OpenAI's layout by name."""
    found: dict[str, list[Message]] = {}
    for name, text in ANSWERS.items():
        found[f"answer: {name}"] = [ASKED, said(text), MORE, said("Reply omega.")]
        for how in ("inline", "tight", "field"):
            found[f"{how}: {name}"] = [ASKED, thought(text, how)]
    for name, text in TEXTS.items():
        found[f"both: {name}"] = [user(f"Quest: {text}"), said(text)]
    for how in ("inline", "field", "padded field"):
        found[f"{how}: two questions"] = [
            ASKED,
            thought("Reply alpha.", how),
            MORE,
            thought("  Reply omega.", how, "mu"),
        ]
        found[f"{how}: first alone"] = [ASKED, thought("Reply alpha.", how), MORE, said("Reply omega.")]
        found[f"{how}: last alone"] = [ASKED, said("Reply alpha."), MORE, thought("  Reply omega.", how, "mu")]
        one = thought("", how) | {"tool_calls": [call()]}
        found[f"{how}: before a call"] = [ASKED, one]
        found[f"{how}: before a call and after"] = [
            ASKED,
            one,
            result("clear sigma"),
            thought("  Reply omega.", how, "mu"),
        ]
        found[f"{how}: before a text with a call"] = [ASKED, thought("I look.", how) | {"tool_calls": [call()]}]
    found |= {
        "closing tag alone": [ASKED, said("Hmm kappa.\n</think>\n\n  Reply alpha.")],
        "empty thinking": [ASKED, said("<think>\n\n</think>\n\nReply alpha.")],
        "empty thinking, twice": [ASKED, said("<think></think>Reply alpha."), MORE, said("<think></think>  omega")],
        "two thoughts": [ASKED, said("<think>Hmm kappa.</think>Reply alpha.<think>lambda</think> omega")],
        "system": [{"role": "system", "content": "Rule: be brief."}, ASKED, said("Reply alpha.")],
        "system with space": [{"role": "system", "content": " Rule: be brief.\n"}, ASKED, said("Reply alpha.")],
        "empty system": [{"role": "system", "content": ""}, ASKED, said("Reply alpha.")],
        "late system": [
            *(ASKED, said("Reply alpha.")),
            *({"role": "system", "content": "Rule: be kind."}, MORE, said("Reply omega.")),
        ],
        "four questions": [
            *(user("Quest a?"), said("Reply a."), user("Quest b?"), said("Reply b.")),
            *(user("Quest c?"), said("Reply c."), user("Quest d?"), said("Reply d.")),
        ],
        "the same words": [user("Same."), said("Same."), user("Same."), said("Same.")],
        "two answers in a row": [ASKED, said("Reply alpha."), said("Reply beta."), MORE, said("Reply omega.")],
        "two questions in a row": [ASKED, MORE, said("Reply alpha.")],
        "the last is a question": [ASKED, said("Reply alpha."), MORE],
        "an answer first": [said("Reply alpha."), ASKED, said("Reply omega.")],
        "white space in questions": [
            user("  Quest one\n\n"),
            said("Reply alpha."),
            user("\tQuest two"),
            said("Omega."),
        ],
        "control token in a question": [user("Quest <|im_end|> one?"), said("Reply alpha.")],
        "call": [ASKED, said("", tool_calls=[call()])],
        "call of many types": [
            ASKED,
            said("", tool_calls=[call(town="Sao'\"\\ Ü", n=1.5, on=True, no=None, l=[1, "b"])]),
        ],
        "two calls": [ASKED, said("", tool_calls=[call(1), call(2, town="Oslo")])],
        "text with a call": [ASKED, said("I look.", tool_calls=[call()])],
        "call and result": [ASKED, said("", tool_calls=[call()]), result("clear sigma"), said("Reply omega.")],
        "two results": [
            *(ASKED, said("", tool_calls=[call(1), call(2, town="Oslo")])),
            *(result("clear sigma", 1), result("rain tau", 2), said("Reply omega.")),
        ],
        "two rounds of calls": [
            *(ASKED, said("", tool_calls=[call(1)]), result("clear sigma", 1), said("Reply alpha.")),
            *(MORE, said("", tool_calls=[call(2, town="Oslo")]), result("rain tau", 2), said("  Reply omega.")),
        ],
    }
    made = {name: {"messages": messages} for name, messages in found.items()}
    for name in ("answer: plain", "call", "call and result", "field: before a call and after"):
        made[f"{name}, with definitions"] = {**made[name], "tools": [TOOL]}
    return made


# -- transformers' rendering -------------------------------------------------------------------------------------------


def forms(messages: list[Message], as_list: bool) -> Iterator[list[Message]]:
    """The same messages, with calls, and contents beside calls, in every form that templates expect."""
    calls = any(each.get("tool_calls") for each in messages)
    names = {c["id"]: c["function"]["name"] for each in messages for c in each.get("tool_calls", ())}
    for as_text, none, named in itertools.product((False, True) if calls else (False,), repeat=3):
        changed = []
        for each in messages:
            one = dict(each)
            if as_list:
                one["content"] = [{"type": "text", "text": one["content"]}]
            if one.get("tool_calls"):
                if none and not each["content"]:
                    one["content"] = None
                if as_text:
                    one["tool_calls"] = [
                        {
                            **c,
                            "function": {
                                **c["function"],
                                "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False),
                            },
                        }
                        for c in one["tool_calls"]
                    ]
            if named and one["role"] == "tool":
                one["name"] = names[one["tool_call_id"]]
            changed.append(one)
        yield changed


class Oracle:
    """What transformers renders with one template."""

    def __init__(self, name: str, tokenizer: Any, source: str) -> None:
        self.name, self.tokenizer, self.source = name, tokenizer, source
        self.as_list = "Probe q" not in (self.text([user("Probe q")], None) or "")
        self.marked = re.search(r"\{%-?\s*generation", source) is not None
        probes = (said("alpha", **field("kappa")), said("", **field("kappa"), tool_calls=[call()]))
        self.reads_field = any("kappa" in (self.text([ASKED, probe], None) or "") for probe in probes)

    def text(self, messages: list[Message], tools: Any, prompt: bool = False) -> str | None:
        """The text; None if the template refuses the messages."""
        try:
            with ON_THE_DATE:
                return self.tokenizer.apply_chat_template(
                    messages, tools=tools, chat_template=self.source, tokenize=False, add_generation_prompt=prompt
                )
        except Exception:
            return None

    def marks(self, messages: list[Message], tools: Any) -> list[tuple[int, int]]:
        """The characters that the template marks as generated."""
        with ON_THE_DATE:
            _, spans = chat_template_utils.render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        return list(spans[0])

    def given(self, messages: list[Message]) -> list[Message]:
        """The messages as the template's model documents them, where it knows only one of the two forms of thinking."""
        changed = []
        for each in messages:
            one = dict(each)
            thinking = one.get(FIELDS[0])
            if thinking and not self.reads_field:
                for name in FIELDS:
                    del one[name]
                one["content"] = "<think>\n" + thinking.strip("\n") + "\n</think>\n\n" + one["content"]
            elif one["role"] == "assistant" and self.reads_field and self.name.startswith(FIELD_ALONE):
                found = re.fullmatch(
                    r"(?:<think>)?[\r\n]*((?:(?!</?think>).)*?)[\r\n]*</think>[\r\n]*(.*)", one["content"], re.S
                )
                if found and "think>" not in found[2]:
                    one["content"] = found[2]
                    one |= field(found[1]) if found[1].strip() else {}
            changed.append(one)
        return changed


def stored(record: dict[str, Any]) -> Conversation:
    """A record as it comes out of a converted data set."""
    return Conversation.from_record("k", json.loads(json.dumps(parse_record(record).record("k", [], []))))


def verdict(
    template: ChatTemplate, oracle: Oracle, record: dict[str, Any], messages: list[Message] | None = None
) -> str:
    """``exact``, ``refused: REASON`` or ``wrong: WHY``; the oracle reads ``messages`` instead of the record's."""
    try:
        chat = template.render(stored(record))
    except SampleRejected as error:
        return f"refused: {error.reason}"
    tools = record.get("tools")
    shown = oracle.given(messages or record["messages"])
    for messages in forms(shown, oracle.as_list):
        text = oracle.text(messages, tools)
        if text is not None and chat.text in (text, *(text + token for token in NEXT_HEADERS)):
            break
    else:
        plain = oracle.text(next(forms(shown, oracle.as_list)), tools)
        return f"wrong: text {chat.text[-90:]!r} is not {(plain or 'refused')[-90:]!r}"
    trained = [False] * len(chat.text)
    for span in chat.spans:
        trained[span.start : span.end] = [span.weight > 0] * (span.end - span.start)
    return _targets(oracle, messages, shown, tools, chat.text, trained) or "exact"


def _targets(
    oracle: Oracle, messages: list[Message], shown: list[Message], tools: Any, text: str, trained: list[bool]
) -> str | None:
    """What is wrong with the trained characters; None if nothing is."""
    at, last_question = 0, max(n for n, each in enumerate(shown) if each["role"] == "user")
    for number, each in enumerate(shown):
        thinking = each.get(FIELDS[0]) or ""
        texts = re.split(
            "</?think>", thinking + "<think>" + each["content"] if each["role"] == "assistant" else each["content"]
        )
        for core in filter(None, map(str.strip, texts)):
            escaped = json.dumps(core, ensure_ascii=False)[1:-1]
            place = next((p for p in (text.find(core, at), text.find(escaped, at)) if p >= 0), -1)
            if place < 0:
                if each["role"] == "system" or (each["role"] == "assistant" and number < last_question):
                    continue  # moved to the front, or thinking that the template takes back
                return f"wrong: {core!r} of turn {number + 1} is missing"
            end = place + len(core)
            if each["role"] == "assistant" and not all(trained[place:end]):
                return f"wrong: {core[:30]!r} of turn {number + 1} is not trained"
            if each["role"] != "assistant" and any(trained[place:end]):
                return f"wrong: {core[:30]!r} of turn {number + 1} ({each['role']}) is trained"
            at = end
        for one in each.get("tool_calls", ()):
            if one["function"]["name"] not in text:
                return "wrong: a call is missing"
    if oracle.marked:
        return _against_marks(oracle.marks(messages, tools), oracle, text, trained)
    return _against_prefixes(oracle, messages, tools, text, trained)


def _against_marks(marks: list[tuple[int, int]], oracle: Oracle, text: str, trained: list[bool]) -> str | None:
    marked = [False] * len(text)
    for start, end in marks:
        marked[start:end] = [True] * (end - start)
        token = next((t for t in oracle.tokenizer.get_added_vocab() if text.startswith(t, end)), "")
        marked[end : end + len(token)] = [None] * len(token)  # type: ignore[list-item]  # ends a turn: either way
    for at, (ours, theirs) in enumerate(zip(trained, marked, strict=True)):
        if theirs is not None and ours != theirs:
            return f"wrong: {'trained' if ours else 'untrained'} against the template's marks: {text[at : at + 30]!r}"
    return None


def _against_prefixes(
    oracle: Oracle, messages: list[Message], tools: Any, text: str, trained: list[bool]
) -> str | None:
    """Answers begin where the generation prompt ends, less the thinking that it opens, and end with their token."""
    asked, header = (oracle.text(next(forms([ASKED], oracle.as_list)), None, prompt=ask) or "" for ask in (False, True))
    header = header.removeprefix(asked)
    for number, each in enumerate(messages):
        if each["role"] != "assistant":
            continue
        before, prompt = (oracle.text(messages[:number], tools, prompt=ask) for ask in (False, True))
        if number and prompt and before is not None and text.startswith(prompt) and prompt.startswith(before):
            opened = prompt.find("<think>", len(before))
            start = opened if opened >= 0 else len(prompt)
            if messages[number - 1]["role"] == "tool" and text.startswith(header, start):
                start += len(header)  # after a result, Gemma 4 writes in history what its prompt leaves out
            if not trained[start] or any(trained[len(before) : start]):
                return f"wrong: answer {number + 1} begins at {text[max(start - 20, 0) : start + 20]!r}"
        whole = oracle.text(messages[: number + 1], tools)
        if whole and text.startswith(whole):
            rest = len(whole)
            while rest and not trained[rest - 1]:
                rest -= 1
            unasked = not header and asked.endswith(whole[rest:])  # Llama 3's first template always writes one
            if (whole[rest:].strip() and not unasked) or rest == 0:
                return f"wrong: answer {number + 1} ends before {whole[rest:]!r}"
            beyond = text[len(whole) :] if any(trained[len(whole) :]) else ""
            if beyond and beyond not in NEXT_HEADERS and number + 1 == len(messages):
                return f"wrong: {beyond!r} after the last answer is trained"
    return None


def judged(name: str, tokenizer: Any, source: str) -> dict[str, str]:
    """Verdicts by record."""
    template, oracle = chat_template(tokenizer, source=source, date=DATE), Oracle(name, tokenizer, source)
    return {kind: verdict(template, oracle, record) for kind, record in records().items()}


def pair_table(templates: Iterator[tuple[str, Any, str]]) -> str:
    """Counts of verdicts by template (name, tokenizer, source), and every wrong pair in words."""
    counts: dict[str, Counter[str]] = {}
    wrong = []
    for name, tokenizer, source in templates:
        found = judged(name, tokenizer, source)
        counts[name] = Counter(each.partition(": ")[0] if each.startswith("wrong") else each for each in found.values())
        wrong += [f"{name}, {kind}: {each}" for kind, each in found.items() if each.startswith("wrong")]
    counts["all"] = sum(counts.values(), Counter())
    columns = ["exact", *sorted(each for each in counts["all"] if each.startswith("refused")), "wrong"]
    lines = ["| template | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    lines += [f"| `{name}` | " + " | ".join(str(of[each]) for each in columns) + " |" for name, of in counts.items()]
    return "\n".join([*lines, *wrong])
