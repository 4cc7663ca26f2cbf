r"""Prompt formats in a few strings: a YAML file becomes a Jinja template that marks what is trained.

::

    default_system: "Be brief."                               # if a conversation has no system turn; null for none
    system: "<|im_start|>system\n{content}<|im_end|>"
    user: "<|im_start|>user\n{content}<|im_end|>"
    assistant: "<|im_start|>assistant\n{content}<|im_end|>"      # trained from {content} to the end
    separator: "\n"                                              # after every turn, never trained

Only the names in braces that a field knows are replaced; all other braces are text. docs/prompts.md describes every
field. `energon_packing.chat.prompt_jinja` compiles the format.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from energon_packing.errors import ConfigError

MEDIA_NAMES = ("image", "video", "image_token", "video_token")
_NAMES = ("content", "system", "bos", "eos")
_TOOL_NAMES = ("tools", "definitions", "json", "fields", "calls", "name", "arguments", "id")
BRACED = re.compile(r"\{(" + "|".join((*_NAMES, *MEDIA_NAMES, *_TOOL_NAMES)) + r")\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaText:
    """The text that stands for an image or a video.

    ``{image}`` and ``{video}`` are what the processor's own template writes for one; ``{image_token}`` and
    ``{video_token}`` are the placeholder alone.
    """

    image: str = "{image}"
    video: str = "{video}"
    placement: Literal["inline", "first"] = "inline"
    """``first`` puts all media of a turn before its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolText:
    """Tool definitions and calls; a conversation that needs a part that is None is refused."""

    definitions: str | None = None
    """Follows the content of the system turn; ``{definitions}`` stands for all of them."""
    before_definitions: str = ""
    """Between the content of the system turn, if there is one, and the definitions."""
    placement: Literal["system", "last_user"] = "system"
    """``last_user`` puts the definitions before the last user turn instead."""
    definition: str = "{json}"
    """One definition: ``{json}`` is its JSON; ``{fields}`` are the fields of its function as Mistral writes them: JSON,
    but with texts on the first level quoted without escaping, and without a field ``return``."""
    between_definitions: str = ""
    calls: str = "{calls}"
    """Around all calls of an assistant turn."""
    call: str | None = None
    """One call: ``{name}`` as it is, ``{arguments}`` as JSON, ``{id}`` as the record has it."""
    before_calls: str = ""
    """Between the text of an assistant turn, if it has any, and its calls."""
    between_calls: str = ""
    alone: bool = False
    """Whether the format has no place for text next to calls; an answer with both is refused."""
    id_length: int | None = None
    """Length that ids of calls and of their answers must have; None accepts any."""
    tokens: tuple[str, ...] = ()
    """Texts that must be one token each; if the tokenizer lacks one, tools are refused."""

    def __post_init__(self) -> None:
        _hold_once(
            self,
            "tools.",
            ("definitions", "definitions"),
            ("call", "name"),
            ("call", "arguments"),
            ("calls", "calls"),
        )
        if self.definition.count("{json}") + self.definition.count("{fields}") != 1:
            raise ConfigError(
                f"The prompt's tools.definition {self.definition!r} must contain {{json}} or {{fields}} exactly once."
            )
        if self.definitions is None:
            unread = ("placement", "definition", "between_definitions", "before_definitions")
            _unread(self, "tools.", unread, "tools.definitions")
        if self.placement != "system":
            _unread(self, "tools.", ("before_definitions",), "tools.placement: system")
        if self.call is None:
            _unread(self, "tools.", ("calls", "before_calls", "between_calls", "alone"), "tools.call")
        if self.alone and self.before_calls:
            raise ConfigError("The prompt's tools.alone refuses text next to calls, so nothing reads before_calls.")
        if self.id_length is not None and self.id_length < 1:
            raise ConfigError(f"The prompt's tools.id_length is {self.id_length}; it must be at least 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFormat:
    """The strings that turn a conversation into text; see the module's docstring."""

    user: str
    assistant: str
    begin: str = ""
    """Before everything else; ``{bos}`` is empty if the tokenizer has none."""
    default_system: str | None = None
    system: str | None = None
    system_in_user: str | None = None
    """For formats without a system turn: the first user turn's content, made from ``{system}`` and ``{content}``."""
    assistant_after_tool: str | None = None
    """The assistant turn after a tool's answer, if it differs."""
    assistant_with_calls: str | None = None
    """The assistant turn that calls tools, if it differs; the calls follow ``{content}``."""
    tool: str | None = None
    """A tool's answer; ``{id}`` stands for the id of the call."""
    tool_group: str = "{tools}"
    """Around consecutive tool turns."""
    between_tools: str = ""
    separator: str = ""
    generation_prompt: str | None = None
    """The text that asks for an answer; None takes ``assistant`` up to ``{content}``."""
    trim: bool = False
    """Whether contents are stripped of surrounding white space."""
    trim_assistant: bool = False
    media: MediaText = field(default_factory=MediaText)
    tools: ToolText = field(default_factory=ToolText)
    tokens: tuple[str, ...] = ()
    """Texts that must be one token each, or the format is not what the model was trained on."""

    def __post_init__(self) -> None:
        _hold_once(
            self,
            "",
            ("user", "content"),
            ("assistant", "content"),
            ("system", "content"),
            ("tool", "content"),
            ("assistant_after_tool", "content"),
            ("assistant_with_calls", "content"),
            ("tool_group", "tools"),
            ("system_in_user", "content"),
            ("system_in_user", "system"),
        )
        if self.system is not None and self.system_in_user is not None:
            raise ConfigError("A prompt has either system or system_in_user, not both.")
        if self.default_system is not None and self.system is None and self.system_in_user is None:
            raise ConfigError("The prompt has a default_system, but neither system nor system_in_user to put it into.")
        tools = self.tools
        if tools.definitions is not None and self.system is None and tools.placement == "system":
            raise ConfigError("The prompt's tools.definitions follow the system turn, so it needs a system.")
        if self.tool is None:
            _unread(self, "", ("tool_group", "between_tools", "assistant_after_tool"), "tool")
        if tools.call is None:
            _unread(self, "", ("assistant_with_calls",), "tools.call")
        if tools.call is None and self.tool is None:
            _unread(tools, "tools.", ("id_length",), "tool or tools.call")
            if tools.definitions is None:
                _unread(tools, "tools.", ("tokens",), "tool, tools.call or tools.definitions")

    @property
    def needs_eos(self) -> bool:
        """Whether an end-of-sequence token is part of the format."""
        # A default system turn is written verbatim, like one in a conversation.
        texts = (
            getattr(part, entry.name)
            for part in (self, self.media, self.tools)
            for entry in dataclasses.fields(part)
            if entry.name != "default_system"
        )
        return any(isinstance(text, str) and "{eos}" in text for text in texts)


def _hold_once(part: Any, prefix: str, *wanted: tuple[str, str]) -> None:
    """Refuses a field that does not hold exactly once the name in braces at which it is split."""
    for name, braced in wanted:
        text = getattr(part, name)
        if text is not None and text.count(f"{{{braced}}}") != 1:
            raise ConfigError(f"The prompt's {prefix}{name} {text!r} must contain {{{braced}}} exactly once.")


def _unread(part: Any, prefix: str, names: tuple[str, ...], needed: str) -> None:
    """Refuses fields that differ from their defaults although nothing reads them, because ``needed`` is not set."""
    for entry in dataclasses.fields(part):
        value = getattr(part, entry.name)
        if entry.name in names and value != entry.default:
            raise ConfigError(
                f"The prompt's {prefix}{entry.name} is {value!r}, but nothing reads it unless {needed} is set."
            )
