"""What is known about a run's model, tokenizer and data besides its settings, read as JSON without extra packages.

Facts about the data are measured, see `looks.samples`.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from energon_packing.errors import ConfigError

# The hub's form of names; a leading dot or slash marks a path, and so does a second slash.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_FILES = ("tokenizer_config.json", "tokenizer.json", "preprocessor_config.json", "processor_config.json", "config.json")


def is_hub_name(name: str) -> bool:
    """Whether ``owner/name`` can only be the hub's: a path whose folder ``owner`` is here means that folder."""
    return _NAME.match(name) is not None and not Path(name.partition("/")[0]).is_dir()


def cached_directory(name: str) -> Path | None:
    """Where this machine's cache keeps the files of a name; None if it has no processor files for it, or no hub."""
    try:
        from huggingface_hub import constants

        # What `try_to_load_from_cache` looks for first. It stands beside the downloads, whose import takes 0.2 seconds.
        if not (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
            return None
        from huggingface_hub import try_to_load_from_cache

        cached = (try_to_load_from_cache(name, file) for file in _FILES)
        return next((Path(file).parent for file in cached if isinstance(file, str)), None)
    except (ImportError, ValueError):  # HFValidationError is one
        return None


def offline() -> contextlib.AbstractContextManager[Any]:
    """Inside the block all is loaded from this machine or not at all, repository code (``auto_map``) included.
    ``local_files_only`` does not reach all that transformers loads with a processor; the hub's own switch does."""
    from unittest import mock

    from huggingface_hub import constants

    return mock.patch.object(constants, "HF_HUB_OFFLINE", True)


PLACEHOLDERS = {
    "image": ("<|image_pad|>", "<IMG_CONTEXT>", "<image>", "<|image|>", "<image_soft_token>", "[IMG]"),
    "video": ("<|video_pad|>", "<video>", "<|video|>"),
    "vision_start": ("<|vision_start|>",),
    "vision_end": ("<|vision_end|>",),
}
"""Texts that stand for a visual token in the vocabularies of known families, and around it, by the model's name."""

GEOMETRY = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
    "image_size": "image_size",
}
"""Sizes that processor and vision encoder must share: their names in a processor and in a model."""

LARGEST_JSON = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFacts:
    """Ids that a tokenizer produces, or that a model takes."""

    # upper bound of the ids, exclusive: the tokenizer's largest plus one, or rows of the model's embedding, if known
    size: int | None = None
    placeholders: Mapping[str, int] = field(default_factory=dict)  # a name of `PLACEHOLDERS` -> id of that token
    # a name of `GEOMETRY` -> pixels, frames or patches; those that are stated
    geometry: Mapping[str, int] = field(default_factory=dict)
    processor: str | None = None  # class of a processor; None if unknown, and for models


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """Results of measuring part of the data set. Lengths are tokens, padded to the alignment multiple."""

    samples: int  # of the whole split
    measured: int  # samples of the part
    dropped: int  # samples of the part that the encoder dropped, including those longer than a row
    too_long: int  # samples of the part that are longer than a row
    longest: int  # length of the longest sample of the part, without padding
    mean: float  # mean length of the samples that are kept
    fill: float  # real tokens over row tokens if the part is packed with the run's settings
    packs: int  # number of rows if the part is packed

    @property
    def packs_per_epoch(self) -> int:
        """Packs per epoch over all replicas."""
        return round(self.packs * self.samples / self.measured) if self.measured else 0

    @property
    def samples_per_epoch(self) -> int:
        """Samples kept per epoch: the rows of a run that packs in the batch, or not at all."""
        return round((self.measured - self.dropped) * self.samples / self.measured) if self.measured else 0


def processor_facts(processor: Any) -> TokenFacts | None:
    """Ids and sizes of the processor in a directory, or of a hub name in the cache; None if it is neither (another's
    data set may hold a processor itself), or has no ``tokenizer.json``. Raises ConfigError: it cannot be read."""
    if not isinstance(processor, str) or not processor:
        return None
    local = Path(processor).is_dir() or not is_hub_name(processor)
    folder = Path(processor) if local else cached_directory(processor)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    values = _read(folder / "tokenizer.json")
    added = {entry["content"]: int(entry["id"]) for entry in values.get("added_tokens", [])}
    vocabulary = values.get("model", {}).get("vocab", {})
    # Unigram tokenizers list their tokens; the others map tokens to ids.
    last = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    ids = {kind: next((added[text] for text in texts if text in added), None) for kind, texts in PLACEHOLDERS.items()}
    texts = [_read(folder / name) for name in _PROCESSOR_FILES if (folder / name).is_file()]
    return TokenFacts(
        size=max([last, *added.values()]) + 1,
        placeholders=numbers(ids),
        geometry=model_geometry(*_stated_sizes(texts), names={name: name for name in GEOMETRY}),
        processor=next((text["processor_class"] for text in texts if text.get("processor_class")), None),
    )


def numbers(ids: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids that are stated."""
    return {kind: number for kind, number in ids.items() if isinstance(number, int)}


def _stated_sizes(texts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Settings of images: transformers 5 nests them in the processor's file, and Pixtral repeats them there."""
    for values in (values for text in texts for values in (text.get("image_processor"), text)):
        if isinstance(values, Mapping):
            size = values.get("crop_size") if values.get("do_center_crop") else values.get("size")
            yield {"image_size": size, "merge_size": values.get("spatial_merge_size")} | dict(values)


def _side(value: Any) -> int | None:
    """A side in pixels or patches: a number, a square's two, or ``height`` and ``width``; None for anything else."""
    if isinstance(value, Mapping):
        value = (value.get("height"), value.get("width"))
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return value if type(value) is int and value > 0 else None


def model_geometry(*sources: Any, names: Mapping[str, str] = GEOMETRY) -> dict[str, int]:
    """Returns the sizes of a vision encoder, by their ``names`` in configurations (mappings, objects with attributes,
    or None); the first source that states one counts."""
    sizes: dict[str, int] = {}
    for source in sources:
        read = source.get if isinstance(source, Mapping) else partial(getattr, source)
        sizes = {name: side for name, theirs in names.items() if (side := _side(read(theirs, None)))} | sizes
    return sizes


def model_facts(config_file: Path) -> dict[str, Any]:
    """Fields of a `RunView` that a model's ``config.json`` determines. Raises ConfigError: the file cannot be read."""
    values = _read(config_file)
    text = values.get("text_config") or values
    heads = text.get("num_attention_heads")
    width = text.get("head_dim") or (text["hidden_size"] // heads if heads and "hidden_size" in text else None)
    if (mla := text.get("qk_rope_head_dim")) is not None:
        width = mla + text.get("qk_nope_head_dim", 0)
    stated = {kind: values.get(f"{kind}_token_id", values.get(f"{kind}_token_index")) for kind in PLACEHOLDERS}
    vision = values.get("vision_config") or {}
    return {
        "head_dim": width,
        "value_dim": None if mla is None else text.get("v_head_dim"),
        "num_attention_heads": heads,
        "num_query_groups": text.get("num_key_value_heads"),
        "num_layers": text.get("num_hidden_layers"),
        "num_moe_experts": text.get("num_experts"),
        "model_tokens": TokenFacts(
            size=text.get("vocab_size") or values.get("vocab_size"),
            placeholders=numbers(stated),
            # Mistral 3 states its merge size beside the vision encoder.
            geometry=model_geometry(vision, {"spatial_merge_size": values.get("spatial_merge_size")}),
        ),
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
