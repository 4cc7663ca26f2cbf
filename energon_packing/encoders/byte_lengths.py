"""The number of text bytes that each token of a byte-level vocabulary represents.

Their cumulative sum locates every token, for a fraction of the time that the tokenizers library needs to record the
characters of every token. This holds for lossless byte-level BPE (GPT-2's, which Qwen, InternVL 3 and DeepSeek use). A
tokenizer that adds, drops or changes characters is detected, and has no byte lengths.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

_LOSSLESS = frozenset({"Sequence", "Split", "ByteLevel", "Digits"})
"""Pre-tokenizers that only cut a text; settings that make them change it are checked below."""


def byte_lengths(backend: Any) -> np.ndarray | None:
    """Returns int32 ``[largest id + 1]``, 0 for ids without a token; None if bytes do not locate the tokens.

    Args:
        backend: a ``tokenizers.Tokenizer``. If its normalizer changes a text (only NFC is accepted) or its
            post-processor adds tokens, text and tokens differ in bytes: compare the two for every text.
    """
    from tokenizers import models, pre_tokenizers  # type: ignore[import-untyped]

    model, added = backend.model, backend.get_added_tokens_decoder()
    if not isinstance(model, models.BPE) or model.dropout:
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if _state(backend.normalizer).get("type", "NFC") != "NFC" or not _only_cuts(_state(backend.pre_tokenizer)):
        return None
    if _state(backend.decoder).get("type") != "ByteLevel" or not _keeps_offsets(_state(backend.post_processor)):
        return None
    if any(token.lstrip or token.rstrip for token in added.values()):
        return None
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for name, number in backend.get_vocab(False).items() if number not in added}
    if not alphabet <= vocabulary.keys() or not set("".join(vocabulary)) <= alphabet:
        return None
    found = np.zeros(max([*vocabulary.values(), *added]) + 1, dtype=np.int32)
    found[list(vocabulary.values())] = [len(name) for name in vocabulary]
    for number, token in added.items():
        found[number] = len(token.content.encode())
    return found


def _state(part: Any) -> dict[str, Any]:
    if part is None:
        return {}
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found


def _only_cuts(state: dict[str, Any]) -> bool:
    if state.get("type") not in _LOSSLESS or state.get("add_prefix_space") or state.get("behavior") == "Removed":
        return False
    return all(_only_cuts(inner) for inner in state.get("pretokenizers", ()))


def _keeps_offsets(state: dict[str, Any]) -> bool:
    """Whether offsets include a token's leading space; with Llama 3's post-processor they do not."""
    if state.get("type") == "ByteLevel" and state.get("trim_offsets"):
        return False
    return all(_keeps_offsets(inner) for inner in state.get("processors", ()))
