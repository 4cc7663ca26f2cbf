"""Renders a conversation with a chat template, with proof that the text holds everything the conversation says.

Templates expect input in different forms, so several are tried. The structure of a conversation (everything but its
words) is rendered once and cached.

An answer begins after its header, which is what the template writes as generation prompt. It ends with the text at
which generation stops: a token that ends turns or, if the template has none, the token that opens the next turn. Both
are found by comparing renderings, without any knowledge of the template.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from energon_packing.chat.marks import MARKUP, Layout, Marks, Messages, Passing, Piece, Tools, find_marks, names_of
from energon_packing.chat.renderer import TemplateRenderer, common_prefix
from energon_packing.chat.thinking import TAG
from energon_packing.config.encoder import ToolDefinitions
from energon_packing.conversation import Conversation, MediaPart, Turn
from energon_packing.errors import SampleRejected

Render = Callable[[Sequence[dict[str, Any]], bool], str]
"""Renders messages with marks, with or without the generation prompt."""
_PROBE = "Zq999999Xv"
_LEADING = (
    "the conversation begins with an assistant turn, and the chat template cannot show where its text begins; put a "
    "user turn before it, or mark the template with {% generation %}"
)


class Answer(NamedTuple):
    """An assistant turn in a layout."""

    turn: int
    first: int  # its first mark, an index into `Layout.order`; the answer begins ``before`` characters before it
    before: int
    last: int  # its last mark; the answer ends ``after`` characters after it
    after: int
    # The text at which generation stops, if the template writes it only before another turn and none follows.
    added: str = ""
    # Whether the answer ends with the token that opens the next turn; the text after it belongs to that turn.
    opens: bool = False


class StopTokens:
    """The tokens that end an answer, for one tokenizer: texts of tokens at which generation stops, and of all special
    tokens, which may open a turn."""

    def __init__(self, stops: Sequence[str], special: Sequence[str]) -> None:
        self.stops = tuple(sorted({*stops} - {""}, key=lambda token: (-len(token), token)))
        self._stop = _any_of(self.stops)
        self._special = _any_of(sorted({*special} - {""}, key=lambda token: (-len(token), token)))
        self._rest = re.compile(rf"(?:\s*(?:{self._stop.pattern}))+(?=\s*\Z)")

    def first_end(self, text: str) -> tuple[int | None, bool]:
        """Returns where the first token that ends a turn ends, or None; and whether no special token precedes it."""
        stop, special = self._stop.search(text), self._special.search(text)
        return stop and stop.end(), stop is not None and (special is None or special.end() >= stop.end())

    def after(self, text: str, start: int) -> int:
        """Returns the end of the turn-ending token that begins at ``start``; ``start`` if there is none."""
        return found.end() if (found := self._stop.match(text, start)) else start

    def rest(self, text: str, start: int) -> int:
        """The end of tokens from ``start`` on that end the whole text (a turn's, then a sequence's); else ``start``."""
        return found.end() if (found := self._rest.match(text, start)) else start

    def whole(self, text: str, at: int) -> int:
        """Returns ``at``, or the beginning of the special token that a cut at ``at`` would split."""
        return next((found.start() for found in self._special.finditer(text) if found.start() < at < found.end()), at)

    def opening(self, text: str) -> int | None:
        """Returns where the special token ends that opens a text, after any white space; None if there is none."""
        found = self._special.match(text, len(text) - len(text.lstrip()))
        return found.end() if found else None


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


class AnswerSearch(NamedTuple):
    """Finds the answers of a conversation in its layout."""

    layout: Layout
    messages: Sequence[dict[str, Any]]  # with marks, those that the layout was made from
    render: Render  # runs the template
    stops: StopTokens
    thinking: str  # what the template writes before thinking; a generation prompt that holds it opens the thinking

    def answers(self) -> list[Answer]:
        """Returns all answers with at least one mark. Raises SampleRejected: ``assistant_first`` if the template does
        not show where a leading answer begins, ``unstable_prefix`` if it renders the turns before an answer differently
        on their own, or writes no generation prompt."""
        answers = []
        for turn, (first, last) in sorted(self.layout.places_of_turns().items()):
            if self.messages[turn].get("role") == "assistant":
                last = self._last_mark(turn, last)
                before = len(self.layout.frames[first]) - self._header(turn, first)
                answers.append(Answer(turn, first, before, last, *self._end(turn, last)))
        return answers

    def _header(self, turn: int, first: int) -> int:
        """Returns the length of the frame before an answer up to the end of its header."""
        try:
            asked = self.render(self.messages[:turn], True)
        except SampleRejected as error:
            if turn:
                raise
            # Otherwise the header, and a system prompt that the template adds, would count as part of the answer.
            raise SampleRejected("assistant_first", _LEADING) from error
        frame = self.layout.frames[first]
        if not turn:
            # Without turns, a template writes no beginning and no default prompt; the frame must hold the whole header.
            opening = asked.partition(self.thinking)[0]
            if not opening or opening not in frame:
                raise SampleRejected("assistant_first", _LEADING)
            return frame.rindex(opening) + len(opening)
        prompt = _behind(asked, self.layout.order[first - 1] if first else None)
        if prompt is None:
            what = f"the chat template renders the turns before turn {turn + 1} differently on their own"
            fix = "mark the answers in it with {% generation %} and name the file in encoder.chat_template"
            raise SampleRejected("unstable_prefix", f"{what}; {fix}")
        header = common_prefix(prompt, frame)
        header = min(self.stops.whole(prompt, header), self.stops.whole(frame, header))
        # The generation prompt may open the thinking while history does not; thinking belongs to the answer.
        opened = prompt.find(self.thinking)
        header = header if opened < 0 else min(header, opened)
        # After a tool's result, some templates write a header in history but not in the generation prompt.
        name = self._own_header(turn)
        header += len(name) if name and frame.startswith(name, header) else 0
        # A special token that opens the text is a header if the template has no generation prompt.
        headless = self.layout.pieces[self.layout.order[first]].kind == "text" and self.stops.opening(frame[header:])
        if headless and self.render(self.messages[:turn], False) == asked:
            what = "the chat template writes no generation prompt, so an answer's header would be trained too"
            fix = "make it write one for add_generation_prompt, or mark the answers with {% generation %}"
            raise SampleRejected("unstable_prefix", f"{what}; {fix}")
        return header

    def _own_header(self, turn: int) -> str:
        """What the generation prompt adds to the last question before an answer."""
        questions = [at for at, message in enumerate(self.messages[:turn]) if message.get("role") == "user"]
        if not questions or questions[-1] + 1 == turn:
            return ""  # the question directly precedes the answer, so its prompt was already compared
        without, prompted = (self._shown(questions[-1] + 1, prompt) for prompt in (False, True))
        name = prompted[len(without) :] if without and prompted.startswith(without) else ""
        return name.partition(self.thinking)[0]

    def _shown(self, turns: int, prompt: bool = False, *more: dict[str, Any]) -> str:
        """Returns the text of the first turns, and ``more`` after them; an empty one if the template refuses them."""
        try:
            return self.render([*self.messages[:turns], *more], prompt)
        except SampleRejected:
            return ""

    def _last_mark(self, turn: int, last: int) -> int:
        """The last mark of an answer, repetitions included, except those in a result that names its call again."""
        order, again = self.layout.order, last
        while again + 1 < len(order) and self.layout.pieces[order[again + 1]].turn == turn:
            again += 1
        if again == last or turn + 1 == len(self.messages):
            return again
        shown = [piece for _, _, piece in find_marks(self._shown(turn + 1))]
        while again > last and shown.count(order[again]) < order[: again + 1].count(order[again]):
            again -= 1
        return again

    def _end(self, turn: int, last: int) -> tuple[int, str, bool]:
        """`Answer.after`, `Answer.added` and `Answer.opens`."""
        frame = self.layout.frames[last + 1]
        end, is_first = self.stops.first_end(frame)
        is_last = last + 1 == len(self.layout.order) and turn + 1 == len(self.messages)
        if end is not None and (is_last or is_first):
            return (self.stops.rest(frame, end) if is_last else end), "", False
        if is_last:
            return self._open_end(last, frame)
        closing = common_prefix(_behind(self._shown(turn + 1), self.layout.order[last]) or "", frame)
        if end is not None and end <= closing:
            return end, "", False
        # Of the headers that may follow, only those of a question or a result stop an answer.
        follows = turn + 1 < len(self.messages) and self.messages[turn + 1].get("role") in ("user", "tool")
        opening = self.stops.opening(frame[closing:]) if follows else None
        return closing + (opening or 0), "", bool(opening)

    def _open_end(self, last: int, frame: str) -> tuple[int, str, bool]:
        """The end of a last answer without a turn-ending token: adding a turn shows where generation stops."""
        content: Any = _PROBE
        if any(isinstance(message.get("content"), list) for message in self.messages):
            content = [{"type": "text", "text": _PROBE}]
        role = "tool" if self.messages[-1].get("tool_calls") else "user"
        shown = self._shown(len(self.messages), False, {"role": role, "content": content})
        followed = _behind(shown, self.layout.order[last])
        if followed is None:  # the template refuses another turn, or drops the answer before it
            return len(frame), "", False
        behind = followed.partition(_PROBE)[0]
        closing = common_prefix(frame, behind)
        if closing < len(frame):
            # The template appends the generation prompt unasked, so the shared prefix may end inside a header.
            return self.stops.opening(frame) or closing, "", True
        opening = self.stops.opening(behind[closing:])
        return closing, behind[closing:][:opening] if opening else "", bool(opening)


def _behind(text: str, piece: int | None) -> str | None:
    """Returns the text after the last mark of a piece; the whole text if ``piece`` is None; None if it is not shown."""
    if piece is None:
        return text
    ends = [end for _, end, found in find_marks(text) if found == piece]
    return text[ends[-1] :] if ends else None


_MODES: tuple[dict[str, bool], ...] = ({}, {"markup": True}, {"markup": True, "calls": False})
"""Ways to mark a conversation, the most informative first; the others suit templates that look into texts or calls."""
KEPT_STRUCTURES = 256  # Structures whose layouts are cached; data sets have few, and each costs two or more renderings


class Structure:
    """A conversation's structure under a template: where its pieces go, whatever they say.

    Attributes:
        messages, tools: with marks.
        as_python: whether arguments of a call are shown as Python writes them.
        answers: once they were looked for.
        turns: turn of each mark.
    """

    def __init__(self, messages: Messages, tools: Tools, text: str, pieces: Sequence[Piece]) -> None:
        self.messages, self.tools = messages, tools
        self.layout = Layout.of(text, pieces)
        self.missing, self.disorder = self.layout.missing(), self.layout.disorder()
        calls = (call.get("function") or call for message in messages for call in message.get("tool_calls") or ())
        objects = (call.get("arguments") for call in calls)
        self.as_python = any(isinstance(entry, Mapping) and bool(entry) and str(entry) in text for entry in objects)
        self.answers: list[Answer] | None = None
        self.turns = [self.layout.pieces[piece].turn for piece in self.layout.order]
        self.roles = [message.get("role") for message in messages]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A conversation as the template renders it: for each mark of the structure's layout the characters ``[start,
    end)`` of the text, and those that the template marks as generated."""

    structure: Structure
    places: list[tuple[int, int]]
    text: str
    generated: list[tuple[int, int]]


