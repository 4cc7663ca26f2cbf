"""Tokens of characters: the quick way through the tokenizer against all offsets."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from energon_packing.demo import processor_path
from energon_packing.encoders.tokenized import TokenizedText, any_of
from energon_packing.errors import SampleRejected

LETTERS = ["a", "b", "é", "e", "▁", "你", "!", "ab", "▁a", "▁b", "aé"]


@cache
def backend(kind: str) -> Tokenizer:
    """Byte-level with NFC as shipped; Metaspace with a prefix as in Llama 2; one that normalises characters away."""
    if kind == "bytes":
        return AutoTokenizer.from_pretrained(processor_path("text")).backend_tokenizer
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "<|end|>", *LETTERS])}
    merges = [("a", "b"), ("▁", "a"), ("▁", "b"), ("a", "é")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    if kind == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    else:
        made.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Strip()])
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "<|end|>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


pieces = st.sampled_from([" ", "  ", "\n", "a", "b", "é", "e\u0301", "你", "🙂", "👩‍👧", "!", "ab", "<|im_end|>", "<|end|>"])


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "normalised"])
@settings(max_examples=400)
@given(words=st.lists(pieces, max_size=12), one=st.integers(0, 30), other=st.integers(0, 30), special=st.booleans())
def test_tokens_of_a_span_are_all_those_that_hold_a_character_of_it(kind, words, one, other, special):
    text = "".join(words)
    start, end = sorted((min(one, len(text)), min(other, len(text))))
    made = TokenizedText(backend(kind), text, add_special_tokens=special)
    offsets = backend(kind).encode(text, add_special_tokens=special).offsets
    held = [at for at, (begin, stop) in enumerate(offsets) if begin < end and stop > start]
    assert made.tokens_of(start, end) == ((held[0], held[-1] + 1) if held else (0, 0))


def test_a_span_that_ends_in_a_character_of_several_tokens_holds_all_of_them():
    made = TokenizedText(backend("bytes"), "a🙂b", add_special_tokens=False)
    assert len(made.ids) > 3
    assert made.tokens_of(0, 2) == (0, len(made.ids) - 1)


def test_half_of_a_surrogate_pair_is_a_rejected_text():
    with pytest.raises(SampleRejected, match="bad_text"):
        TokenizedText(backend("bytes"), "a\ud800", add_special_tokens=False)


@given(ids=st.lists(st.integers(0, 9)), wanted=st.lists(st.integers(0, 9), max_size=4))
def test_a_few_ids_are_found_as_numpy_finds_them(ids, wanted):
    row = np.array(ids, dtype=np.int32)
    assert any_of(row, wanted).tolist() == np.isin(row, wanted).tolist()
