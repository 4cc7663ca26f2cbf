"""Paths of the shipped processor directories, which `scripts/train_demo_tokenizer.py` makes."""

from __future__ import annotations

from pathlib import Path

from energon_packing.errors import UserError

# name: the class that `AutoProcessor` (for "text": `AutoTokenizer`) returns for it
PROCESSORS: dict[str, str] = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "text": "Qwen2Tokenizer",
}


def processor_path(name: str) -> Path:
    """The directory to give to ``AutoProcessor.from_pretrained`` (``"text"``: to ``AutoTokenizer.from_pretrained``).

    Args:
        name: ``"qwen2_5_vl"``, ``"qwen3_vl"`` or ``"text"``.

    Raises:
        UserError: there is no shipped processor of that name.
    """
    if name not in PROCESSORS:
        raise UserError(f"there is no demo processor {name!r}; known: {', '.join(PROCESSORS)}")
    return Path(__file__).parent / "processors" / name
