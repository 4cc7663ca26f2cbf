"""A processor that pads on the left, or cuts, changes nothing: rows are padded by the assembly alone."""

import pytest
from transformers import AutoProcessor

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_processor_that_pads_on_the_left_gives_the_tokens_of_one_that_does_not(encoders, family):
    processor = AutoProcessor.from_pretrained(processor_path(family))
    processor.tokenizer.padding_side = "left"
    backend = processor.tokenizer.backend_tokenizer
    # As a tokenizer.json that was saved in the middle of a batch may have it.
    backend.enable_padding(direction="left", length=512, pad_id=0, pad_token="<|endoftext|>")
    backend.enable_truncation(max_length=20)
    media = (Media(kind="image", name="a.png", width=100, height=60),)
    turns = (
        Turn(role="user", parts=(MediaPart(index=0), "How many birds are on the wire in this picture, and why?")),
        Turn(role="assistant", parts=("Nine of them, since the tenth has just left.",)),
    )
    conversation = Conversation(key="k", turns=turns, media=media)
    found = ConversationEncoder(EncoderConfig(), processor=processor).measure(conversation)
    expected = encoders[family].measure(conversation)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.trained.tolist() == expected.trained.tolist()
    assert found.length == expected.length


@pytest.mark.parametrize("family", ["text", "qwen2_5_vl"])
def test_a_processor_that_others_use_between_two_samples_changes_no_token(encoders, family):
    """A call of transformers that pads, cuts, or reads special tokens as text leaves the tokenizer so."""
    processor = AutoProcessor.from_pretrained(processor_path(family))
    encoder = ConversationEncoder(EncoderConfig(), processor=processor)
    turns = (Turn(role="user", parts=("How many birds are on the wire?",)), Turn(role="assistant", parts=("Nine.",)))
    conversation = Conversation(key="k", turns=turns, media=())
    expected = encoders[family].measure(conversation).token_ids.tolist()
    tokenizer = getattr(processor, "tokenizer", processor)
    padded, cut = {"padding": "max_length", "max_length": 512}, {"truncation": True, "max_length": 3}
    for options in (padded, cut, {"split_special_tokens": True}):
        tokenizer(["a question of somebody else"], **options)
        assert encoder.measure(conversation).token_ids.tolist() == expected
