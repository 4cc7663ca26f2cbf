"""Compiles a prompt format to a Jinja template, with marks around what is trained.

The template is rendered like any other, by the sandboxed renderer of transformers. Every text of the format becomes a
Jinja string, so its content is written and never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from energon_packing.chat.prompt import BRACED, MEDIA_NAMES, PromptFormat, ToolText


def compile_prompt(name: str, prompt: PromptFormat, media: Mapping[str, str], *, lacking: Sequence[str] = ()) -> str:
    """Returns the Jinja template of a prompt format.

    Args:
        name: of the format, for the messages that refuse a conversation.
        prompt: the format.
        media: values of ``image``, ``video``, ``image_token`` and ``video_token``; the template refuses an image or
            video whose value is missing.
        lacking: tokens of ``prompt.tools.tokens`` that the tokenizer lacks; if there are any, tools are refused.
    """
    undefined = f"the prompt {name} defines no"
    if lacking:
        undefined = f"the tokenizer has no token {lacking[0]}, so that {undefined}"
    return _Compiler(
        name=name,
        prompt=prompt,
        media=media,
        tools=ToolText() if lacking else prompt.tools,
        tool=None if lacking else prompt.tool,
        undefined=undefined,
    ).template()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compiler:
    """Writes the template piece by piece; each method returns the Jinja of the part that it names.

    In the template, ``state.system`` is the system turn's content or the default, and ``state.first`` the index of the
    first message after it. If tools are defined before the last question, ``state.asked`` is the number of the last
    user turn and ``state.users`` that of the current one, counted from 0.

    Attributes:
        name, prompt, media: as passed to `compile_prompt`.
        tools, tool: of the prompt; empty if the tokenizer lacks one of their tokens.
        undefined: the beginning of the message that refuses tools.
    """

    name: str
    prompt: PromptFormat
    media: Mapping[str, str]
    tools: ToolText
    tool: str | None
    undefined: str

    def template(self) -> str:
        """The whole template."""
        prompt = self.prompt
        separator = _text(prompt.separator)
        ask = prompt.assistant.split("{content}")[0] if prompt.generation_prompt is None else prompt.generation_prompt
        turn = _cases(
            {
                "message.role == 'assistant'": self.assistant_turn() + separator,
                "message.role == 'user'": self.user_turn() + separator,
                "message.role == 'tool'": self.tool_turn(),  # consecutive ones share one separator
                "message.role == 'system'": self.later_system_turn() + separator,
            },
            _refuse(f"the prompt {self.name} knows no such role"),
        )
        return (
            self.show_macro()
            + (FIELDS if "{fields}" in self.tools.definition else "")
            + self.beginning()
            + _for("message in messages[state.first:]", turn)
            + _if("add_generation_prompt", _text(ask))
        )

    def show_macro(self) -> str:
        """``show(content)``: writes a content, which is a text or a list of texts, images and videos."""
        part = _cases(
            {
                "part is string": "{{ part }}",
                "part.type == 'image'": self.media_text("image"),
                "part.type == 'video'": self.media_text("video"),
                "part.type == 'text'": "{{ part.text }}",
            },
            _refuse("a part of the content is neither text, image nor video"),
        )
        parts = _for("part in content", part)
        if self.prompt.media.placement == "first":
            visual = "['image', 'video']"
            parts = "".join(
                _for("part in content", _if(condition, part))
                for condition in (
                    f"part is not string and part.type in {visual}",
                    f"part is string or part.type not in {visual}",
                )
            )
        return (
            "{% macro show(content) %}{% if content is string %}{{ content }}{% elif content %}"
            + parts
            + "{% endif %}{% endmacro %}"
        )

    def media_text(self, kind: str) -> str:
        """The text of an image or video; a refusal if `media` has no value for it."""
        source = getattr(self.prompt.media, kind)
        wanted = [found for found in BRACED.findall(source) if found in MEDIA_NAMES]
        if any(found not in self.media for found in wanted):
            return _refuse(f"the prompt {self.name} has no text for a {kind}")
        return _text(source, **{found: _quoted(self.media[found]) for found in wanted})

    def beginning(self) -> str:
        """Everything before the turns: the state, the beginning, the system turn and tool definitions."""
        prompt, default = self.prompt, self.prompt.default_system
        trimmed = " | trim" if prompt.trim else ""
        return (
            "{% set state = namespace(system=" + ("none" if default is None else _quoted(default)) + ", first=0) %}"
            "{% if messages and messages[0].role == 'system' %}"
            "{% set state.system = show(messages[0].content)" + trimmed + " %}"
            "{% set state.first = 1 %}{% endif %}"
            + _text(prompt.begin)
            + self.system_turn()
            + (self.count_of_questions() if self.defined_before_question else "")
        )

    def system_turn(self) -> str:
        """The system turn with tool definitions, as far as the format has a place for either."""
        prompt, spoken = self.prompt, "state.system is not none"
        between = _text(self.tools.before_definitions)
        between = _if("state.system is not none", between) if between else ""
        definitions = "" if self.defined_before_question else _if("tools", between + self.definitions())
        if prompt.system is not None:
            before, after = prompt.system.split("{content}")
            turn = _text(before) + "{{ state.system or '' }}" + definitions + _text(after) + _text(prompt.separator)
            return _if(spoken if self.defined_before_question else f"{spoken} or tools", turn)
        if prompt.system_in_user is None:
            return definitions + _if(spoken, _refuse(f"the prompt {self.name} has no system turn"))
        unread = "(messages | length == state.first or messages[state.first].role != 'user')"
        refusal = _refuse(f"the prompt {self.name} writes a system turn into a user turn, and none follows")
        return definitions + _if(f"{spoken} and {unread}", refusal)

    def later_system_turn(self) -> str:
        """A system turn that is not the first message."""
        if self.prompt.system is None:
            return _refuse(f"the prompt {self.name} knows a system turn at the beginning only")
        return self.plain_turn(self.prompt.system)

    @property
    def defined_before_question(self) -> bool:
        """Whether tool definitions precede the last question."""
        return self.tools.definitions is not None and self.tools.placement == "last_user"

    def count_of_questions(self) -> str:
        """Counts user turns in advance, so that the last one is known when it is reached."""
        return (
            "{% set state.asked = -1 %}{% for message in messages[state.first:] if message.role == 'user' %}"
            "{% set state.asked = state.asked + 1 %}{% endfor %}{% set state.users = -1 %}"
        ) + _if(
            "tools and state.asked < 0",
            _refuse(f"the prompt {self.name} defines tools before the last question, and there is none"),
        )

    def definitions(self) -> str:
        """Definitions of all tools."""
        tools = self.tools
        if tools.definitions is None:
            return _refuse(f"{self.undefined} tools")
        before, after = tools.definitions.split("{definitions}")
        each = _text(tools.definition, json="tool | tojson", fields="fields(tool.function or tool)")
        between = _if("not loop.first", _text(tools.between_definitions))
        return _text(before) + _for("tool in tools", between + each) + _text(after)

    def user_turn(self) -> str:
        """A user turn, with the system text or tool definitions if the format puts them there."""
        prompt = self.prompt
        turn = self.plain_turn(prompt.user)
        if prompt.system_in_user is not None:
            before, after = prompt.user.split("{content}")
            joined = _text(prompt.system_in_user, system="state.system", content=_content(prompt.trim))
            first = _text(before) + joined + _text(after)
            turn = _if("loop.first and state.system is not none", first, turn)
        if self.defined_before_question:
            defined = _if("tools and state.users == state.asked", self.definitions())
            turn = "{% set state.users = state.users + 1 %}" + defined + turn
        return turn

    def plain_turn(self, source: str) -> str:
        """A turn from a text with ``{content}``."""
        return _text(source, content=_content(self.prompt.trim))

    def assistant_turn(self) -> str:
        """An assistant turn; its form depends on the turn before it and on whether it calls tools."""
        prompt = self.prompt
        turn = self.answer(prompt.assistant)
        if prompt.assistant_after_tool is not None:
            after_tool = "loop.previtem is defined and loop.previtem.role == 'tool'"
            turn = _if(after_tool, self.answer(prompt.assistant_after_tool), turn)
        if prompt.assistant_with_calls is not None:
            turn = _if("message.tool_calls", self.answer(prompt.assistant_with_calls), turn)
        return turn

    def answer(self, source: str) -> str:
        """An assistant turn, marked as trained from its content to its end."""
        before, after = source.split("{content}")
        content = _content(self.prompt.trim or self.prompt.trim_assistant)
        trained = "{{ " + content + " }}" + _if("message.tool_calls", self.calls()) + _text(after)
        return _text(before) + "{% generation %}" + trained + "{% endgeneration %}"

    def calls(self) -> str:
        """Tool calls of an assistant turn."""
        tools = self.tools
        if tools.call is None:
            return _refuse(f"{self.undefined} tool calls")
        opening, closing = tools.calls.split("{calls}")
        beside = _text(tools.before_calls)
        if tools.alone:
            beside = _refuse(f"the prompt {self.name} has no place for a text beside tool calls")
        call = _text(
            tools.call,
            name="call.name",
            arguments="call.arguments if call.arguments is string else call.arguments | tojson",
            id="call_id",
        )
        each = (
            "{% set call = entry.function if entry.function else entry %}{% set call_id = entry.id %}"
            + self.check_id("call_id")
            + _if("not loop.first", _text(tools.between_calls))
            + call
        )
        return (
            (_if("message.content", beside) if beside else "")
            + _text(opening)
            + _for("entry in message.tool_calls", each)
            + _text(closing)
        )

    def tool_turn(self) -> str:
        """A tool's answer; consecutive ones form one group."""
        prompt = self.prompt
        if self.tool is None:
            return _refuse(f"{self.undefined} tool turn")
        opening, closing = prompt.tool_group.split("{tools}")
        first = "loop.previtem is not defined or loop.previtem.role != 'tool'"
        last = "loop.nextitem is not defined or loop.nextitem.role != 'tool'"
        return (
            _if(first, _text(opening), _text(prompt.between_tools))
            + self.check_id("message.tool_call_id")
            + _text(self.tool, content=_content(prompt.trim), id="message.tool_call_id")
            + _if(last, _text(closing) + _text(prompt.separator))
        )

    def check_id(self, value: str) -> str:
        """Refuses an id that is missing or does not have the length that the format requires."""
        length = self.tools.id_length
        if length is None:
            return ""
        why = f"the prompt {self.name} writes ids of tool calls, of {length} characters each"
        return _if(f"{value} is not string or {value} | length != {length}", _refuse(why))


