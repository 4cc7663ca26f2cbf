"""The weight of each target of a sample: by token, by sample, or in between; for a globally normalised loss.

If a sample has x targets, each weighs 1 (``token``), 1/x (``sample``) or 1/sqrt(x) (``square``; ``len2weight`` of
InternVL's ``internvl_chat_finetune.py``). The loss of a step is the weighted sum over all its samples,
divided by the sum of the weights.

If turns have weights, x is the sum of the weights of the targets, which is their number where all weigh 1. Then a
sample counts x, 1 or sqrt(x) in a step, whatever its turns weigh: weights of turns say how it is divided among them.

The loss mask carries the weights. Megatron-Bridge's ``masked_next_token_loss`` returns ``sum(loss * mask)`` and the sum
of the mask **as an integer**, and the step divides by the latter. A sample with weights 1/x would count as 0 or 1, so
all weights are multiplied by one constant, which cancels in the division.
"""

from __future__ import annotations

import math

from energon_packing.config import EncoderConfig

FIXED_POINT = 2**14
"""Factor of fractional weights.

The cast to an integer loses less than 1 from a sum of at least `FIXED_POINT` (every sample adds that much with
``sample``, and sqrt(x) times as much with ``square``), so less than 6.2e-5 of it. Megatron-Core counts the sum over a
whole step in 32 bits: with ``sample`` a global batch may hold up to 131,071 samples, and with ``square`` the sum of
sqrt(x) over its samples must stay below that number.
"""


def target_weight(config: EncoderConfig, targets: float) -> float:
    """Returns the factor of every weight of a sample, including `FIXED_POINT`.

    Args:
        targets: the number of targets, or the sum of their weights if turns have weights; above 0.
    """
    scale = config.loss_scale
    if config.loss_weighting == "token":
        return float(scale or 1)
    share = targets if config.loss_weighting == "sample" else math.sqrt(targets)
    return (scale or FIXED_POINT) / share
