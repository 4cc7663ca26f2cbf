"""Limits of one data set of a blend: limits in its ``subflavors`` replace ``encoder.limits`` for its samples.

In the metadataset::

    blend:
      - {weight: 3, path: documents, subflavors: {limits: {max_tokens: 4096, when_over: [truncate]}}}
      - {weight: 1, path: charts, subflavors: {limits: {max_images: 2}}}
"""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from energon_packing.config import LimitsConfig, PackingConfig, from_mapping, to_mapping
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.sample_encoder import SampleEncoder
from energon_packing.errors import ConfigError

SUBFLAVOR = "limits"


class DatasetLimits:
    """Encoders with the limits of each data set of a blend, none above those of a pack (``packing``; None if nothing is
    packed). Each encoder is built once."""

    def __init__(self, packing: PackingConfig | None) -> None:
        self._packing = packing
        self._encoders: dict[tuple[int, str], SampleEncoder] = {}

    def encoder(self, encoder: SampleEncoder, sample: Any, *, number: int = 0) -> SampleEncoder:
        """Returns `encoder`, or a copy of it with the limits of the sample's data set. Warns UserWarning: once per data
        set, if one of its limits is above that of a pack; in the first worker only. Raises ConfigError: the subflavor
        is not a mapping, has an unknown key or an invalid value, or the encoder is not a `ConversationEncoder`."""
        if (given := _given(sample)) is None:
            return encoder
        where = _where(sample)
        known = (number, json.dumps([where, given], sort_keys=True, default=str))
        if known not in self._encoders:
            if not isinstance(encoder, ConversationEncoder):
                kind = type(encoder).__name__
                raise ConfigError(f"{where}: {kind} does not support limits; use a ConversationEncoder.")
            if not isinstance(given, Mapping):
                raise ConfigError(f"{where} is {given!r}; it must be a mapping of limits, such as {{max_images: 2}}.")
            limits = from_mapping(LimitsConfig, {**to_mapping(encoder.config.limits), **given}, where=where)
            limits, sentences = (limits, []) if self._packing is None else lowered(limits, self._packing)
            if sentences and ((worker := torch.utils.data.get_worker_info()) is None or worker.id == 0):
                lower = ", ".join(sentences)
                warnings.warn(f"{where}: a sample must fit into a pack, so these were lowered: {lower}.", stacklevel=2)
            self._encoders[known] = encoder.under(limits)
        return self._encoders[known]


def refuse_dataset_limits(sample: Any) -> None:
    """Refuses limits of a data set for samples that do not support them."""
    if _given(sample) is not None:
        raise ConfigError(f"{_where(sample)}: these samples do not support limits per data set; set them in encoder.")


def _given(sample: Any) -> Any:
    return (sample.__subflavors__ or {}).get(SUBFLAVOR)


def _where(sample: Any) -> str:
    places = sorted({str(source.dataset_path) for source in sample.__sources__ or ()})
    return f"subflavors.{SUBFLAVOR} of the data set {', '.join(places) or '?'}"


PAIRS = (("max_tokens", "seq_length"), ("max_visual_tokens", "seq_length"), ("max_images", "max_images_per_pack"))
"""Each limit of a sample, with the limit of a pack that it may not exceed."""


def lowered(limits: LimitsConfig, packing: PackingConfig) -> tuple[LimitsConfig, list[str]]:
    """Returns limits no higher than a pack's, and what was lowered: ``max_tokens 9000 to packing.seq_length 4096``.
    Under the higher limit a sample between the two would be measured and then refused because it fits no pack. Under
    the pack's limit it is resized or truncated if ``when_over`` allows it. A limit that is None stays None. With
    ``oversize: split`` nothing is lowered, because a sample may then be larger than a pack."""
    changed: dict[str, Any] = {}
    sentences: list[str] = []
    for name, of_pack in PAIRS if packing.oversize != "split" else ():
        own, most = getattr(limits, name), getattr(packing, of_pack)
        if own is not None and most is not None and own > most:
            changed[name] = most
            sentences.append(f"{name} {own} to packing.{of_pack} {most}")
    return (dataclasses.replace(limits, **changed) if changed else limits), sentences
