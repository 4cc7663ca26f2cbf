"""A chat template as a program: how it receives a conversation, and how it renders a few probes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from energon_packing.chat.sandbox import render_template
from energon_packing.chat.sentinels import Passing, Words, to_messages
from energon_packing.chat.thinking import CLOSE, OPEN
from energon_packing.conversation import Conversation, Turn
from energon_packing.errors import ConfigError, SampleRejected

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIELDS = re.compile(r"\b(?:reasoning_content|reasoning|thinking)\b")
"""Fields of a message in which templates look for thinking."""
_PROBE = "energon packing probe"


class TemplateRenderer:
    """Renders messages with a chat template.

    Args:
        source: the Jinja text.
        special: special tokens by name, as ``apply_chat_template`` passes them.

    Raises:
        ConfigError: the template is not valid Jinja or shows no text of a plain conversation.
    """

    def __init__(self, source: str, special: Mapping[str, Any]) -> None:
        self.source, self._special = source, special
        self.marks_generation = _GENERATION.search(source) is not None
        self.content_as_list = self._wants_lists()

    def run(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, track: bool, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders messages.

        Args:
            messages, tools: for the template.
            track: whether to return the spans that the template marks as generated.
            prompt: whether to add the generation prompt.

        Returns:
            The text, and the spans ``[start, end)`` of characters that the template marks; none if ``track`` is False.

        Raises:
            SampleRejected: ``template_error`` if the template refuses the messages.
            ConfigError: the template is not valid Jinja.
        """
        import jinja2

        try:
            text, spans = render_template(
                self.source, messages, tools, special=self._special, track=track, prompt=prompt
            )
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise ConfigError(
                f"The chat template is not valid Jinja (line {error.lineno}): {error.message}."
            ) from error
        except Exception as error:
            # A template is a program of its own: whatever goes wrong in it (a division, a recursion, an attribute
            # that the sandbox refuses) is due to this conversation and that template, not to our code.
            reason = str(error) or type(error).__name__
            raise SampleRejected("template_error", f"the chat template refuses the conversation: {reason}") from error
        return text, list(spans)

    def messages(
        self, conversation: Conversation, words: Words, passing: Passing
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tool definitions in the form that the template reads; see `to_messages`.

        Raises:
            SampleRejected: ``bad_record`` if the arguments of a call are nested beyond the recursion limit.
        """
        try:
            return to_messages(conversation, words, passing, as_list=self.content_as_list)
        except RecursionError as error:
            raise SampleRejected("bad_record", "the arguments of a tool call are nested too deeply") from error

    @cached_property
    def reads_thinking(self) -> bool:
        """Whether the template shows thinking that is passed in a field of the message; see `_FIELDS`."""
        if not _FIELDS.search(self.source):
            return False
        turns = (
            Turn(role="user", parts=(_PROBE,)),
            Turn(role="assistant", parts=(f"{OPEN}thinking probe{CLOSE}answer probe",)),
        )
        messages, _ = self.messages(Conversation(key="probe", turns=turns), Words(), Passing(thinking_apart=True))
        try:
            text, _ = self.run(messages, None, track=False)
        except SampleRejected:
            return False
        return "thinking probe" in text

    @cached_property
    def hides_empty_system(self) -> bool:
        """Whether the template treats an empty system turn as none, and writes a default prompt if there is none."""
        probe, word = _PROBE, "system probe"

        def rendered(*systems: str) -> str:
            turns = [("system", text) for text in systems] + [("user", probe)]
            messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
            if self.content_as_list:
                messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
            return self.run(messages, None, track=False)[0]

        try:
            without, empty, spoken = rendered(), rendered(""), rendered(word)
        except SampleRejected:
            return False
        if empty != without:
            return False
        # Without a default prompt, the text without a system turn is the text with one, less one stretch.
        at = spoken.find(word)
        start, end = 0, 0
        while start < min(at, len(without)) and spoken[start] == without[start]:
            start += 1
        while end < len(without) - start and spoken[-1 - end] == without[-1 - end]:
            end += 1
        return start + end < len(without)

    def _wants_lists(self) -> bool:
        """Whether the template reads content only as a list of parts, as some vision templates (LLaVA's) do."""
        turn = {"role": "user", "content": _PROBE}
        for content, as_list in ((_PROBE, False), ([{"type": "text", "text": _PROBE}], True)):
            try:
                text, _ = self.run([{**turn, "content": content}], None, track=False)
            except SampleRejected:
                continue
            if _PROBE in text:
                return as_list
        raise ConfigError(
            "The chat template renders no text for a plain user message; give another encoder.chat_template."
        )
