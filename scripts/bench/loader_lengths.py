"""Tokens of each sample on every path of the loader benchmark: a path that trains on other tokens is no result."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import PackingError, SampleRejected

_IMAGE_SHARE = 0.05
"""Bridge resizes an image with ``qwen_vl_utils`` before its processor does, so its size may round to other tokens."""
_TOKENS_OF_A_FRAME = 64
"""It enlarges a small frame up to the largest one of the demo's processor."""


class Expected(NamedTuple):
    """Tokens of a sample on our path, and by how much those of Bridge's may differ; 0 for text."""

    tokens: int
    slack: float


def expected_lengths(conversations: Iterable[Conversation], config: EncoderConfig) -> dict[str, Expected]:
    """What each path must emit for each key.

    Args:
        conversations: of the benchmark; those that cannot be encoded are left out.
        config: processor and limits of our path.
    """
    encoder = ConversationEncoder(config)
    found: dict[str, Expected] = {}
    for conversation in conversations:
        try:
            measured = encoder.measure(conversation)
        except SampleRejected:
            continue
        images = sum(plan.tokens for plan in measured.plans if plan.kind == "image")
        videos = [plan for plan in measured.plans if plan.kind == "video"]
        steps = sum(plan.grid[0] for plan in videos)
        found[conversation.key] = Expected(
            measured.length,
            _IMAGE_SHARE * images + max(_TOKENS_OF_A_FRAME * steps, _IMAGE_SHARE * sum(plan.tokens for plan in videos)),
        )
    return found


def check_lengths(path: str, lengths: Mapping[str, int], expected: Mapping[str, Expected], *, exact: bool) -> None:
    """Compares what a path emitted with what it should have.

    Args:
        path: its name, for the message.
        lengths: key -> tokens of each emitted sample.
        expected: of each sample that can be encoded.
        exact: whether nothing may differ, as on our own path.

    Raises:
        PackingError: a sample has other tokens than the benchmark's page allows.
    """
    for key, tokens in lengths.items():
        if key not in expected:
            continue
        wanted, slack = expected[key]
        if abs(tokens - wanted) > (0 if exact else slack):
            raise PackingError(f"{path} emitted {tokens} tokens for {key}; ours has {wanted}, give or take {slack:.0f}")
