"""Limits of one data set of a blend: what stands in its ``subflavors`` replaces ``encoder.limits`` for its samples.

In the metadataset::

    blend:
      - {weight: 3, path: documents, subflavors: {limits: {max_tokens: 4096, when_over: [truncate]}}}
      - {weight: 1, path: charts, subflavors: {limits: {max_images: 2}}}
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from energon_packing.config import LimitsConfig, PackingConfig, from_mapping, to_mapping
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.sample_encoder import SampleEncoder
from energon_packing.energon.lowered_limits import lowered
from energon_packing.errors import ConfigError

SUBFLAVOR = "limits"


class DatasetLimits:
    """Encoders under the limits of the data sets of a blend, each made once.

    Args:
        packing: whose limits of a pack no data set may be above; None where there are no packs.
    """

    def __init__(self, packing: PackingConfig | None) -> None:
        self._packing = packing
        self._encoders: dict[tuple[int, str], SampleEncoder] = {}

    def encoder(self, encoder: SampleEncoder, sample: Any, *, number: int = 0) -> SampleEncoder:
        """`encoder`, or one like it under the limits of the sample's data set.

        Args:
            encoder: what measures where the data set says nothing.
            sample: with Energon's subflavors and sources.
            number: of the encoder among those of the task encoder.

        Warns:
            UserWarning: once a data set, where one of its limits is above that of a pack; in the first worker only.

        Raises:
            ConfigError: the subflavor is no mapping, has an unknown key or an impossible value, or the encoder is not a
                `ConversationEncoder`.
        """
        given = _given(sample)
        if given is None:
            return encoder
        where = _where(sample)
        known = (number, json.dumps([where, given], sort_keys=True, default=str))
        if known not in self._encoders:
            self._encoders[known] = self._make(encoder, given, where)
        return self._encoders[known]

    def _make(self, encoder: SampleEncoder, given: Any, where: str) -> SampleEncoder:
        if not isinstance(encoder, ConversationEncoder):
            raise ConfigError(f"{where}: {type(encoder).__name__} takes no limits; use a ConversationEncoder.")
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where} is {given!r}; it is a mapping of limits, such as {{max_images: 2}}.")
        limits = from_mapping(LimitsConfig, {**to_mapping(encoder.config.limits), **given}, where=where)
        limits, sentences = (limits, []) if self._packing is None else lowered(limits, self._packing)
        worker = torch.utils.data.get_worker_info()
        if sentences and (worker is None or worker.id == 0):
            warnings.warn(
                f"{where}: a sample may not hold more than a pack: lowered {', '.join(sentences)}.", stacklevel=2
            )
        return encoder.under(limits)


def refuse_dataset_limits(sample: Any) -> None:
    """For samples that no limits of this kind hold for.

    Raises:
        ConfigError: the sample's data set has limits of its own.
    """
    if _given(sample) is not None:
        raise ConfigError(f"{_where(sample)}: clips take no limits of a data set; set them in the encoder section.")


def _given(sample: Any) -> Any:
    return (sample.__subflavors__ or {}).get(SUBFLAVOR)


def _where(sample: Any) -> str:
    places = sorted({str(source.dataset_path) for source in sample.__sources__ or ()})
    return f"subflavors.{SUBFLAVOR} of the data set {', '.join(places) or '?'}"
