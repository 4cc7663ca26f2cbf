"""What a record says, in one form for all trainers, and what a converted data set says, read without this package."""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Said = list[tuple[str, str]]
"""Role and text of each turn; a call is the role ``call`` and its JSON with sorted keys."""


def call_text(call: dict[str, Any]) -> str:
    """Name and arguments of a call."""
    arguments = call["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps({"name": call["name"], "arguments": arguments}, sort_keys=True)


def definitions(tools: Any) -> str:
    """Definitions of tools, bare, as JSON with sorted keys; empty if there are none."""
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    if not tools:
        return ""
    tools = tools if isinstance(tools, list) else [tools]
    tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
    return json.dumps([tool.get("function", tool) for tool in tools], sort_keys=True)


def digest(content: Any) -> Any:
    """SHA-256 of a file, or of each frame of a video."""
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else [digest(part) for part in content]


@dataclass
class Heard:
    """One sample.

    Attributes:
        said: the turns, or those before the two answers of a pair; ``<image>`` and ``<video>`` where these stand.
        chosen, rejected: the answers of a pair.
        media: kind and bytes (of a list of frames: of each frame) of each image and video, in order of mention.
        tools: definitions.
        weights: of all turns that have one.
        extras: values of the trained tokens.
    """

    said: Said
    chosen: Said = field(default_factory=list)
    rejected: Said = field(default_factory=list)
    media: Any = ()
    tools: Any = ""
    weights: list[float] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.media = [(kind, digest(content)) for kind, content in self.media]
        self.tools = definitions(self.tools)


def said_by(turns: Any, parsed: Any) -> Said:
    """The turns of a parsed record."""
    shown = dict(enumerate(f"<{reference.kind}>" for reference in parsed.references))
    found: Said = []
    for turn in turns:
        thought = "" if turn.thinking is None else f"<think>\n{turn.thinking.strip(chr(10))}\n</think>\n\n"
        text = thought + "".join(part if isinstance(part, str) else shown[part.index] for part in turn.parts)
        found += [(turn.role, text)] if text else []
        found += [("call", call_text(call["function"])) for call in turn.tool_calls]
    return found


def stored(out: Path, split: str = "train") -> list[Heard]:
    """The samples of a polylithic data set, in the order of its tars."""
    files: dict[str, bytes] = {}
    for path in sorted((out / "media").glob("*.tar")):
        with tarfile.open(path) as tar:
            files.update({member.name: tar.extractfile(member).read() for member in tar})  # type: ignore[union-attr]
    samples = []
    for path in sorted((out / "text").glob(f"{split}-*.tar")):
        with tarfile.open(path) as tar:
            samples += [json.loads(tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    return [_heard(sample, files) for sample in samples]


def _heard(sample: dict[str, Any], files: dict[str, bytes]) -> Heard:
    entries = sample.get("media", [])

    def said(turns: list[dict[str, Any]]) -> Said:
        found: Said = []
        for turn in turns:
            parts = [part if isinstance(part, str) else f"<{entries[part['media']]['kind']}>" for part in turn["parts"]]
            if "thinking" in turn:  # written into the text, as the renderers do
                stripped = turn["thinking"].strip("\n")
                parts = [f"<think>\n{stripped}\n</think>\n\n", *parts]
            calls = [("call", call_text(call["function"])) for call in turn.get("tool_calls", [])]
            if (text := "".join(parts)) or not calls:
                found.append((turn["role"], text))
            found += calls
        return found

    media = []
    for entry in entries:
        frames = entry.get("frame_names")
        media.append((entry["kind"], [files[name] for name in frames] if frames else files[entry["name"]]))
    return Heard(
        said(sample["turns"]),
        chosen=said(sample.get("chosen", [])),
        rejected=said(sample.get("rejected", [])),
        media=media,
        tools=sample.get("tools"),
        weights=[turn["loss_weight"] for turn in sample["turns"] if "loss_weight" in turn],
        extras=sample.get("extras", {}),
    )
