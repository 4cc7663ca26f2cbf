"""Attention masks of a packed row, written out for a Hugging Face model: which token may attend to which.

Each token sees what it would see in its sample alone. Besides the causal rule, two rules of Gemma 3 (and of any model
with such layers) apply: sliding layers see a window, and the tokens of one image see each other in both directions.
"""

from __future__ import annotations

from typing import Any

import torch


def written_mask(
    config: Any, segment: torch.Tensor, images: torch.Tensor | None, *, isolate: bool
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Returns the mask or masks that the language model takes as ``attention_mask``.

    Args:
        config: of the language model; ``layer_types`` and ``sliding_window`` are read.
        segment: int64 ``[T]``, number of the sample that each token belongs to.
        images: bool ``[T]``, tokens that see each other within a run in both directions; None if the model is causal.
        isolate: tokens see their own segment only; without it the whole row, as if there were no boundaries.

    Returns:
        bool ``[1, 1, T, T]``, True where a query (second last axis) sees a key; if the model has sliding layers, one
        such mask per layer type.
    """
    order = torch.arange(segment.numel(), device=segment.device)
    causal = order[:, None] >= order[None, :]
    kinds = getattr(config, "layer_types", None) or ()
    masks = {"full_attention": causal}
    if "sliding_attention" in kinds:
        masks["sliding_attention"] = causal & (order[:, None] - order[None, :] < config.sliding_window)
    for name, mask in masks.items():
        if images is not None:
            mask = mask | _same_image(images)
        if isolate:
            mask = mask & (segment[:, None] == segment[None, :])
        masks[name] = mask[None, None]
    return masks if len(masks) > 1 else masks["full_attention"]


def _same_image(images: torch.Tensor) -> torch.Tensor:
    """Whether two tokens stand in one uninterrupted run of image tokens, ``[T, T]``."""
    starts = images & ~torch.cat([images.new_zeros(1), images[:-1]])
    run = torch.where(images, starts.cumsum(0), 0)
    return (run[:, None] == run[None, :]) & images[:, None]
