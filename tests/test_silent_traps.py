"""Traps that belong to no single module: from a conversation to a packed row."""

import dataclasses

import pytest
import torch

from energon_packing import thd
from energon_packing.conversation import Conversation, Turn


def text_conversation(key: str, words: int) -> Conversation:
    return Conversation(
        key=key,
        turns=(
            Turn(role="user", parts=("Count to " + " and ".join(map(str, range(words))),)),
            Turn(role="assistant", parts=("No.",)),
        ),
    )


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("kind", ["1d", "mrope"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_text_only_pack_gets_ordinary_positions(encoders, family, kind, multiple):
    encoder = encoders[family]
    before, encoder.config = encoder.config, dataclasses.replace(encoder.config, position_ids=kind)
    try:
        measured = [encoder.measure(text_conversation(f"t{words}", words)) for words in (3, 30, 8)]
        rows = [encoder.render(sample, lambda name: b"") for sample in measured]
    finally:
        encoder.config = before
    batch = thd.assemble(rows, multiple=multiple)
    axes = batch.position_ids.reshape(-1, batch.total_tokens)
    assert axes.shape[0] == (3 if kind == "mrope" else 1)
    for start, length in zip(batch.boundaries.tolist(), batch.sample_lengths, strict=False):
        for axis in axes[:, start : start + length]:
            assert torch.equal(axis, torch.arange(length))


def test_no_token_of_a_pack_of_conversations_learns_the_next_conversation(encoders):
    encoder = encoders["text"]
    rows = [
        encoder.render(encoder.measure(text_conversation(f"t{words}", words)), lambda name: b"") for words in (3, 9)
    ]
    batch = thd.assemble(rows)
    for start, row in zip(batch.boundaries.tolist(), rows, strict=False):
        own = row["input_ids"]
        labels, weights = (tensor[0, start : start + len(own)] for tensor in (batch.labels, batch.loss_mask))
        assert labels[-1] == -100
        assert weights[-1] == 0
        assert weights.sum() > 0
        learned = weights[:-1] > 0
        assert torch.equal(labels[:-1][learned], own[1:][learned])
