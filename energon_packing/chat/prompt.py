r"""Prompt formats in a few strings: a YAML file becomes a Jinja template that marks what is trained.

::

    default_system: "Be brief."                               # where a conversation has no system turn; null for none
    system: "<|im_start|>system\n{content}<|im_end|>"
    user: "<|im_start|>user\n{content}<|im_end|>"
    assistant: "<|im_start|>assistant\n{content}<|im_end|>"      # trained from {content} to the end
    separator: "\n"                                              # after every turn, never trained

Only the names in braces that a field knows are replaced, all other braces are text. docs/prompts.md tells every field.
The compiled template is rendered as any other, by the sandboxed renderer of transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from energon_packing.errors import ConfigError

NAMES = ("content", "system", "bos", "eos", "image", "video", "image_token", "video_token")
_TOOL_NAMES = ("tools", "definitions", "json", "calls", "name", "arguments")
_BRACED = re.compile(r"\{(" + "|".join((*NAMES, *_TOOL_NAMES)) + r")\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaText:
    """What stands for an image and a video.

    ``{image}`` and ``{video}`` are what the processor's own template writes for one, ``{image_token}`` and
    ``{video_token}`` the placeholder alone.
    """

    image: str = "{image}"
    video: str = "{video}"
    placement: Literal["inline", "first"] = "inline"
    """``first`` puts all media of a turn before its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolText:
    """Tool definitions and calls; a part that is None is refused where a conversation needs it."""

    definitions: str | None = None
    """Follows the content of the system turn; ``{definitions}`` stands for all of them."""
    definition: str = "{json}"
    calls: str = "{calls}"
    """Around all calls of an assistant turn."""
    call: str | None = None
    """One call: ``{name}`` as it is, ``{arguments}`` as JSON."""
    before_calls: str = ""
    """Between the text of an assistant turn, where it has any, and its calls."""
    between_calls: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFormat:
    """The strings that make a conversation a text; see the module's docstring."""

    user: str
    assistant: str
    begin: str = ""
    """Before everything; ``{bos}`` is nothing for a tokenizer without one."""
    default_system: str | None = None
    system: str | None = None
    system_in_user: str | None = None
    """For formats without a system turn: the first user turn's content, from ``{system}`` and ``{content}``."""
    assistant_after_tool: str | None = None
    """The assistant turn after a tool's answer, where it differs."""
    tool: str | None = None
    tool_group: str = "{tools}"
    """Around tool turns that follow each other."""
    between_tools: str = ""
    separator: str = ""
    generation_prompt: str | None = None
    """What an answer is asked for with; None is the assistant's text up to ``{content}``."""
    trim: bool = False
    """Whether contents lose the white space around them."""
    trim_assistant: bool = False
    media: MediaText = field(default_factory=MediaText)
    tools: ToolText = field(default_factory=ToolText)
    tokens: tuple[str, ...] = ()
    """Texts that must be one token each, or the format is not what the model was trained on."""

    def __post_init__(self) -> None:
        for name, wanted in (
            ("user", "content"),
            ("assistant", "content"),
            ("system", "content"),
            ("tool", "content"),
            ("assistant_after_tool", "content"),
            ("tool_group", "tools"),
            ("system_in_user", "content"),
            ("system_in_user", "system"),
        ):
            text = getattr(self, name)
            if text is not None and text.count(f"{{{wanted}}}") != 1:
                raise ConfigError(f"The prompt's {name} {text!r} must hold {{{wanted}}} exactly once.")
        if self.system is not None and self.system_in_user is not None:
            raise ConfigError("A prompt has either system or system_in_user, not both.")
        if self.default_system is not None and self.system is None and self.system_in_user is None:
            raise ConfigError("The prompt has a default_system, but neither system nor system_in_user to put it into.")
        for name, wanted in (
            ("definitions", "definitions"),
            ("call", "name"),
            ("call", "arguments"),
            ("calls", "calls"),
        ):
            text = getattr(self.tools, name)
            if text is not None and text.count(f"{{{wanted}}}") != 1:
                raise ConfigError(f"The prompt's tools.{name} {text!r} must hold {{{wanted}}} exactly once.")
        if self.tools.definitions is not None and self.system is None:
            raise ConfigError("The prompt's tools.definitions follow the system turn, so it needs a system.")

    @property
    def needs_eos(self) -> bool:
        """Whether an end-of-sequence token is part of the format."""
        return any(
            "{eos}" in text for text in (self.user, self.assistant, self.assistant_after_tool or "", self.separator)
        )


