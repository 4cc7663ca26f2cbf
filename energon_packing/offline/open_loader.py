"""`open_loader`: the loader of whatever ``data.path`` names, a data set, a plan, or a packed directory."""

from __future__ import annotations

from typing import Any

from energon_packing.config import RunConfig
from energon_packing.energon.loader import build_loader
from energon_packing.energon.loader_base import LoaderBase
from energon_packing.offline.data_paths import is_packed, is_plan


def open_loader(config: RunConfig, **arguments: Any) -> LoaderBase:
    """The loader of a data set, a plan or a packed directory, by ``data.path``.

    Args:
        arguments: of `energon_packing.energon.loader.build_loader`.

    Raises:
        UserError: nothing is there, or it cannot be read.
        ConfigError: a setting that cannot work, or does not suit the plan.
    """
    if is_plan(config.data.path):
        from energon_packing.offline.planned_loader import planned_loader

        return planned_loader(config, **arguments)
    if is_packed(config.data.path):
        from energon_packing.offline.packed_loader import packed_loader

        return packed_loader(config, **arguments)
    return build_loader(config, **arguments)
