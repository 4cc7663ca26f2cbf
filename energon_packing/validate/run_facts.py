"""What is known about a run's model, tokenizer and data besides its settings.

`processor_facts` and `model_facts` read JSON and need no extra packages. Facts about the data are measured, see
`measurement`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from energon_packing.errors import ConfigError

PLACEHOLDERS = {
    "image": ("<|image_pad|>", "<IMG_CONTEXT>", "<image>"),
    "video": ("<|video_pad|>", "<video>"),
}
"""Texts that stand for a visual token in the vocabularies of known families, for images and for videos."""

LARGEST_JSON = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFacts:
    """Ids that a tokenizer produces, or that a model takes.

    Attributes:
        size: upper bound of the ids, exclusive: the tokenizer's largest id plus one, or the rows of the model's
            embedding; None if unknown.
        placeholders: ``image`` and ``video`` -> id of the token that stands for a visual token.
    """

    size: int | None = None
    placeholders: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """Results of measuring part of the data set. Lengths are tokens, padded to the alignment multiple.

    Attributes:
        samples: of the whole split.
        measured: samples of the part.
        dropped: samples of the part that the encoder dropped, including those longer than a row.
        too_long: samples of the part that are longer than a row.
        longest: length of the longest sample of the part, without padding.
        mean: mean length of the samples that are kept.
        fill: real tokens over row tokens if the part is packed with the run's settings.
        packs: number of rows if the part is packed.
    """

    samples: int
    measured: int
    dropped: int
    too_long: int
    longest: int
    mean: float
    fill: float
    packs: int

    @property
    def samples_per_pack(self) -> float:
        """Mean number of samples per row."""
        return (self.measured - self.dropped) / self.packs if self.packs else 0.0

    @property
    def packs_per_epoch(self) -> int:
        """Packs per epoch over all replicas."""
        return round(self.packs * self.samples / self.measured) if self.measured else 0

    @property
    def samples_per_epoch(self) -> int:
        """Samples kept per epoch: the rows of a run that packs in the batch, or not at all."""
        return round((self.measured - self.dropped) * self.samples / self.measured) if self.measured else 0


def processor_facts(processor: str | None) -> TokenFacts | None:
    """The ids of the tokenizer in a directory; None for a hub name, or a directory without ``tokenizer.json``.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = Path(processor) / "tokenizer.json" if processor else None
    if file is None or not file.is_file():
        return None
    values = _read(file)
    added = {entry["content"]: int(entry["id"]) for entry in values.get("added_tokens", [])}
    vocabulary = values.get("model", {}).get("vocab", {})
    # Unigram tokenizers list their tokens; the others map tokens to ids.
    last = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    ids = {
        kind: next(added[text] for text in texts if text in added)
        for kind, texts in PLACEHOLDERS.items()
        if any(text in added for text in texts)
    }
    return TokenFacts(size=max([last, *added.values()]) + 1, placeholders=ids)


def model_facts(config_file: Path) -> dict[str, Any]:
    """Fields of a `RunView` that a model's ``config.json`` determines.

    Raises:
        ConfigError: the file cannot be read.
    """
    values = _read(config_file)
    text = values.get("text_config") or values
    heads = text.get("num_attention_heads")
    width = text.get("head_dim") or (text["hidden_size"] // heads if heads and "hidden_size" in text else None)
    size = text.get("vocab_size") or values.get("vocab_size")
    ids = {kind: values[f"{kind}_token_id"] for kind in PLACEHOLDERS if isinstance(values.get(f"{kind}_token_id"), int)}
    return {
        "head_dim": width,
        "num_layers": text.get("num_hidden_layers"),
        "num_moe_experts": text.get("num_experts"),
        "model_tokens": TokenFacts(size=size, placeholders=ids),
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > LARGEST_JSON:
            raise ConfigError(f"{file} has {file.stat().st_size} bytes, too many for a configuration.")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}; expected an object.")
    return values