def compile_prompt(name: str, prompt: PromptFormat, media: Mapping[str, str]) -> str:
    """The Jinja template of a prompt format.

    Args:
        name: of the format, for the messages with which the template refuses a conversation.
        prompt: the format.
        media: values of ``image``, ``video``, ``image_token`` and ``video_token``; a missing one is refused where a
            conversation has such a medium.
    """

    def text(source: str, **known: str) -> str:
        """Jinja that writes ``source``; ``known`` gives the expressions of names in braces."""
        values = {"bos": "(bos_token | default('') or '')", "eos": "eos_token", **known}
        pieces = []
        for at, piece in enumerate(_BRACED.split(source)):
            if at % 2 and piece in values:
                pieces.append("{{ " + values[piece] + " }}")
            else:
                pieces.append(_literal(f"{{{piece}}}" if at % 2 else piece))
        return "".join(pieces)

    def medium(kind: str) -> str:
        source = getattr(prompt.media, kind)
        wanted = [found for found in _BRACED.findall(source) if found in NAMES]
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

    tools = prompt.tools
    calls = _refuse(f"the prompt {name} defines no tool calls")
    if tools.call is not None:
        opening, closing = tools.calls.split("{calls}")
        one = text(
            tools.call,
            name="call.name",
            arguments="call.arguments if call.arguments is string else call.arguments | tojson",
        )
        calls = (
            ("{% if message.content %}" + text(tools.before_calls) + "{% endif %}" if tools.before_calls else "")
            + text(opening)
            + "{% for entry in message.tool_calls %}"
            + "{% set call = entry.function if entry.function else entry %}"
            + ("{% if not loop.first %}" + text(tools.between_calls) + "{% endif %}")
            + one
            + "{% endfor %}"
            + text(closing)
        )
    calls = "{% if message.tool_calls %}" + calls + "{% endif %}"

    definitions = _refuse(f"the prompt {name} defines no tools")
    if tools.definitions is not None:
        before, after = tools.definitions.split("{definitions}")
        each = text(tools.definition, json="tool | tojson")
        definitions = text(before) + "{% for tool in tools %}" + each + "{% endfor %}" + text(after)

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
        start += (
            "{% if state.system is not none or tools %}" + text(before) + "{{ state.system or '' }}"
            "{% if tools %}" + definitions + "{% endif %}" + text(after) + text(prompt.separator) + "{% endif %}"
        )
        later_system = turn(prompt.system)
    else:
        start += "{% if tools %}" + definitions + "{% endif %}"
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

    assistant = answer(prompt.assistant)
    if prompt.assistant_after_tool is not None:
        assistant = (
            "{% if loop.previtem is defined and loop.previtem.role == 'tool' %}"
            + answer(prompt.assistant_after_tool)
            + "{% else %}"
            + assistant
            + "{% endif %}"
        )
    tool = _refuse(f"the prompt {name} defines no tool turn")
    if prompt.tool is not None:
        opening, closing = prompt.tool_group.split("{tools}")
        tool = (
            "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}"
            + text(opening)
            + "{% else %}"
            + text(prompt.between_tools)
            + "{% endif %}"
            + turn(prompt.tool)
            + "{% if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}"
            + text(closing)
            + text(prompt.separator)
            + "{% endif %}"
        )
    separator = text(prompt.separator)
    ask = prompt.assistant.split("{content}")[0] if prompt.generation_prompt is None else prompt.generation_prompt
    return (
        show + start + "{% for message in messages[state.first:] %}"
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


def _literal(source: str) -> str:
    """Jinja that writes a text unchanged, whatever tags or line breaks it holds."""
    return "{{ " + json.dumps(source, ensure_ascii=False) + " }}" if source else ""


def _refuse(why: str) -> str:
    return "{{ raise_exception(" + json.dumps(why, ensure_ascii=False) + ") }}"
