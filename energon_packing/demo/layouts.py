"""Drafts as records in the two layouts of conversation files: ShareGPT and OpenAI."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from energon_packing.demo.drafts import Draft, Saying
from energon_packing.demo.tool_use import TOOLS

Record = dict[str, Any]
_MARKER = re.compile(r"(<image>|<video>)")


def sharegpt_record(draft: Draft, rng: Random) -> Record:
    """``conversations`` of ``from``/``value``; media in columns, tools as JSON text, calls as turns of their own."""
    turns: list[Record] = []
    record: Record = {"id": draft.key}
    if draft.system:
        if rng.random() < 0.5:
            record["system"] = draft.system
        else:
            turns.append({"from": "system", "value": draft.system})
    for saying in draft.sayings:
        if saying.speaker == "call":
            calls = [{"name": use.name, "arguments": use.arguments} for use in saying.uses]
            turns.append({"from": "function_call", "value": _json(calls[0] if len(calls) == 1 else calls)})
        elif saying.speaker == "result":
            turns += ({"from": "observation", "value": _json(use.result)} for use in saying.uses)
        else:
            turns.append({"from": "human" if saying.speaker == "user" else "gpt", "value": saying.text})
    record["conversations"] = turns
    if draft.with_tools:
        record["tools"] = _json([tool["function"] for tool in TOOLS])
    return record | _columns(draft)


def openai_record(draft: Draft, rng: Random) -> Record:
    """``messages`` of ``role``/``content``; media in columns or, in one record in three, as parts of the content."""
    as_parts = bool(draft.images or draft.videos) and rng.random() < 0.34
    messages: list[Record] = [{"role": "system", "content": draft.system}] if draft.system else []
    images = iter([order.name for order in draft.images])
    videos = iter([order.name for order in draft.videos])
    for number, saying in enumerate(draft.sayings):
        if saying.speaker == "call":
            messages.append({"role": "assistant", "content": None, "tool_calls": _calls(saying, number)})
        elif saying.speaker == "result":
            calls = _calls(saying, number - 1)
            messages += (
                {"role": "tool", "tool_call_id": call["id"], "content": _json(use.result)}
                for call, use in zip(calls, saying.uses, strict=True)
            )
        elif as_parts and saying.speaker == "user":
            parts: list[Record] = []
            for piece in _MARKER.split(saying.text):
                if piece == "<image>" and rng.random() < 0.5:
                    parts.append({"type": "image", "image": next(images)})
                elif piece == "<image>":
                    parts.append({"type": "image_url", "image_url": {"url": next(images)}})
                elif piece == "<video>":
                    parts.append({"type": "video", "video": next(videos)})
                elif piece:
                    parts.append({"type": "text", "text": piece})
            messages.append({"role": "user", "content": parts})
        else:
            messages.append({"role": saying.speaker, "content": saying.text})
    record: Record = {"id": draft.key, "messages": messages}
    if draft.with_tools:
        record["tools"] = list(TOOLS)
    return record if as_parts else record | _columns(draft)


def _columns(draft: Draft) -> Record:
    columns: Record = {}
    if draft.images:
        columns["images"] = [order.name for order in draft.images]
    if draft.videos:
        columns["videos"] = [order.name for order in draft.videos]
    return columns


def _calls(saying: Saying, number: int) -> list[Record]:
    return [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": use.name, "arguments": _json(use.arguments)},
        }
        for place, use in enumerate(saying.uses)
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
