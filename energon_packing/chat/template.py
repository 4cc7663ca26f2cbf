"""Rendering a conversation through a Hugging Face chat template, and which characters of it are trained.

Two ways to know what the assistant said, both exact:

* the template marks it with ``{% generation %}``: the marked spans are taken, as ``apply_chat_template`` does with
  ``return_assistant_tokens_mask``; an end-of-turn token that directly follows a span joins it;
* it does not: every assistant turn is found by rendering the conversation up to it and up to its end. That holds only
  where each rendering is a prefix of the next, which is checked; a template for which it does not hold is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from energon_packing.chat.sandbox import render_template
from energon_packing.chat.thinking import mask_thinking, strip_thinking
from energon_packing.config import Thinking, TrainOn
from energon_packing.conversation import Conversation, MediaKind
from energon_packing.errors import ConfigError, SampleRejected

# Tokens that close a turn in the templates in use. Only those that the tokenizer knows as special tokens count.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<|end_of_text|>", "</s>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TrainedSpan(NamedTuple):
    """Characters ``[start, end)`` of a rendered text whose tokens are trained with ``weight``."""

    start: int
    end: int
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        text: what the template made, media still one placeholder each.
        spans: trained characters, ascending and disjoint.
    """

    text: str
    spans: tuple[TrainedSpan, ...]


