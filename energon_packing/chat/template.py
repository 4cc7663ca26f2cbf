"""Rendering a conversation through a Hugging Face chat template, and which characters of it are trained.

Everything that a conversation says must stand in the text, in order: the conversation is rendered a second time with
marks in place of its words (`energon_packing.chat.sentinels`), and the text must be what stands around the marks with
the words between. A template that leaves something out costs the sample, by name. The same comparison finds the
answers:

* a template with ``{% generation %}`` marks them itself: the marked spans are taken, as ``apply_chat_template`` does
  with ``return_assistant_tokens_mask``, tied to the turns that they belong to; an end-of-turn token that directly
  follows a span joins it;
* for any other they are found by comparing renderings (`energon_packing.chat.answers`).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from energon_packing.chat.answers import Answer, StopTokens, find_answers
from energon_packing.chat.layout import Layout, names_of
from energon_packing.chat.sandbox import render_template
from energon_packing.chat.sentinels import Marks, Passing, Piece, Words, to_messages
from energon_packing.chat.thinking import (
    CLOSE,
    EMPTY,
    OPEN,
    TrainedSpan,
    mask_thinking,
    strip_thinking,
    trim_empty_thinking,
)
from energon_packing.config import Thinking, ToolDefinitions, TrainLineBreak, TrainOn
from energon_packing.conversation import Conversation, MediaKind, MediaPart, Turn
from energon_packing.errors import ConfigError, SampleRejected

# Tokens that close a turn in the templates in use. Only those that the tokenizer knows as special tokens count.
END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eot|>", "<|eom|>"),
    *("<|end_of_text|>", "<|endoftext|>", "</s>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>"),
    *("<|call|>", "<|return|>", "<｜end▁of▁sentence｜>"),
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIELDS = re.compile(r"\b(?:reasoning_content|reasoning|thinking)\b")
"""Fields of a message in which templates look for thinking."""
_MODES: tuple[dict[str, bool], ...] = ({}, {"markup": True}, {"markup": True, "calls": False})
"""Ways to mark a conversation, the most telling first; the others are for templates that look into texts or calls."""
KEPT_STRUCTURES = 256
"""Structures of conversations whose layout is kept; data sets have few, and each costs two renderings or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        text: what the template made, media still one placeholder each.
        spans: trained characters, ascending and disjoint; with the weight 0 what no trained token may touch.
        ends: for each answer that could be located, the number of turns up to it and the characters that they fill.
    """

    text: str
    spans: tuple[TrainedSpan, ...]
    ends: tuple[tuple[int, int], ...] = ()


class _Structure:
    """A conversation's structure under a template: where its pieces go, whatever they say."""

    def __init__(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str, pieces: Sequence[Piece]
    ) -> None:
        self.messages, self.tools = messages, tools
        self.layout = Layout.of(text, pieces)
        self.as_python = _holds_python(messages, text)
        self.answers: list[Answer] | None = None


