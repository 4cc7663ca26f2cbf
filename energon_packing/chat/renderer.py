"""A chat template as a program: how it receives a conversation, and how it renders a few probes."""

import contextlib
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

from energon_packing.chat.marks import Marks, Messages, Passing, Tools, to_messages
from energon_packing.chat.thinking import PLAIN, ThinkingForm, find_form
from energon_packing.conversation import Conversation
from energon_packing.errors import ConfigError, SampleRejected

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIELDS = re.compile(r"\b(?:reasoning_content|reasoning|thinking)\b")
"""Fields of a message in which templates look for thinking."""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_CLOCK = re.compile(r"\bstrftime_now\s*\(")
_CHANCE = re.compile(r"\|\s*random\b|\blipsum\s*\(")
_PROBE = "energon packing probe"


class TemplateRenderer:
    """Renders messages with a chat template, the Jinja text ``source``. ``special`` are special tokens by name, as
    ``apply_chat_template`` passes them; ``date`` is the day that ``strftime_now`` tells, as ``2026-01-31``, and None
    refuses a template that asks for it. Raises ConfigError: the template is not valid Jinja, shows no text of a plain
    conversation, draws at random, or asks for the date without being given one."""

    def __init__(self, source: str, special: Mapping[str, Any], *, date: str | None = None) -> None:
        code = _COMMENT.sub("", source)
        if chance := _CHANCE.search(code):
            raise ConfigError(
                f"The chat template draws at random ({chance[0]!r}), so that a sample would have other tokens whenever "
                "it is measured; remove that from the template."
            )
        if date is None and _CLOCK.search(code):
            _no_date("")
        self.source = source
        # A variable of this name takes the place of the function that transformers gives to every template.
        self._special = {**special, "strftime_now": _no_date if date is None else datetime.fromisoformat(date).strftime}
        self.marks_generation = _GENERATION.search(code) is not None
        self.content_as_list = self._wants_lists()

    def run(self, messages: Messages, tools: Tools, *, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Renders messages, with the generation prompt if ``prompt``: returns the text, and the spans ``[start, end)``
        of characters that the template marks as generated. Raises SampleRejected: ``template_error`` if the template
        refuses the messages; ConfigError: the template is not valid Jinja."""
        import jinja2

        try:
            return render_template(self.source, messages, tools, special=self._special, prompt=prompt)
        except jinja2.TemplateSyntaxError as bad:
            raise ConfigError(f"The chat template is not valid Jinja (line {bad.lineno}): {bad.message}.") from bad
        except ConfigError:
            raise
        except Exception as error:
            # A template is a program of its own: whatever goes wrong in it (a division, a recursion, an attribute
            # that the sandbox refuses) is due to this conversation and that template, not to our code.
            reason = str(error) or type(error).__name__
            raise SampleRejected("template_error", f"the chat template refuses the conversation: {reason}") from error

    def text_of(self, messages: Messages, prompt: bool = False) -> str:
        """Returns the text of messages whose contents are texts, in the form that the template reads; see `run`."""
        if self.content_as_list:
            messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        return self.run(messages, None, prompt=prompt)[0]

    def messages(
        self, conversation: Conversation, marks: Marks | None = None, passing: Passing | None = None
    ) -> tuple[Messages, Tools]:
        """Returns messages and tool definitions in the form that the template reads; see `to_messages`."""
        try:
            return to_messages(conversation, marks, passing or self.passing, as_list=self.content_as_list)
        except RecursionError as error:
            raise SampleRejected("bad_record", "the arguments of a tool call are nested too deeply") from error

    @cached_property
    def passing(self) -> Passing:
        """The form for a conversation without calls."""
        form = self.thinking
        return Passing(thinking_apart=form.field, thinking_split=form.field and not form.inline)

    @cached_property
    def thinking(self) -> ThinkingForm:
        """How the template writes thinking."""
        if not _FIELDS.search(self.source):
            return PLAIN

        def render(messages: Messages, prompt: bool) -> str:
            try:
                return self.text_of(messages, prompt)
            except SampleRejected:
                return ""

        return find_form(render)

    @cached_property
    def hides_empty_system(self) -> bool:
        """Whether the template treats an empty system turn as none, and writes a default prompt if there is none."""
        word, asked = "system probe", {"role": "user", "content": _PROBE}
        try:
            without = self.text_of([asked])
            empty, spoken = (self.text_of([{"role": "system", "content": text}, asked]) for text in ("", word))
        except SampleRejected:
            return False
        if empty != without:
            return False
        # Without a default prompt, the text without a system turn is the text with one, less one stretch.
        start = min(common_prefix(spoken, without), max(spoken.find(word), 0))
        return start + common_prefix(spoken[::-1], without[start:][::-1]) < len(without)

    def _wants_lists(self) -> bool:
        """Whether the template reads content only as a list of parts, as some vision templates (LLaVA's) do."""
        for content, as_list in ((_PROBE, False), ([{"type": "text", "text": _PROBE}], True)):
            with contextlib.suppress(SampleRejected):
                if _PROBE in self.run([{"role": "user", "content": content}], None)[0]:
                    return as_list
        why = "The chat template renders no text for a plain user message; give another encoder.chat_template."
        raise ConfigError(why)


def _no_date(form: str) -> str:
    raise ConfigError(
        "The chat template writes today's date (strftime_now), so that a sample would have other tokens on another "
        "day; set encoder.template_date to the date that it shall write, such as '2026-01-31'."
    )


def common_prefix(one: str, other: str) -> int:
    """Returns the length of the prefix that both texts share."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def render_template(
    source: str, messages: Messages, tools: Tools, *, special: Mapping[str, Any], prompt: bool
) -> tuple[str, list[tuple[int, int]]]:
    """Renders one conversation as ``apply_chat_template`` does, in the sandbox that transformers makes; see
    `TemplateRenderer.run`. If transformers has the functions that ``render_jinja_template`` calls, under their names of
    5.12, they are called directly with the compiled template, which transformers caches: the wrapper searches the
    template's text again for every conversation, which takes a tenth of the time."""
    from transformers.utils import chat_template_utils

    tracked = getattr(chat_template_utils, "_render_with_assistant_indices", None)
    compiled = getattr(chat_template_utils, "_compile_jinja_template", None)
    if tracked is not None and compiled is not None:
        text, spans = tracked(compiled(source), messages, tools, None, prompt, **special)
        return text, list(spans)
    rendered, marked = chat_template_utils.render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=source,
        return_assistant_tokens_mask=True,
        add_generation_prompt=prompt,
        **special,
    )
    return rendered[0], list(marked[0])
