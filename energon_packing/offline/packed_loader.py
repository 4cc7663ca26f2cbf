"""Opens a packed directory as a loader."""

from __future__ import annotations

from typing import Any

from energon_packing.config import RunConfig
from energon_packing.energon.epoch_end import Agree
from energon_packing.energon.loader import build_task_encoder
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError
from energon_packing.offline.packed import Packed, stored_fingerprint
from energon_packing.offline.packed_packs import PackedPacks
from energon_packing.offline.planned_loader import PlannedLoader, check_plan, loader_of


def packed_loader(
    config: RunConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    split: str | None = None,
    workers: int | None = None,
    prefetch: int = 2,
    task_encoder: PackingTaskEncoder | None = None,
    data_parallel_group: Any = None,
    agree: Agree | None = None,
) -> PlannedLoader:
    """Builds the loader of the packed directory at ``data.path``.

    Its packs, and its states, are those of the plan that was packed.

    Args:
        config: of the run; encoder and row must be those of the plan.
        split: must be the plan's own if it is given.
        rank, world_size, workers, prefetch, task_encoder, data_parallel_group, agree: as for
            `energon_packing.energon.loader.build_loader`.

    Raises:
        UserError: the directory is damaged or not complete.
        ConfigError: the run has another encoder, row or alignment than the plan, or does not pack.
    """
    packed = Packed.open(config.data.path)
    encoder = build_task_encoder(config) if task_encoder is None else task_encoder
    check_plan(packed.plan, config, encoder, split)
    check_stored(packed, encoder)
    packs = PackedPacks(packed, encoder, rank=rank)
    base = {"rank": rank, "world_size": world_size, "prefetch": prefetch, "agree": agree, "group": data_parallel_group}
    return loader_of(packs, packed.plan, config, encoder, workers=workers, **base)


def check_stored(packed: Packed, encoder: PackingTaskEncoder) -> None:
    """Compares what was stored with what the run would make.

    Raises:
        ConfigError: a setting of the encoder differs that a plan leaves open, but stored packs do not.
    """
    own = stored_fingerprint(encoder, packed.facts.store)
    for name in sorted({*own, *packed.facts.encoder}):
        if own.get(name) != packed.facts.encoder.get(name):
            raise ConfigError(
                f"{packed.directory} was packed with {name}={packed.facts.encoder.get(name)}, but this run has "
                f"{own.get(name)}; restore the setting, or plan and pack again."
            )
