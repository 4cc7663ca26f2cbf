"""Data sets that our converter makes of a test's records."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """A record of one question and its answer."""
    said = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in said], **more}


def chats(words: Iterable[int]) -> list[dict[str, Any]]:
    """Conversations with answers of so many words."""
    return [chat(f"question {number}", "word " * count) for number, count in enumerate(words)]
