"""Opens a packed directory as a loader."""

from __future__ import annotations

from typing import Any

from energon_packing.config import RunConfig
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError
from energon_packing.offline.packed import Packed, stored_fingerprint
from energon_packing.offline.packed_packs import PackedPacks
from energon_packing.offline.planned_loader import PlannedLoader, loader_of


def packed_loader(config: RunConfig, **arguments: Any) -> PlannedLoader:
    """Builds the loader of the packed directory at ``data.path``.

    Its packs, and its states, are those of the plan that was packed.

    Args:
        config, arguments: of `energon_packing.offline.planned_loader.loader_of`.

    Raises:
        UserError: the directory is damaged or not complete.
        ConfigError: the run has another encoder, row or alignment than the plan, or does not pack.
    """
    packed = Packed.open(config.data.path)

    def packs_of(encoder: PackingTaskEncoder, rank: int) -> PackedPacks:
        check_stored(packed, encoder)
        return PackedPacks(packed, encoder, rank=rank)

    return loader_of(packed.plan, packs_of, config, **arguments)


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
