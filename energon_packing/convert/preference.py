"""Preference records: which messages are the shared beginning, and which are the chosen and the rejected answer.

These published layouts are read:

* ``conversations`` or ``messages`` (the beginning), ``chosen`` and ``rejected`` (a text, a message, or a list of them);
* ``prompt`` (a text or a list of messages), ``chosen`` and ``rejected``;
* ``chosen`` and ``rejected`` alone, two whole conversations that begin alike;
* ``messages`` that include the chosen answer, and ``rejected_response`` or ``rejected_messages``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from energon_packing.convert.layouts.layout import TURN_COLUMNS
from energon_packing.convert.thinking_fields import THINKING_FIELDS
from energon_packing.errors import SampleRejected

_ALIASES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RawPair:
    """The unparsed messages of a pair: the beginning and the two answers.

    Attributes:
        beginning, chosen, rejected: lists of messages.
        columns: where each of the three is in the record.
    """

    beginning: list[Any]
    chosen: list[Any]
    rejected: list[Any]
    columns: tuple[str, str, str]


def find_pair(record: Mapping[str, Any]) -> RawPair | None:
    """Splits a preference record into its parts; None for any other record.

    Raises:
        SampleRejected: ``bad_pair`` if a part is missing or the answers do not follow the same beginning.
    """
    answers = {name: record[name] for name in ("chosen", "rejected") if record.get(name) is not None}
    other = [name for name in ("rejected_response", "rejected_messages") if record.get(name) is not None]
    if not answers and not other:
        return None
    if record.get("rejected_images") or record.get("rejected_videos"):
        raise _bad("the rejected answer has its own media; both answers must follow the same media")
    columns = [name for name in (*TURN_COLUMNS, "prompt") if record.get(name) is not None]
    if len(columns) > 1:
        raise _bad(f"both {columns[0]!r} and {columns[1]!r} contain the beginning; keep one of them")
    common = _messages(record[columns[0]], columns[0], "user") if columns else None
    if other:
        if record.get("chosen_messages") is not None:
            raise _bad(f"'chosen_messages' with {other[0]!r} is not supported; rename them to 'chosen' and 'rejected'")
        if answers or len(other) > 1:
            raise _bad(f"the record has both {other[0]!r} and {(*other[1:], *answers)[0]!r}; keep one of them")
        return _replaced(common, record[other[0]], (columns[0] if columns else "", other[0]))
    if len(answers) == 1:
        (only,) = answers
        raise _bad(f"the record has only {only!r}; a pair needs both 'chosen' and 'rejected'")
    chosen, rejected = (_messages(answers[name], name, "assistant") for name in ("chosen", "rejected"))
    if common is None:
        return _split(chosen, rejected, ("chosen", "rejected"))
    return RawPair(
        beginning=common,
        chosen=_without(common, chosen),
        rejected=_without(common, rejected),
        columns=(columns[0], "chosen", "rejected"),
    )


def _bad(detail: str) -> SampleRejected:
    return SampleRejected("bad_pair", detail)


def _messages(value: Any, column: str, speaker: str) -> list[Any]:
    """Turns a text into one message by ``speaker``, and a single message into a list."""
    if isinstance(value, str):
        return [{"role": speaker, "content": value}]
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list) or not value:
        raise _bad(f"{column!r} is neither text nor a message nor a list of messages")
    return value


def _speech(message: Any) -> Any:
    """Who speaks and what they say, whatever the names of the fields."""
    if not isinstance(message, dict):
        return message
    role = message.get("role", message.get("from"))
    alias = _ALIASES.get(role) if isinstance(role, str) else None
    said = [message.get(name) or None for name in ("tool_calls", "function_call", *THINKING_FIELDS)]
    return alias or role, message.get("content", message.get("value")), said


def _without(beginning: list[Any], answer: list[Any]) -> list[Any]:
    """Removes the beginning from an answer that repeats it, as some data sets do."""
    head = answer[: len(beginning)]
    if len(answer) > len(beginning) and [_speech(turn) for turn in head] == [_speech(turn) for turn in beginning]:
        return answer[len(beginning) :]
    return answer


def _split(chosen: list[Any], rejected: list[Any], columns: tuple[str, str]) -> RawPair:
    """Two whole conversations; their shared messages before the first difference are the beginning."""
    shared = 0
    most = min(len(chosen), len(rejected)) - 1
    while shared < most and _speech(chosen[shared]) == _speech(rejected[shared]):
        shared += 1
    if shared == 0:
        raise _bad("the chosen and the rejected conversation share no beginning, and the record has no 'prompt'")
    beginning, one, other = chosen[:shared], chosen[shared:], rejected[shared:]
    return RawPair(beginning=beginning, chosen=one, rejected=other, columns=(columns[0], *columns))


def _replaced(whole: list[Any] | None, rejected: Any, columns: tuple[str, str]) -> RawPair:
    """``messages`` that end with the chosen answer, and the rejected answer that replaces it."""
    first, column = columns
    if whole is None:
        raise _bad(f"the record has {column!r} but no 'messages', which must end with the chosen answer")
    if column == "rejected_messages":
        return _split(whole, _messages(rejected, column, "assistant"), columns)
    answer = _messages(rejected, column, "assistant")
    if isinstance(rejected, str | dict):  # in the place of the last message
        return RawPair(beginning=whole[:-1], chosen=whole[-1:], rejected=answer, columns=(first, *columns))
    asked = [at for at, turn in enumerate(whole, 1) if isinstance(turn, dict) and _speech(turn)[0] == "user"]
    end = asked[-1] if asked else 0  # in the place of all that follows the last question
    return RawPair(beginning=whole[:end], chosen=whole[end:], rejected=answer, columns=(first, *columns))
