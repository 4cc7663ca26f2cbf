"""Renders a conversation with a Hugging Face chat template, and finds the characters that are trained.

Everything that a conversation says must appear in the text, in order: the conversation is rendered again with marks in
place of its words (`energon_packing.chat.marks`), and the text must equal that rendering with the words in place of the
marks. The same comparison finds the answers:

* a template with ``{% generation %}`` marks them itself: the marked spans are taken, as ``apply_chat_template`` does
  with ``return_assistant_tokens_mask``, and assigned to the turns that they belong to; an end-of-turn token that
  directly follows a span joins it;
* for any other template they are found by comparing renderings (`energon_packing.chat.structures`).
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from energon_packing.chat.renderer import TemplateRenderer
from energon_packing.chat.structures import AnswerSearch, Reading, StopTokens, TemplateReader
from energon_packing.chat.thinking import OPEN, TrainedSpan, as_shown, without_spans
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, MediaKind
from energon_packing.errors import ConfigError, SampleRejected

# Tokens that close a turn in the templates in use. Only those count that the tokenizer has as special or added tokens.
END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eot|>", "<|eom|>"),
    *("<|end_of_text|>", "<|endoftext|>", "</s>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>"),
    *("<|call|>", "<|return|>", "<｜end▁of▁sentence｜>"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedChat:
    """A conversation as text."""

    text: str  # the rendering, with one placeholder per image or video
    # Trained characters, ascending and disjoint; no trained token may touch a span of weight 0.
    spans: tuple[TrainedSpan, ...]
    # For each answer that was found, the turns up to and including it, and the characters that they fill.
    ends: tuple[tuple[int, int], ...] = ()


class ChatTemplate:
    """A chat template bound to a tokenizer, and the settings of ``config`` for its texts. Raises ConfigError: the
    tokenizer has no chat template or several, thinking cannot be told from the answer as ``thinking`` asks, or as for
    `TemplateRenderer`.

    Args:
        source: the Jinja text; None takes the tokenizer's own.
        stops: texts of further tokens at which generation stops, such as those of a generation configuration.
    """

    def __init__(
        self, tokenizer: Any, config: EncoderConfig, *, source: str | None = None, stops: Sequence[str] = ()
    ) -> None:
        source = source if source is not None else tokenizer.chat_template
        if isinstance(source, Mapping):
            raise ConfigError(
                f"The processor has several chat templates ({', '.join(map(str, source))}); write the one to train "
                "with into a Jinja file and name it with encoder.chat_template."
            )
        if not isinstance(source, str) or not source:
            fix = "name a Jinja file with encoder.chat_template, or use a processor that ships one."
            raise ConfigError(f"The processor has no chat template; {fix}")
        self.source, self.train_on, self.thinking = source, config.train_on, config.thinking
        self.train_line_break = config.train_line_break
        # As apply_chat_template passes them: strings, or a list if a tokenizer keeps several under one name.
        named = dict(tokenizer.special_tokens_map)
        self.renderer = TemplateRenderer(source, named, date=config.template_date)
        if self.thinking in ("mask", "trim_empty") and "" in self.renderer.thinking:  # as one of its marks
            raise ConfigError(
                f"encoder.thinking is {self.thinking!r}, but the chat template writes no mark before or after thinking "
                "that tells it from the answer; use keep or strip, or another encoder.chat_template."
            )
        self._reader = TemplateReader(self.renderer, config.tool_definitions)
        known = set(tokenizer.get_added_vocab()) | {str(token) for token in named.values()}
        ends = {*stops, *(token for token in END_OF_TURN if token in known)}
        ends |= {tokenizer.eos_token} - {None}
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.stops = StopTokens(sorted(ends), sorted({*special, *tokenizer.all_special_tokens}))

    def render(self, conversation: Conversation) -> RenderedChat:
        """Renders one conversation. Raises ConfigError: the template is not valid Jinja; or SampleRejected:
        ``template_error`` if the template itself refuses the conversation, ``template_omits`` if it leaves out
        something that the conversation says, ``unstable_prefix`` if it puts turns out of order or the answers cannot be
        told apart, ``assistant_first`` if it does not show where a leading assistant turn begins,
        ``loss_weight_mismatch`` if it does not show a weighted turn as generated, ``unclosed_thinking`` if thinking is
        to be stripped or masked and a tag has no partner, ``empty_answer`` if a trained answer has no word,
        ``nothing_to_learn`` if no character is trained."""
        conversation = as_shown(conversation, self.thinking)
        reading = self._reader.read(conversation)
        text = reading.text
        try:
            answers = self._answers(reading)
        except SampleRejected:
            if self.train_on != "all" or any(turn.loss_weight is not None for turn in conversation.turns):
                raise
            answers = []  # everything is trained, wherever answers begin
        text += answers[-1][2] if answers else ""
        spans = {turn: found for turn, found, _ in answers}
        if self.thinking == "trim_empty":
            text, spans = _cut(text, spans, self._empty(reading, spans, breaks=True))
        pieces = (reading.structure.layout.pieces[at] for at in reading.structure.layout.order)
        worded = {piece.turn for piece in pieces if self.thinking != "mask" or piece.kind != "thinking"}
        trained = self._trained(conversation, text, spans, worded)
        if self.thinking == "mask":
            hidden = [*self._empty(reading, spans, breaks=False), *self._thoughts(reading)]
            trained = without_spans(trained, sorted(hidden))
        kept = tuple(span for span in trained if span.end > span.start)
        if not any(span.weight > 0 for span in kept):
            raise SampleRejected("nothing_to_learn", f"train_on={self.train_on} leaves no token of the text to train")
        ends = tuple((turn + 1, len(text) - len(text[own[-1].end :].lstrip())) for turn, own in spans.items() if own)
        return RenderedChat(text=text, spans=kept, ends=ends)

    def trained_turns(self, conversation: Conversation) -> frozenset[int]:
        """Returns the turns of a record that are trained; with ``train_on: all``, every turn. Raises as `render`. A
        record chooses its targets once. Whatever is cut from it afterwards trains what is left of this choice: no
        earlier answer becomes the last one, and none is trained that the template does not mark in the whole."""
        if self.train_on == "all":
            return frozenset(range(len(conversation.turns)))
        chat = self.render(conversation)
        return frozenset(
            next(turns for turns, end in chat.ends if span.end <= end) - 1 for span in chat.spans if span.weight > 0
        )

    def turn_end(self, conversation: Conversation, chat: RenderedChat, turns: int) -> int | None:
        """Returns where the first ``turns`` turns of a conversation end in the text that `render` returned, in
        characters. None if the template does not tell: it refuses those turns alone or renders them differently, and
        they do not end with an answer."""
        conversation = as_shown(conversation, self.thinking)
        try:
            messages, tools = self.renderer.messages(conversation)
            before, _ = self.renderer.run(messages[:turns], tools)
        except SampleRejected:
            before = None
        return len(before) if before is not None and chat.text.startswith(before) else dict(chat.ends).get(turns)

    def _thoughts(self, reading: Reading) -> list[tuple[int, int]]:
        """Returns the characters ``[start, end)`` of every thinking of an answer, with the marks around it. A text that
        the template writes between its marks is thinking too (gpt-oss: beside a call)."""
        form, places, text = self.renderer.thinking, reading.places, reading.text
        pieces = [reading.structure.layout.pieces[piece] for piece in reading.structure.layout.order]
        found: list[tuple[int, int]] = []
        at = 0
        while at < len(pieces):
            first, at = at, at + 1
            kind, turn = pieces[first].kind, pieces[first].turn
            if kind not in ("thinking", "text") or reading.structure.roles[turn] != "assistant":
                continue
            while kind == "thinking" and at < len(pieces) and pieces[at].kind == kind and pieces[at].turn == turn:
                at += 1  # nested, or with an image inside
            start = form.before(text, places[first - 1][1] if first else 0, places[first][0])
            end = form.after(text, places[at - 1][1], places[at][0] if at < len(places) else len(text))
            if start is not None and end is not None:
                found.append((start, end))
            elif kind == "thinking":
                raise SampleRejected(
                    "unclosed_thinking",
                    f"the thinking of turn {turn + 1} is not between {form.opening!r} and {form.closing!r} in the chat "
                    "template's text, so it cannot be masked",
                )
        return found

    def _empty(
        self, reading: Reading, spans: Mapping[int, list[TrainedSpan]], *, breaks: bool
    ) -> list[tuple[int, int]]:
        """Returns the characters ``[start, end)`` of empty thinking in answers; if ``breaks``, with its line ends, and
        only where an answer opens with it."""
        form = self.renderer.thinking if breaks else self.renderer.thinking._replace(breaks=0)
        found = []
        for turn, (first, last) in sorted(reading.structure.layout.places_of_turns().items()):
            if not spans.get(turn):
                continue
            words = [(spans[turn][0].start,) * 2, *reading.places[first : last + 1], (spans[turn][-1].end,) * 2]
            for (_, start), (end, _) in [*pairwise(words)][: 1 if breaks else None]:
                empty = form.empty(reading.text, start, end)
                found += [empty] if empty else []
        return found

    def _answers(self, reading: Reading) -> list[tuple[int, list[TrainedSpan], str]]:
        """For each answer: its turn, its spans, and the text that is added after it."""
        if self.renderer.marks_generation:
            return [(turn, spans, "") for turn, spans in sorted(self._tie(reading).items())]
        structure, places, text = reading.structure, reading.places, reading.text
        if structure.answers is None:
            tools, run = structure.tools, self.renderer.run
            structure.answers = AnswerSearch(
                structure.layout,
                structure.messages,
                lambda messages, prompt: run(list(messages), tools, prompt=prompt)[0],
                self.stops,
                self.renderer.thinking.opening or OPEN,
            ).answers()
        found = []
        for answer in structure.answers:
            start = places[answer.first][0] - answer.before
            end = places[answer.last][1] + answer.after
            if self.train_line_break == "always" and not answer.opens:
                end += text.startswith("\n", end)
            found.append((answer.turn, [TrainedSpan(start, end + len(answer.added))], answer.added))
        return found

    def _tie(self, reading: Reading) -> dict[int, list[TrainedSpan]]:
        """The spans that the template marks, by turn."""
        text, turns, roles = reading.text, reading.structure.turns, reading.structure.roles
        starts = [start for start, _ in reading.places]
        tied: dict[int, list[TrainedSpan]] = {}
        for start, end in sorted((start, end) for start, end in reading.generated if end > start):
            first, last = bisect_left(starts, start), bisect_left(starts, end)
            turn = next((each for each in turns[first:last] if each >= 0 and roles[each] == "assistant"), None)
            if turn is None:
                silent = [turn for turn, role in enumerate(roles) if role == "assistant" and turn not in turns]
                latest = max(turns[:first], default=-1)
                later = [turn for turn, role in enumerate(roles) if role == "assistant" and turn > latest]
                is_answer = latest >= 0 and roles[latest] == "assistant"
                turn = latest if is_answer and latest + 1 not in silent else (later or [latest])[0]
            end = self.stops.after(text, end)
            if self.train_line_break == "always":
                end += text.startswith("\n", end)
            elif self.train_line_break == "never":
                bare = start + len(text[start:end].rstrip())
                end = bare if text[start:bare].endswith(self.stops.stops) else end
            spans = tied.setdefault(turn, [])
            if spans and start <= spans[-1].end:
                spans[-1] = spans[-1]._replace(end=max(end, spans[-1].end))
            else:
                spans.append(TrainedSpan(start, end))
        return tied

    def _trained(
        self, conversation: Conversation, text: str, spans: Mapping[int, list[TrainedSpan]], worded: Collection[int]
    ) -> list[TrainedSpan]:
        """Spans of the trained turns, with the weights of their turns; ``worded`` are those with a word to train."""
        weights = [turn.loss_weight for turn in conversation.turns]
        answers = [number for number, turn in enumerate(conversation.turns) if turn.role == "assistant"]
        weighted = any(weights[number] is not None for number in answers)
        if self.train_on == "all" and not weighted:
            return [TrainedSpan(start=0, end=len(text))]
        texts = {n for n in answers if all(isinstance(part, str) for part in conversation.turns[n].parts)}
        hidden = [n for n in answers if weights[n] and not spans.get(n) and not (n in texts and n not in worded)]
        if hidden:
            shown = f"the template marks nothing of turn {hidden[0] + 1} as generated"
            detail = f"{shown}, although the turn has the weight {weights[hidden[0]]}"
            raise SampleRejected("loss_weight_mismatch", detail)
        if self.train_on == "last_assistant":
            answers = answers[-1:]
        chosen = []
        for turn in answers:
            weight = weights[turn]
            is_shown = turn in worded and (spans.get(turn) or self.renderer.marks_generation)
            if weight != 0 and turn in texts and not is_shown:
                detail = f"turn {turn + 1} (assistant) has no word to train; remove it, or set its weight to 0"
                raise SampleRejected("empty_answer", detail)
            chosen += [span._replace(weight=1.0 if weight is None else weight) for span in spans.get(turn, [])]
        return _with_gaps(chosen, len(text)) if self.train_on == "all" else chosen


def media_texts(tokenizer: Any, source: str | None, placeholders: Mapping[MediaKind, str]) -> dict[str, str]:
    """Returns the text that stands for one image or video, for prompt formats that leave it to the processor. ``image``
    and ``video`` are what the processor's own template (``source``) writes for one between two texts, frame included,
    or the placeholder if it writes none; ``image_token`` and ``video_token`` are the placeholder alone."""
    before, after = "text before a medium", "text after a medium"
    texts: dict[str, str] = {}
    for kind, placeholder in placeholders.items():
        texts[f"{kind}_token"] = texts[kind] = placeholder
        content = [{"type": "text", "text": before}, {"type": kind}, {"type": "text", "text": after}]
        try:
            # No day changes what is asked for here.
            own = ChatTemplate(tokenizer, EncoderConfig(template_date="2000-01-01"), source=source)
            shown, _ = own.renderer.run([{"role": "user", "content": content}], None)
        except (ConfigError, SampleRejected):
            continue  # no template of its own, or one that does not take this kind
        between = shown.partition(before)[2].partition(after)[0]
        if placeholder in between:
            texts[kind] = between
    return texts


def _with_gaps(spans: list[TrainedSpan], length: int) -> list[TrainedSpan]:
    """The spans, and everything before, between and after them with weight 1."""
    result: list[TrainedSpan] = []
    cursor = 0
    for span in spans:
        result += [TrainedSpan(start=cursor, end=span.start), span]
        cursor = span.end
    return [*result, TrainedSpan(start=cursor, end=length)]


def _cut(
    text: str, spans: Mapping[int, list[TrainedSpan]], cuts: Sequence[tuple[int, int]]
) -> tuple[str, dict[int, list[TrainedSpan]]]:
    """The text and the spans without ascending ranges of characters."""

    def moved(at: int) -> int:
        return at - sum(min(end, at) - start for start, end in cuts if start < at)

    shifted = {
        turn: [span._replace(start=moved(span.start), end=moved(span.end)) for span in found]
        for turn, found in spans.items()
    }
    for start, end in reversed(cuts):
        text = text[:start] + text[end:]
    return text, shifted