class TemplateReader:
    """Reads conversations through a template."""

    def __init__(self, renderer: TemplateRenderer, tool_definitions: ToolDefinitions) -> None:
        self._renderer, self._tool_definitions = renderer, tool_definitions
        self._structures: OrderedDict[str, Structure | SampleRejected] = OrderedDict()

    def read(self, conversation: Conversation) -> Reading:
        """Renders a conversation and finds everything that it says in the text. Raises SampleRejected:
        ``template_omits`` if something is missing, ``unstable_prefix`` if a turn appears before turns that it followed,
        ``template_error`` if the template refuses the conversation, ``bad_record`` if it cannot be passed to it;
        ConfigError: the template is not valid Jinja."""
        first = conversation.turns[0]
        if first.role == "system" and not _says(first) and self._renderer.hides_empty_system:
            what = "the chat template writes its default prompt in place of the empty system turn"
            raise SampleRejected("template_omits", f"{what}; remove that turn, or use another encoder.chat_template")
        self._check_order_of_silence(conversation)
        failure: SampleRejected | None = None
        with_calls = any(turn.tool_calls for turn in conversation.turns) or bool(conversation.tools)
        for mode in _MODES[: 3 if with_calls else 2]:
            if failure is not None and failure.reason == "template_omits" and not mode.get("calls", True):
                break  # without marks, nothing can be found missing
            found, error = self._best(conversation, mode)
            if found is None and not mode:
                self._renderer.run(*self._renderer.messages(conversation))  # raises with its own words
            if found is None or error is not None:
                failure = failure or error
                continue
            passing, structure, pieces = found
            text, marked = self._renderer.run(*self._renderer.messages(conversation, None, passing))
            places, other = structure.layout.walk(text, pieces)
            if other is None:
                if mode:
                    _check_unmarked(conversation, structure, places, text, calls=not mode.get("calls", True))
                return Reading(structure=structure, places=places, text=text, generated=marked)
            failure = failure or SampleRejected(
                "template_omits",
                f"the chat template changes {names_of(pieces, conversation.turns, [other])}, or the text around it "
                "depends on it; use another encoder.chat_template",
            )
        assert failure is not None
        raise failure

    def _best(
        self, conversation: Conversation, mode: Mapping[str, bool]
    ) -> tuple[tuple[Passing, Structure, list[Piece]] | None, SampleRejected | None]:
        """The way of passing that loses least, and what is still wrong with it; None if the template refuses all."""
        best: tuple[tuple[int, ...], Passing, Structure, list[Piece]] | None = None
        refusal: SampleRejected | None = None
        complaint: SampleRejected | None = None
        for passing in self._passings(conversation):
            try:
                structure, pieces = self._structure(conversation, passing, mode)
            except SampleRejected as refused:
                refusal = refusal or refused
                continue
            missing, disorder = structure.missing, structure.disorder
            left_out = [*self._left_out(conversation, pieces, missing), *_thought_too_late(conversation, structure)]
            score = (len(left_out), int(disorder is not None), len(missing), int(structure.as_python))
            if best is None or score < best[0]:
                best = (score, passing, structure, pieces)
                complaint = self._complaint(conversation, pieces, left_out, disorder)
            if not any(score):
                break
        return (None, refusal) if best is None else (best[1:], complaint)

    def _left_out(self, conversation: Conversation, pieces: Sequence[Piece], missing: Sequence[int]) -> list[int]:
        """Returns the missing pieces that may not be: many templates drop thinking before the last question, and
        definitions may be missing if the user allows it."""
        last_question = max((at for at, turn in enumerate(conversation.turns) if turn.role == "user"), default=-1)
        allowed = {"definition"} if self._tool_definitions == "optional" else set()
        return [
            at
            for at in missing
            if pieces[at].kind not in allowed and (pieces[at].kind != "thinking" or pieces[at].turn >= last_question)
        ]

    @staticmethod
    def _complaint(
        conversation: Conversation, pieces: list[Piece], left_out: list[int], disorder: tuple[int, int] | None
    ) -> SampleRejected | None:
        if left_out:
            kinds = {pieces[piece].kind for piece in left_out}
            way = "use another encoder.chat_template"
            if kinds & {"call", "argument", "definition"}:
                way = "it has no tool support; use a format that has, such as encoder.chat_template: qwen"
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
                "answers would be trained after turns that they did not answer; move the turn, or use another "
                "encoder.chat_template",
            )
        return None

    def _passings(self, conversation: Conversation) -> Iterator[Passing]:
        """Ways of passing worth trying, the plain one first."""
        plain = self._renderer.passing
        if not any(turn.tool_calls for turn in conversation.turns):
            yield plain
            return
        results = any(turn.role == "tool" for turn in conversation.turns)
        for names in (False, True) if results else (False,):
            for as_text in (False, True):
                for none in (False, True):
                    yield replace(plain, no_text_is_none=none, arguments_as_text=as_text, name_results=names)

    def _structure(
        self, conversation: Conversation, passing: Passing, mode: Mapping[str, bool]
    ) -> tuple[Structure, list[Piece]]:
        """Returns the structure of a conversation, cached or rendered, and the conversation's pieces."""
        marks = Marks(**mode)
        messages, tools = self._renderer.messages(conversation, marks, passing)
        key = repr((messages, tools))
        found = self._structures.pop(key, None)
        if found is None:
            try:
                found = Structure(messages, tools, self._renderer.run(messages, tools)[0], marks.pieces)
            except SampleRejected as error:
                found = error
        self._structures[key] = found  # at the end; the one that was used longest ago is dropped
        if len(self._structures) > KEPT_STRUCTURES:
            self._structures.popitem(last=False)
        if isinstance(found, SampleRejected):
            raise SampleRejected(found.reason, found.detail)
        return found, marks.pieces

    def _check_order_of_silence(self, conversation: Conversation) -> None:
        """Checks where questions and results without words belong: they leave no trace, so words are filled in."""
        silent = [turn.role in ("user", "tool") and not _says(turn) for turn in conversation.turns]
        if not any(silent) or conversation.is_pair:
            return
        filled = tuple(
            replace(turn, parts=("energon packing filler",)) if empty else turn
            for turn, empty in zip(conversation.turns, silent, strict=True)
        )
        _, error = self._best(replace(conversation, turns=filled), {})
        if error is not None and error.reason == "unstable_prefix":
            raise error


