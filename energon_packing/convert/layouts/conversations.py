"""ShareGPT (``conversations`` of ``from``/``value``) and OpenAI (``messages`` of ``role``/``content``), pairs included.

These are what `energon_packing.convert.records` reads, so their records stay as they are.
"""

from collections.abc import Mapping
from typing import Any

from energon_packing.convert.layouts import llamafactory_v1, qwen_vl
from energon_packing.convert.layouts.layout import ANSWER_COLUMNS, TURN_COLUMNS, Layout, filled, has_turns


def _is_conversation(record: Mapping[str, Any]) -> bool:
    if llamafactory_v1.matches(record):
        return False
    if qwen_vl.matches(record) and not (filled(record, "image") or filled(record, "images")):  # else tags may be text
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
DECLARED = (SHAREGPT, OPENAI)
