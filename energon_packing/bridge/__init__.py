"""Packs as data sets of Megatron-Bridge, which must be installed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energon_packing.bridge.dataset import PackedEnergonDatasetConfig as PackedEnergonDatasetConfig

__all__ = ["PackedEnergonDatasetConfig"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from energon_packing.bridge import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module 'energon_packing.bridge' has no attribute {name!r}")
