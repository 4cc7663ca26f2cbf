"""`open_loader`: the loader of whatever ``data.path`` names, a data set, a plan, or a packed directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from energon_packing.config import RunConfig
from energon_packing.energon.loader import build_loader
from energon_packing.energon.loader_base import LoaderBase

PLAN_SUFFIX = ".parquet"
PACKED_FILE = "packed.json"


def is_plan(path: str | Path) -> bool:
    """Whether the path names a plan."""
    return str(path).endswith(PLAN_SUFFIX)


def is_packed(path: str | Path) -> bool:
    """Whether the path names a packed directory, complete or not."""
    return (Path(path) / PACKED_FILE).is_file()


def has_global_packs(path: str | Path) -> bool:
    """Whether the path names packs in a global order: its loader's state is a position, the same on every rank."""
    return is_plan(path) or is_packed(path)


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