class ChatTemplate:
    """A chat template bound to a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer; gives the special tokens that templates use.
        source: the Jinja text; None takes the tokenizer's own.
        train_on: ``assistant`` trains every assistant turn, ``last_assistant`` the last one, ``all`` every token.
        thinking: what becomes of the assistant's ``<think>`` spans.

    Raises:
        ConfigError: the tokenizer has no chat template or several, or the template is not valid Jinja or shows no text
            of a plain conversation.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: str | None = None,
        train_on: TrainOn = "assistant",
        thinking: Thinking = "keep",
    ) -> None:
        source = source if source is not None else tokenizer.chat_template
        if isinstance(source, Mapping):
            raise ConfigError(
                f"The processor has several chat templates ({', '.join(map(str, source))}); write the one to train "
                "with into a Jinja file and name it with encoder.chat_template."
            )
        if not isinstance(source, str) or not source:
            raise ConfigError(
                "The processor has no chat template; name a Jinja file with encoder.chat_template, "
                "or use a processor that ships one."
            )
        self.source = source
        self.train_on = train_on
        self.thinking = thinking
        self.marks_generation = _GENERATION.search(source) is not None
        # As apply_chat_template passes them: strings, but a list where a tokenizer keeps several under one name.
        self._special = dict(tokenizer.special_tokens_map)
        known = set(tokenizer.get_added_vocab()) | {str(token) for token in self._special.values()}
        end = {token for token in END_OF_TURN if token in known}
        if tokenizer.eos_token is not None:
            end.add(tokenizer.eos_token)
        self.end_of_turn = tuple(sorted(end, key=lambda token: (-len(token), token)))
        self._content_as_list = self._wants_lists()

    def render(self, conversation: Conversation) -> RenderedChat:
        """Renders one conversation.

        Raises:
            SampleRejected: ``template_error`` where the template itself refuses the conversation,
                ``assistant_first`` where it does not show where a leading assistant turn begins,
                ``loss_weight_mismatch`` where weighted turns are not the spans that it shows,
                ``unclosed_thinking`` where thinking is to be stripped or masked and a tag has no partner,
                ``nothing_to_learn`` where no character is trained.
            ConfigError: the template is not prefix-stable and marks no generation.
        """
        if self.thinking == "strip":
            conversation = strip_thinking(conversation)
        messages = self._messages(conversation)
        tools = [dict(tool) for tool in conversation.tools] if conversation.tools else None
        weights = [turn.loss_weight for turn in conversation.turns if turn.role == "assistant"]
        weighted = any(weight is not None for weight in weights)
        if self.train_on == "all" and not weighted:
            text, _ = self._run(messages, tools, track=False)
            spans = [TrainedSpan(start=0, end=len(text))]
        else:
            text, spans = self._assistant_spans(messages, tools)
            if weighted:
                spans = _weigh(spans, weights)
            if self.train_on == "all":
                spans = _with_gaps(spans, len(text))
            elif self.train_on == "last_assistant":
                spans = spans[-1:]
        if self.thinking == "mask":
            spans = mask_thinking(text, spans)
        trained = tuple(span for span in spans if span.weight > 0 and span.end > span.start)
        if not trained:
            raise SampleRejected("nothing_to_learn", f"train_on={self.train_on} leaves no token of the text to train")
        return RenderedChat(text=text, spans=trained)

    def turn_end(self, conversation: Conversation, text: str, turns: int) -> int | None:
        """Where in a rendered text the first so many turns end, in characters.

        Args:
            conversation: whole, as `render` got it.
            text: what `render` made of it.
            turns: 1 to the number of turns.

        Returns:
            None where the template cannot say: it refuses those turns alone, or shows them in another way.
        """
        if self.thinking == "strip":
            conversation = strip_thinking(conversation)
        tools = [dict(tool) for tool in conversation.tools] if conversation.tools else None
        try:
            before, _ = self._run(self._messages(conversation)[:turns], tools, track=False)
        except SampleRejected:
            return None
        return len(before) if text.startswith(before) else None

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        messages = conversation.to_messages()
        if self._content_as_list:
            for message in messages:
                if isinstance(message["content"], str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        return messages

    def _wants_lists(self) -> bool:
        """Some vision templates (LLaVA's) read content only as a list of parts: find out once, with a probe."""
        probe = "energon packing probe"
        turn = {"role": "user", "content": probe}
        for content, as_list in ((probe, False), ([{"type": "text", "text": probe}], True)):
            try:
                text, _ = self._run([{**turn, "content": content}], None, track=False)
            except SampleRejected:
                continue
            if probe in text:
                return as_list
        raise ConfigError(
            "The chat template renders no text for a plain user message; give another encoder.chat_template."
        )

    def _run(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, track: bool, prompt: bool = False
    ) -> tuple[str, list[TrainedSpan]]:
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
            # that the sandbox refuses) is about this conversation and that template, not about us.
            reason = str(error) or type(error).__name__
            raise SampleRejected("template_error", f"the chat template refuses the conversation: {reason}") from error
        return text, [TrainedSpan(start, end) for start, end in spans]

    def _assistant_spans(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[TrainedSpan]]:
        if self.marks_generation:
            text, spans = self._run(messages, tools, track=True)
            return text, [self._with_end_of_turn(text, span) for span in spans]
        text, _ = self._run(messages, tools, track=False)
        return text, self._spans_by_prefix(text, messages, tools)

    def _with_end_of_turn(self, text: str, span: TrainedSpan) -> TrainedSpan:
        for token in self.end_of_turn:
            if text.startswith(token, span.end):
                return TrainedSpan(start=span.start, end=span.end + len(token))
        return span

    def _spans_by_prefix(
        self, text: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[TrainedSpan]:
        spans: list[TrainedSpan] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._before(messages[:index], tools)
            # The last turn ends where the text does; rendering it once more would take as long as all other work.
            after = text if index + 1 == len(messages) else self._run(messages[: index + 1], tools, track=False)[0]
            if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
                raise ConfigError(
                    f"The chat template is not prefix-stable: message {index + 1} of {len(messages)} changes what "
                    "stands before or in it. Mark the assistant's part of the template with {% generation %} and name "
                    "the file with encoder.chat_template."
                )
            end = len(after.rstrip())
            closed = after[len(before) : end].endswith(self.end_of_turn)
            spans.append(TrainedSpan(start=len(before), end=end if closed else len(after)))
        return spans

    def _before(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """What stands before an assistant turn that follows ``messages``, its header included."""
        try:
            return self._run(messages, tools, track=False, prompt=True)[0]
        except SampleRejected as error:
            if messages:
                raise
            # Without this the header, and a system prompt that the template adds, would be taken for the answer.
            raise SampleRejected(
                "assistant_first",
                "the conversation begins with an assistant turn, and the chat template cannot show where its text "
                "begins; put a user turn before it, or mark the template with {% generation %}",
            ) from error


def media_texts(tokenizer: Any, source: str | None, placeholders: Mapping[MediaKind, str]) -> dict[str, str]:
    """What stands for one medium of each kind, for prompt formats that leave it to the processor.

    Args:
        tokenizer: of the processor.
        source: the processor's own chat template, or None.
        placeholders: of the family, by kind.

    Returns:
        ``image`` and ``video``: what the own template writes between two texts, frame included, or the placeholder
        where it writes none; ``image_token`` and ``video_token``: the placeholder alone.
    """
    before, after = "text before a medium", "text after a medium"
    texts: dict[str, str] = {}
    for kind, placeholder in placeholders.items():
        texts[f"{kind}_token"] = texts[kind] = placeholder
        content = [{"type": "text", "text": before}, {"type": kind}, {"type": "text", "text": after}]
        try:
            own = ChatTemplate(tokenizer, source=source)
            shown, _ = own._run([{"role": "user", "content": content}], None, track=False)
        except (ConfigError, SampleRejected):
            continue  # no template of its own, or one that takes no such medium
        between = shown.partition(before)[2].partition(after)[0]
        if placeholder in between:
            texts[kind] = between
    return texts


def _weigh(spans: list[TrainedSpan], weights: list[float | None]) -> list[TrainedSpan]:
    if len(spans) != len(weights):
        raise SampleRejected(
            "loss_weight_mismatch",
            f"the template shows {len(spans)} assistant spans for {len(weights)} weighted assistant turns",
        )
    return [
        TrainedSpan(start=span.start, end=span.end, weight=1.0 if weight is None else weight)
        for span, weight in zip(spans, weights, strict=True)
    ]


def _with_gaps(spans: list[TrainedSpan], length: int) -> list[TrainedSpan]:
    """The spans, and with weight 1 all that stands before, between and after them."""
    result: list[TrainedSpan] = []
    cursor = 0
    for span in spans:
        result += [TrainedSpan(start=cursor, end=span.start), span]
        cursor = span.end
    return [*result, TrainedSpan(start=cursor, end=length)]