def _thought_too_late(conversation: Conversation, structure: Structure) -> list[int]:
    """Pieces of a thinking field that stand after the calls that it led to, because a template without such a field
    writes the text of an answer after its calls."""
    pieces = structure.layout.pieces
    called: set[int] = set()
    late: list[int] = []
    for piece in structure.layout.order:
        kind, turn = pieces[piece].kind, pieces[piece].turn
        called |= {turn} if kind == "call" else set()
        late += [piece] if kind == "thinking" and turn in called and conversation.turns[turn].thinking else []
    return late


def _says(turn: Turn) -> bool:
    return bool(turn.text.strip()) or any(isinstance(part, MediaPart) for part in turn.parts)


def _check_unmarked(
    conversation: Conversation, structure: Structure, places: list[tuple[int, int]], text: str, *, calls: bool
) -> None:
    """Checks that what had no mark (tags inside texts, and calls) appears between the turns before and after."""
    turns = structure.layout.places_of_turns()
    for number, turn in enumerate(conversation.turns):
        start = max((places[last][1] for other, (_, last) in turns.items() if other < number), default=0)
        end = min((places[first][0] for other, (first, _) in turns.items() if other > number), default=len(text))
        shown = text[start:end]
        tags = [tag for tag in MARKUP.findall(turn.text) if not TAG.fullmatch(tag)]
        missing = [tag for tag in tags if shown.count(tag) < tags.count(tag)]
        for call in turn.tool_calls if calls else ():
            function = call.get("function") or call
            missing += [word for word in _words([function.get("name"), function.get("arguments")]) if word not in shown]
        if missing:
            what = f"{missing[0]!r} of turn {number + 1} ({turn.role}); use another encoder.chat_template"
            raise SampleRejected("template_omits", f"the chat template leaves out {what}")


def _words(value: Any) -> list[str]:
    """Names, keys, texts and numbers in nested JSON values."""
    if isinstance(value, Mapping):
        return [str(key) for key in value] + _words(list(value.values()))
    if isinstance(value, list | tuple):
        return [word for entry in value for word in _words(entry)]
    return [] if value is None or isinstance(value, bool) else [str(value)]
