"""What other trainers make of a record, written from their documentation and source, independent of the converter.

A conversation is a list of ``(role, text)``; a call is the role ``call`` and its JSON with sorted keys. LLaMA-Factory's
rules are those of 0.9.5: ``data/converter.py`` for v0, ``v1/core/utils/rendering.py`` and its Qwen3 template for v1.
"""

from __future__ import annotations

import json
from typing import Any

from energon_packing.conversation import MediaPart, Turn
from energon_packing.convert.records import ParsedRecord

Said = list[tuple[str, str]]


def call_text(call: dict[str, Any]) -> str:
    arguments = call["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps({"name": call["name"], "arguments": arguments}, sort_keys=True)


def alpaca(record: dict[str, Any]) -> tuple[Said, Said, Said]:
    """Prompt, chosen or only answer, rejected answer."""
    said: Said = [("system", record["system"])] if record.get("system") else []
    for question, answer in record.get("history") or []:
        said += [("user", question), ("assistant", answer)]
    asked = [record[name] for name in ("instruction", "input") if record.get(name)]
    said.append(("user", "\n".join(asked)))
    if "chosen" in record:
        return said, [("assistant", record["chosen"])], [("assistant", record["rejected"])]
    return said, [("assistant", record["output"])], []


SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "system": "system"}


def sharegpt(messages: list[dict[str, str]], role: str = "from", content: str = "value") -> Said:
    said: Said = []
    for message in messages:
        name, text = message[role], message[content]
        if name == "function_call":
            calls = json.loads(text)
            said += [("call", call_text(call)) for call in (calls if isinstance(calls, list) else [calls])]
        else:
            said.append((SHAREGPT.get(name, name), text))
    return said


def v1(messages: list[dict[str, Any]]) -> Said:
    said: Said = []
    for message in messages:
        of = {kind: [p["value"] for p in message["content"] if p["type"] == kind] for kind in ("text", "reasoning")}
        text = "".join(of["text"])
        if of["reasoning"]:
            thought = "".join(of["reasoning"]).strip("\n")
            text = f"<think>\n{thought}\n</think>\n\n{text}"
        if text:
            said.append((message["role"], text))
        calls = [json.loads(part["value"]) for part in message["content"] if part["type"] == "tool_call"]
        said += [("call", call_text(call)) for call in calls]
    return said


def said_by(turns: tuple[Turn, ...], parsed: ParsedRecord) -> Said:
    """The turns that the converter made, in the same form."""
    said: Said = []
    for turn in turns:
        text = "".join(
            f"<{parsed.references[part.index].kind}>" if isinstance(part, MediaPart) else part for part in turn.parts
        )
        if turn.thinking is not None:  # written into the text, as the renderers do
            stripped = turn.thinking.strip("\n")
            text = f"<think>\n{stripped}\n</think>\n\n{text}"
        if text:
            said.append((turn.role, text))
        said += [("call", call_text(call["function"])) for call in turn.tool_calls]
    return said
