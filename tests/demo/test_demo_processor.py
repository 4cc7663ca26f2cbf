"""The shipped processor directories: what makes them, what Hugging Face makes of them, and the chat template."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.demo import PROCESSORS, processor_path
from energon_packing.demo.conversations import KINDS, openai_record, write_draft
from energon_packing.errors import UserError

VISION = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(processor_path("text"))


@pytest.fixture(scope="module")
def processors() -> dict[str, Any]:
    from transformers import AutoProcessor

    return {name: AutoProcessor.from_pretrained(processor_path(name)) for name in VISION}


def _files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_shipped_directories_have_one_tokenizer_and_stay_below_a_megabyte_and_a_half() -> None:
    files = _files(processor_path("text").parent)
    assert len({content for name, content in files.items() if name.endswith("/tokenizer.json")}) == 1
    assert sum(map(len, files.values())) < 1_500_000


def test_an_unknown_processor_is_refused_with_the_known_names() -> None:
    with pytest.raises(UserError, match="qwen2_5_vl, qwen3_vl, text"):
        processor_path("qwen9")


@pytest.mark.parametrize("name", VISION)
def test_autoprocessor_gives_the_class_that_the_family_has(processors: dict[str, Any], name: str) -> None:
    processor = processors[name]
    assert type(processor).__name__ == PROCESSORS[name]
    assert processor.tokenizer.is_fast
    assert type(processor.image_processor).__name__ == "Qwen2VLImageProcessor"
    video_class = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[name]
    assert type(processor.video_processor).__name__ == video_class
    assert processor.video_processor.do_sample_frames
    assert processor.video_processor.fps == 2.0
    assert processor.tokenizer.convert_ids_to_tokens(processor.image_token_id) == "<|image_pad|>"
    assert processor.tokenizer.convert_ids_to_tokens(processor.video_token_id) == "<|video_pad|>"


def test_the_tokenizer_has_4096_tokens_and_splits_words_as_qwen2_does(tokenizer: Any) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert type(tokenizer).__name__ == PROCESSORS["text"]
    assert len(tokenizer) == 4096
    saved = json.loads((processor_path("text") / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": PRETOKENIZE_REGEX}
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_every_special_token_is_one_token(tokenizer: Any) -> None:
    added = json.loads((processor_path("text") / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    assert [entry["id"] for entry in added] == list(range(4070, 4096))
    assert [tokenizer.encode(entry["content"]) for entry in added] == [[entry["id"]] for entry in added]


def test_any_text_survives_encoding_and_decoding() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(processor_path("text") / "tokenizer.json"))

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(max_size=200))
    def survives(text: str) -> None:
        decoded = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        assert decoded == unicodedata.normalize("NFC", text)

    survives()


def _expected_mask(tokenizer: Any, ids: list[int]) -> list[int]:
    """By walking over the tokens: from behind ``<|im_start|>assistant\\n`` to ``<|im_end|>``, that one included."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    header = tokenizer.encode("assistant\n")
    mask, inside, place = [0] * len(ids), False, 0
    while place < len(ids):
        if ids[place] == start and ids[place + 1 : place + 1 + len(header)] == header:
            inside, place = True, place + 1 + len(header)
            continue
        mask[place] = int(inside)
        inside = inside and ids[place] != end
        place += 1
    return mask


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_assistant_mask_is_exactly_what_the_assistant_says_with_its_end_token(tokenizer: Any, kind: str) -> None:
    for index in range(12):
        record = openai_record(write_draft(5, index, kind), Random(index))
        result = tokenizer.apply_chat_template(
            record["messages"], tools=record.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(result["input_ids"]), list(result["assistant_masks"])
        assert mask == _expected_mask(tokenizer, ids)
        spoken = [message for message in record["messages"] if message["role"] == "assistant"]
        ends = [place for place, token in enumerate(ids) if token == tokenizer.eos_token_id and mask[place]]
        assert len(ends) == len(spoken)
        trained = tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])
        said = [message["content"] for message in spoken if message["content"]]
        assert all(text in trained for text in said)
        assert "<|image_pad|>" not in trained
        assert "<|im_start|>" not in trained


def test_the_template_writes_chatml_with_system_prompt_media_and_both_speakers(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": "Compare with "},
                {"type": "image_url", "image_url": {"url": "a.jpg"}},
                {"type": "video"},
            ],
        },
        {"role": "assistant", "content": "Equal."},
    ]
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{image}Compare with {image}{video}<|im_end|>\n"
        "<|im_start|>assistant\nEqual.<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True).endswith(
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_calls_and_results_are_written_in_the_hermes_form(tokenizer: Any) -> None:
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "Gladly.", "tool_calls": calls},
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4"},
        ],
        tools=[tool],
        tokenize=False,
    )
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text
    assert (
        "<|im_start|>assistant\nGladly.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    ) in text
