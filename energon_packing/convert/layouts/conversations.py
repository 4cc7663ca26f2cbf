"""Lists of turns: ShareGPT (``conversations`` of ``from``/``value``) and OpenAI (``messages`` of ``role``/``content``),
pairs included; LLaMA-Factory's v1 samples of typed parts; and Qwen-VL's conversations, whose text has paths of images.

The first two are what `energon_packing.convert.records` reads, so their records stay as they are.

* LLaMA-Factory's v1 samples: ``messages``, or ``chosen_messages`` and ``rejected_messages``, of typed parts. A part is
  ``{"type", "value"}``; its types are ``text``, ``reasoning``, ``tool_call`` (JSON text), ``image_url``, ``video_url``
  and ``audio_url``. As its Qwen3 renderer reads them, the texts of a message are joined, and so are its thoughts.
* Qwen-VL's conversations: ``Picture 1: <img>a.jpg</img>``. Everything around the
  tags stays in the text, boxes too: ``<box>(12,30),(480,720)</box>`` counts in thousandths of the image for Qwen-VL,
  and in pixels for later models, so no number of it is changed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from energon_packing.convert.fields import says_nothing
from energon_packing.convert.layouts.layout import ANSWER_COLUMNS, TURN_COLUMNS, Layout, filled, has_turns, without
from energon_packing.convert.turns import parse_call_text
from energon_packing.errors import SampleRejected

_PAIR = ("chosen_messages", "rejected_messages")
_MEDIA = {"image_url": "image", "video_url": "video"}
_IMAGE = re.compile(r"<img>(.+?)</img>", re.DOTALL)
_FIELDS = ("value", "content")


def _is_llamafactory_v1(record: Mapping[str, Any]) -> bool:
    if all(isinstance(record.get(name), list) for name in _PAIR):
        return True
    messages = record.get("messages")
    held = [each.get("content") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    parts = (part for content in held if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and "type" in part and "value" in part for part in parts)


def _restate_llamafactory_v1(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    if not says_nothing(record.get("extra_info")) and "kto" in str(record["extra_info"]):
        raise SampleRejected("unsupported_column", "the column 'extra_info' holds a preference label (KTO) of v1")
    if not all(isinstance(record.get(name), list) for name in _PAIR):
        return {**record, "messages": _messages(record["messages"])}
    chosen, rejected = (_messages(record[name]) for name in _PAIR)
    return {**without(record, *_PAIR), "chosen": chosen, "rejected": rejected}


def _messages(messages: list[Any]) -> list[Any]:
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: Any, number: int) -> Any:
    """A message with OpenAI's fields; one without parts stays as it is."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in content:
        kind, value = (part.get("type"), part.get("value")) if isinstance(part, dict) else (None, None)
        if not isinstance(value, str):
            raise SampleRejected("non_string_value", f"turn {number}: a part of type {kind!r} has no text in 'value'")
        rest = without(part, "type", "value")
        if kind == "text":
            parts.append({"type": "text", "text": value, **rest})
        elif kind == "reasoning":
            thoughts.append(value)
        elif kind == "tool_call":
            calls += parse_call_text(value, set())
        elif isinstance(kind, str) and kind in _MEDIA:
            parts.append({"type": _MEDIA[kind], _MEDIA[kind]: value, **rest})
        else:
            known = ", ".join(("text", "reasoning", "tool_call", *_MEDIA))
            raise SampleRejected("unknown_part", f"turn {number} has a content part of type {kind!r}; known: {known}")
    read: dict[str, Any] = {**message, "content": parts}
    if thoughts:
        read["reasoning_content"] = "".join(thoughts)
    if calls:
        read["tool_calls"] = calls
    return read


def _is_qwen_vl(record: Mapping[str, Any]) -> bool:
    return any("<img>" in text and _IMAGE.search(text) for text in _texts(record))


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    for column in TURN_COLUMNS:
        turns = record.get(column)
        for turn in turns if isinstance(turns, list) else ():
            for field in _FIELDS if isinstance(turn, dict) else ():
                if isinstance(text := turn.get(field), str):
                    yield text


def _restate_qwen_vl(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    if any("<box>" in text for text in _texts(record)):
        warnings.append("boxes_kept_as_text")
    columns = [column for column in TURN_COLUMNS if isinstance(record.get(column), list)]
    return {**record, **{column: [_turn(turn) for turn in record[column]] for column in columns}}


def _turn(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    return {name: _parts(value) if name in _FIELDS else value for name, value in turn.items()}


def _parts(text: Any) -> Any:
    """Text with image tags as a list of parts; any other value as it is."""
    if not isinstance(text, str) or not _IMAGE.search(text):
        return text
    return [
        {"type": "image", "image": piece} if number % 2 else {"type": "text", "text": piece}
        for number, piece in enumerate(_IMAGE.split(text))  # text and paths in turn
    ]


def _is_conversation(record: Mapping[str, Any]) -> bool:
    has_images = filled(record, "image") or filled(record, "images")  # beside which tags may be text
    if _is_llamafactory_v1(record) or (_is_qwen_vl(record) and not has_images):
        return False
    is_pair = any(record.get(name) is not None for name in ANSWER_COLUMNS)
    # ms-swift's pair of a query has the chosen answer in `response`.
    of_query = filled(record, "query", "response") and record.get("chosen") is None
    return has_turns(record) or (is_pair and not of_query and "instruction" not in record)


def _is_sharegpt(record: Mapping[str, Any]) -> bool:
    """Whether the first message, of the turns or of the answers of a pair, has the fields of ShareGPT."""
    for column in (*TURN_COLUMNS, "prompt", *ANSWER_COLUMNS):
        value = record.get(column)
        message = value[0] if isinstance(value, list) and value else value
        if isinstance(message, dict):
            return "from" in message and "role" not in message
    return False


SHAREGPT = Layout(
    name="sharegpt",
    expects="'conversations' of from/value",
    matches=lambda record: _is_sharegpt(record) and _is_conversation(record),
    fields=("from", "value"),
)
OPENAI = Layout(
    name="openai",
    expects="'messages' of role/content",
    matches=lambda record: not _is_sharegpt(record) and _is_conversation(record),
    fields=("role", "content"),
)
_LLAMAFACTORY_V1 = Layout(
    name="llamafactory-v1",
    expects="'messages' whose content is a list of type/value",
    matches=_is_llamafactory_v1,
    restate=_restate_llamafactory_v1,
)
_QWEN_VL = Layout(
    name="qwen-vl", expects="turns with <img>path</img> in their text", matches=_is_qwen_vl, restate=_restate_qwen_vl
)
DECLARED = (SHAREGPT, OPENAI, _LLAMAFACTORY_V1, _QWEN_VL)
