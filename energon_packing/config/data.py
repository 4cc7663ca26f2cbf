"""The section ``data`` of a configuration: where the conversations come from and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from energon_packing.config.setting import check_bounds, setting
from energon_packing.errors import ConfigError

EpochEnd = Literal["uneven", "drop", "pad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the conversations come from and how they are read."""

    path: str = setting("", stated="data set", place=True)
    """An Energon data set: a directory made by ``convert``, a prepared WebDataset, or a metadataset YAML."""
    split: str = setting("train", stated="split")
    """Part of the data set to read."""
    workers: int = setting(2, unit="processes", stated="workers", least=0)
    """Loader processes of one rank; 0 reads in the training process."""
    shuffle_buffer: int = setting(100, unit="samples", changes="packs", least=1)
    """Samples shuffled before encoding; 1 keeps the order of the shards."""
    shuffle_over_epochs: int = setting(1, unit="epochs", changes="packs", least=0)
    """Epochs over which shards are shuffled together; 1 and 0 keep every epoch apart."""
    repeat: bool = setting(True, changes="packs")
    """False ends after one epoch; exact resume is promised for True only (see docs/resume.md)."""
    epoch_end: EpochEnd = setting("uneven", changes="packs")
    """What to do when ranks run out of packs at different steps, which happens with ``repeat: false``; a training step
    hangs if one rank is missing. ``drop`` stops all ranks when the first runs out. ``pad`` feeds fully masked packs to
    a rank that has run out until all have. ``uneven`` leaves it to the trainer."""
    seed: int = setting(0, unit="number", changes="packs")
    """Seed of the order of shards and samples."""
    packs_ahead: int = setting(2, unit="packs", changes="nothing", least=0)
    """Packs that every rank of a replica has ready before its step asks, so that no step waits for reading or for the
    transfer (docs/bridge.md). They take that much memory more: once per host, plus once per rank in pinned memory where
    there is a GPU. 0 reads and transfers each pack when it is asked for; so do ``workers: 0`` and any
    ``epoch_end`` but ``uneven``."""
    keep_memory: bool = setting(True, changes="nothing")
    """Loader processes reuse the memory of finished pixels instead of returning it to the kernel after each image, so
    they stay as large as their largest pack made them. The busier the machine's memory, the more CPU time this saves
    (docs/correctness.md). Takes effect with glibc only."""
    accept_changed: tuple[str, ...] = setting((), changes="nothing")
    """What may differ between a restored loader state and this run, by the names in the message that refuses it, such
    as ``encoder.max_pixels`` or ``data set``; a section's name stands for all its settings. ``missing_state`` lets a
    run that continues begin its data anew. ``ranks`` and ``workers`` cannot be accepted.
    docs/resume.md says what is then still exact."""

    @property
    def depth(self) -> int:
        """Packs that are made ahead of use. None without workers, since Energon then reads in the training process and
        admits one reader at a time; and none where ranks agree on an epoch's end, which they do on the trainer's own
        process group."""
        return self.packs_ahead if self.workers and self.epoch_end == "uneven" else 0

    def __post_init__(self) -> None:
        if self.repeat and self.epoch_end != "uneven":
            raise ConfigError(
                f"data.epoch_end is {self.epoch_end!r}, but no epoch ends while data.repeat is true; set it to false."
            )
        check_bounds("data", self)


def group_name(subflavors: Mapping[str, Any] | None) -> str:
    """Returns the group of a data set, which never shares a pack with another group; empty if it names none.

    It is ``group`` in the ``subflavors`` of a data set in a blend::

        blend:
          - {weight: 3, path: chats, subflavors: {group: text}}
          - {weight: 1, path: charts, subflavors: {group: charts}}

    Energon's development branch has the same word as a key of the entry.

    Raises:
        ConfigError: the group is no name.
    """
    group = (subflavors or {}).get("group", "")
    if not isinstance(group, str | int | None) or isinstance(group, bool):
        raise ConfigError(f"subflavors.group is {group!r}; it must be a name.")
    return "" if group is None else str(group)
