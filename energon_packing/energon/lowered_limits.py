"""Lowers limits of a sample that are above those of a pack, with one warning."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from energon_packing.config import EncoderConfig, LimitsConfig, PackingConfig

PAIRS = (
    ("max_tokens", "seq_length"),
    ("max_visual_tokens", "seq_length"),
    ("max_images", "max_images_per_pack"),
)
"""Each limit of a sample, with the limit of a pack that it may not exceed."""


def lower_limits(encoder: EncoderConfig, packing: PackingConfig) -> EncoderConfig:
    """Returns the encoder's configuration with ``encoder.limits`` no higher than what a pack may hold; see `lowered`.

    Warns:
        UserWarning: once, naming every limit that was lowered.
    """
    limits, sentences = lowered(encoder.limits, packing)
    if not sentences:
        return encoder
    named = ", ".join(f"encoder.limits.{sentence}" for sentence in sentences)
    warnings.warn(f"A sample must fit into a pack, so these were lowered: {named}.", stacklevel=3)
    return dataclasses.replace(encoder, limits=limits)


def lowered(limits: LimitsConfig, packing: PackingConfig) -> tuple[LimitsConfig, list[str]]:
    """Returns limits no higher than a pack's, and what was lowered: ``max_tokens 9000 to packing.seq_length 4096``.

    Under the higher limit a sample between the two would be measured and then refused because it fits no pack. Under
    the pack's limit it is resized or truncated if ``when_over`` allows it. A limit that is None stays None. With
    ``oversize: split`` nothing is lowered, because a sample may then be larger than a pack.
    """
    changed: dict[str, Any] = {}
    sentences: list[str] = []
    for name, of_pack in PAIRS if packing.oversize != "split" else ():
        own, most = getattr(limits, name), getattr(packing, of_pack)
        if own is not None and most is not None and own > most:
            changed[name] = most
            sentences.append(f"{name} {own} to packing.{of_pack} {most}")
    return (dataclasses.replace(limits, **changed) if changed else limits), sentences
