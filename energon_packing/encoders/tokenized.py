"""A text as tokens, and which tokens hold which characters."""

import contextlib
import json
import os
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from energon_packing.chat.renderer import common_prefix
from energon_packing.chat.template import ChatTemplate, RenderedChat
from energon_packing.chat.thinking import CLOSE, OPEN, TrainedSpan
from energon_packing.config.encoder import SpecialTokensInText
from energon_packing.conversation import Conversation, MediaKind, Turn
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.base import MediaPlan, VisionFamily

_THREADS = "TOKENIZERS_PARALLELISM"
_KEPT_WORDS = 50_000
"""Words whose tokens the library keeps; its own 10,000 are full after a few thousand texts, and never change again."""
_FIRST_STAND_IN, _STAND_INS = 0x17000, 6136
"""Tangut characters: printable, changed by no normalizer, and in hardly any text."""


class TokenizedText:
    """Tokens of one text, as the tokenizers library returns them; ``ids`` is int32 ``[n]``."""

    def __init__(self, text: str, encoding: Any) -> None:
        self.ids = np.array(encoding.ids, dtype=np.int32)
        self._encoding, self._text = encoding, text

    @cached_property
    def offsets(self) -> np.ndarray:
        """Characters ``[start, end)`` of each token, int64 ``[n, 2]``. All of them cost a fifth of the tokenization."""
        return np.array(self._encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def tokens_of(self, start: int, end: int) -> tuple[int, int]:
        """Tokens ``[first, last)`` that hold any of the characters ``[start, end)``; ``(0, 0)`` if none does. For a
        character of several tokens (an emoji in a byte-level vocabulary) ``char_to_token`` returns only the first, so a
        span that ends with one would lose the others: it is asked where the character after the span begins."""
        first = self._encoding.char_to_token(start) if start < end else None
        behind = self._encoding.char_to_token(end) if end < len(self._text) else len(self.ids) - 1
        if first is None or behind is None or behind < first:
            # No token holds the character, for example because it was normalised away: look at all offsets.
            held = np.flatnonzero((self.offsets[:, 0] < end) & (self.offsets[:, 1] > start))
            return (int(held[0]), int(held[-1]) + 1) if len(held) else (0, 0)
        # A token may hold characters on both sides of the end, and tokens before it may hold none at all.
        for last in range(behind, first - 1, -1):
            begin, stop = self._encoding.token_to_chars(last) or (0, 0)
            if begin < end and stop > start:
                return first, last + 1
        return first, first

    def reaches_over(self, token: int, end: int) -> bool:
        """Whether a token holds more than white space from the character ``end`` on. White space does not count,
        because some tokenizers have an end of turn that includes the next line break."""
        _, stop = self._encoding.token_to_chars(token) or (0, 0)
        return stop > end and not self._text[end:stop].isspace()


class ByteText(TokenizedText):
    """Tokens of one text in a byte-level vocabulary whose bytes are those of the text. ``ends`` holds the bytes of the
    text up to the end of each token, ``[n]``."""

    def __init__(self, backend: Any, text: str, add_special_tokens: bool, ids: np.ndarray, ends: np.ndarray) -> None:
        self.ids, self._ends = ids, ends
        self._backend, self._text, self._add_special_tokens = backend, text, add_special_tokens
        self._known = 0, 0  # a place in the text, and the bytes before it

    @cached_property
    def offsets(self) -> np.ndarray:
        """Characters ``[start, end)`` of each token, int64 ``[n, 2]``, computed by the tokenizer on first use."""
        encoding = self._backend.encode(self._text, add_special_tokens=self._add_special_tokens)
        return np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def tokens_of(self, start: int, end: int) -> tuple[int, int]:
        start, end = self._bytes_before(start), self._bytes_before(end)
        # The first token that ends after the start, and the first token that reaches the end.
        first, last = self._ends.searchsorted(start, side="right"), self._ends.searchsorted(end) + 1
        return (int(first), int(last)) if first < last and end > 0 else (0, 0)

    def reaches_over(self, token: int, end: int) -> bool:
        start, stop = self._bytes_before(end), int(self._ends[token])
        return stop > start and not self._text.encode()[start:stop].isspace()

    def _bytes_before(self, place: int) -> int:
        """Bytes of the text up to a character; spans are asked for in order, so only what follows is counted."""
        if self._text.isascii():
            return place
        known, count = self._known
        if place < known:
            known = count = 0
        self._known = place, count + len(self._text[known:place].encode())
        return self._known[1]


class SpecialTexts:
    """What becomes of special tokens that a record's texts contain, see ``encoder.special_tokens_in_text``. For
    ``text``, a record is rendered with stand-ins in their place, of the same length. In the rendered text, the real
    ones are then the template's own. Tokenizing exchanges the two: a copy of the tokenizer has the stand-ins as its
    special tokens, so that the record's are text to it, and every character stays where it is. Thinking tags do not
    count, which records have as marks. Raises ConfigError: for ``text``, if the tokenizer cannot write one so."""

    def __init__(self, tokenizer: Any, choice: SpecialTokensInText) -> None:
        self._choice = choice
        special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = sorted(name for name in special if name and name not in (OPEN, CLOSE)) if choice != "keep" else []
        if choice == "text" and len(names) > _STAND_INS:
            raise _no_text(f"it has {len(names)} special tokens, more than {_STAND_INS}")
        self._other: dict[str, str] = {}
        if choice == "text":
            stand_ins = {name: chr(_FIRST_STAND_IN + at) * len(name) for at, name in enumerate(names)}
            self._other = stand_ins | {stand_in: name for name, stand_in in stand_ins.items()}
        longest_first = sorted(self._other or names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._stand_in = re.compile(f"[{chr(_FIRST_STAND_IN)}-{chr(_FIRST_STAND_IN + _STAND_INS - 1)}]")
        if choice == "text":
            from tokenizers import Tokenizer  # type: ignore[import-untyped]

            backend = tokenizer.backend_tokenizer
            state = json.loads(backend.to_str())
            named = {}
            for token in state["added_tokens"]:
                name = token["content"]
                named[name] = token["content"] = self._other.get(name, name)
            copy = Tokenizer.from_str(json.dumps(state))
            pairs = {copy.token_to_id(new): backend.token_to_id(name) for name, new in named.items()}
            # For each id of the copy that of the tokenizer, int32 [largest id + 1].
            self._ids = np.arange(max(*copy.get_vocab().values(), *pairs) + 1, dtype=np.int32)
            self._ids[list(pairs)] = list(pairs.values())
            self._copy = TextTokenizer(copy)
            for name in names:
                tokens = (self._copy(held, add_special_tokens=False).ids for held in (self._other[name], name))
                own, text = (self._ids.take(ids).tolist() for ids in tokens)
                if own != [special[name]] or not set(text).isdisjoint(special.values()):
                    raise _no_text(f"its vocabulary holds {name!r} as a word")

    def __call__(self, conversation: Conversation) -> Conversation:
        """Returns the conversation as it is to be rendered; the same object if no text has a special token. Raises
        SampleRejected: ``special_token`` if one has and ``choice`` is ``refuse``, ``bad_text`` if one also has
        characters that stand for them, ``bad_record`` if a tool call is nested too deeply."""
        if self._choice == "keep":
            return conversation
        found: list[str] = []

        def changed(text: str) -> str:
            if (match := self._pattern.search(text)) is None:
                return text
            if self._choice == "refuse":
                found_in = f"a text, tool call or tool definition holds {match[0]!r}, a special token of the tokenizer"
                fix = "encoder.special_tokens_in_text: text trains it as ordinary text"
                raise SampleRejected("special_token", f"{found_in}; {fix}")
            found.append(match[0])
            if self._stand_in.search(text):
                detail = f"a text holds {match[0]!r} and Tangut characters, which stand for special tokens"
                raise SampleRejected("bad_text", detail)
            return self.exchanged(text)

        def of(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
            return tuple(
                replace(
                    turn,
                    parts=tuple(changed(part) if isinstance(part, str) else part for part in turn.parts),
                    tool_calls=_each(turn.tool_calls, changed),
                    tool_call_id=_each(turn.tool_call_id, changed),
                    thinking=_each(turn.thinking, changed),
                )
                for turn in turns
            )

        try:
            turns, chosen, rejected = of(conversation.turns), of(conversation.chosen), of(conversation.rejected)
            tools = _each(conversation.tools, changed)
        except RecursionError as error:
            raise SampleRejected("bad_record", "the arguments of a tool call are nested too deeply") from error
        if not found:
            return conversation
        return replace(conversation, turns=turns, chosen=chosen, rejected=rejected, tools=tools)

    def exchanged(self, text: str) -> str:
        """Returns a text with stand-ins in place of special tokens, and these in place of stand-ins."""
        return self._pattern.sub(lambda match: self._other[match[0]], text)

    def holds_stand_ins(self, text: str) -> bool:
        """Whether a rendered text may be that of a record whose special tokens have been replaced."""
        return bool(self._other) and not text.isascii() and self._stand_in.search(text) is not None

    def tokens(self, text: str, *, add_special_tokens: bool) -> TokenizedText:
        """Returns the tokens of a rendered text, in which the record's special tokens are text."""
        tokenized = self._copy(self.exchanged(text), add_special_tokens=add_special_tokens)
        tokenized.ids = self._ids.take(tokenized.ids)
        return tokenized


def _no_text(why: str) -> ConfigError:
    return ConfigError(
        "encoder.special_tokens_in_text is 'text', but the tokenizer cannot write its special tokens as ordinary text: "
        f"{why}; use 'refuse' or 'keep'."
    )


def _each(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _each(entry, change) for key, entry in value.items()}
    return type(value)(_each(entry, change) for entry in value) if isinstance(value, list | tuple) else value


class TextTokenizer:
    """Makes `TokenizedText`; ``specials`` tokenizes texts of records whose special tokens are text. Padding, truncation
    and ``split_special_tokens`` are switched off whenever they are on: they may have been saved with the tokenizer, and
    a processor that is also used elsewhere may switch them on at any call."""

    def __init__(self, backend: Any, specials: SpecialTexts | None = None) -> None:
        self._backend, self._specials = backend, specials
        if resize := getattr(backend.model, "_resize_cache", None):  # tokenizers 0.21
            resize(_KEPT_WORDS)
        if _one_thread():
            _ = self._lengths  # before a fork, which shares them
        self._is_nfc = backend.normalizer is not None

    def __call__(self, text: str, *, add_special_tokens: bool) -> TokenizedText:
        """Returns the tokens of one text. Raises SampleRejected: ``bad_text`` where the text is not valid Unicode."""
        if self._specials is not None and self._specials.holds_stand_ins(text):
            return self._specials.tokens(text, add_special_tokens=add_special_tokens)
        try:
            (quick,) = self.several([text], add_special_tokens=add_special_tokens)
            if quick is not None:
                return quick
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            # The tokenizers library raises these for a lone surrogate, which JSON can hold and UTF-8 cannot.
            raise SampleRejected("bad_text", f"the text is not valid Unicode: {error}") from error
        return TokenizedText(text, encoding)

    def several(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[ByteText | None]:
        """Returns the tokens of each text; None where the quick way is not open. Raises TypeError or UnicodeEncodeError
        if one is not valid Unicode. Texts that follow each other find the tokenizer's tables in the cache."""
        if self._backend.padding is not None:
            self._backend.no_padding()
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend.encode_special_tokens:  # the template's special tokens are no text
            self._backend.encode_special_tokens = False
        # The call without offsets exists only for batches, and a batch starts the library's threads, which a worker
        # that is forked later cannot use. So it is used only if the library's own variable switches threads off.
        if not _one_thread() or self._lengths is None:
            return [None] * len(texts)
        kept = {  # those that the normalizer leaves as they are
            at: text
            for at, text in enumerate(texts)
            if text.isascii() or not self._is_nfc or unicodedata.is_normalized("NFC", text)
        }
        encodings = self._backend.encode_batch_fast(list(kept.values()), add_special_tokens=add_special_tokens)
        quick: list[ByteText | None] = [None] * len(texts)
        for (at, text), encoding in zip(kept.items(), encodings, strict=True):
            tokens = encoding.ids
            ids = np.fromiter(tokens, dtype=np.int32, count=len(tokens))
            ends = self._lengths.take(ids).cumsum()
            # Bytes of tokens that are not those of the text tell no places.
            if (ends[-1] if len(ids) else 0) == (len(text) if text.isascii() else len(text.encode())):
                quick[at] = ByteText(self._backend, text, add_special_tokens, ids, ends)
        return quick

    @cached_property
    def _lengths(self) -> np.ndarray | None:
        return byte_lengths(self._backend)


def use_one_thread() -> None:
    """Lets the tokenizers library work without threads in this process, unless the user has said otherwise: texts that
    are measured one after the other have nothing to divide among them, and `TextTokenizer` is a fifth faster."""
    os.environ.setdefault(_THREADS, "false")


def _one_thread() -> bool:
    value = os.environ.get(_THREADS)
    return value is not None and value.lower() in ("", "off", "false", "f", "no", "n", "0")


_LOSSLESS = frozenset({"Sequence", "Split", "ByteLevel", "Digits"})
"""Pre-tokenizers that only cut a text; settings that make them change it are checked below."""


def byte_lengths(backend: Any) -> np.ndarray | None:
    """Returns the number of text bytes that each token of a byte-level vocabulary represents, int32 ``[largest id +
    1]``. Their cumulative sum locates every token, for a fraction of the time that the tokenizers library needs to
    record the characters of every token. This holds for lossless byte-level BPE (GPT-2's, which Qwen, InternVL 3 and
    DeepSeek use); for any other tokenizer the result is None. If the normalizer changes a text (only NFC is accepted)
    or the post-processor adds tokens, text and tokens differ in bytes: compare the two for every text."""
    from tokenizers import models, pre_tokenizers

    model, added = backend.model, backend.get_added_tokens_decoder()
    if (
        not isinstance(model, models.BPE)
        or model.dropout
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
        or _state(backend.normalizer).get("type", "NFC") != "NFC"
        or not _only_cuts(_state(backend.pre_tokenizer))
        or _state(backend.decoder).get("type") != "ByteLevel"
        or not _keeps_offsets(_state(backend.post_processor))
        or any(token.lstrip or token.rstrip for token in added.values())
    ):
        return None
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for name, number in backend.get_vocab(False).items() if number not in added}
    if not alphabet <= vocabulary.keys() or not set("".join(vocabulary)) <= alphabet:
        return None
    lengths = np.zeros(max([*vocabulary.values(), *added]) + 1, dtype=np.int32)
    lengths[list(vocabulary.values())] = [len(name) for name in vocabulary]
    lengths[list(added)] = [len(token.content.encode()) for token in added.values()]
    return lengths


def _state(part: Any) -> dict[str, Any]:
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _only_cuts(state: dict[str, Any]) -> bool:
    changes = state.get("type") not in _LOSSLESS or state.get("add_prefix_space") or state.get("behavior") == "Removed"
    return not changes and all(map(_only_cuts, state.get("pretokenizers", ())))


def _keeps_offsets(state: dict[str, Any]) -> bool:
    """Whether offsets include a token's leading space; with Llama 3's post-processor they do not."""
    trims = state.get("type") == "ByteLevel" and state.get("trim_offsets")
    return not trims and all(map(_keeps_offsets, state.get("processors", ())))


class Expanded(NamedTuple):
    """A rendered conversation with the texts of its images and videos in place of their placeholders."""

    text: str
    # Its trained characters, ascending, and with weight 0 those of ``media``: no trained token touches them.
    spans: tuple[TrainedSpan, ...]
    # Characters ``[start, end)`` of each image and video in conversation order: everything that its family inserts
    # (tokens, times, numbers of frames, sentences about crops, line breaks), and its frame.
    media: tuple[tuple[int, int], ...]
    moved: Callable[[int], int]  # maps a character position of the rendered text to ``text``


class Placeholders:
    """Finds and replaces what the chat template writes for an image or video. The template defines the frames around a
    placeholder: ``<|vision_start|>``, ``Picture 1:``, a line break."""

    def __init__(self, family: VisionFamily, template: ChatTemplate) -> None:
        self.family, self._template = family, template
        kinds = sorted(family.placeholders.items())
        self._kinds = [kind for kind, _ in kinds]
        self._pattern = re.compile("|".join(f"({re.escape(text)})" for _, text in kinds) or "(?!)")

    @cached_property
    def _frames(self) -> dict[MediaKind, tuple[re.Pattern[str], re.Pattern[str]]]:
        """What may stand directly before and after a placeholder, by kind; a number may be another one. It is what the
        template adds to a message with one image or video, which is the difference to the same message without it,
        wherever the template puts it: between two texts, or before both, as LLaVA's do. Both sides are empty if the
        template does not take this kind."""
        texts = [{"type": "text", "text": text} for text in ("text before a medium", "text after a medium")]
        found = {}
        for kind, placeholder in self.family.placeholders.items():
            sides = "", ""
            with contextlib.suppress(SampleRejected):
                without, shown = (
                    self._template.renderer.run([{"role": "user", "content": content}], None)[0]
                    for content in (texts, [texts[0], {"type": kind}, texts[1]])
                )
                start = common_prefix(without, shown)
                end = common_prefix(without[start:][::-1], shown[start:][::-1])
                before, there, after = shown[start : len(shown) - end].partition(placeholder)
                sides = (before, after) if there else sides
            opening, closing = (re.sub(r"\d+", r"\\d+", re.escape(side)) for side in sides)
            found[kind] = re.compile(rf"(?:{opening})\Z"), re.compile(closing)
        return found

    def expand(self, chat: RenderedChat, plans: Sequence[MediaPlan]) -> Expanded:
        """Replaces the placeholder of each medium; ``placeholder_mismatch`` if they are not those of ``plans``."""
        if not plans and not any(text in chat.text for text in self.family.placeholders.values()):
            return Expanded(chat.text, chat.spans, (), lambda at: at)  # the search takes a tenth of the tokenization
        matches = list(self._pattern.finditer(chat.text))
        found = [self._kinds[(match.lastindex or 1) - 1] for match in matches]
        expected = [plan.kind for plan in plans]
        if found != expected:
            detail = f"the chat template writes media {found}, but the conversation has {expected}"
            raise SampleRejected("placeholder_mismatch", detail)
        parts: list[str] = []
        media: list[tuple[int, int]] = []
        ends, shifts = [], [0]
        cursor = framed = 0
        for match, plan in zip(matches, plans, strict=True):
            start, text = match.start(), self.family.replacement(plan)
            before, after = self._frames[plan.kind]
            parts += (chat.text[cursor:start], text)
            cursor = match.end()
            opened, closed = before.search(chat.text, framed, start), after.match(chat.text, cursor)
            framed = closed.end() if closed else cursor
            ends.append(cursor)
            shifts.append(shifts[-1] + len(text) - (cursor - start))
            media.append(((opened.start() if opened else start) + shifts[-2], framed + shifts[-1]))
        parts.append(chat.text[cursor:])

        def moved(at: int) -> int:
            return at + shifts[bisect_right(ends, at)]

        spans = [TrainedSpan(moved(span.start), moved(span.end), span.weight) for span in chat.spans]
        spans += [TrainedSpan(start, end, 0.0) for start, end in media]
        return Expanded("".join(parts), tuple(sorted(spans)), tuple(media), moved)

    def check_reserved(self, conversation: Conversation) -> None:
        """Refuses (``reserved_token``) a text, tool call or tool definition with a token that stands for media."""
        called = [turn for turn in conversation.turns if turn.tool_calls or turn.tool_call_id]
        texts = [(f"a {turn.role} turn", f"{turn.thinking or ''}{turn.text}") for turn in conversation.turns]
        texts += [("a tool call", text) for turn in called for text in _strings([turn.tool_calls, turn.tool_call_id])]
        texts += [("a tool definition", text) for text in _strings(conversation.tools)]
        for where, text in texts:
            for token in self.family.reserved:
                if token in text:
                    raise SampleRejected("reserved_token", f"{where} holds {token!r}, which stands for media")


def _strings(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        entry = pending.pop()
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, Mapping):
            pending += [*entry.keys(), *entry.values()]
        elif isinstance(entry, list | tuple):
            pending += entry
