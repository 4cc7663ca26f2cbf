"""All layouts, and which of them a record has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_packing.convert.layouts.conversations import OPENAI, SHAREGPT
from energon_packing.convert.layouts.layout import Layout
from energon_packing.convert.layouts.llamafactory_v1 import V1
from energon_packing.convert.layouts.plain_text import TEXT
from energon_packing.convert.layouts.question_answer import ALPACA, PROMPT_COMPLETION, QUERY_RESPONSE
from energon_packing.convert.layouts.qwen_vl import QWEN_VL
from energon_packing.errors import SampleRejected

LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout for layout in (SHAREGPT, OPENAI, ALPACA, QUERY_RESPONSE, PROMPT_COMPLETION, V1, QWEN_VL, TEXT)
}
_CONVERSATIONS = (SHAREGPT.name, OPENAI.name)


def find_layout(record: Mapping[str, Any], wanted: str) -> Layout:
    """The layout of a record.

    Args:
        record: the parsed JSON.
        wanted: a name, or ``auto``.

    Raises:
        SampleRejected: ``unknown_layout`` if none matches, ``ambiguous_layout`` if several do.
    """
    if wanted in _CONVERSATIONS:
        return LAYOUTS[wanted]  # which names what it misses
    if wanted != "auto":
        layout = LAYOUTS[wanted]
        if not layout.matches(record):
            raise unknown_layout(record, layout.expects)
        return layout
    found = [layout for layout in LAYOUTS.values() if layout.matches(record)]
    if len(found) > 1:
        names = " and ".join(layout.name for layout in found)
        columns = "; ".join(f"{layout.name} has {layout.expects}" for layout in found)
        raise SampleRejected("ambiguous_layout", f"the record fits {names} ({columns}); name one with --format")
    if not found:
        raise unknown_layout(record, " or ".join(LAYOUTS[name].expects for name in _CONVERSATIONS))
    return found[0]


def unknown_layout(record: Mapping[str, Any], expected: str) -> SampleRejected:
    """Why a record cannot be read, with its columns."""
    keys = ", ".join(sorted(key[:40] for key in record)[:20]) or "none"
    return SampleRejected("unknown_layout", f"expected {expected}; the record's keys are: {keys}")
