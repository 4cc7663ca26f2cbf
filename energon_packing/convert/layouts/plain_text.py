"""Documents for continued pre-training: one column ``text``, which becomes one turn of the assistant.

What is trained of it is `encoder.train_on`; ``all`` with a template that writes the content alone trains the document.
"""

from collections.abc import Mapping
from typing import Any

from energon_packing.convert.layouts.layout import ANSWER_COLUMNS, Layout, has_turns, without

_OTHERS = ("instruction", "query", "prompt", *ANSWER_COLUMNS)
"""Columns of other layouts; beside them, ``text`` is a copy of theirs, as in Stanford's Alpaca, and counted."""


def _matches(record: Mapping[str, Any]) -> bool:
    has_others = any(record.get(name) is not None for name in _OTHERS)
    return isinstance(record.get("text"), str) and not has_turns(record) and not has_others


def _restate(record: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    return {**without(record, "text"), "messages": [{"role": "assistant", "content": record["text"]}]}


LAYOUT = Layout(name="text", expects="'text'", matches=_matches, restate=_restate)
