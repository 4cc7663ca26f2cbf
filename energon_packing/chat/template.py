"""Rendering a conversation through a Hugging Face chat template, and which characters of it are trained.

Two ways to know what the assistant said, both exact:

* the template marks it with ``{% generation %}``: the marked spans are taken, as ``apply_chat_template`` does with
  ``return_assistant_tokens_mask``; an end-of-turn token that directly follows a span joins it;
* it does not: every assistant turn is found by rendering the conversation up to it and up to its end. That holds only
  where each rendering is a prefix of the next, which is checked; a template for which it does not hold is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from energon_packing.config import TrainOn
from energon_packing.conversation import Conversation, Turn
from energon_packing.errors import ConfigError, SampleRejected

# Tokens that close a turn in the templates in use. Only those that the tokenizer knows as special tokens count.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<|end_of_text|>", "</s>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSpan:
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

    Raises:
        ConfigError: the tokenizer has no chat template, or the template shows no text of a plain conversation.
    """

    def __init__(self, tokenizer: Any, *, source: str | None = None, train_on: TrainOn = "assistant") -> None:
        source = source if source is not None else tokenizer.chat_template
        if not isinstance(source, str) or not source:
            raise ConfigError(
                "The processor has no chat template; name a Jinja file with encoder.chat_template, "
                "or use a processor that ships one."
            )
        self.source = source
        self.train_on = train_on
        self.marks_generation = _GENERATION.search(source) is not None
        self._special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        known = set(tokenizer.get_added_vocab()) | set(self._special.values())
        end = {token for token in END_OF_TURN if token in known}
        if tokenizer.eos_token is not None:
            end.add(tokenizer.eos_token)
        self.end_of_turn = tuple(sorted(end, key=lambda token: (-len(token), token)))
        self._content_as_list = self._wants_lists()

    def render(self, conversation: Conversation) -> RenderedChat:
        """Renders one conversation.

        Raises:
            SampleRejected: ``template_error`` where the template itself refuses the conversation,
                ``nothing_to_learn`` where no character is trained.
            ConfigError: the template is not prefix-stable and marks no generation.
        """
        messages = self._messages(conversation)
        tools = [dict(tool) for tool in conversation.tools] if conversation.tools else None
        if self.train_on == "all":
            text, _ = self._run(messages, tools, track=False)
            spans = [TrainedSpan(start=0, end=len(text))]
        elif self.marks_generation:
            text, spans = self._run(messages, tools, track=True)
            spans = self._weigh([self._with_end_of_turn(text, span) for span in spans], conversation.turns)
        else:
            text, _ = self._run(messages, tools, track=False)
            spans = self._weigh(self._spans_by_prefix(text, messages, tools), conversation.turns)
        trained = tuple(span for span in spans if span.weight > 0 and span.end > span.start)
        if not trained:
            raise SampleRejected("nothing_to_learn", f"train_on={self.train_on} leaves no token of the text to train")
        return RenderedChat(text=text, spans=trained)

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
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=track,
                add_generation_prompt=prompt,
                **self._special,
            )
        except (jinja2.exceptions.TemplateError, TypeError, KeyError, ValueError) as error:
            raise SampleRejected("template_error", f"the chat template refuses the conversation: {error}") from error
        return rendered[0], [TrainedSpan(start=s, end=e) for s, e in spans[0]] if track else []

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
            before, _ = self._run(messages[:index], tools, track=False, prompt=True) if index else ("", [])
            after, _ = self._run(messages[: index + 1], tools, track=False)
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

    def _weigh(self, spans: list[TrainedSpan], turns: tuple[Turn, ...]) -> list[TrainedSpan]:
        assistant = [turn for turn in turns if turn.role == "assistant"]
        weighted = any(turn.loss_weight is not None for turn in turns)
        if weighted and len(spans) != len(assistant):
            raise SampleRejected(
                "loss_weight_mismatch",
                f"the template shows {len(spans)} assistant spans for {len(assistant)} weighted assistant turns",
            )
        if weighted:
            weights = [1.0 if turn.loss_weight is None else turn.loss_weight for turn in assistant]
            spans = [
                TrainedSpan(start=span.start, end=span.end, weight=weight)
                for span, weight in zip(spans, weights, strict=True)
            ]
        return spans[-1:] if self.train_on == "last_assistant" else spans
