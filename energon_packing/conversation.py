"""A conversation: turns of text and media, as every stage after conversion sees it.

It is stored as JSON in the Energon data set (`Conversation.to_record`), so reading a sample never involves guessing its
layout. Media are named, never embedded; their sizes are probed once, at conversion.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count, pairwise
from typing import Any, Literal, Self

from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.stored_record import LARGEST_NUMBER, StoredRecord

Role = Literal["system", "user", "assistant", "tool"]
MediaKind = Literal["image", "video"]
ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")
RECORD_VERSION = 1
PREFERENCE = "preference"
"""The extra that is computed, not read: 1 for targets of a chosen answer, -1 for those of a rejected one, else 0."""
Pairs = Literal["refuse", "chosen", "drop", "both"]
"""``packing.pairs``: what is trained of preference pairs, and of answers that a label marks (KTO)."""
_RECORD = StoredRecord("conversation")
_OLD_NOISE = Fraction(1, 2**50)
RECORD_FIELDS = frozenset(("version", "id", "turns", "media", "tools", "chosen", "rejected", "extras"))
_LISTS = ("frame_names", "frame_times", "time_points")
MOST_POINTS = 1000  # Corners of `Media.time_points`, a number and a second each
MEDIA_FIELDS = ("kind", "name", "width", "height", "frames", "fps", "duration", *_LISTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """One image or video that a conversation names.

    Attributes:
        kind: ``"image"`` or ``"video"``.
        name: the entry's name in its store, for example ``"a1b2.jpg"``; relative, without ``..``.
        width, height: pixels as displayed, that is after EXIF or container rotation; None if not probed yet.
        frames, fps, duration: number of frames, average frames per second (see `rate`) and seconds of a video; None for
            images.
        frame_names: for a video that is a list of images, the names of its ``frames`` entries in the store, in order;
            ``name`` is the first one. Such a list is already sampled: families use every frame of it.
        frame_times: seconds at which each of those frames is shown, ascending; empty if they are ``1 / fps`` apart.
        time_points: of a video file whose frames are not ``1 / fps`` apart: number of a frame, its second, number of a
            later frame, its second, and so on from the first frame (0, 0.0) to the last; those between two of them are
            evenly spread. Empty for other files, and for those that were converted before this was noted.
    """

    kind: MediaKind
    name: str
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: float | None = None
    duration: float | None = None
    frame_names: tuple[str, ...] = ()
    frame_times: tuple[float, ...] = ()
    time_points: tuple[float, ...] = ()

    @property
    def rate(self) -> Fraction | None:
        """The frame rate that ``fps`` stands for: a fraction such as 24000/1001 where one is close by, else ``fps``.
        Containers state fractions, and a record holds the nearest float, an older one up to 4 units in the last place
        off. No two fractions are so close at usual rates if one has a denominator of at most 10,000 and the other fits
        into a container (32 bits)."""
        if self.fps is None:
            return None
        exact = Fraction(self.fps)
        near = exact.limit_denominator(10_000)
        return near if abs(near - exact) <= exact * _OLD_NOISE else exact

    def to_record(self) -> dict[str, Any]:
        """The JSON form, without fields that are None or empty."""
        stated = {name: value for name in MEDIA_FIELDS if (value := getattr(self, name)) is not None and value != ()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in stated.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """The place of ``Conversation.media[index]`` in a turn."""

    index: int


Part = str | MediaPart


@dataclass(frozen=True, kw_only=True, slots=True)
class PairCounts:
    """How much of a data set a cross-entropy loss must not train as it is: among all samples, ``pairs`` of a chosen and
    a rejected answer, and answers that a label calls ``unwanted`` (KTO)."""

    samples: int = 0
    pairs: int = 0
    unwanted: int = 0

    def __add__(self, other: Self) -> Self:
        pairs, unwanted = self.pairs + other.pairs, self.unwanted + other.unwanted
        return replace(self, samples=self.samples + other.samples, pairs=pairs, unwanted=unwanted)

    def __bool__(self) -> bool:
        return bool(self.pairs or self.unwanted)

    def __str__(self) -> str:
        counts = ((self.pairs, "preference pair"), (self.unwanted, "unwanted answer"))
        named = " and ".join(f"{count:,} {what}{'s' * (count != 1)}" for count, what in counts if count)
        mixed = ", mixed with plain conversations" if 0 < self.pairs < self.samples - self.unwanted else ""
        return f"{named or 'no preference pairs'} among {self.samples:,} samples{mixed}"

    def check(self, where: object, pairs: Pairs) -> None:
        """Refuses a run on such data before its first step, if it did not choose what is trained of them."""
        if self and pairs == "refuse":
            raise _refused(f"{where} has {self}")


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, and packing.pairs is 'refuse', because cross-entropy would train rejected answers like all others; "
        "set it to 'chosen' (only the chosen answers are trained), 'drop', or 'both' (for a loss that reads "
        "'preference', see docs/limits.md)."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one speaker says.

    Attributes:
        parts: text and media in reading order; adjacent texts are merged by the converters.
        tool_calls: OpenAI-style calls of an assistant turn,
            ``{"type": "function", "function": {"name": ..., "arguments": ...}}``; an ``"id"`` is kept.
        tool_call_id: for a tool turn, the id of the call that it answers; None if the data has none.
        loss_weight: for an assistant turn that ``train_on`` trains: 0.0 excludes the turn, any other number weights
            its tokens, None means 1.0. Ignored for other turns.
        thinking: what the record holds in a field of its own (``reasoning_content`` and others), to the byte; None for
            an answer without such a field, whose text may hold ``<think>...</think>``.
    """

    role: Role
    parts: tuple[Part, ...]
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    loss_weight: float | None = None
    tool_call_id: str | None = None
    thinking: str | None = None

    @property
    def text(self) -> str:
        """All text of the turn, media left out."""
        if len(self.parts) == 1 and isinstance(self.parts[0], str):  # nearly all turns
            return self.parts[0]
        return "".join(part for part in self.parts if isinstance(part, str))

    def to_record(self) -> dict[str, Any]:
        """The JSON form."""
        parts: list[Any] = list(self.parts)
        if len(parts) != 1 or not isinstance(parts[0], str):  # few turns
            parts = [part if isinstance(part, str) else {"media": part.index} for part in parts]
        stated = {
            "role": self.role,
            "parts": parts,
            "tool_calls": [dict(call) for call in self.tool_calls] or None,
            "loss_weight": self.loss_weight,
            "tool_call_id": self.tool_call_id,
            "thinking": self.thinking,
        }
        return {name: value for name, value in stated.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One training sample before tokenization.

    Attributes:
        key: unique in its data set; letters, digits, ``-`` and ``_`` only (a dot would split a WebDataset key).
        turns: in order; at least one.
        media: every image and video, in order of first mention; exactly one `MediaPart` uses each index (a file
            mentioned twice is listed twice, under one name).
        tools: tool definitions for the chat template (a list of JSON schemas), or None.
        chosen, rejected: for preference data, the turns that follow ``turns`` in the preferred answer and in the other
            one; text only. Both or neither are given.
        extras: values of the trained tokens by name (advantages, log-probabilities, rewards): one number for all, or
            one per token in order; for a pair, ``{"chosen": ..., "rejected": ...}`` of these, or one number for both.
        source_id: the id of its record where the key cannot be that, because it is not ASCII.
    """

    key: str
    turns: tuple[Turn, ...]
    media: tuple[Media, ...] = ()
    tools: tuple[Mapping[str, Any], ...] | None = None
    chosen: tuple[Turn, ...] = ()
    rejected: tuple[Turn, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    source_id: str | None = None

    @property
    def modality(self) -> str:
        """What it has beside text, for counting: ``text`` (nothing), ``image``, ``video`` or ``image and video``."""
        return " and ".join(sorted({media.kind for media in self.media})) or "text"

    @property
    def is_pair(self) -> bool:
        """Whether this holds a chosen and a rejected answer to the same beginning."""
        return bool(self.chosen)

    def answers(self) -> tuple[Self, Self]:
        """The two conversations of a pair, chosen first; of the assistant turns, only those of the answer are trained.
        Their ``extras`` are the record's plus `PREFERENCE`: 1 for the chosen one, -1 for the rejected one. Raises
        SampleRejected: ``no_pair`` if the conversation is not a pair."""
        if not self.is_pair:
            raise SampleRejected("no_pair", "the record has no chosen and rejected answer")
        common = tuple(replace(turn, loss_weight=0.0) if turn.role == "assistant" else turn for turn in self.turns)

        def answer(which: str, turns: tuple[Turn, ...], sign: float) -> Any:
            own = {name: part[which] if isinstance(part, Mapping) else part for name, part in self.extras.items()}
            own[PREFERENCE] = sign
            return replace(self, key=f"{self.key}/{which}", turns=(*common, *turns), chosen=(), rejected=(), extras=own)

        return answer("chosen", self.chosen, 1.0), answer("rejected", self.rejected, -1.0)

    @property
    def is_unwanted(self) -> bool:
        """Whether a label says that the answer is unwanted (KTO)."""
        return bool(self.extras) and not self.is_pair and self.extras.get(PREFERENCE, 0) < 0

    def trained(self, pairs: Pairs) -> Self:
        """What a run trains of it: itself, or under ``chosen`` of a pair the conversation with the chosen answer. As in
        a pair, earlier answers of that conversation are not trained, because nobody chose them. Raises SampleRejected:
        one of `energon_packing.drops.WISHED`; ConfigError: the run did not choose, and this is a pair or an unwanted
        answer."""
        if pairs == "both" or not (self.is_pair or PREFERENCE in self.extras):
            return self
        if pairs == "drop":
            if self.is_pair:
                raise SampleRejected("pair", "it has two answers, and packing.pairs is 'drop'")
            raise SampleRejected("labelled_answer", "its answer has a label, and packing.pairs is 'drop'")
        if pairs == "chosen":
            if self.is_unwanted:
                raise SampleRejected("unwanted_answer", "its label says so, and packing.pairs is 'chosen'")
            return replace(self.answers()[0], key=self.key) if self.is_pair else self
        if self.is_pair or self.is_unwanted:
            kind = "a preference pair" if self.is_pair else "an answer that its label calls unwanted"
            raise _refused(f"Sample {self.key} is {kind}")
        return self

    def __post_init__(self) -> None:
        if bool(self.chosen) != bool(self.rejected):
            raise SampleRejected("bad_record", "a pair needs both a chosen and a rejected answer")
        for turn in (*self.chosen, *self.rejected) if self.chosen else ():
            if any(isinstance(part, MediaPart) for part in turn.parts):
                raise SampleRejected("bad_record", "the answers of a pair may contain only text; put media before them")
        for name, value in self.extras.items():
            wrong = wrong_extra(value, is_pair=self.is_pair)
            if name == PREFERENCE and (self.is_pair or not isinstance(value, int | float)):
                wrong = "is made from the answers of a pair"
            if wrong:
                raise SampleRejected("bad_record", f"extras {name!r} {wrong}")
        named = [part.index for turn in self.turns for part in turn.parts if type(part) is MediaPart]
        if named != list(range(len(self.media))):
            detail = f"the turns name media {named}, but the record lists {len(self.media)} media in order"
            raise SampleRejected("placeholder_mismatch", detail)
        if not self.turns:
            raise SampleRejected("empty_conversation", "the record has no turns")
        for turn in (*self.turns, *self.chosen, *self.rejected) if self.chosen else self.turns:
            if turn.role not in ROLES:
                raise SampleRejected("unknown_role", f"role {reprlib.repr(turn.role)} is not one of {', '.join(ROLES)}")

    def to_messages(self) -> list[dict[str, Any]]:
        """Messages for a Hugging Face chat template, ``{"role": ..., "content": [{"type": "image"}, ...]}``. The
        content of a turn without media is a plain string, which every template accepts."""
        messages: list[dict[str, Any]] = []
        for turn in self.turns:
            content: Any = turn.text
            if any(isinstance(part, MediaPart) for part in turn.parts):
                content = [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": self.media[part.index].kind}
                    for part in turn.parts
                ]
            stated = {
                "role": turn.role,
                "content": content,
                "tool_calls": [dict(call) for call in turn.tool_calls] or None,
                "tool_call_id": turn.tool_call_id,
                "reasoning_content": turn.thinking,
            }
            messages.append({name: value for name, value in stated.items() if value is not None})
        return messages

    @classmethod
    def from_messages(
        cls,
        messages: Iterable[Mapping[str, Any]],
        *,
        media: Iterable[Media] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        key: str = "messages",
    ) -> Self:
        """Returns the conversation of messages as Hugging Face's chat templates take them, what `to_messages` returns.
        Raises SampleRejected: ``bad_record`` for messages of another form, and the reasons of `Conversation` itself.

        Args:
            messages: each has ``role`` and ``content``, and may have ``tool_calls``, ``tool_call_id`` and
                ``reasoning_content``. Content is text or a list of parts: text, ``{"type": "text", "text": ...}``, or
                ``{"type": "image"}`` and ``{"type": "video"}``, of which each takes the next of ``media``.
            media: what the parts name, in order (`energon_packing.media_file` reads the sizes of a file).
        """
        listed, turns = tuple(media), []
        kinds = [entry.kind for entry in listed]
        names = {name: name for name in ("role", "tool_calls", "tool_call_id")} | {"thinking": "reasoning_content"}
        taken = count()
        for number, message in enumerate(messages, 1):
            where = f"message {number}"
            _RECORD.check_keys(message, {"content", *names.values()}, where)
            content = message.get("content")
            given: Any = [content or ""] if content is None or isinstance(content, str) else content
            if not isinstance(given, list | tuple):
                found = type(given).__name__
                raise _RECORD.bad(f"the content of {where} is a {found}, expected text or a list of parts")
            parts: list[Any] = []
            for part in given:
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind in ("image", "video"):
                    parts.append({"media": (index := next(taken))})
                    if kinds[index : index + 1] not in ([], [kind]):
                        raise _RECORD.bad(f"a part of {where} is of type {kind}, its medium of {kinds[index]}")
                elif (text := part.get("text") if kind == "text" else part) is None or not isinstance(text, str):
                    raise _RECORD.bad(f"a part of {where} is {reprlib.repr(part)}, neither text, image nor video")
                else:
                    parts.append(text)
            stated = {name: message.get(theirs) for name, theirs in names.items()}
            turns.append({name: value for name, value in stated.items() if value is not None} | {"parts": parts})
        record = {"version": RECORD_VERSION, "turns": turns, "media": [entry.to_record() for entry in listed]}
        return cls.from_record(key, record if tools is None else record | {"tools": list(tools)})

    def to_record(self) -> dict[str, Any]:
        """The JSON form that is stored in the data set; `from_record` reads it back unchanged."""
        spoken = {"turns": self.turns, "chosen": self.chosen, "rejected": self.rejected}
        parts: dict[str, Any] = {name: [turn.to_record() for turn in turns] for name, turns in spoken.items()}
        parts |= {"extras": _plain(self.extras), "media": [media.to_record() for media in self.media]}
        tools = {} if self.tools is None else {"tools": [dict(tool) for tool in self.tools]}
        source = {} if self.source_id is None else {"id": self.source_id}
        return {"version": RECORD_VERSION, **source, **{name: part for name, part in parts.items() if part}, **tools}

    @classmethod
    def from_record(cls, key: str, record: Any) -> Self:
        """Reads what `to_record` wrote. Raises SampleRejected: ``bad_record`` if the JSON does not have that form,
        ``media_outside_root`` if a media name is absolute or has ``..``, and the reasons of `Conversation`."""
        _RECORD.check_keys(record, RECORD_FIELDS, "the record")
        _RECORD.check_version(record, RECORD_VERSION)
        if not isinstance(source_id := record.get("id"), str | None):
            raise _RECORD.bad(f"the id of the record is a {type(source_id).__name__}, expected text")
        return cls(
            key=key,
            turns=_read_turns(record, "turns"),
            **{name: _read_turns(record, name, f"{name} ") for name in ("chosen", "rejected") if name in record},
            media=tuple(media_of(entry) for entry in _RECORD.read_list(record, "media", "the record", optional=True)),
            tools=None if record.get("tools") is None else _mappings(record, "tools", "the record"),
            extras=read_extras(record.get("extras", {})),
            source_id=source_id,
        )


def _mappings(value: Mapping[str, Any], field: str, where: str) -> tuple[Mapping[str, Any], ...]:
    entries = tuple(_RECORD.read_list(value, field, where, optional=True))
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise _RECORD.bad(f"{field} of {where} holds something that is not an object")
    return entries


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return list(value) if isinstance(value, list | tuple) else value


def read_extras(value: Any) -> dict[str, Any]:
    """The ``extras`` of a JSON record; anything but finite numbers, lists of them, and pairs of either is a
    ``bad_record``."""
    if not isinstance(value, Mapping):
        raise _RECORD.bad(f"extras of the record is a {type(value).__name__}, expected an object")
    return {str(name): _read_extra(name, part) for name, part in value.items()}


def wrong_extra(value: Any, *, is_pair: bool) -> str | None:
    """Why a value cannot be an extra of a pair, or of another conversation; None if it can."""
    if isinstance(value, Mapping) and (not is_pair or set(value) != {"chosen", "rejected"}):
        return "has parts other than the two answers of a pair"
    if isinstance(value, list | tuple) and is_pair:
        return "is one list, but a pair has two answers; give one list for each"
    return None


def _read_extra(name: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        _RECORD.check_keys(value, {"chosen", "rejected"}, f"extras {name!r}")
        return {which: _read_extra(name, part) for which, part in value.items() if not isinstance(part, Mapping)}
    numbers = value if isinstance(value, list | tuple) else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= LARGEST_NUMBER:
            raise _RECORD.bad(f"extras {name!r} contains something that is not a finite number")
    return tuple(value) if isinstance(value, list | tuple) else value


def _read_turns(record: Mapping[str, Any], name: str, which: str = "") -> tuple[Turn, ...]:
    turns = enumerate(_RECORD.read_list(record, name, "the record"), 1)
    return tuple([_read_turn(turn, number, which) for number, turn in turns])


def _read_turn(turn: Any, number: int, which: str = "") -> Turn:
    if type(turn) is dict and len(turn) == 2:  # nearly all turns: one text, and nothing that could be wrong
        role, parts = turn.get("role"), turn.get("parts")
        if type(role) is str and type(parts) is list and len(parts) == 1 and type(parts[0]) is str:
            return Turn(role=role, parts=(parts[0],))  # type: ignore[arg-type]  # the conversation checks roles
    where = f"{which}turn {number}"
    _RECORD.check_keys(turn, {"role", "parts", "tool_calls", "loss_weight", "tool_call_id", "thinking"}, where)
    if not isinstance(turn.get("role"), str):
        raise _RECORD.bad(f"the role of {where} is a {type(turn.get('role')).__name__}")
    read: list[Part] = []
    for part in _RECORD.read_list(turn, "parts", where):
        if isinstance(part, str):
            read.append(part)
        else:
            _RECORD.check_keys(part, {"media"}, f"a part of {where}")
            _RECORD.check_number(part.get("media"), f"a media index of {where}", whole=True, above_zero=False)
            read.append(MediaPart(index=part["media"]))
    if (weight := turn.get("loss_weight")) is not None:
        _RECORD.check_number(weight, f"the loss_weight of {where}", above_zero=False)
    texts = {name: turn.get(name) for name in ("tool_call_id", "thinking")}
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise _RECORD.bad(f"the {name} of {where} is a {type(value).__name__}, expected text")
    calls = _mappings(turn, "tool_calls", where)
    return Turn(role=turn["role"], parts=tuple(read), tool_calls=calls, loss_weight=weight, **texts)


def media_of(entry: Any) -> Media:
    """Reads what `Media.to_record` wrote; raises as `Conversation.from_record`."""
    _RECORD.check_keys(entry, set(MEDIA_FIELDS), "a media entry")
    kind, name = entry.get("kind"), entry.get("name")
    if kind not in ("image", "video"):
        raise _RECORD.bad(f"a media entry is of kind {reprlib.repr(kind)}")
    _RECORD.check_name(name, kind, "a media entry")
    for what in ("width", "height", "frames", "fps", "duration"):
        if entry.get(what) is not None:
            whole = what not in ("fps", "duration")
            _RECORD.check_number(entry[what], f"{what} of {reprlib.repr(name)}", whole=whole)
    names, times, points = (tuple(_RECORD.read_list(entry, field, "a media entry", optional=True)) for field in _LISTS)
    for frame in names:
        _RECORD.check_name(frame, kind, "a media entry")
    if (names or times) and (kind != "video" or entry.get("frames") != len(names) or names[0] != name):
        raise _RECORD.bad(f"the frames of {kind} {reprlib.repr(name)} differ from its list of frames")
    for time in times:
        _RECORD.check_number(time, f"a frame time of {reprlib.repr(name)}", above_zero=False)
    if times and (len(times) != len(names) or any(later <= time for time, later in pairwise(times))):
        raise _RECORD.bad(f"the frame times of {reprlib.repr(name)} must be ascending, one per frame")
    for at, point in enumerate(points):
        _RECORD.check_number(point, f"a time point of {reprlib.repr(name)}", whole=at % 2 == 0, above_zero=False)
    numbers, seconds = points[::2], points[1::2]
    if points and (
        (kind, names, points[:2], len(seconds)) != ("video", (), (0, 0), len(numbers))
        or len(numbers) > MOST_POINTS
        or numbers[-1] + 1 != entry.get("frames")
        or any(later <= number for number, later in pairwise(numbers))
        or any(later < second for second, later in pairwise(seconds))
    ):
        raise _RECORD.bad(f"the time points of {reprlib.repr(name)} must lead from its first frame to its last one")
    return Media(**{**entry, "frame_names": names, "frame_times": times, "time_points": points})