class ChatTemplate:
    """A chat template bound to a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer; gives the special tokens that templates use.
        source: the Jinja text; None takes the tokenizer's own.
        train_on: ``assistant`` trains every assistant turn, ``last_assistant`` the last one, ``all`` every token.
        thinking: what becomes of the assistant's ``<think>`` spans.
        train_line_break: whether the line break after an answer is trained.
        tool_definitions: whether the template may leave out definitions of tools.
        stops: texts of further tokens at which generation stops, such as those of a generation configuration.

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
        train_line_break: TrainLineBreak = "as_marked",
        tool_definitions: ToolDefinitions = "required",
        stops: Sequence[str] = (),
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
        self.train_line_break = train_line_break
        self.tool_definitions = tool_definitions
        self.marks_generation = _GENERATION.search(source) is not None
        # As apply_chat_template passes them: strings, but a list where a tokenizer keeps several under one name.
        self._special = dict(tokenizer.special_tokens_map)
        known = set(tokenizer.get_added_vocab()) | {str(token) for token in self._special.values()}
        ends = {*stops, *(token for token in END_OF_TURN if token in known)}
        if tokenizer.eos_token is not None:
            ends.add(tokenizer.eos_token)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.stops = StopTokens(sorted(ends), sorted({*special, *tokenizer.all_special_tokens}))
        self._structures: OrderedDict[str, _Structure | SampleRejected] = OrderedDict()
        self._content_as_list = self._wants_lists()

    def render(self, conversation: Conversation) -> RenderedChat:
        """Renders one conversation.

        Raises:
            SampleRejected: ``template_error`` where the template itself refuses the conversation,
                ``template_omits`` where it leaves something out that the conversation says,
                ``unstable_prefix`` where it puts turns out of order or the answers cannot be told apart,
                ``assistant_first`` where it does not show where a leading assistant turn begins,
                ``loss_weight_mismatch`` where it does not show a weighted turn as generated,
                ``unclosed_thinking`` where thinking is to be stripped or masked and a tag has no partner,
                ``nothing_to_learn`` where no character is trained.
            ConfigError: the template is not valid Jinja.
        """
        if self.thinking == "strip":
            conversation = strip_thinking(conversation)
        elif self.thinking == "trim_empty":
            conversation = trim_empty_thinking(conversation)
        self._check_empty_system(conversation)
        structure, places, text, marked = self._read(conversation)
        weights = {number: turn.loss_weight for number, turn in enumerate(conversation.turns)}
        try:
            answers = self._answers(structure, places, text, marked)
        except SampleRejected:
            if self.train_on != "all" or any(weight is not None for weight in weights.values()):
                raise
            answers = []  # everything is trained, wherever an answer begins
        if answers and (added := answers[-1][2]):
            text += added
        spans = {turn: found for turn, found, _ in answers}
        if self.thinking == "trim_empty":
            text, spans = self._without_empty(structure, places, text, spans)
        trained = self._trained(conversation, text, spans, weights)
        if self.thinking == "mask":
            trained = mask_thinking(text, trained)
        kept = tuple(span for span in trained if span.end > span.start)
        if not any(span.weight > 0 for span in kept):
            raise SampleRejected("nothing_to_learn", f"train_on={self.train_on} leaves no token of the text to train")
        ends = tuple((turn + 1, _with_space(text, found[-1].end)) for turn, found in spans.items() if found)
        return RenderedChat(text=text, spans=kept, ends=ends)

    def turn_end(self, conversation: Conversation, chat: RenderedChat, turns: int) -> int | None:
        """Where in a rendered text the first so many turns end, in characters.

        Args:
            conversation: whole, as `render` got it.
            chat: what `render` made of it.
            turns: 1 to the number of turns.

        Returns:
            None where the template cannot say: it refuses those turns alone, or shows them in another way, and they
            do not end with an answer.
        """
        if self.thinking == "strip":
            conversation = strip_thinking(conversation)
        try:
            messages, tools = self._messages(conversation, Words(), Passing())
            before, _ = self._run(messages[:turns], tools, track=False)
        except SampleRejected:
            before = None
        if before is not None and chat.text.startswith(before):
            return len(before)
        return dict(chat.ends).get(turns)

    # -- what stands where -------------------------------------------------------------------------------------------

    def _read(self, conversation: Conversation) -> tuple[_Structure, list[tuple[int, int]], str, list[tuple[int, int]]]:
        """The structure, the place of each of its marks in the text, the text, and what it marks as generated."""
        failure: SampleRejected | None = None
        with_calls = any(turn.tool_calls for turn in conversation.turns) or bool(conversation.tools)
        for mode in _MODES[: 3 if with_calls else 2]:
            if failure is not None and failure.reason == "template_omits" and not mode.get("calls", True):
                break  # what is not marked cannot be missed
            found, error = self._best(conversation, mode)
            if found is None:
                if not mode:
                    self._run(*self._messages(conversation, Words(), Passing()), track=False)  # its own words
                failure = failure or error
                continue
            passing, structure, pieces = found
            if error is not None:
                failure = failure or error
                continue
            messages, tools = self._messages(conversation, Words(), passing)
            text, marked = self._run(messages, tools, track=self.marks_generation)
            places, other = structure.layout.walk(text, pieces)
            if other is not None:  # a template may write the date, and midnight may have passed
                structure = self._structure(conversation, passing, mode, anew=True)[0]
                places, other = structure.layout.walk(text, pieces)
            if other is None:
                if not mode.get("calls", True):
                    self._check_calls(conversation, structure, places, text)
                return structure, places, text, marked
            failure = failure or SampleRejected(
                "template_omits",
                f"the chat template writes {names_of(pieces, conversation.turns, [other])} in another form, or "
                "something around it depends on it; use another encoder.chat_template",
            )
        assert failure is not None
        raise failure

    def _best(
        self, conversation: Conversation, mode: Mapping[str, bool]
    ) -> tuple[tuple[Passing, _Structure, list[Piece]] | None, SampleRejected | None]:
        """The way of passing in which the least is missing, and what then still is."""
        best: tuple[tuple[int, ...], Passing, _Structure, list[Piece]] | None = None
        refusal: SampleRejected | None = None
        complaint: SampleRejected | None = None
        questions = [number for number, turn in enumerate(conversation.turns) if turn.role == "user"]
        last_question = questions[-1] if questions else -1
        for passing in self._passings(conversation):
            try:
                structure, pieces = self._structure(conversation, passing, mode)
            except SampleRejected as refused:
                refusal = refusal or refused
                continue
            missing = structure.layout.missing()
            left_out = [piece for piece in missing if not self._may_omit(pieces[piece], last_question)]
            disorder = structure.layout.disorder()
            score = (len(left_out), int(disorder is not None), len(missing), int(structure.as_python))
            if best is None or score < best[0]:
                best = (score, passing, structure, pieces)
                complaint = self._complaint(conversation, pieces, left_out, disorder)
            if not any(score):
                break
        return (None, refusal) if best is None else (best[1:], complaint)

    def _may_omit(self, piece: Piece, last_question: int) -> bool:
        """Thinking of earlier questions, which many templates take back, and definitions where a user allows it."""
        if piece.kind == "definition":
            return self.tool_definitions == "optional"
        return piece.kind == "thinking" and piece.turn < last_question

    @staticmethod
    def _complaint(
        conversation: Conversation, pieces: list[Piece], left_out: list[int], disorder: tuple[int, int] | None
    ) -> SampleRejected | None:
        if left_out:
            kinds = {pieces[piece].kind for piece in left_out}
            way = "use another encoder.chat_template"
            if kinds & {"call", "argument", "definition"}:
                way = "it shows no tools; use a format that does, such as encoder.chat_template: qwen"
            if kinds == {"definition"}:
                way += ", or allow it with encoder.tool_definitions: optional"
            if kinds == {"thinking"}:
                way = "leave thinking out with encoder.thinking: strip, or use another encoder.chat_template"
            what = names_of(pieces, conversation.turns, left_out)
            return SampleRejected("template_omits", f"the chat template leaves out {what}; {way}")
        if disorder is not None:
            early, late = disorder
            roles = [turn.role for turn in conversation.turns]
            return SampleRejected(
                "unstable_prefix",
                f"the chat template puts turn {early + 1} ({roles[early]}) after turn {late + 1} ({roles[late]}), so "
                "that answers would be trained after other turns than they were given to; move the turn, or use "
                "another encoder.chat_template",
            )
        return None

    def _passings(self, conversation: Conversation) -> Iterator[Passing]:
        """Ways of passing worth a try, the plain one first."""
        thought = any("</think>" in turn.text for turn in conversation.turns if turn.role == "assistant")
        apart = thought and self._reads_thinking
        calls = any(turn.tool_calls for turn in conversation.turns)
        results = calls and any(turn.role == "tool" for turn in conversation.turns)
        for names in (False, True) if results else (False,):
            for as_text in (False, True) if calls else (False,):
                for none in (False, True) if calls else (False,):
                    yield Passing(
                        no_text_is_none=none, arguments_as_text=as_text, name_results=names, thinking_apart=apart
                    )

    @cached_property
    def _reads_thinking(self) -> bool:
        """Whether the template shows thinking that is a field of the message, in the words that it has for it."""
        if not _FIELDS.search(self.source):
            return False
        turns = (
            Turn(role="user", parts=("energon packing probe",)),
            Turn(role="assistant", parts=(f"{OPEN}thinking probe{CLOSE}answer probe",)),
        )
        messages, _ = self._messages(Conversation(key="probe", turns=turns), Words(), Passing(thinking_apart=True))
        try:
            text, _ = self._run(messages, None, track=False)
        except SampleRejected:
            return False
        return "thinking probe" in text

    def _structure(
        self, conversation: Conversation, passing: Passing, mode: Mapping[str, bool], *, anew: bool = False
    ) -> tuple[_Structure, list[Piece]]:
        """The structure of a conversation, from those that were seen or by rendering, and what the conversation says.

        Raises:
            SampleRejected: the template refuses it.
        """
        marks = Marks(**mode)
        messages, tools = self._messages(conversation, marks, passing)
        key = repr((messages, tools))
        found = self._structures.get(key)
        if found is None or anew:
            try:
                text, _ = self._run(messages, tools, track=False)
                found = _Structure(messages, tools, text, marks.pieces)
            except SampleRejected as error:
                found = error
            self._structures[key] = found
            if len(self._structures) > KEPT_STRUCTURES:
                self._structures.popitem(last=False)
        else:
            self._structures.move_to_end(key)
        if isinstance(found, SampleRejected):
            raise SampleRejected(found.reason, found.detail)
        return found, marks.pieces

    @staticmethod
    def _check_calls(
        conversation: Conversation, structure: _Structure, places: list[tuple[int, int]], text: str
    ) -> None:
        """Looks for calls that could not be marked: name and arguments must stand behind what was said before them."""
        turns = structure.layout.places_of_turns()
        for number, turn in enumerate(conversation.turns):
            before = [last for other, (_, last) in turns.items() if other < number]
            start = places[max(before)][1] if before else 0
            for call in turn.tool_calls:
                function = call.get("function") or call
                arguments = function.get("arguments")
                for said in (function.get("name"), *(arguments if isinstance(arguments, Mapping) else ())):
                    if str(said) not in text[start:]:
                        raise SampleRejected(
                            "template_omits",
                            f"the chat template leaves out {said!r} of a call of turn {number + 1}; use a format that "
                            "shows tools, such as encoder.chat_template: qwen",
                        )

    def _check_empty_system(self, conversation: Conversation) -> None:
        first = conversation.turns[0]
        if first.role != "system" or first.text.strip() or any(isinstance(part, MediaPart) for part in first.parts):
            return
        if self._hides_empty_system:
            raise SampleRejected(
                "template_omits",
                "the chat template writes its default prompt in place of the empty system turn; remove that turn, or "
                "use another encoder.chat_template",
            )

    @cached_property
    def _hides_empty_system(self) -> bool:
        """Whether an empty system turn is taken for none, and none brings a default prompt."""
        probe, word = "energon packing probe", "system probe"

        def rendered(*systems: str) -> str:
            turns = [("system", text) for text in systems] + [("user", probe)]
            messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
            if self._content_as_list:
                messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
            return self._run(messages, None, track=False)[0]

        try:
            without, empty, spoken = rendered(), rendered(""), rendered(word)
        except SampleRejected:
            return False
        if empty != without:
            return False
        # Without a default, the text without a system turn is that with one, less one stretch.
        at = spoken.find(word)
        start, end = 0, 0
        while start < min(at, len(without)) and spoken[start] == without[start]:
            start += 1
        while end < len(without) - start and spoken[-1 - end] == without[-1 - end]:
            end += 1
        return start + end < len(without)

    # -- what is trained ---------------------------------------------------------------------------------------------

    def _answers(
        self, structure: _Structure, places: list[tuple[int, int]], text: str, marked: Sequence[tuple[int, int]]
    ) -> list[tuple[int, list[TrainedSpan], str]]:
        """For each answer its turn, its spans, and what is added to the text behind it."""
        if self.marks_generation:
            tied = self._tie(structure, places, text, marked)
            return [(turn, spans, "") for turn, spans in sorted(tied.items())]
        if structure.answers is None:
            structure.answers = find_answers(
                structure.layout,
                structure.messages,
                lambda messages, prompt: self._run(list(messages), structure.tools, track=False, prompt=prompt)[0],
                self.stops,
            )
        found = []
        for answer in structure.answers:
            start = places[answer.first][0] - answer.before
            end = places[answer.last][1] + answer.after
            if self.train_line_break == "always" and not answer.opens:
                end = _with_line_break(text, end)
            found.append((answer.turn, [TrainedSpan(start, end + len(answer.added))], answer.added))
        return found

    def _tie(
        self, structure: _Structure, places: list[tuple[int, int]], text: str, marked: Sequence[tuple[int, int]]
    ) -> dict[int, list[TrainedSpan]]:
        """The spans that the template marks, by turn."""
        layout = structure.layout
        turns = [layout.pieces[piece].turn for piece in layout.order]
        roles = [message.get("role") for message in structure.messages]
        silent = [turn for turn, role in enumerate(roles) if role == "assistant" and turn not in turns]
        starts = [start for start, _ in places]
        tied: dict[int, list[TrainedSpan]] = {}
        for start, end in sorted((start, end) for start, end in marked if end > start):
            first, last = bisect_left(starts, start), bisect_left(starts, end)
            turn = next(
                (turns[at] for at in range(first, last) if turns[at] >= 0 and roles[turns[at]] == "assistant"), None
            )
            if turn is None:
                latest = max(turns[:first], default=-1)
                later = [turn for turn, role in enumerate(roles) if role == "assistant" and turn > latest]
                is_answer = latest >= 0 and roles[latest] == "assistant"
                turn = latest if is_answer and latest + 1 not in silent else (later or [latest])[0]
            end = self.stops.after(text, end)
            if self.train_line_break == "always":
                end = _with_line_break(text, end)
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
        self,
        conversation: Conversation,
        text: str,
        spans: Mapping[int, list[TrainedSpan]],
        weights: Mapping[int, float | None],
    ) -> list[TrainedSpan]:
        """Spans of the turns that are trained, with the weights of their turns."""
        answers = [number for number, turn in enumerate(conversation.turns) if turn.role == "assistant"]
        weighted = any(weights[number] is not None for number in answers)
        if self.train_on == "all" and not weighted:
            return [TrainedSpan(start=0, end=len(text))]
        hidden = [number for number in answers if weights[number] and not spans.get(number)]
        if hidden:
            raise SampleRejected(
                "loss_weight_mismatch",
                f"the template shows nothing of turn {hidden[0] + 1} as generated, which has the weight "
                f"{weights[hidden[0]]}",
            )
        if self.train_on == "last_assistant":
            answers = answers[-1:]
        chosen = []
        for turn in answers:
            weight = weights[turn]
            chosen += [span._replace(weight=1.0 if weight is None else weight) for span in spans.get(turn, [])]
        return _with_gaps(chosen, len(text)) if self.train_on == "all" else chosen

    def _without_empty(
        self,
        structure: _Structure,
        places: list[tuple[int, int]],
        text: str,
        spans: Mapping[int, list[TrainedSpan]],
    ) -> tuple[str, dict[int, list[TrainedSpan]]]:
        """The text without the empty thinking that the template opens answers with."""
        first_marks = {turn: first for turn, (first, _) in structure.layout.places_of_turns().items()}
        cuts: list[tuple[int, int]] = []
        for turn, found in spans.items():
            if found and turn in first_marks:
                empty = EMPTY.search(text, found[0].start, places[first_marks[turn]][0])
                cuts += [empty.span()] if empty else []
        if not cuts:
            return text, dict(spans)

        def moved(at: int) -> int:
            return at - sum(min(end, at) - start for start, end in cuts if start < at)

        pieces = [
            text[start:end]
            for start, end in zip(
                [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)], strict=True
            )
        ]
        shifted = {
            turn: [span._replace(start=moved(span.start), end=moved(span.end)) for span in found]
            for turn, found in spans.items()
        }
        return "".join(pieces), shifted

    # -- rendering ---------------------------------------------------------------------------------------------------

    def _messages(
        self, conversation: Conversation, words: Words, passing: Passing
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        try:
            return to_messages(conversation, words, passing, as_list=self._content_as_list)
        except RecursionError as error:
            raise SampleRejected("bad_record", "the arguments of a tool call are nested too deeply") from error

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
    ) -> tuple[str, list[tuple[int, int]]]:
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
        return text, list(spans)


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


def _holds_python(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether arguments of a call stand in a rendering as Python writes them, which is no JSON."""
    calls = (call.get("function") or call for message in messages for call in message.get("tool_calls") or ())
    objects = (call.get("arguments") for call in calls)
    return any(isinstance(entry, Mapping) and bool(entry) and str(entry) in text for entry in objects)


def _with_line_break(text: str, end: int) -> int:
    return end + 1 if text.startswith("\n", end) else end


def _with_space(text: str, end: int) -> int:
    while end < len(text) and text[end].isspace():
        end += 1
    return end


def _with_gaps(spans: list[TrainedSpan], length: int) -> list[TrainedSpan]:
    """The spans, and with weight 1 all that stands before, between and after them."""
    result: list[TrainedSpan] = []
    cursor = 0
    for span in spans:
        result += [TrainedSpan(start=cursor, end=span.start), span]
        cursor = span.end
    return [*result, TrainedSpan(start=cursor, end=length)]
