"""What a plan is made of: the data sets of one or more indexes, with all their rows counted through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from energon_packing.config import to_mapping
from energon_packing.config.setting import length_free_of
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline.index import Index, IndexedDataset, IndexedShard, Kind, kind_of
from energon_packing.offline.kinds import kind_of_config
from energon_packing.offline.sample_kind import AnyEncoderConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sources:
    """Data sets in order. A *source* is a row of their shards' files, numbered from 0 through all of them.

    Attributes:
        kind: of their samples.
        datasets: of all indexes.
        indexes: the index of each of them.
        fingerprint: of the encoder; one for all indexes.
        starts: ``[shards + 1]`` int64: the first source of each shard of all data sets, and the number of sources.
        dataset: ``[shards]`` int16, the data set of each shard.
        shard: ``[shards]`` int32, the number of each shard in its data set.
    """

    kind: Kind
    datasets: tuple[IndexedDataset, ...]
    indexes: tuple[Index, ...]
    fingerprint: dict[str, str]
    starts: np.ndarray
    dataset: np.ndarray
    shard: np.ndarray

    @classmethod
    def open(cls, directories: Sequence[str | Path], encoder: AnyEncoderConfig) -> Sources:
        """The data sets of these indexes.

        Args:
            directories: indexes.
            encoder: of the plan's configuration.

        Raises:
            UserError: there is no index or no data set, or a data set is in two of them.
            ConfigError: an index was measured with another encoder; names the setting.
        """
        indexes = [Index.open(each) for each in directories]
        if not any(index.datasets for index in indexes):
            raise UserError("There is nothing to plan: the index has no data sets; run 'energon-packing measure'.")
        kind = kind_of(dataset for index in indexes for dataset in index.datasets)
        if kind != kind_of_config(encoder).name:
            raise ConfigError(f"{directories[0]} is an index of {kind}; give the configuration that measured it.")
        for index in indexes:
            _check_encoder(index, encoder)
            _check_same(index, indexes[0])
        datasets = [(index, dataset) for index in indexes for dataset in index.datasets]
        seen: set[tuple[str, str]] = set()
        for _, found in datasets:
            if (found.root, found.split) in seen:  # parts of a metadataset share its path
                raise UserError(f"{found.path} ({found.split}) is in two of the indexes; name only one of them.")
            seen.add((found.root, found.split))
        shards = [
            (number, at, shard.samples)
            for number, (_, found) in enumerate(datasets)
            for at, shard in enumerate(found.shards)
        ]
        return cls(
            kind=kind,
            datasets=tuple(found for _, found in datasets),
            indexes=tuple(index for index, _ in datasets),
            fingerprint=dict(indexes[0].fingerprint),
            starts=np.cumsum([0, *(samples for _, _, samples in shards)], dtype=np.int64),
            dataset=np.array([number for number, _, _ in shards], dtype=np.int16),
            shard=np.array([at for _, at, _ in shards], dtype=np.int32),
        )

    def __len__(self) -> int:
        return int(self.starts[-1])

    def dataset_ends(self) -> np.ndarray:
        """``[data sets]`` int64: for each, the number of sources up to its end."""
        return self.starts[np.searchsorted(self.dataset, np.arange(len(self.datasets)), side="right")]

    def place(self, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Data set int16, shard int32 and row int32 of each source, ``[N]``."""
        number = np.searchsorted(self.starts, sources, side="right") - 1
        return self.dataset[number], self.shard[number], (sources - self.starts[number]).astype(np.int32)

    def found_at(self, source: int) -> tuple[IndexedDataset, IndexedShard, int]:
        """Data set, shard and row of one source."""
        dataset, shard, row = (int(value[0]) for value in self.place(np.array([source])))
        return self.datasets[dataset], self.datasets[dataset].shards[shard], row

    def tables(self, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """The rows of each shard, with the number of its first source.

        Raises:
            UserError: a file of the index is missing or damaged, or has another number of rows than it should.
        """
        for start, number, at in zip(self.starts.tolist(), self.dataset.tolist(), self.shard.tolist(), strict=False):
            dataset, index = self.datasets[number], self.indexes[number]
            shard = dataset.shards[at]
            table = index.rows(dataset, shard, columns)
            if table.num_rows != shard.samples:
                raise UserError(
                    f"{index.directory / dataset.name / shard.file} has {table.num_rows} rows, {shard.samples} are "
                    "expected; run 'energon-packing measure' again"
                )
            yield start, table


def _check_encoder(index: Index, encoder: AnyEncoderConfig) -> None:
    measured, own = dict(index.encoder), to_mapping(encoder)
    free = length_free_of(encoder)
    for name in sorted(measured.keys() | own.keys()):
        if name not in free and _plain(measured.get(name)) != _plain(own.get(name)):
            raise ConfigError(
                f"{index.directory} was measured with encoder.{_differing(name, measured.get(name), own.get(name))}; "
                "give the same configuration to 'energon-packing measure' and 'energon-packing plan'."
            )


def _plain(value: Any) -> Any:
    """A section without settings that are None: one that is missing is one that an older version did not have."""
    return (
        {name: _plain(each) for name, each in value.items() if each is not None} if isinstance(value, dict) else value
    )


def _differing(name: str, measured: Any, own: Any) -> str:
    if isinstance(measured, dict) and isinstance(own, dict):
        inner = min(key for key in measured.keys() | own.keys() if measured.get(key) != own.get(key))
        return _differing(f"{name}.{inner}", measured.get(inner), own.get(inner))
    return f"{name}={measured!r}, the configuration has {own!r}"


def _check_same(index: Index, first: Index) -> None:
    for name in sorted(index.fingerprint.keys() | first.fingerprint.keys()):
        if index.fingerprint.get(name) != first.fingerprint.get(name):
            raise UserError(
                f"{first.directory} and {index.directory} cannot share a plan: {name} is "
                f"{first.fingerprint.get(name)!r} in one and {index.fingerprint.get(name)!r} in the other; measure "
                "both with the same processor and configuration."
            )