FIELDS = (
    "{% macro fields(function) %}{% for key, value in function.items() if key != 'return' %}"
    "{% if not loop.first %}{{ ', ' }}{% endif %}"
    """{{ '"' + key + '": ' }}{{ '"' + value + '"' if value is string else value | tojson }}"""
    "{% endfor %}{% endmacro %}"
)


def _text(source: str, **known: str) -> str:
    """Jinja that writes ``source``; ``known`` maps names in braces to expressions."""
    values = {"bos": "(bos_token | default('') or '')", "eos": "eos_token", **known}
    pieces = []
    for at, piece in enumerate(BRACED.split(source)):
        if at % 2 and piece in values:
            pieces.append("{{ " + values[piece] + " }}")
        else:
            pieces.append(_literal(f"{{{piece}}}" if at % 2 else piece))
    return "".join(pieces)


def _literal(source: str) -> str:
    """Jinja that writes a text unchanged, whatever tags or line breaks it holds."""
    return "{{ " + _quoted(source) + " }}" if source else ""


def _quoted(source: str) -> str:
    """A text as a Jinja string."""
    return json.dumps(source, ensure_ascii=False)


def _content(trim: bool) -> str:
    return "show(message.content)" + (" | trim" if trim else "")


def _refuse(why: str) -> str:
    return "{{ raise_exception(" + _quoted(why) + ") }}"


def _for(header: str, body: str) -> str:
    return "{% for " + header + " %}" + body + "{% endfor %}"


def _if(condition: str, then: str, otherwise: str | None = None) -> str:
    return "{% if " + condition + " %}" + then + ("" if otherwise is None else "{% else %}" + otherwise) + "{% endif %}"


def _cases(cases: Mapping[str, str], otherwise: str) -> str:
    """Jinja for the first text whose condition holds, or ``otherwise``."""
    written = "{% elif ".join(condition + " %}" + then for condition, then in cases.items())
    return "{% if " + written + "{% else %}" + otherwise + "{% endif %}"
