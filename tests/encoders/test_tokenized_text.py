"""Tokens of characters: the quick way through the tokenizer against all offsets."""

import unicodedata
from functools import cache
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from energon_packing.demo import processor_path
from energon_packing.encoders.tokenized import (
    ByteText,
    SpecialTexts,
    TextTokenizer,
    TokenizedText,
    byte_lengths,
    use_one_thread,
)
from energon_packing.errors import ConfigError

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


pieces = st.sampled_from(
    [" ", "  ", "\n", "a", "b", "é", "e\u0301", "你", "🙂", "👩‍👧", "!", "ab", "<|im_end|>", "<|end|>"]
)


@cache
def quick(kind: str) -> TextTokenizer:
    return TextTokenizer(backend(kind))


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "normalised"])
@settings(max_examples=150)
@given(words=st.lists(pieces, max_size=12), one=st.integers(0, 30), other=st.integers(0, 30), special=st.booleans())
def test_tokens_of_a_span_are_all_those_that_hold_a_character_of_it(kind, words, one, other, special):
    text = "".join(words)
    start, end = sorted((min(one, len(text)), min(other, len(text))))
    encoding = backend(kind).encode(text, add_special_tokens=special)
    held = [at for at, (begin, stop) in enumerate(encoding.offsets) if begin < end and stop > start]
    expected = (held[0], held[-1] + 1) if held else (0, 0)
    for made in (TokenizedText(text, encoding), quick(kind)(text, add_special_tokens=special)):
        assert made.tokens_of(start, end) == expected
        assert made.ids.tolist() == encoding.ids
        assert made.offsets.tolist() == [list(pair) for pair in encoding.offsets]


@settings(max_examples=200)
@given(
    text=st.text(st.characters(codec="utf-8"), max_size=40),
    places=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6),
)
def test_spans_may_be_asked_for_in_any_order(text, places):
    encoding = backend("bytes").encode(text, add_special_tokens=False)
    made, plain = quick("bytes")(text, add_special_tokens=False), TokenizedText(text, encoding)
    for pair in places:
        start, end = sorted(min(place, len(text)) for place in pair)
        first, last = made.tokens_of(start, end)
        assert (first, last) == plain.tokens_of(start, end)
        if last > first:
            assert made.reaches_over(last - 1, end) == plain.reaches_over(last - 1, end)


def test_the_quick_way_is_taken_for_a_byte_level_vocabulary_and_for_no_other():
    assert isinstance(quick("bytes")("a 🙂 b", add_special_tokens=False), ByteText)
    assert not isinstance(quick("bytes")("e\u0301", add_special_tokens=False), ByteText)  # NFC makes it shorter
    for kind in ("metaspace", "normalised"):
        assert byte_lengths(backend(kind)) is None


def changed(**parts) -> Tokenizer:
    """The shipped tokenizer with other parts."""
    made = Tokenizer.from_str(backend("bytes").to_str())
    for name, part in parts.items():
        setattr(made, name, part)
    return made


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
PREFIXED = pre_tokenizers.ByteLevel(add_prefix_space=True)
LOSSY = {
    "a prefix": {"pre_tokenizer": PREFIXED},
    "a removed space": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])},
    "lower case": {"normalizer": normalizers.Lowercase()},
    "offsets without spaces": {"post_processor": processors.ByteLevel(trim_offsets=True)},
    "another decoder": {"decoder": decoders.Metaspace()},
}


@pytest.mark.parametrize("parts", LOSSY.values(), ids=LOSSY)
def test_a_tokenizer_that_changes_its_text_has_no_byte_lengths(parts):
    assert byte_lengths(changed()) is not None
    assert byte_lengths(changed(**parts)) is None


def test_a_token_that_takes_the_spaces_around_it_leaves_no_byte_lengths():
    made = changed()
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert byte_lengths(made) is None


def test_tokens_that_the_tokenizer_adds_are_no_bytes_of_the_text():
    made = changed()
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]),
        ]
    )
    assert byte_lengths(made) is not None
    text = TextTokenizer(made)("ab cd", add_special_tokens=True)
    assert not isinstance(text, ByteText)
    assert text.tokens_of(0, 2)[0] == 1


def test_threads_of_the_tokenizers_library_are_never_started(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    made = TextTokenizer(backend("bytes"))
    assert not isinstance(made("a b", add_special_tokens=False), ByteText)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    use_one_thread()  # the user has said otherwise
    assert not isinstance(made("a b", add_special_tokens=False), ByteText)


@cache
def specials(kind: str) -> SpecialTexts:
    return SpecialTexts(PreTrainedTokenizerFast(tokenizer_object=backend(kind)), "text")


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "normalised"])
@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.tuples(pieces, st.booleans()), max_size=10), add=st.booleans())
def test_special_tokens_of_a_record_are_text_and_those_of_the_template_are_tokens(kind, words, add):
    """Oracle: the tokenizer's own option to read special tokens as text, on each stretch between the template's."""
    own = {"bytes": "<|im_end|>", "metaspace": "<|end|>", "normalised": "<|end|>"}[kind]
    swap = specials(kind)
    words = [(word, word == own and is_template) for word, is_template in words]
    shown = "".join(word if is_template else swap.exchanged(word) for word, is_template in words)
    text = "".join(word for word, _ in words)
    found = TextTokenizer(backend(kind), swap)(shown, add_special_tokens=add)
    plain = quick(kind)(text, add_special_tokens=add)
    if all(word != own or is_template for word, is_template in words):
        assert found.ids.tolist() == plain.ids.tolist()
        assert found.offsets.tolist() == plain.offsets.tolist()
        return
    number = backend(kind).token_to_id(own)
    assert found.ids.tolist().count(number) == sum(is_template for _, is_template in words)
    if kind == "bytes":  # the others write each stretch as the beginning of a text
        expected: list[int] = []
        for is_template, run in groupby(words, key=lambda word: word[1]):
            run = [word for word, _ in run]
            expected += [number] * len(run) if is_template else as_text(backend(kind), "".join(run))
        assert found.ids.tolist() == expected
        if unicodedata.is_normalized("NFC", text):  # or offsets are those of the normalised text
            held = dict.fromkeys(map(tuple, found.offsets.tolist()))
            assert "".join(text[start:end] for start, end in held) == text


def as_text(made: Tokenizer, text: str) -> list[int]:
    made.encode_special_tokens = True
    try:
        return made.encode(text, add_special_tokens=False).ids
    finally:
        made.encode_special_tokens = False


def test_a_tokenizer_whose_special_token_is_also_a_word_cannot_write_it_as_text():
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -1.0) for letter in "</s>ab▁")]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    made.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    with pytest.raises(
        ConfigError, match=r"special_tokens_in_text is 'text'.*'</s>' as a word; use 'refuse' or 'keep'"
    ):
        SpecialTexts(tokenizer, "text")
    for choice in ("refuse", "keep"):
        SpecialTexts(tokenizer, choice)
