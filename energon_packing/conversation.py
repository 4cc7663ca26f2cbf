"""A conversation: turns of text and media, as every stage after conversion sees it.

The same structure is stored as JSON in the Energon data set (`Conversation.to_record`), so that reading a sample needs
no guess about its layout. Media are named, never embedded; their sizes are probed once, at conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from energon_packing.errors import SampleRejected

Role = Literal["system", "user", "assistant", "tool"]
MediaKind = Literal["image", "video"]
ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")
RECORD_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """One image or video that a conversation names.

    Attributes:
        kind: ``"image"`` or ``"video"``.
        name: the entry's name in its store, for example ``"a1b2.jpg"``; relative, without ``..``.
        width: pixels as displayed, that is after EXIF or container rotation; None where nobody probed it yet.
        height: pixels as displayed.
        frames: number of frames of a video; None for images.
        fps: average frames a second of a video; None for images.
        duration: seconds of a video; None for images.
    """

    kind: MediaKind
    name: str
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: float | None = None
    duration: float | None = None

    def to_record(self) -> dict[str, Any]:
        """The JSON form, without the fields that are None."""
        fields = ("kind", "name", "width", "height", "frames", "fps", "duration")
        return {name: value for name in fields if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """A place in a turn where ``Conversation.media[index]`` stands."""

    index: int


Part = str | MediaPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one speaker says.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        parts: text and media in reading order; adjacent texts are merged by the converters.
        tool_calls: OpenAI-style calls of an assistant turn,
            ``{"type": "function", "function": {"name": ..., "arguments": ...}}``.
        loss_weight: None follows ``train_on``; 0.0 excludes the turn, any other number weighs its tokens.
    """

    role: Role
    parts: tuple[Part, ...]
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    loss_weight: float | None = None

    @property
    def text(self) -> str:
        """All text of the turn, media left out."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One training sample before tokenization.

    Attributes:
        key: unique in its data set; letters, digits, ``-`` and ``_`` only (a dot would split a WebDataset key).
        turns: in order; at least one.
        media: every image and video, in the order of first mention; each index is used by exactly one `MediaPart`
            (a file named twice is listed twice, under one name).
        tools: tool definitions for the chat template (a list of JSON schemas), or None.
    """

    key: str
    turns: tuple[Turn, ...]
    media: tuple[Media, ...] = ()
    tools: tuple[Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        named = [part.index for turn in self.turns for part in turn.parts if isinstance(part, MediaPart)]
        if named != list(range(len(self.media))):
            raise SampleRejected(
                "placeholder_mismatch",
                f"the turns name media {named}, but the record lists {len(self.media)} media in order",
            )
        if not self.turns:
            raise SampleRejected("empty_conversation", "the record has no turns")
        for turn in self.turns:
            if turn.role not in ROLES:
                raise SampleRejected("unknown_role", f"role {turn.role!r} is none of {', '.join(ROLES)}")

    def to_messages(self) -> list[dict[str, Any]]:
        """Messages for a Hugging Face chat template, ``{"role": ..., "content": [{"type": "image"}, ...]}``.

        A turn without media has a plain string as content, which every template accepts.
        """
        messages: list[dict[str, Any]] = []
        for turn in self.turns:
            content: Any = turn.text
            if any(isinstance(part, MediaPart) for part in turn.parts):
                content = [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": self.media[part.index].kind}
                    for part in turn.parts
                ]
            message: dict[str, Any] = {"role": turn.role, "content": content}
            if turn.tool_calls:
                message["tool_calls"] = [dict(call) for call in turn.tool_calls]
            messages.append(message)
        return messages

    def to_record(self) -> dict[str, Any]:
        """The JSON form that is stored in the data set; `from_record` reads it back unchanged."""
        turns: list[dict[str, Any]] = []
        for turn in self.turns:
            record: dict[str, Any] = {
                "role": turn.role,
                "parts": [part if isinstance(part, str) else {"media": part.index} for part in turn.parts],
            }
            if turn.tool_calls:
                record["tool_calls"] = [dict(call) for call in turn.tool_calls]
            if turn.loss_weight is not None:
                record["loss_weight"] = turn.loss_weight
            turns.append(record)
        result: dict[str, Any] = {"version": RECORD_VERSION, "turns": turns}
        if self.media:
            result["media"] = [media.to_record() for media in self.media]
        if self.tools is not None:
            result["tools"] = [dict(tool) for tool in self.tools]
        return result

    @classmethod
    def from_record(cls, key: str, record: Any) -> Conversation:
        """Reads what `to_record` wrote.

        Raises:
            SampleRejected: ``bad_record`` where the JSON is not of that form.
        """
        try:
            if record["version"] != RECORD_VERSION:
                raise SampleRejected("bad_record", f"record version {record['version']!r}, expected {RECORD_VERSION}")
            turns = tuple(
                Turn(
                    role=turn["role"],
                    parts=tuple(
                        part if isinstance(part, str) else MediaPart(index=int(part["media"])) for part in turn["parts"]
                    ),
                    tool_calls=tuple(turn.get("tool_calls", ())),
                    loss_weight=turn.get("loss_weight"),
                )
                for turn in record["turns"]
            )
            media = tuple(Media(**entry) for entry in record.get("media", ()))
            tools = record.get("tools")
        except (KeyError, TypeError, ValueError) as error:
            raise SampleRejected("bad_record", f"not a stored conversation: {error!r}") from error
        return cls(key=key, turns=turns, media=media, tools=None if tools is None else tuple(tools))
