"""Records of one question and one answer in columns of their own; and documents for continued pre-training.

* ``alpaca``: ``instruction``, ``input``, ``output``, ``history`` (earlier questions and answers); in place of
  ``output`` also ``chosen`` and ``rejected``. LLaMA-Factory's rules: the question is ``instruction`` and ``input`` with
  a line break between them, empty ones left out; every answer of ``history`` is trained.
* ``query-response``: ms-swift's ``query``, ``response`` and ``history``.
* ``prompt-completion``: TRL's ``prompt`` and ``completion``, texts or lists of messages.
* ``text``: a document, which becomes one turn of the assistant. What is trained of it is `encoder.train_on`; ``all``
  with a template that writes the content alone trains the document.
"""

from collections.abc import Mapping
from typing import Any

from energon_packing.convert.fields import expect, says_nothing
from energon_packing.convert.layouts.layout import ANSWER_COLUMNS, Layout, filled, has_turns, without
from energon_packing.errors import SampleRejected

_OTHERS = ("instruction", "query", "prompt", *ANSWER_COLUMNS)
"""Columns of other layouts; beside them, ``text`` is a copy of theirs, as in Stanford's Alpaca, and counted."""


def _text(record: Mapping[str, Any], column: str) -> str:
    value = "" if record.get(column) is None else record[column]
    return expect(value, str, "non_string_value", f"the column {column!r} is", "text")


def _history(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    if says_nothing(value := record.get("history")):
        return []
    messages: list[dict[str, Any]] = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(text, str) for text in entry):
            detail = "the column 'history' must be a list of pairs of texts, [question, answer]"
            raise SampleRejected("non_string_value", detail)
        messages += [{"role": "user", "content": entry[0]}, {"role": "assistant", "content": entry[1]}]
    return messages


def _restate_alpaca(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    question = "\n".join(text for text in (_text(record, "instruction"), _text(record, "input")) if text)
    messages = [*_history(record), {"role": "user", "content": question}]
    rest = without(record, "instruction", "input", "history")
    # An output beside two answers stays and is counted as ignored, because nothing says what it would be.
    if not filled(record, "chosen", "rejected"):
        messages.append({"role": "assistant", "content": _text(rest, "output")})
        rest.pop("output", None)
    return {**rest, "messages": messages}


def _restate_query(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    question = {"role": "user", "content": _text(record, "query")}
    answer = {"role": "assistant", "content": _text(record, "response")}
    return without(record, "query", "response", "history") | {"messages": [*_history(record), question, answer]}


def _restate_prompt(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    messages: list[Any] = []
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        value = expect(record[column], (str, list), "non_string_value", f"the column {column!r} is", "text or messages")
        messages += [{"role": role, "content": value}] if isinstance(value, str) else value
    return {**without(record, "prompt", "completion"), "messages": messages}


def _is_text(record: Mapping[str, Any]) -> bool:
    has_others = any(record.get(name) is not None for name in _OTHERS)
    return isinstance(record.get("text"), str) and not has_turns(record) and not has_others


def _restate_text(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    return {**without(record, "text"), "messages": [{"role": "assistant", "content": record["text"]}]}


_ALPACA = Layout(
    name="alpaca",
    expects="'instruction', 'input' and 'output', or 'chosen' and 'rejected'",
    matches=lambda record: (
        isinstance(record.get("instruction"), str)
        and ("output" in record or all(isinstance(record.get(name), str) for name in ("chosen", "rejected")))
    ),
    restate=_restate_alpaca,
)
_QUERY_RESPONSE = Layout(
    name="query-response",
    expects="'query' and 'response'",
    matches=lambda record: all(isinstance(record.get(name), str) and record[name] for name in ("query", "response")),
    restate=_restate_query,
)
_PROMPT_COMPLETION = Layout(
    name="prompt-completion",
    expects="'prompt' and 'completion'",
    matches=lambda record: filled(record, "prompt", "completion"),
    restate=_restate_prompt,
)
_TEXT = Layout(name="text", expects="'text'", matches=_is_text, restate=_restate_text)
DECLARED = (_ALPACA, _QUERY_RESPONSE, _PROMPT_COMPLETION, _TEXT)
