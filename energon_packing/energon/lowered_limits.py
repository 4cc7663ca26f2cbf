"""Limits of a sample that lie above those of a pack: lowered, and said so once."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from energon_packing.config import EncoderConfig, PackingConfig


def lower_limits(encoder: EncoderConfig, packing: PackingConfig) -> EncoderConfig:
    """The encoder's configuration with ``encoder.limits`` no higher than what a pack may hold.

    Such a sample would be measured, and then refused because it fits no pack; under the pack's limit it is resized or
    truncated instead, where ``when_over`` says so. A limit that is None stays None. With ``oversize: split`` nothing is
    lowered: a sample may be larger than a pack there.

    Warns:
        UserWarning: once, with every limit that was lowered.
    """
    if packing.oversize == "split":
        return encoder
    pairs = (
        ("max_tokens", "seq_length"),
        ("max_visual_tokens", "seq_length"),
        ("max_images", "max_images_per_pack"),
    )
    lowered: dict[str, Any] = {}
    sentences = []
    for name, of_pack in pairs:
        own, most = getattr(encoder.limits, name), getattr(packing, of_pack)
        if own is not None and most is not None and own > most:
            lowered[name] = most
            sentences.append(f"encoder.limits.{name} {own} to packing.{of_pack} {most}")
    if not lowered:
        return encoder
    warnings.warn(f"A sample may not hold more than a pack: lowered {', '.join(sentences)}.", stacklevel=3)
    return dataclasses.replace(encoder, limits=dataclasses.replace(encoder.limits, **lowered))
