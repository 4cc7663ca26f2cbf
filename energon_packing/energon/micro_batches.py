"""Micro-batches of single samples, for a trainer that packs in the batch or does not pack.

`MicroBatchTaskEncoder` measures, limits, renders and accounts for samples as `PackingTaskEncoder` does, but does not
choose them: the next ``micro_batch_size`` samples of the stream form one micro-batch. They travel as one `PackedBatch`
without padding, so readers, states and ledgers are the same as for packs. `energon_packing.bridge.in_batch` turns them
into the form that Megatron-Bridge's collators produce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.energon import WorkerConfig, stateless

from energon_packing import thd
from energon_packing.config import PACK_LIMITS, EncoderConfig, PackingConfig, ParallelConfig
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.encoders.sample_encoder import AnyMeasured
from energon_packing.energon.internals import SavableDataset
from energon_packing.energon.samples import MeasuredSample, Pack, RenderedSample, by_group
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError

UNREAD = ("window", "policy", "balance_window", "dummy_image", *PACK_LIMITS)
"""Fields of `PackingConfig` that decide which samples share a row; they have no effect here."""


def refuse_unread(packing: PackingConfig, *, where: str, mode: str) -> None:
    """Refuses settings of packs in a mode that makes no packs.

    Args:
        packing: the settings.
        where: their name in the run's configuration, for the message.
        mode: name of the mode, for the message.

    Raises:
        ConfigError: one of `UNREAD` differs from its default.
    """
    default = PackingConfig()
    for name in UNREAD:
        value, usual = getattr(packing, name), getattr(default, name)
        if value != usual:
            raise ConfigError(
                f"{where}.{name} is {value!r}, but the mode {mode!r} chooses no packs, so nothing reads it; leave it "
                f"at {usual!r}."
            )


def two_rows(key: str) -> ConfigError:
    """The sentence about a pair of which both answers are asked for where a sample is one row."""
    return ConfigError(
        f"Sample {key} is a preference pair, of which packing.pairs 'both' makes two rows, but this run has one row "
        "per sample; use packs (dataset.mode: packs), or set packing.pairs to 'chosen' or 'drop'."
    )


class MicroBatchTaskEncoder(PackingTaskEncoder):
    """Puts ``micro_batch_size`` consecutive samples of at most ``packing.seq_length`` tokens into each micro-batch.

    If a sample cannot be rendered, its micro-batch has fewer samples. Under ``packing.pairs: both`` a preference pair
    is two rows, and stops the run.

    Args:
        encoder, parallel, processor, cookers, fingerprint: as for `PackingTaskEncoder`.
        packing: length and ``oversize`` of a sample, drop budget, ledger; see `UNREAD` for what must stay unset.
        micro_batch_size: samples per micro-batch.

    Raises:
        ConfigError: ``micro_batch_size`` is below 1, a setting is never read, or as for `PackingTaskEncoder`.
    """

    aligns_rows = False

    def __init__(
        self,
        encoder: EncoderConfig,
        packing: PackingConfig,
        parallel: ParallelConfig | None = None,
        *,
        micro_batch_size: int,
        **others: Any,
    ) -> None:
        if micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size is {micro_batch_size}; it must be at least 1.")
        refuse_unread(packing, where="packing", mode="one sample per row")
        super().__init__(encoder, dataclasses.replace(packing, window=micro_batch_size), parallel, **others)
        self.micro_batch_size = micro_batch_size

    @property
    def capacity(self) -> int:
        """Tokens of a micro-batch of the longest samples."""
        return self.packing.seq_length * self.micro_batch_size

    def fingerprint(self) -> dict[str, Any]:
        """Names and values that a saved loader state must match."""
        return {**super().fingerprint(), "micro_batch_size": self.micro_batch_size}

    def packed(
        self, dataset: SavableDataset[Any], packing_buffer_size: int | None, worker_config: WorkerConfig
    ) -> SavableDataset[Any]:
        """Micro-batches of the measured samples.

        Raises:
            ConfigError: ``packing_buffer_size`` is set, so Energon would choose which samples share a micro-batch.
        """
        if packing_buffer_size is not None:
            raise ConfigError("Micro-batches of single samples are not chosen; leave packing_buffer_size out.")
        return super().packed(dataset, None, worker_config)

    def _check_size(self, measured: AnyMeasured) -> None:
        if len(measured.segments) > 1:
            raise two_rows(measured.key)
        super()._check_size(measured)

    @stateless
    def pack_selected_samples(self, samples: list[RenderedSample]) -> Pack:
        """Joins the samples of one micro-batch, one after the other without padding."""
        batch = thd.assemble(
            joinable([row for sample in samples for row in sample.rows], self.fields), extra_fields=self.fields
        )
        pack = self._pack_of(samples, batch)
        pack.occupied = batch.real_tokens  # nothing is aligned here; that happens when the run forms its rows
        return pack

    def select_pack(self, samples: Sequence[MeasuredSample], ended: bool) -> list[int]:
        """The next samples of the oldest one's group, in their order."""
        return next(iter(by_group(samples).values()))[: self.micro_batch_size]

    def fewest_packs(self, samples: Sequence[MeasuredSample]) -> int:
        """Number of micro-batches that the samples fill."""
        return sum(-(-len(held) // self.micro_batch_size) for held in by_group(samples).values())
