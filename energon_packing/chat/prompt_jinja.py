"""From a prompt format to the Jinja template that writes it, with marks around what is trained.

The template is rendered as any other, by the sandboxed renderer of transformers. Every text of the format becomes a
Jinja string, so that whatever it holds is written and never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from energon_packing.chat.prompt import BRACED, MEDIA_NAMES, PromptFormat, ToolText


def compile_prompt(name: str, prompt: PromptFormat, media: Mapping[str, str], *, lacking: Sequence[str] = ()) -> str:
    """The Jinja template of a prompt format.

    Args:
        name: of the format, for the messages with which the template refuses a conversation.
        prompt: the format.
        media: values of ``image``, ``video``, ``image_token`` and ``video_token``; a missing one is refused where a
            conversation has such a medium.
        lacking: tokens of ``prompt.tools.tokens`` that the tokenizer does not have; tools are refused with them.
    """

    def text(source: str, **known: str) -> str:
        """Jinja that writes ``source``; ``known`` gives the expressions of names in braces."""
        values = {"bos": "(bos_token | default('') or '')", "eos": "eos_token", **known}
        pieces = []
        for at, piece in enumerate(BRACED.split(source)):
            if at % 2 and piece in values:
                pieces.append("{{ " + values[piece] + " }}")
            else:
                pieces.append(_literal(f"{{{piece}}}" if at % 2 else piece))
        return "".join(pieces)

    def medium(kind: str) -> str:
        source = getattr(prompt.media, kind)
        wanted = [found for found in BRACED.findall(source) if found in MEDIA_NAMES]
        if any(found not in media for found in wanted):
            return _refuse(f"the prompt {name} has no text for a {kind}")
        return text(source, **{found: json.dumps(media[found], ensure_ascii=False) for found in wanted})

    def content(trim: bool) -> str:
        return "show(message.content)" + (" | trim" if trim else "")

    def turn(source: str) -> str:
        return text(source, content=content(prompt.trim))

    def answer(source: str) -> str:
        before, after = source.split("{content}")
        trained = "{{ " + content(prompt.trim or prompt.trim_assistant) + " }}" + calls + text(after)
        return text(before) + "{% generation %}" + trained + "{% endgeneration %}"

    tools, no_tools = prompt.tools, f"the prompt {name} defines no"
    if lacking:
        tools, no_tools = ToolText(), f"the tokenizer has no token {lacking[0]}, so that the prompt {name} defines no"
    calls = _refuse(f"{no_tools} tool calls")
    if tools.call is not None:
        opening, closing = tools.calls.split("{calls}")
        one = text(
            tools.call,
            name="call.name",
            arguments="call.arguments if call.arguments is string else call.arguments | tojson",
            id="call_id",
        )
        beside = text(tools.before_calls)
        if tools.alone:
            beside = _refuse(f"the prompt {name} has no place for a text beside tool calls")
        calls = (
            ("{% if message.content %}" + beside + "{% endif %}" if beside else "")
            + text(opening)
            + "{% for entry in message.tool_calls %}"
            + "{% set call = entry.function if entry.function else entry %}"
            + "{% set call_id = entry.id %}"
            + _check_id(name, "call_id", tools.id_length)
            + ("{% if not loop.first %}" + text(tools.between_calls) + "{% endif %}")
            + one
            + "{% endfor %}"
            + text(closing)
        )
    calls = "{% if message.tool_calls %}" + calls + "{% endif %}"

    definitions = _refuse(f"{no_tools} tools")
    if tools.definitions is not None:
        before, after = tools.definitions.split("{definitions}")
        each = text(tools.definition, json="tool | tojson", fields="fields(tool.function or tool)")
        between = "{% if not loop.first %}" + text(tools.between_definitions) + "{% endif %}"
        definitions = text(before) + "{% for tool in tools %}" + between + each + "{% endfor %}" + text(after)
    asked = tools.definitions is not None and tools.placement == "last_user"

    part = (
        "{% if part is string %}{{ part }}"
        "{% elif part.type == 'image' %}"
        + medium("image")
        + "{% elif part.type == 'video' %}"
        + medium("video")
        + "{% elif part.type == 'text' %}{{ part.text }}"
        "{% else %}" + _refuse("a part of the content is neither text, image nor video") + "{% endif %}"
    )
    parts = "{% for part in content %}" + part + "{% endfor %}"
    if prompt.media.placement == "first":
        visual = "['image', 'video']"
        parts = "".join(
            "{% for part in content %}{% if " + condition + " %}" + part + "{% endif %}{% endfor %}"
            for condition in (
                f"part is not string and part.type in {visual}",
                f"part is string or part.type not in {visual}",
            )
        )
    show = (
        "{% macro show(content) %}{% if content is string %}{{ content }}{% elif content %}"
        + parts
        + "{% endif %}{% endmacro %}"
    )

    default = "none" if prompt.default_system is None else json.dumps(prompt.default_system, ensure_ascii=False)
    start = (
        "{% set state = namespace(system=" + default + ", first=0) %}"
        "{% if messages and messages[0].role == 'system' %}"
        "{% set state.system = show(messages[0].content)" + (" | trim" if prompt.trim else "") + " %}"
        "{% set state.first = 1 %}{% endif %}"
    ) + text(prompt.begin)
    if prompt.system is not None:
        before, after = prompt.system.split("{content}")
        here = "" if asked else "{% if tools %}" + definitions + "{% endif %}"
        start += ("{% if state.system is not none %}" if asked else "{% if state.system is not none or tools %}") + (
            text(before) + "{{ state.system or '' }}" + here + text(after) + text(prompt.separator) + "{% endif %}"
        )
        later_system = turn(prompt.system)
    else:
        start += "" if asked else "{% if tools %}" + definitions + "{% endif %}"
        later_system = _refuse(f"the prompt {name} knows a system turn at the beginning only")
    user = turn(prompt.user)
    if prompt.system_in_user is not None:
        joined = text(prompt.system_in_user, system="state.system", content=content(prompt.trim))
        before, after = prompt.user.split("{content}")
        first = text(before) + joined + text(after)
        user = "{% if loop.first and state.system is not none %}" + first + "{% else %}" + user + "{% endif %}"
        start += (
            "{% if state.system is not none and (messages | length == state.first"
            " or messages[state.first].role != 'user') %}"
            + _refuse(f"the prompt {name} writes a system turn into a user turn, and none follows")
            + "{% endif %}"
        )
    elif prompt.system is None:
        start += "{% if state.system is not none %}" + _refuse(f"the prompt {name} has no system turn") + "{% endif %}"

    if asked:
        start += (
            "{% set state.asked = -1 %}{% for message in messages[state.first:] if message.role == 'user' %}"
            "{% set state.asked = state.asked + 1 %}{% endfor %}{% set state.users = -1 %}"
            "{% if tools and state.asked < 0 %}"
            + _refuse(f"the prompt {name} defines tools before the last question, and there is none")
            + "{% endif %}"
        )
        user = (
            "{% set state.users = state.users + 1 %}"
            "{% if tools and state.users == state.asked %}" + definitions + "{% endif %}" + user
        )

    assistant = answer(prompt.assistant)
    if prompt.assistant_after_tool is not None:
        assistant = (
            "{% if loop.previtem is defined and loop.previtem.role == 'tool' %}"
            + answer(prompt.assistant_after_tool)
            + "{% else %}"
            + assistant
            + "{% endif %}"
        )
    if prompt.assistant_with_calls is not None:
        called = answer(prompt.assistant_with_calls)
        assistant = "{% if message.tool_calls %}" + called + "{% else %}" + assistant + "{% endif %}"
    tool = _refuse(f"{no_tools} tool turn")
    if prompt.tool is not None and not lacking:
        opening, closing = prompt.tool_group.split("{tools}")
        tool = (
            "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}"
            + text(opening)
            + "{% else %}"
            + text(prompt.between_tools)
            + "{% endif %}"
            + _check_id(name, "message.tool_call_id", tools.id_length)
            + text(prompt.tool, content=content(prompt.trim), id="message.tool_call_id")
            + "{% if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}"
            + text(closing)
            + text(prompt.separator)
            + "{% endif %}"
        )
    separator = text(prompt.separator)
    ask = prompt.assistant.split("{content}")[0] if prompt.generation_prompt is None else prompt.generation_prompt
    return (
        show
        + (FIELDS if "{fields}" in tools.definition else "")
        + start
        + "{% for message in messages[state.first:] %}"
        "{% if message.role == 'assistant' %}"
        + assistant
        + separator
        + "{% elif message.role == 'user' %}"
        + user
        + separator
        + "{% elif message.role == 'tool' %}"
        + tool
        + "{% elif message.role == 'system' %}"
        + later_system
        + separator
        + "{% else %}"
        + _refuse(f"the prompt {name} knows no such role")
        + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + text(ask) + "{% endif %}"
    )


FIELDS = (
    "{% macro fields(function) %}{% for key, value in function.items() if key != 'return' %}"
    "{% if not loop.first %}{{ ', ' }}{% endif %}"
    """{{ '"' + key + '": ' }}{{ '"' + value + '"' if value is string else value | tojson }}"""
    "{% endfor %}{% endmacro %}"
)


def _check_id(name: str, value: str, length: int | None) -> str:
    """Jinja that refuses an id that is missing or of another length."""
    if length is None:
        return ""
    why = f"the prompt {name} writes ids of tool calls, of {length} characters each"
    return "{% if " + value + " is not string or " + value + f" | length != {length} %}}" + _refuse(why) + "{% endif %}"


def _literal(source: str) -> str:
    """Jinja that writes a text unchanged, whatever tags or line breaks it holds."""
    return "{{ " + json.dumps(source, ensure_ascii=False) + " }}" if source else ""


def _refuse(why: str) -> str:
    return "{{ raise_exception(" + json.dumps(why, ensure_ascii=False) + ") }}"
