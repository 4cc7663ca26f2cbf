"""How much a token of a long sample weighs against one of a short sample, in a form that survives Bridge's arithmetic.

Bridge's loss is the sum of weighted token losses divided by the number of tokens, and its number of tokens is the sum
of the weights of a rank's micro-batch, **cut to a whole number** (``masked_next_token_loss``: ``.to(torch.int)``).
Whole weights do not notice. Weights like one over the sample's length lose up to 1 of every sum, which on a
context-parallel slice may be all of it. A common factor cancels between loss and number of tokens, so the weights here
are scaled up: the error of the divisor is then at most ``1 / scale`` for every micro-batch and rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from energon_packing.errors import ConfigError, PackingError

Weighting = Literal["token", "sample", "square_root"]

SCALE = 1024.0
"""Factor of all weights but those of ``token``. Bridge counts in int32: the sum of a global batch stays below 2**31."""

_POWERS: dict[str, float] = {"token": 0.0, "sample": 1.0, "square_root": 0.5}


def weigh(rows: Sequence[Mapping[str, Any]], weighting: Weighting, *, scale: float = SCALE) -> list[dict[str, Any]]:
    """The rows with the loss weights of a weighting.

    ``token`` keeps the weights: every trained token counts the same, a long sample counts more. ``sample`` divides them
    by their sum, so that every sample counts the same. ``square_root`` divides by the square root of the sum, between
    the two. Weights of turns inside a sample keep their proportion.

    Args:
        rows: as `energon_packing.thd.assemble` takes them, with ``loss_mask`` ``[L]``.
        weighting: one of the three.
        scale: factor of the weights of ``sample`` and ``square_root`` (see above); all rows of a run need the same.

    Returns:
        copies of the rows with a new ``loss_mask`` ``[L]`` float32.

    Raises:
        ConfigError: an unknown weighting, or a scale that is not above 0.
        PackingError: a row in which no token has a weight.
    """
    if weighting not in _POWERS:
        raise ConfigError(f"loss weighting {weighting!r} is none of {', '.join(_POWERS)}")
    if not 0 < scale < float("inf"):
        raise ConfigError(f"the scale of loss weights is {scale}; it must be a number above 0")
    if weighting == "token":
        return [dict(row) for row in rows]
    weighed = []
    for index, row in enumerate(rows):
        weights = torch.as_tensor(row["loss_mask"]).double()
        total = float(weights.sum())
        if not total > 0:
            raise PackingError(f"sample {row.get('key', index)}: no token has a loss weight, so it cannot be weighed")
        weighed.append(dict(row, loss_mask=(weights * (scale / total ** _POWERS[weighting])).float()))
    return weighed
