"""Opens a packed directory as a loader."""

from __future__ import annotations

from typing import Any

from energon_packing.errors import ConfigError
from energon_packing.offline.kinds import KINDS
from energon_packing.offline.packed import Packed, stored_fingerprint
from energon_packing.offline.planned_loader import PlannedLoader, loader_of
from energon_packing.offline.positioned_packs import PositionedPacks
from energon_packing.offline.sample_kind import AnyRun
from energon_packing.offline.stored_kinds import STORED_KINDS


def packed_loader(config: AnyRun, **arguments: Any) -> PlannedLoader:
    """Builds the loader of the packed directory at ``data.path``.

    Its packs, and its states, are those of the plan that was packed.

    Args:
        config, arguments: of `energon_packing.offline.planned_loader.loader_of`.

    Raises:
        UserError: the directory is damaged or not complete.
        ConfigError: the run has another encoder, row or alignment than the plan, or does not pack.
    """
    packed = Packed.open(config.data.path)

    def packs_of(encoder: Any, rank: int) -> PositionedPacks:
        check_stored(packed, encoder)
        return STORED_KINDS[packed.plan.facts.kind].packs(packed, encoder, rank=rank)

    return loader_of(packed.plan, packs_of, config, **arguments)


def check_stored(packed: Packed, encoder: Any) -> None:
    """Compares what was stored with what the run would make.

    Raises:
        ConfigError: a setting of the encoder differs that a plan leaves open, but stored packs do not.
    """
    own = stored_fingerprint(KINDS[packed.plan.facts.kind], encoder, packed.facts.store)
    for name in sorted({*own, *packed.facts.encoder}):
        if own.get(name) != packed.facts.encoder.get(name):
            raise ConfigError(
                f"{packed.directory} was packed with {name}={packed.facts.encoder.get(name)}, but this run has "
                f"{own.get(name)}; restore the setting, or plan and pack again."
            )
