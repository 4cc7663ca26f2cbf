"""Which tokens of a sample are trained, and whether they are enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from energon_packing.chat.thinking import TrainedSpan
from energon_packing.encoders.measured import Measured
from energon_packing.encoders.tokenized import TokenizedText, any_of
from energon_packing.errors import SampleRejected


def trained_tokens(
    text: TokenizedText, spans: Sequence[TrainedSpan], never: Sequence[int]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the tokens inside the trained spans of a text, and their weights.

    A token across the beginning of a span is trained, because the answer begins in it. A token across its end is not
    trained, because generation never produces it. No trained token touches a span of weight 0.

    Args:
        text: tokens of the text.
        spans: of its characters, ascending.
        never: ids of tokens that are never trained.

    Returns:
        bool ``[L]``; and float32 ``[L]``, 0 where nothing is trained, or None if all weights are 1.
    """
    trained = np.zeros(len(text.ids), dtype=bool)
    plain = all(span.weight in (0.0, 1.0) for span in spans)
    weights = None if plain else np.zeros(len(text.ids), dtype=np.float32)
    for span in spans:
        if span.weight <= 0:
            continue
        first, last = text.tokens_of(span.start, span.end)
        while last > first and text.reaches_over(last - 1, span.end):
            last -= 1
        trained[first:last] = True
        if weights is not None:
            weights[first:last] = span.weight
    for span in spans:
        if span.weight <= 0:
            first, last = text.tokens_of(span.start, span.end)
            trained[first:last] = False
    if never:
        trained[any_of(text.ids, never)] = False
    if weights is not None:
        weights[~trained] = 0.0
    return trained, weights


def enough_targets(measured: Measured, ratio: float) -> Measured:
    """Returns the sample if the share of targets among its tokens is strictly above ``ratio``.

    Raises:
        SampleRejected: ``too_few_targets``.
    """
    if measured.targets <= ratio * measured.length:
        raise SampleRejected(
            "too_few_targets",
            f"only {measured.targets} of {measured.length} tokens are targets; their share must exceed "
            f"encoder.limits.min_active_ratio={ratio:.6g}",
        )
    return measured
