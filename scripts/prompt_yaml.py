"""Writes a prompt format in YAML, as this package read it before 0.1, as a Jinja file; for one release.

::

    python scripts/prompt_yaml.py my.yaml > my.jinja
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from energon_packing.errors import ConfigError, UserError
from energon_packing.plain_yaml import load_yaml

_MEDIA = {"image": "{image}", "video": "{video}", "placement": "inline"}
_TOOLS: dict[str, Any] = {
    **{"definitions": None, "before_definitions": "", "placement": "system", "definition": "{json}", "tokens": []},
    **{"between_definitions": "", "calls": "{calls}", "call": None, "before_calls": "", "between_calls": ""},
    **{"alone": False, "id_length": None},
}
_PROMPT: dict[str, Any] = {
    **{"user": None, "assistant": None, "begin": "", "separator": "", "default_system": None, "system": None},
    **{"system_in_user": None, "assistant_after_tool": None, "assistant_with_calls": None, "generation_prompt": None},
    **{"tool": None, "tool_group": "{tools}", "between_tools": "", "trim": False, "trim_assistant": False},
    **{"media": {}, "tools": {}, "tokens": []},
}
_FIELDS = (
    "{% macro fields(function) %}{% for key, value in function.items() if key != 'return' %}"
    """{{ ('"' if loop.first else ', "') + key + '": ' }}"""
    """{{ '"' + value + '"' if value is string else value | tojson }}"""
    "{% endfor %}{% endmacro %}\n"
)
_STATE = "{% set first = 1 if messages and messages[0].role == 'system' else 0 %}\n"


def jinja_of(name: str, text: str) -> str:
    """Returns the Jinja template of a format in YAML; ``name`` is for its refusals.

    Raises:
        ConfigError: the text is not YAML, or does not hold what a format has.
    """
    import yaml

    try:
        values = load_yaml(text)
        media, tools = _MEDIA | values.get("media", {}), _TOOLS | values.get("tools", {})
        prompt = _PROMPT | values
        if {*prompt, *media, *tools} - {*_PROMPT, *_MEDIA, *_TOOLS}:
            raise ValueError(f"unknown keys {sorted({*prompt, *media, *tools} - {*_PROMPT, *_MEDIA, *_TOOLS})}")
        return _written(name, prompt, media, tools)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name} is no prompt format in YAML: {' '.join(str(error).split())}") from error


def _written(name: str, prompt: dict[str, Any], media: dict[str, Any], tools: dict[str, Any]) -> str:
    (ask, _), (user, after_user) = prompt["assistant"].split("{content}"), prompt["user"].split("{content}")
    content, no_such = "show(message.content)", f"the prompt {name} defines no "
    plain = content + " | trim" * prompt["trim"]
    lacks = "{{ raise_exception((('the tokenizer has no token ' + lacking + ', so that ') if lacking else '') + "

    def defined(part: str | None, what: str) -> str:
        refusal = lacks + json.dumps(no_such + what, ensure_ascii=False) + ") }}"
        return refusal if part is None else _if("lacking", refusal, part)

    def refuse(why: str) -> str:
        return "{{ raise_exception(" + json.dumps(f"the prompt {name} {why}", ensure_ascii=False) + ") }}"

    def checked(value: str) -> str:
        length = tools["id_length"]
        why = f"writes ids of tool calls, of {length} characters each"
        return _if(f"{value} is not string or {value} | length != {length}", refuse(why)) if length else ""

    def visual(kind: str) -> str:
        keys = {key: f"media.{key}" for key in ("image", "video", "image_token", "video_token")}
        wanted = [value for key, value in keys.items() if f"{{{key}}}" in media[kind]]
        return _if(" and ".join(wanted) or "true", _text(media[kind], **keys), refuse(f"has no text for a {kind}"))

    def answer(text: str) -> str:
        before, after = text.split("{content}")
        trained = "{{ " + content + " | trim" * (prompt["trim"] or prompt["trim_assistant"]) + " }}"
        trained += _if("message.tool_calls", defined(calls, "tool calls")) + _text(after)
        return _text(before) + "{% generation %}" + trained + "{% endgeneration %}"

    neither = "{{ raise_exception('a part of the content is neither text, image nor video') }}"
    shown = _if("part is string", "{{ part }}", _if("part.type == 'text'", "{{ part.text }}", neither))
    shown = _if("part.type == 'image'", visual("image"), _if("part.type == 'video'", visual("video"), shown))
    visible = "part is not string and part.type in ['image', 'video']"
    kinds = (visible, f"not ({visible})") if media["placement"] == "first" else ("true",)
    parts = "".join(_for(f"part in parts if {kind}", shown) for kind in kinds)
    calls = definitions = None
    if tools["call"] is not None:
        opening, closing = tools["calls"].split("{calls}")
        beside = refuse("has no place for a text beside tool calls") if tools["alone"] else _text(tools["before_calls"])
        arguments = "call.arguments if call.arguments is string else call.arguments | tojson"
        call = _text(tools["call"], name="call.name", arguments=arguments, id="entry.id")
        each = "{% set call = entry.function or entry %}" + checked("entry.id")
        each += _if("not loop.first", _text(tools["between_calls"])) + call
        calls = _if("message.content", beside) + _text(opening)
        calls += _for("entry in message.tool_calls", each) + _text(closing)
    if tools["definitions"] is not None:
        opening, closing = tools["definitions"].split("{definitions}")
        each = _text(tools["definition"], json="tool | tojson", fields="fields(tool.function or tool)")
        each = _if("not loop.first", _text(tools["between_definitions"])) + each
        definitions = _text(opening) + _for("tool in tools", each) + _text(closing)
    asked = definitions is not None and tools["placement"] == "last_user"
    spoken, separator = "system is not none", _text(prompt["separator"])
    system = _if(spoken, _text(tools["before_definitions"])) + defined(definitions, "tools")
    system = "" if asked else _if("tools", system)
    if prompt["system"] is not None:
        before, after = prompt["system"].split("{content}")
        system = _text(before) + "{{ system or '' }}" + system + _text(after) + separator
        system = _if(spoken if asked else f"{spoken} or tools", system)
    elif prompt["system_in_user"] is None:
        system += _if(spoken, refuse("has no system turn"))
    else:
        unread = f"{spoken} and (messages | length == first or messages[first].role != 'user')"
        system += _if(unread, refuse("writes a system turn into a user turn, and none follows"))
    questions = "messages | selectattr('role', 'equalto', 'user') | list | length"
    counted = "{% set seen = namespace(questions=0) %}"
    counted += _if(f"tools and not {questions}", refuse("defines tools before the last question, and there is none"))
    question = _text(prompt["user"], content=plain)
    if prompt["system_in_user"] is not None:
        joined = _text(user) + _text(prompt["system_in_user"], system="system", content=plain) + _text(after_user)
        question = _if(f"loop.first and {spoken}", joined, question)
    if asked:
        last = _if(f"tools and seen.questions == {questions}", defined(definitions, "tools"))
        question = "{% set seen.questions = seen.questions + 1 %}" + last + question
    assistant, after_tool = answer(prompt["assistant"]), "loop.previtem is defined and loop.previtem.role == 'tool'"
    if prompt["assistant_after_tool"] is not None:
        assistant = _if(after_tool, answer(prompt["assistant_after_tool"]), assistant)
    if prompt["assistant_with_calls"] is not None:
        assistant = _if("message.tool_calls", answer(prompt["assistant_with_calls"]), assistant)
    result = None
    if prompt["tool"] is not None:
        opening, closing = prompt["tool_group"].split("{tools}")
        result = _if(after_tool, _text(prompt["between_tools"]), _text(opening)) + checked("message.tool_call_id")
        result += _text(prompt["tool"], content=plain, id="message.tool_call_id")
        more = "loop.nextitem is defined and loop.nextitem.role == 'tool'"
        result += _if(more, "", _text(closing) + separator)
    later = refuse("knows a system turn at the beginning only")
    later = later if prompt["system"] is None else _text(prompt["system"], content=plain) + separator
    turn = _if("message.role == 'system'", later, refuse("knows no such role"))
    turn = _if("message.role == 'tool'", defined(result, "tool turn"), turn)
    turn = _if("message.role == 'user'", question + separator, turn)
    turn = _if("message.role == 'assistant'", assistant + separator, turn)
    head = f"{{#- {name}\ntokens: {json.dumps(prompt['tokens'], ensure_ascii=False)}\n"
    head += f"tokens of tools: {json.dumps(tools['tokens'], ensure_ascii=False)}\n-#}}\n"
    head += "{% macro show(content) %}{% set parts = [content] if content is string else content or [] %}" + parts
    default = "none" if prompt["default_system"] is None else json.dumps(prompt["default_system"], ensure_ascii=False)
    trimmed = " | trim" * prompt["trim"]
    head += "{% endmacro %}\n" + _FIELDS + _STATE
    head += "{% set system = show(messages[0].content)" + trimmed + " if first else " + default + " %}\n"
    ask = ask if prompt["generation_prompt"] is None else prompt["generation_prompt"]
    body = _text(prompt["begin"]) + system + counted * asked + _for("message in messages[first:]", turn)
    return head + body + _if("add_generation_prompt", _text(ask)) + "\n"


def _text(source: str, **known: str) -> str:
    """Jinja that writes ``source``; ``known`` maps names in braces to expressions."""
    values = {"bos": "bos_token or ''", "eos": "eos_token", **known}
    pieces = re.split(r"(\{(?:" + "|".join(values) + r")\})", source)
    written = (
        f"({values[piece[1:-1]]})" if at % 2 else json.dumps(piece, ensure_ascii=False)
        for at, piece in enumerate(pieces)
        if piece
    )
    return "".join("{{ " + each + " }}" for each in written)


def _for(header: str, body: str) -> str:
    return "{% for " + header + " %}" + body + "{% endfor %}"


def _if(condition: str, then: str, otherwise: str = "") -> str:
    return "{% if " + condition + " %}" + then + "{% else %}" + otherwise + "{% endif %}" if then or otherwise else ""


if __name__ == "__main__":
    try:
        sys.stdout.write(jinja_of(Path(sys.argv[-1]).name, Path(sys.argv[-1]).read_text(encoding="utf-8-sig")))
    except (UserError, OSError) as error:
        sys.exit(f"{error}")
