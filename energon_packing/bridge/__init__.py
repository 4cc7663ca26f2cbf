"""Packs in Megatron-Bridge, which must be installed: data sets of recipes, the forward step, metrics."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energon_packing.bridge.dataset import PackedEnergonDatasetConfig, use_packed_data
    from energon_packing.bridge.metrics import PackingMetrics
    from energon_packing.bridge.step import forward_step

__all__ = ["PackedEnergonDatasetConfig", "PackingMetrics", "forward_step", "use_packed_data"]
_MODULES = {"PackingMetrics": "metrics", "forward_step": "step"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'dataset')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
