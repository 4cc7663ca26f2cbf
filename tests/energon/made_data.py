"""Data sets that our converter makes of a test's records."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from energon_packing.convert import ConvertConfig, convert


def converted(folder: Path, records: Iterable[dict[str, Any]], **options: Any) -> Path:
    """The data set of these records, all in the split ``train``; images lie in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "chats.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    convert(
        ConvertConfig(**{"sources": (source,), "out": folder / "data", "split": {"train": 1.0}, "workers": 0} | options)
    )
    return folder / "data"


def metadataset(file: Path, train: dict[str, Any], **splits: Any) -> str:
    """Writes a metadataset of Energon with these splits, and returns its path."""
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    file.write_text(yaml.safe_dump(head | {"splits": {"train": train, **splits}}, sort_keys=False))
    return str(file)


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """A record of one question and its answer."""
    said = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in said], **more}


def chats(words: Iterable[int]) -> list[dict[str, Any]]:
    """Conversations with answers of so many words."""
    return [chat(f"question {number}", "word " * count) for number, count in enumerate(words)]
