"""What offline commands ask about the samples of a data set; conversations and clips answer it, each in its file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from energon_packing.config import EncoderConfig, RunConfig, from_mapping, load_values
from energon_packing.offline.array_limits import AnyLimits, SizedRow
from energon_packing.offline.index import Kind
from energon_packing.wan.config import TextToVideoConfig, TextToVideoRunConfig

if TYPE_CHECKING:  # planning needs neither torch nor Energon
    from megatron.energon import CrudeSample
    from megatron.energon.cache import FileStore

    from energon_packing.energon.window_task_encoder import WindowTaskEncoder

AnyRun = RunConfig | TextToVideoRunConfig
AnyEncoderConfig = EncoderConfig | TextToVideoConfig
NO_ROW = 2**30
"""Tokens of the row that samples are measured for: none is too long for it."""


class SampleKind(ABC):
    """One kind of sample.

    Attributes:
        name: of the kind.
        run_class: its configuration.
        schema: columns of a shard's file in the index.
        sizes: what `PlannedSample.sizes` are, in the plural.
    """

    name: ClassVar[Kind]
    run_class: ClassVar[type[Any]]
    schema: ClassVar[pa.Schema]
    sizes: ClassVar[str]

    def load_run(self, path: str | Path | None, overrides: Iterable[str] = ()) -> Any:
        """Reads a configuration file.

        Raises:
            ConfigError: as `energon_packing.config.load_config`.
        """
        values, where = load_values(path, overrides)
        return from_mapping(self.run_class, values, where=where)

    @property
    @abstractmethod
    def encoder_class(self) -> type[WindowTaskEncoder]:
        """Its task encoder, online and offline."""

    @abstractmethod
    def cook(self, sample: CrudeSample, store: FileStore[bytes]) -> Any:
        """Cooks a record as the loader does; a bad one carries its problem."""

    @abstractmethod
    def measuring_encoder(self, run: Any) -> Any:
        """The task encoder of a run's ``encoder`` section, whose rows hold every sample.

        Raises:
            ConfigError: a processor or model cannot be used.
        """

    @abstractmethod
    def task_encoder(self, run: Any, **models: Any) -> Any:
        """The task encoder of a run.

        Args:
            run: its configuration.
            models: of one's own, where the kind has any.

        Raises:
            ConfigError: a processor or model cannot be used.
        """

    @abstractmethod
    def packing_encoder(self, run: Any) -> Any:
        """The task encoder that makes packs to be stored; it keeps no ledger."""

    @abstractmethod
    def row(self, measured: Any) -> dict[str, Any]:
        """The sizes of a measured sample by the names of `schema`; of None, zeros."""

    @abstractmethod
    def planned_sizes(self, measured: Any) -> tuple[int, ...]:
        """What must be as it was planned; see `energon_packing.offline.plan.PlannedSample.sizes`."""

    @abstractmethod
    def media_names(self, measured: Any) -> Iterable[str]:
        """Names of the files that rendering reads."""

    @abstractmethod
    def limits(self, run: Any) -> AnyLimits:
        """Limits of a pack that the configuration alone determines, as the task encoder has them.

        Raises:
            ConfigError: ``seq_length`` is not a multiple of the alignment.
            UserError: only the task encoder knows them.
        """

    @abstractmethod
    def decided(self, run: Any, limits: AnyLimits) -> dict[str, Any]:
        """The settings besides those of `SampleKind.planned_limits` on which the packs of a plan depend."""

    @abstractmethod
    def planned_limits(self, decided: Mapping[str, Any], encoder: Any) -> AnyLimits:
        """The limits of a plan's packs.

        Args:
            decided: `PlanFacts.decided`.
            encoder: task encoder of the run, whose settings are those of the plan.
        """

    @abstractmethod
    def too_long(self, size: SizedRow, limits: Any, run: Any) -> str:
        """Why a sample is longer than a row, in the words of the online loader."""

    @abstractmethod
    def stored_settings(self, fingerprint: Mapping[str, Any], store: str) -> dict[str, str]:
        """Of the encoder's fingerprint, what stored packs depend on: all but what the loader still decides."""
